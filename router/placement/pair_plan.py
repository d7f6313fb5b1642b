"""Cost of pairs: compute a prompt where it is decoded, or elsewhere and transfer it; the least cost wins.

For a decode engine d, a prefill engine p of the same version, and a prompt of N tokens, in seconds::

    local(d):      cost(d)                        as every engine's (cost.py)
                 + weight * running(d) * prefill(d)     delay of the sequences there by this prefill
    remote(p, d):  cost(p) + weight * running(p) * prefill(p)
                 + overhead                       two requests instead of one
                 + transfer * lacks(d)            tokens that the decode engine does not hold
                 + queue(d) + decode(d)           its own wait, and delays by its requests

So an engine that holds most of a prompt computes the rest itself, and so does an idle one, without a
threshold except the minimum ``min_remote_tokens``. The best prefill engine depends on the decode engine
only by its version, and for engines with both roles: so |P| + |D| costs are computed, not |P| * |D|.

With a service level, plans predicted to give the first token in time go before those that are within the
margin for errors, and these before those that are not. Alone, the prediction is the engine's; apart, the sum
of the prefill engine's, the overhead, the transfer and the wait at the decode engine, with both margins. With
concurrent legs that wait passes during the prefill: then the sum is an upper bound.

Waiting sequences count in the price of delays of ``cost`` (docs/decisions/050), not in the weight: counted as
delayed there too, whole answers took 2 % longer in the mean of six simulated fleets (450 conversations, 2 + 6
and 3 + 5 engines, loads 0.6, 0.85 and 1.1).

Invariants: an engine is never paired with itself; ties go to the longest shared prefix, then by rendezvous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.placement.candidate import Candidate, Cost, Hit, PolicySettings
from kvatlas.router.placement.cost import Choice, ScoredCandidates, make_choice, score, weight
from kvatlas.router.placement.engine_order import EngineOrder
from kvatlas.router.placement.service_level import Pick, Predicting, level_met


class Side(msgspec.Struct, frozen=True, gc=False):
    """One engine as a candidate for one of the two roles. ``version`` None: unknown. ``lacks``: tokens that
    would be transferred to it. ``own_s``: its overhead; ``margin_s``: for errors of its predictions, which
    ``engine`` makes, None: the cost's own seconds are taken."""

    candidate: Candidate
    version: str | None
    lacks: int = 0
    own_s: float = 0.0
    margin_s: float = 0.0
    engine: Predicting | None = None

    def level_s(
        self, scored: ScoredCandidates, index: int, order: EngineOrder | None = None
    ) -> tuple[float, float]:
        """Implement ``Predicting``."""
        if self.engine is None:
            return scored.cost(index).first_token_s + self.candidate.interference_s, self.margin_s
        return self.engine.level_s(scored, index, order)


def lacked(hit: Hit, prompt_tokens: int, *, states: bool) -> int:
    """Prompt tokens that an engine with this hit would be sent; ``states``: its model has Mamba layers."""
    # Their state is always sent, so the full-attention prefix counts; it is no hit for the engine alone.
    has = max(hit.soon_tokens, hit.shared_prefix_tokens) if states else hit.soon_tokens
    return max(0, prompt_tokens - has)


class Partner(msgspec.Struct, frozen=True, gc=False):
    """The prefill engine for some decode engine; ``choice`` is among ``sides``."""

    sides: Sequence[Side]
    choice: Choice
    cost_s: float
    first_token_s: float
    margin_s: float


class _Place(msgspec.Struct, frozen=True, gc=False):
    """One decode engine, with or without a prefill engine, and the cost."""

    at: int
    seconds: float
    cost: Cost
    first_token_s: float
    margin_s: float
    left_s: float
    partner: Partner | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """Lower is better."""
        late = (self.first_token_s > self.left_s) + (self.first_token_s + self.margin_s > self.left_s)
        return late, self.seconds


class PairPlan(msgspec.Struct, frozen=True, gc=False):
    """The decode engine, by its position, and its cost; the prefill engine, ``partner``, None for the decode
    engine itself, with the reason ``why``. ``scored``: decode engines'; ``local_s``: cost of the best engine
    alone."""

    decode: int
    cost: Cost
    partner: Partner | None
    scored: ScoredCandidates
    local_s: float
    first_token_s: float
    """Predicted time to first token of this plan."""
    margin_s: float
    """For errors of that prediction."""
    remote_s: float | None = None
    why: str = ""


