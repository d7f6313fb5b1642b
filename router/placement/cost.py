"""The default choice: place by the trunk, pay by the exact hit.

For engine e and a prompt of N tokens, with a = prefill seconds per token of e, in seconds::

    cost = queue                         prefill and loads still to do at e for prompts already placed there,
                                         or room_share of the wait for pages, if that is more
         + a * (N - hit - offloaded)     what e computes for this prompt
         - beta * a * (trunk - hit - offloaded)
         + premium * (the two above)     what others will pay for the pages that this visit takes
         + load * cpu + fetch * storage  blocks e copies back instead of computing them
         + decode * running              what running sequences cost the prefill
         + sequence * (running + waiting)    these two only where some engine could load a part of the prompt
         + scarcity * a * (N - hit)
         + spread * max(0, recent - mean recent)
         + crowding * share * waiting * a * (N - hit - offloaded)    only where prompts wait for pages

    offloaded = cpu + storage,  0 <= hit + offloaded <= trunk <= N - 1

``hit`` is what the engine would take from its cache when this prompt's turn comes (``Hit``): what it holds
now (exact, all groups), or what a prompt already waiting there will have put in, if that is more.

The credit is for what this visit makes the engine keep: under vLLM's default retention a branch point of a
hybrid model becomes a hit only after a visit (vLLM calls it ``shared_prefix_boundary``), so plain exact
argmin (beta = 0) spreads siblings by load and no engine is visited twice. Source of the form: fleet
simulations with vLLM's own cache manager, docs/decisions/002-cost-model.md; the form is that of Mooncake's
conductor and Dynamo's KV scheduler (both: prefill left + load), plus the credit.

The premium (``eviction_premium``) is a second price of a computed token: besides the time now it takes a
page, and a page that is wanted again has to go for it, to be computed once more later. A cost without it
looks at this prompt alone, and copies what another engine holds as soon as a short queue makes the copy
cheaper; every copy makes all caches smaller. Found by simulation: docs/decisions/005-eviction-premium.md.

The price of a sequence: where memory behind the GPUs works, a fifth of the tokens is computed, and what is
short is no longer compute but blocks for sequences that generate. Found by simulation as well: 012.

Scarcity: a load spares the computing and not the page; a hit on the GPU spares both, for prompts share pages
there. While first tokens come later than computing and loading explain, prompts wait for pages, and this is
their price, up to ``scarcity_premium``: 013.

Spread: seconds of work that e was sent in the last half minute beyond the mean of all candidates. The queue
is that of this moment; long sessions come back every few seconds, and without this term several share one
engine while others idle.

Pages: where the sequences of e hold its pool, prompts wait for ``room`` seconds (``load/pages.py``) and each
second of prefill there keeps ``share`` of the pool from the ``waiting`` prompts behind it, in proportion to
how far ``room`` exceeds the queue. A cost with all of
the wait and without that price moves sessions from the engines that hold them: more has to be computed, and
all wait longer. Both found by simulation: docs/decisions/014-pages-and-recent-work.md.

The bound: against the engine with the shortest queue, the chosen engine's queue is longer by at most
``max(queue_gap_s, saving_factor * saving)``, where ``saving`` is what choosing it saves in all parts of the
cost but the queue, at most (1 + premium + scarcity) times the prefill of the whole prompt plus
the difference of the load and decode parts. Hence no engine is flooded for its cache; and a cold prompt goes
first to engines that were without work for ``probe_interval_s`` (at most ``probe_cost_max_s`` dearer), so
none starves.

Always true: the result depends on the arguments alone, not on the order of the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from router.placement.candidate import Candidate, Cost, Hit, PolicySettings, Pull, Reason

_SCARCE_AT_S: Final = 5.0
"""Mean lateness of first tokens at which pages have their full price."""

Part = tuple[int, int, float, float]
"""A prompt before some hit, in tokens: what is cached and the trunk, both clamped, and what would take as
long to compute as all costs that go by the engine's rate. And ``load_s``."""


