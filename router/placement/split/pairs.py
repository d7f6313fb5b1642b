"""One decision over pairs: compute a prompt where it is decoded, or elsewhere and transfer it; the least cost
wins.

For a decode engine d, a prefill engine p of the same version, and a prompt of N tokens, in seconds::

    local(d)     = cost(d)                        as every engine's (cost.py)
                 + weight * running(d) * prefill(d)     what this prefill makes the sequences there wait
    remote(p, d) = cost(p) + weight * running(p) * prefill(p)
                 + overhead                       two requests instead of one
                 + transfer * lacks(d)            what the decode engine does not hold
                 + queue(d) + decode(d)

So an engine that holds most of a prompt computes the rest itself, and so does an idle one, without a
threshold but for the floor ``min_remote_tokens``. Which prefill engine is best does not depend on the decode
engine except for its version, and for engines that do both: so |P| + |D| costs are worked out, not |P| *
|D|.

Sequences that wait count by the queue alone, although those ahead of this prompt would run by its turn.
Tried by simulation (450 conversations, 2 + 6 and 3 + 5 engines, loads 0.6, 0.85 and 1.1): counted as held up
too, whole answers took 2 % longer in the mean of the six; counted at decode engines only, 5 %.

Always true: an engine is never paired with itself; ties go to the longest trunk, then by rendezvous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from router.pd.settings import PdSettings
from router.placement.candidate import Candidate, Cost, PolicySettings
from router.placement.cost import Choice, Weighed, weigh, weight

Pick = Callable[[Sequence[Candidate]], Choice]
"""The policy's choice among some engines; raises ``ValueError`` without any."""


class Side(msgspec.Struct, frozen=True, gc=False):
    """One engine as a candidate for one of the two roles. ``version`` None: not known. ``lacks``: tokens that
    would be transferred to it."""

    candidate: Candidate
    version: str | None
    lacks: int = 0


class Partner(msgspec.Struct, frozen=True, gc=False):
    """The prefill engine for some decode engine; ``choice`` is among ``sides``."""

    sides: Sequence[Side]
    choice: Choice
    cost_s: float


class _Place(msgspec.Struct, frozen=True, gc=False):
    """One decode engine, with or without a partner, and what that costs."""

    at: int
    seconds: float
    cost: Cost
    partner: Partner | None = None


class PairPlan(msgspec.Struct, frozen=True, gc=False):
    """Where the prompt is decoded: position among the decode engines, and its cost; where it is computed:
    ``partner``, None for the decode engine itself, which ``why`` explains. ``weighed``: decode engines';
    ``local_s``: what the best engine alone costs."""

    decode: int
    cost: Cost
    partner: Partner | None
    weighed: Weighed
    local_s: float
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
) -> PairPlan:
    """The cheapest of all. Raises ``ValueError`` without a decode engine."""
    weighed = weigh([side.candidate for side in decode], prompt_tokens, policy)
    partners = _Partners(prefill, prompt_tokens, pick, policy, pd)
    why = "no_prefill_engine" if not prefill else "short"
    alone: _Place | None = None
    apart: _Place | None = None
    for index, side in enumerate(decode):
        cost = weighed.cost(index)
        alone = _less(alone, _Place(index, cost.total_s + _delay_s(side, cost, pd), cost), key)
        if side.lacks < pd.min_remote_tokens or not prefill:
            continue
        partner = partners.of(side)
        if partner is None:
            why = "version"
            continue
        transfer_s = pd.leg_overhead_s + pd.transfer_s_per_token * side.lacks
        remote_s = partner.cost_s + transfer_s + cost.queue_s + cost.decode_s
        apart = _less(apart, _Place(index, remote_s, cost, partner), key)
    if alone is None:
        raise ValueError("no decode engine")
    if apart is None:
        return PairPlan(alone.at, alone.cost, None, weighed, alone.seconds, None, why)
    if apart.seconds < alone.seconds:
        return PairPlan(apart.at, apart.cost, apart.partner, weighed, alone.seconds, apart.seconds)
    return PairPlan(alone.at, alone.cost, None, weighed, alone.seconds, apart.seconds, "local")


def cheapest_taker(
    decode: Sequence[Side], prompt_tokens: int, key: int, *, policy: PolicySettings, pd: PdSettings
) -> int:
    """Which decode engine takes over what is computed already: its position."""
    weighed = weigh([side.candidate for side in decode], prompt_tokens, policy)

    def order(i: int) -> tuple[float, int, int]:
        transfer_s, cost = pd.transfer_s_per_token * decode[i].lacks, weighed.cost(i)
        return _order(transfer_s + cost.queue_s + cost.decode_s, cost, key)

    return min(range(len(decode)), key=order)


def fits(one: str | None, other: str | None, pd: PdSettings) -> bool:
    """Whether engines of these versions may be paired."""
    return pd.mix_versions or (one is not None and one == other)


class _Partners:
    """The best prefill engine for each decode engine, worked out once per version."""

    def __init__(
        self,
        prefill: Sequence[Side],
        prompt_tokens: int,
        pick: Pick,
        policy: PolicySettings,
        pd: PdSettings,
    ) -> None:
        self._prefill = prefill
        self._ids = {side.candidate.engine_id for side in prefill}
        self._tokens = prompt_tokens
        self._pick = pick
        self._policy = policy
        self._pd = pd
        self._known: dict[tuple[str | None, str], Partner | None] = {}

    def of(self, side: Side) -> Partner | None:
        """None: no prefill engine may be paired with it."""
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
        choice = self._pick([other.candidate for other in sides])
        cost = choice.cost
        return Partner(sides, choice, cost.total_s + _delay_s(sides[choice.index], cost, self._pd))


def _delay_s(side: Side, cost: Cost, pd: PdSettings) -> float:
    """What a prefill there makes the sequences that run there wait, together."""
    return pd.decode_delay_weight * side.candidate.running * cost.prefill_s


def _less(known: _Place | None, other: _Place, key: int) -> _Place:
    """The cheaper one."""
    if known is None or other.seconds < known.seconds:
        return other
    if other.seconds > known.seconds:
        return known
    places = known, other
    return min(places, key=lambda place: _order(place.seconds, place.cost, key))


def _order(seconds: float, cost: Cost, key: int) -> tuple[float, int, int]:
    return seconds, -cost.trunk_tokens, -weight(cost.engine_id, key)