def plan(
    decode: Sequence[Side],
    prefill: Sequence[Side],
    prompt_tokens: int,
    key: int,
    *,
    pick: Pick,
    policy: PolicySettings,
    pd: PdSettings,
    left_s: float = math.inf,
) -> PairPlan:
    """Return the cheapest plan with a first token in ``left_s``; if none has, the cheapest. Raises
    ``ValueError`` without a decode engine."""
    scored = score([side.candidate for side in decode], prompt_tokens, policy, answers=False)
    partners = _Partners(prefill, prompt_tokens, pick, policy, pd, left_s - pd.leg_overhead_s)
    why = "no_prefill_engine" if not prefill else "short"
    alone: _Place | None = None
    apart: _Place | None = None
    for index, side in enumerate(decode):
        cost = scored.cost(index)
        local_s = cost.total_s + _delay_s(side, cost, pd)
        # Without a target only that of the plan is needed.
        first_s, margin_s = (0.0, 0.0) if left_s == math.inf else side.level_s(scored, index)
        alone = _less(alone, _Place(index, local_s, cost, first_s, margin_s, left_s), key)
        if side.lacks < pd.min_remote_tokens or not prefill:
            continue
        partner = partners.partner_of(side)
        if partner is None:
            why = "version"
            continue
        transfer_s = pd.leg_overhead_s + pd.transfer_s_per_token * side.lacks
        remote_s = partner.cost_s + transfer_s + cost.queue_s + cost.decode_s
        first_s = partner.first_token_s + transfer_s + cost.wait_s + side.own_s
        margin_s = partner.margin_s + side.margin_s
        apart = _less(apart, _Place(index, remote_s, cost, first_s, margin_s, left_s, partner), key)
    if alone is None:
        raise ValueError("no decode engine")
    best = alone if apart is None or alone.rank <= apart.rank else apart
    first_s, margin_s = best.first_token_s, best.margin_s
    if best is alone and left_s == math.inf:
        first_s, margin_s = decode[best.at].level_s(scored, best.at)
    return PairPlan(
        best.at,
        best.cost,
        best.partner,
        scored,
        alone.seconds,
        first_s,
        margin_s,
        remote_s=None if apart is None else apart.seconds,
        why=why if apart is None else "local" if best is alone else "",
    )


def pick_in_time(sides: Sequence[Side], pick: Pick, left_s: float) -> Choice:
    """Pick an engine; if it is predicted to give the first token later than in ``left_s``, one of those that
    are not, if there are any."""
    choice = pick([side.candidate for side in sides])
    met = level_met(choice, sides, left_s)
    places = [] if met is None else [place for place, good in enumerate(met) if good]
    if not places:
        return choice
    some = pick([sides[place].candidate for place in places])
    other = make_choice(choice.scored, places[some.index], some.reason)
    return msgspec.structs.replace(other, uncached_tokens=some.uncached_tokens)


def cheapest_taker(
    decode: Sequence[Side], prompt_tokens: int, key: int, *, policy: PolicySettings, pd: PdSettings
) -> int:
    """Position of the decode engine that takes over an already computed prompt."""
    scored = score([side.candidate for side in decode], prompt_tokens, policy)

    def order(i: int) -> tuple[float, int, int]:
        transfer_s, cost = pd.transfer_s_per_token * decode[i].lacks, scored.cost(i)
        return _order(transfer_s + cost.queue_s + cost.decode_s, cost, key)

    return min(range(len(decode)), key=order)


def fits(one: str | None, other: str | None, pd: PdSettings) -> bool:
    """Whether engines of these versions may be paired."""
    return pd.mix_versions or (one is not None and one == other)


class _Partners:
    """The best prefill engine for each decode engine, computed once per version."""

    def __init__(
        self,
        prefill: Sequence[Side],
        prompt_tokens: int,
        pick: Pick,
        policy: PolicySettings,
        pd: PdSettings,
        left_s: float,
    ) -> None:
        self._left_s = left_s
        self._prefill = prefill
        self._ids = {side.candidate.engine_id for side in prefill}
        self._tokens = prompt_tokens
        self._pick = pick
        self._policy = policy
        self._pd = pd
        self._known: dict[tuple[str | None, str], Partner | None] = {}

    def partner_of(self, side: Side) -> Partner | None:
        """Return it; None: no prefill engine may be paired with it."""
        name = side.candidate.engine_id
        mark = side.version, name if name in self._ids else ""
        if mark not in self._known:
            self._known[mark] = self._best(side)
        return self._known[mark]

    def _best(self, side: Side) -> Partner | None:
        sides = [
            other
            for other in self._prefill
            if other.candidate.engine_id != side.candidate.engine_id
            and fits(other.version, side.version, self._pd)
        ]
        if not sides:
            return None
        choice = pick_in_time(sides, self._pick, self._left_s)
        cost, side = choice.cost, sides[choice.index]
        seconds = cost.total_s + _delay_s(side, cost, self._pd)
        return Partner(sides, choice, seconds, *side.level_s(choice.scored, choice.index))


def _delay_s(side: Side, cost: Cost, pd: PdSettings) -> float:
    """Total delay of the sequences that run there by a prefill."""
    return pd.decode_delay_weight * side.candidate.running * cost.prefill_s


def _less(known: _Place | None, other: _Place, key: int) -> _Place:
    """Return the better one."""
    if known is None or other.rank < known.rank:
        return other
    if other.rank > known.rank:
        return known
    places = known, other
    return min(places, key=lambda place: _order(place.seconds, place.cost, key))


def _order(seconds: float, cost: Cost, key: int) -> tuple[float, int, int]:
    return seconds, -cost.shared_prefix_tokens, -weight(cost.engine_id, key)