class ScoredCandidates(msgspec.Struct, gc=False):
    """What a prompt costs at each candidate, as every decision works it out: ``totals``, ``queues`` and
    ``parts`` are in the order of the candidates. The rest of a ``Cost`` follows from these."""

    candidates: Sequence[Candidate]
    prompt_tokens: int
    settings: PolicySettings
    totals: list[float]
    queues: list[float]
    parts: list[Part]
    longest_trunk: int
    recent_s: float
    """Mean over the candidates of the work sent there of late."""
    scarcity: float | None = None
    """Price of pages; None where nothing can be loaded, so that neither pages nor sequences have one."""

    def cost(self, index: int) -> Cost:
        """Of one candidate, part by part."""
        candidate, settings, prompt_tokens = self.candidates[index], self.settings, self.prompt_tokens
        cached, trunk, _, load_s = self.parts[index]
        rate, uncached, credit_s = candidate.prefill_s_per_token, prompt_tokens - cached, 0.0
        prefill_s, decode_s = rate * uncached, candidate.interference_s
        if trunk > cached:
            credit_s = settings.beta * rate * (trunk - cached)
        eviction_s = settings.eviction_premium * (prefill_s - credit_s)
        if self.scarcity is not None:
            sequences_s, pages_s = _beside_loads(candidate, prompt_tokens, settings, self.scarcity)
            decode_s, eviction_s = decode_s + sequences_s, eviction_s + pages_s
        return Cost(
            candidate.engine_id,
            self.queues[index],
            prefill_s,
            load_s,
            decode_s,
            credit_s,
            eviction_s,
            settings.spread * max(0.0, candidate.recent_s - self.recent_s),
            _crowding_s(candidate, uncached, settings),
            self.totals[index],
            uncached,
            trunk,
            max(candidate.queue_s, candidate.room_s),
        )

    def first_token_s(self, index: int) -> float:
        """Predicted seconds until the first token at one candidate: ``Cost.first_token_s`` and what its
        running requests add, without the engine's own overhead."""
        candidate = self.candidates[index]
        cached, _, _, load_s = self.parts[index]
        wait_s = max(candidate.queue_s, candidate.room_s)
        prefill_s = candidate.prefill_s_per_token * (self.prompt_tokens - cached)
        return wait_s + prefill_s + load_s + candidate.interference_s


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The engine chosen; ``weighed`` and ``costs`` are in the order of the candidates.

    ``uncached_tokens`` is what the load account must be charged with: the policy's own belief of what
    the engine will compute.
    """

    index: int
    engine_id: str
    reason: Reason
    uncached_tokens: int
    cost: Cost
    """What the chosen one costs."""
    weighed: ScoredCandidates
    pull: Pull | None = None
    """Prefix that the engine is to pull from another one; ``cost`` counts it, ``costs`` do not."""

    @property
    def costs(self) -> tuple[Cost, ...]:
        """What each engine would have cost."""
        return tuple(self.weighed.cost(index) for index in range(len(self.weighed.totals)))


def chosen(weighed: ScoredCandidates, index: int, reason: Reason) -> Choice:
    """The choice of this one."""
    cost = weighed.cost(index)
    return Choice(index, cost.engine_id, reason, cost.uncached_tokens, cost, weighed)


def cost(candidate: Candidate, prompt_tokens: int, settings: PolicySettings) -> Cost:
    """What sending a prompt of ``prompt_tokens`` to this engine costs, part by part."""
    return weigh((candidate,), prompt_tokens, settings).cost(0)


def weigh(candidates: Sequence[Candidate], prompt_tokens: int, settings: PolicySettings) -> ScoredCandidates:
    """The cost of each candidate."""
    # Plain steps: this runs once per engine and request. Engines that have as much of a prompt share the hit.
    most = prompt_tokens - 1  # vLLM always computes at least the last token
    beta, price = settings.beta, 1 + settings.eviction_premium
    spread, mean_s = settings.spread, 0.0
    if spread:
        mean_s = sum([candidate.recent_s for candidate in candidates]) / len(candidates)
    totals: list[float] = []
    queues: list[float] = []
    parts: list[Part] = []
    hit: Hit | None = None
    part: Part = 0, 0, 0.0, 0.0
    longest, loads, by_rate, load_s = 0, False, 0.0, 0.0
    for candidate in candidates:
        if candidate.hit is not hit:
            hit = candidate.hit
            cached, trunk, load_s = hit.whole_tokens, hit.trunk_tokens, 0.0
            cached = most if cached > most else cached  # noqa: FURB136
            if cached > hit.soon_tokens:
                loads, load_s = True, _load_s(hit, cached, settings)
            trunk = most if trunk > most else trunk  # noqa: FURB136
            if hit.replay_tokens and cached > hit.replay_tokens:
                cached, trunk = cached - hit.replay_tokens, trunk - hit.replay_tokens
            if trunk > cached:
                by_rate = price * (prompt_tokens - cached - beta * (trunk - cached))
            else:
                trunk, by_rate = cached, price * (prompt_tokens - cached)
            longest = trunk if trunk > longest else longest  # noqa: FURB136
            part = cached, trunk, by_rate, load_s
        queue_s = candidate.queue_s
        if candidate.room_s:
            queue_s = max(queue_s, settings.room_share * candidate.room_s)
        decode_s = candidate.decode_interference_s * candidate.running
        total_s = queue_s + candidate.prefill_s_per_token * by_rate + load_s + decode_s
        if candidate.recent_s > mean_s:
            total_s += spread * (candidate.recent_s - mean_s)
        if candidate.pool_share:
            total_s += _crowding_s(candidate, prompt_tokens - part[0], settings)
        totals.append(total_s)
        queues.append(queue_s)
        parts.append(part)
    weighed = ScoredCandidates(candidates, prompt_tokens, settings, totals, queues, parts, longest, mean_s)
    if loads:
        _add_scarcity(weighed)
    return weighed


def within_level(weighed: ScoredCandidates, own_s: Sequence[float], left_s: float) -> list[bool]:
    """Return for each candidate whether the first token is predicted in at most ``left_s``.

    ``own_s`` is added to each prediction: the engine's overhead for a request, and a margin for errors.
    """
    return [weighed.first_token_s(index) + extra_s <= left_s for index, extra_s in enumerate(own_s)]


def _crowding_s(candidate: Candidate, uncached: int, settings: PolicySettings) -> float:
    """Return the price of computing ``uncached`` tokens where prompts wait for pages.

    Each second of prefill keeps ``pool_share`` of the pool from those that wait, as far as they wait for
    pages rather than for computing.
    """
    room_s = candidate.room_s
    if room_s <= candidate.queue_s:
        return 0.0
    waiting = settings.crowding * candidate.pool_share * candidate.waiting
    return (1.0 - candidate.queue_s / room_s) * waiting * candidate.prefill_s_per_token * uncached


def _load_s(hit: Hit, cached: int, settings: PolicySettings) -> float:
    near = min(hit.near_tokens, cached)
    near_s = settings.load_s_per_token * (near - hit.soon_tokens)
    return near_s + settings.storage_load_s_per_token * (cached - near)


def _add_scarcity(weighed: ScoredCandidates) -> None:
    """Where a part of the prompt can be loaded: the price of sequences is in ``decode_s``, that of scarce
    pages in ``eviction_s``."""
    candidates, settings = weighed.candidates, weighed.settings
    late_s = sum([candidate.late_s for candidate in candidates]) / len(candidates)
    weighed.scarcity = scarcity = settings.scarcity_premium * min(1.0, late_s / _SCARCE_AT_S)
    for index, candidate in enumerate(candidates):
        weighed.totals[index] += sum(_beside_loads(candidate, weighed.prompt_tokens, settings, scarcity))


def _beside_loads(
    candidate: Candidate, prompt_tokens: int, settings: PolicySettings, scarcity: float
) -> tuple[float, float]:
    """Seconds for the sequences that the engine has, and for the pages that this prompt takes."""
    taken = prompt_tokens - min(candidate.hit.soon_tokens, prompt_tokens - 1)
    sequences_s = settings.sequence_s * (candidate.running + candidate.waiting)
    return sequences_s, scarcity * candidate.prefill_s_per_token * taken


def choose(
    candidates: Sequence[Candidate], prompt_tokens: int, settings: PolicySettings, *, prompt_key: int = 0
) -> Choice:
    """The engine for this prompt. Raises ``ValueError`` without candidates.

    ``prompt_key`` settles ties: different keys spread over equal engines, equal keys meet the same one.
    """
    if not candidates:
        raise ValueError("no engine to choose from")
    weighed = weigh(candidates, prompt_tokens, settings)
    return chosen(weighed, *_pick(weighed, prompt_key))


def within_bound(chosen: Cost, least: Cost, settings: PolicySettings) -> bool:
    """Whether the queue at ``chosen`` may be that much longer than the shortest, for what it saves."""
    return _Bound(least.queue_s, least.total_s, settings).allows(chosen.queue_s, chosen.total_s)


class _Bound:
    """How much longer than the shortest queue another one may be."""

    __slots__ = ("_factor", "_gap_s", "_queue_s", "_service_s")

    def __init__(self, queue_s: float, total_s: float, settings: PolicySettings) -> None:
        self._queue_s = queue_s
        self._service_s = total_s - queue_s
        self._gap_s = settings.queue_gap_s
        self._factor = settings.saving_factor

    def allows(self, queue_s: float, total_s: float) -> bool:
        gap_s = queue_s - self._queue_s
        return gap_s <= self._gap_s or gap_s <= self._factor * (self._service_s - (total_s - queue_s))


def _pick(weighed: ScoredCandidates, key: int) -> tuple[int, Reason]:
    """Position of the choice, and why; candidates go by their positions."""
    totals, queues, settings = weighed.totals, weighed.queues, weighed.settings
    if len(totals) == 1:
        return 0, "only"
    best = second = math.inf
    for total_s in totals:
        if total_s < best:
            second, best = best, total_s
        elif total_s < second:
            second = total_s
    cheapest = totals.index(best)
    cold = weighed.longest_trunk <= settings.cold_fraction * weighed.prompt_tokens
    queue_s, gap_s = queues[cheapest], settings.queue_gap_s
    if not cold and (queue_s <= gap_s or queue_s - min(queues) <= gap_s):
        own_rate = weighed.candidates[cheapest].prefill_s_per_token
        if second > best + _tie_s(own_rate, weighed.prompt_tokens, settings):
            return cheapest, "cheapest"  # within the bound, and by any engine's rate without an equal
    return _weigh_up(weighed, cheapest, key, cold=cold)


def _tie_s(rate: float, prompt_tokens: int, settings: PolicySettings) -> float:
    """Costs that differ by no more are equal, where the fastest engine has this rate."""
    share_s = settings.tie_fraction * (1 + settings.eviction_premium) * prompt_tokens * rate
    return share_s if share_s > settings.tie_s else settings.tie_s  # noqa: FURB136


def _weigh_up(weighed: ScoredCandidates, cheapest: int, key: int, *, cold: bool) -> tuple[int, Reason]:
    """``_pick`` where there may be a bound to keep, engines to probe, or equals."""
    candidates, settings = weighed.candidates, weighed.settings
    queues, totals = weighed.queues, weighed.totals
    shortest, best = min(queues), totals[cheapest]
    least = min([total_s for total_s, queue_s in zip(totals, queues, strict=True) if queue_s == shortest])
    bound = _Bound(shortest, least, settings)
    allowed: Sequence[int] = range(len(totals))
    reason: Reason = "cheapest"
    if not bound.allows(queues[cheapest], best):
        allowed = [i for i in allowed if bound.allows(queues[i], totals[i])]  # one of the shortest always is
        best = min([totals[i] for i in allowed])
        reason = "bounded"
    if cold:
        # Engines without work for long. A prompt that is not cold is no probe: no saving is given up.
        due = [i for i, candidate in enumerate(candidates) if candidate.idle_s >= settings.probe_interval_s]
        dearest = best + settings.probe_cost_max_s
        due = [i for i in due if totals[i] <= dearest and bound.allows(queues[i], totals[i])]
        if due:
            return _settle(weighed, due, key), "probe"
    fastest = min([c.prefill_s_per_token for c in candidates])
    limit = best + _tie_s(fastest, weighed.prompt_tokens, settings)
    equals = [i for i in allowed if totals[i] <= limit]
    if len(equals) == 1:
        return equals[0], reason
    if reason == "cheapest":
        equals = [i for i in equals if bound.allows(queues[i], totals[i])]
        reason = "tie"
    return _settle(weighed, equals, key), reason


def _settle(weighed: ScoredCandidates, equals: list[int], key: int) -> int:
    """Among equals the longest trunk (it is free, and keeps prefixes together), then rendezvous."""
    trunks = [weighed.parts[i][1] for i in equals]
    longest_trunk = max(trunks)
    longest = [i for i, trunk in zip(equals, trunks, strict=True) if trunk == longest_trunk]
    if len(longest) == 1:
        return longest[0]
    return longest[favourite([weighed.candidates[i].engine_id for i in longest], key)]


# Highest-random-weight (rendezvous) hashing (Thaler and Ravishankar, 1998): every prompt has its own order of
# the engines. Different keys spread evenly, the same key meets the same engine, and an engine that comes or
# goes moves only the keys it wins or held.
_U64 = (1 << 64) - 1


def weight(engine_id: str, key: int) -> int:
    """How much ``key`` prefers this engine: uniform over 64 bits, equal in every router process."""
    return xxhash.xxh64_intdigest(engine_id.encode(), key & _U64)


def favourite(engine_ids: Sequence[str], key: int) -> int:
    """Position of the engine that ``key`` prefers. The order of the list does not matter."""
    digest, seed = xxhash.xxh64_intdigest, key & _U64
    weights = [digest(engine_id.encode(), seed) for engine_id in engine_ids]
    return weights.index(max(weights))
