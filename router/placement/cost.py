"""The default choice: place by the trunk, pay by the exact hit.

For engine e and a prompt of N tokens, with a = prefill seconds per token of e, in seconds::

    cost = queue                         prefill and loads still to do at e for prompts already placed there
         + a * (N - hit - offloaded)     what e computes for this prompt
         - beta * a * (trunk - hit - offloaded)
         + premium * (the two above)     what others will pay for the pages that this visit takes
         + load * cpu + fetch * storage  blocks e copies back instead of computing them
         + decode * running              what running sequences cost the prefill
         + sequence * (running + waiting)    these two only where some engine could load a part of the prompt
         + scarcity * a * (N - hit)

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
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

from router.placement.candidate import Candidate, Choice, Cost, PolicySettings, Reason, Weighed

_ENGINE: Final = 0
_QUEUE: Final = 1
_TOTAL: Final = 7
_UNCACHED: Final = 8
_TRUNK: Final = 9
"""Where the fields of ``Cost`` stand in ``Weighed``."""
_SCARCE_AT_S: Final = 5.0
"""Mean lateness of first tokens at which pages have their full price."""


def cost(candidate: Candidate, prompt_tokens: int, settings: PolicySettings) -> Cost:
    """What sending a prompt of ``prompt_tokens`` to this engine costs, part by part."""
    return Cost(*weigh((candidate,), prompt_tokens, settings)[0])


def weigh(candidates: Sequence[Candidate], prompt_tokens: int, settings: PolicySettings) -> list[Weighed]:
    """The cost of each candidate: the fields of ``Cost``, in order."""
    # Plain comparisons, locals and tuples: this runs once per engine and request.
    most = prompt_tokens - 1  # vLLM always computes at least the last token
    beta, premium = settings.beta, settings.eviction_premium
    weighed: list[Weighed] = []
    loads = False
    for candidate in candidates:
        hit, queue_s, rate = candidate.hit, candidate.queue_s, candidate.prefill_s_per_token
        cached, trunk, load_s, credit_s = hit.whole_tokens, hit.trunk_tokens, 0.0, 0.0
        cached = most if cached > most else cached  # noqa: FURB136
        if cached > hit.soon_tokens:
            loads = True
            near = min(hit.near_tokens, cached)
            load_s = settings.load_s_per_token * (near - hit.soon_tokens)
            load_s += settings.storage_load_s_per_token * (cached - near)
        trunk = most if trunk > most else trunk  # noqa: FURB136
        if trunk > cached:
            credit_s = beta * rate * (trunk - cached)
        else:
            trunk = cached
        uncached = prompt_tokens - cached
        prefill_s, decode_s = rate * uncached, candidate.decode_interference_s * candidate.running
        eviction_s = premium * (prefill_s - credit_s)
        total_s = queue_s + prefill_s + eviction_s + load_s + decode_s - credit_s
        weighed.append(
            (
                candidate.engine_id,
                queue_s,
                prefill_s,
                load_s,
                decode_s,
                credit_s,
                eviction_s,
                total_s,
                uncached,
                trunk,
            )
        )
    return _beside_loads(candidates, weighed, prompt_tokens, settings) if loads else weighed


def _beside_loads(
    candidates: Sequence[Candidate],
    weighed: Iterable[Weighed],
    prompt_tokens: int,
    settings: PolicySettings,
) -> list[Weighed]:
    """The same where a part of the prompt can be loaded: the price of sequences is in ``decode_s``, that of
    scarce pages in ``eviction_s``."""
    late_s = sum([candidate.late_s for candidate in candidates]) / len(candidates)
    scarcity = settings.scarcity_premium * min(1.0, late_s / _SCARCE_AT_S)
    dearer: list[Weighed] = []
    for candidate, parts in zip(candidates, weighed, strict=True):
        engine, queue_s, prefill_s, load_s, decode_s, credit_s, eviction_s, total_s, uncached, trunk = parts
        sequences_s = settings.sequence_s * (candidate.running + candidate.waiting)
        taken = prompt_tokens - min(candidate.hit.soon_tokens, prompt_tokens - 1)
        pages_s = scarcity * candidate.prefill_s_per_token * taken
        decode_s, eviction_s = decode_s + sequences_s, eviction_s + pages_s
        total_s += sequences_s + pages_s
        dearer.append(
            (engine, queue_s, prefill_s, load_s, decode_s, credit_s, eviction_s, total_s, uncached, trunk)
        )
    return dearer


def choose(
    candidates: Sequence[Candidate], prompt_tokens: int, settings: PolicySettings, *, prompt_key: int = 0
) -> Choice:
    """The engine for this prompt. Raises ``ValueError`` without candidates.

    ``prompt_key`` settles ties: different keys spread over equal engines, equal keys meet the same one.
    """
    if not candidates:
        raise ValueError("no engine to choose from")
    weighed = weigh(candidates, prompt_tokens, settings)
    index, reason = _pick(candidates, weighed, prompt_tokens, settings, prompt_key)
    chosen = weighed[index]
    return Choice(index, chosen[_ENGINE], reason, chosen[_UNCACHED], weighed)


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


def _pick(
    candidates: Sequence[Candidate],
    weighed: list[Weighed],
    prompt_tokens: int,
    settings: PolicySettings,
    key: int,
) -> tuple[int, Reason]:
    """Position of the choice, and why; candidates go by their positions."""
    if len(weighed) == 1:
        return 0, "only"
    cheapest = trunk = 0
    best = second = shortest = least = math.inf  # least: the lowest cost where the queue is shortest
    for place, each in enumerate(weighed):
        queue_s, total_s, its_trunk = each[_QUEUE], each[_TOTAL], each[_TRUNK]
        if total_s < best:
            second, best, cheapest = best, total_s, place
        elif total_s < second:
            second = total_s
        if queue_s < shortest:
            shortest, least = queue_s, total_s
        elif queue_s == shortest and total_s < least:
            least = total_s
        trunk = its_trunk if its_trunk > trunk else trunk  # noqa: FURB136
    cold = trunk <= settings.cold_fraction * prompt_tokens
    if not cold and weighed[cheapest][_QUEUE] - shortest <= settings.queue_gap_s:
        own_rate = candidates[cheapest].prefill_s_per_token
        if second > best + _tie_s(own_rate, prompt_tokens, settings):
            return cheapest, "cheapest"  # within the bound, and by any engine's rate without an equal
    bound = _Bound(shortest, least, settings)
    return _weigh_up(candidates, weighed, cheapest, bound, prompt_tokens, settings, key, cold=cold)


def _tie_s(rate: float, prompt_tokens: int, settings: PolicySettings) -> float:
    """Costs that differ by no more are equal, where the fastest engine has this rate."""
    share_s = settings.tie_fraction * (1 + settings.eviction_premium) * prompt_tokens * rate
    return share_s if share_s > settings.tie_s else settings.tie_s  # noqa: FURB136


def _weigh_up(
    candidates: Sequence[Candidate],
    weighed: list[Weighed],
    cheapest: int,
    bound: _Bound,
    prompt_tokens: int,
    settings: PolicySettings,
    key: int,
    *,
    cold: bool,
) -> tuple[int, Reason]:
    """``_pick`` where there may be a bound to keep, engines to probe, or equals."""
    queues, totals = [w[_QUEUE] for w in weighed], [w[_TOTAL] for w in weighed]
    best = totals[cheapest]
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
    limit = best + _tie_s(fastest, prompt_tokens, settings)
    equals = [i for i in allowed if totals[i] <= limit]
    if len(equals) == 1:
        return equals[0], reason
    if reason == "cheapest":
        equals = [i for i in equals if bound.allows(queues[i], totals[i])]
        reason = "tie"
    return _settle(weighed, equals, key), reason


def _settle(weighed: list[Weighed], equals: list[int], key: int) -> int:
    """Among equals the longest trunk (it is free, and keeps prefixes together), then rendezvous."""
    trunk = max([weighed[i][_TRUNK] for i in equals])
    longest = [i for i in equals if weighed[i][_TRUNK] == trunk]
    if len(longest) == 1:
        return longest[0]
    return longest[favourite([weighed[i][_ENGINE] for i in longest], key)]


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
