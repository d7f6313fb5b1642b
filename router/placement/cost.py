"""The default choice: place by the trunk, pay by the exact hit.

For engine e and a prompt of N tokens, with a = prefill seconds per token of e, in seconds::

    cost = queue                         seconds of prefill still to do at e for prompts already placed there
         + a * (N - hit - offloaded)     what e computes for this prompt
         - beta * a * (trunk - hit - offloaded)
         + premium * (the two above)     what others will pay for the pages that this visit takes
         + load * cpu + fetch * storage  blocks e copies back instead of computing them
         + decode * running              what running sequences cost the prefill

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

The bound: against the engine with the shortest queue, the chosen engine's queue is longer by at most
``max(queue_gap_s, saving_factor * saving)``, where ``saving`` is what choosing it saves in all parts of the
cost but the queue, at most (1 + premium) times the prefill of the whole prompt plus the difference of the
load and decode parts. Hence no engine is flooded for its cache; and a cold prompt goes first to engines that
were without work for ``probe_interval_s`` (at most ``probe_cost_max_s`` dearer), so none starves.

Always true: the result depends on the arguments alone, not on the order of the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.placement.candidate import Candidate, Choice, Cost, PolicySettings, Reason


def cost(candidate: Candidate, prompt_tokens: int, settings: PolicySettings) -> Cost:
    """What sending a prompt of ``prompt_tokens`` to this engine costs, part by part."""
    # Plain comparisons: this runs once per engine and request, and min() costs four times as much.
    most = prompt_tokens - 1  # vLLM always computes at least the last token
    hit, load_s = candidate.hit, 0.0
    cached, trunk = hit.whole_tokens, hit.trunk_tokens
    cached = most if cached > most else cached  # noqa: FURB136
    if cached > hit.soon_tokens:
        near = min(hit.near_tokens, cached)
        load_s = settings.load_s_per_token * (near - hit.soon_tokens) + settings.storage_load_s_per_token * (
            cached - near
        )
    trunk = most if trunk > most else trunk  # noqa: FURB136
    trunk = cached if trunk < cached else trunk  # noqa: FURB136
    rate = candidate.prefill_s_per_token
    prefill_s = rate * (prompt_tokens - cached)
    decode_s = candidate.decode_interference_s * candidate.running
    credit_s = settings.beta * rate * (trunk - cached)
    eviction_s = settings.eviction_premium * (prefill_s - credit_s)
    queue_s = candidate.queue_s
    return Cost(
        candidate.engine_id,
        queue_s,
        prefill_s,
        load_s,
        decode_s,
        credit_s,
        eviction_s,
        queue_s + prefill_s + eviction_s + load_s + decode_s - credit_s,
        prompt_tokens - cached,
        trunk,
    )


def choose(
    candidates: Sequence[Candidate], prompt_tokens: int, settings: PolicySettings, *, prompt_key: int = 0
) -> Choice:
    """The engine for this prompt. Raises ``ValueError`` without candidates.

    ``prompt_key`` settles ties: different keys spread over equal engines, equal keys meet the same one.
    """
    if not candidates:
        raise ValueError("no engine to choose from")
    costs = [cost(candidate, prompt_tokens, settings) for candidate in candidates]
    index, reason = _pick(candidates, costs, prompt_tokens, settings, prompt_key)
    return Choice(index, costs[index].engine_id, reason, costs[index].uncached_tokens, tuple(costs))


def within_bound(chosen: Cost, least: Cost, settings: PolicySettings) -> bool:
    """Whether the queue at ``chosen`` may be that much longer than the shortest, for what it saves."""
    gap_s = chosen.queue_s - least.queue_s
    if gap_s <= settings.queue_gap_s:
        return True
    return gap_s <= settings.saving_factor * (least.service_s - chosen.service_s)


def _pick(
    candidates: Sequence[Candidate],
    costs: list[Cost],
    prompt_tokens: int,
    settings: PolicySettings,
    key: int,
) -> tuple[int, Reason]:
    if len(costs) == 1:
        return 0, "only"
    shortest = min([c.queue_s for c in costs])
    least = _cheapest([c for c in costs if c.queue_s == shortest])
    allowed = costs
    reason: Reason = "cheapest"
    best = _cheapest(costs)
    if not within_bound(best, least, settings):
        allowed = [c for c in costs if within_bound(c, least, settings)]  # ``least`` always is
        best = _cheapest(allowed)
        reason = "bounded"
    due = _due_probes(candidates, costs, settings, prompt_tokens)
    dearest = best.total_s + settings.probe_cost_max_s
    equals = [c for c in due if c.total_s <= dearest and within_bound(c, least, settings)]
    if equals:
        reason = "probe"
    else:
        fastest = min([c.prefill_s_per_token for c in candidates])
        whole_s = (1 + settings.eviction_premium) * prompt_tokens * fastest
        band = max(settings.tie_s, settings.tie_fraction * whole_s)
        limit = best.total_s + band
        equals = [c for c in allowed if c.total_s <= limit]
        if reason == "cheapest" and len(equals) > 1:
            equals = [c for c in equals if within_bound(c, least, settings)]
            reason = "tie"
    return costs.index(_settle(equals, key)), reason


def _cheapest(costs: list[Cost]) -> Cost:
    totals = [c.total_s for c in costs]
    return costs[totals.index(min(totals))]


def _settle(equals: list[Cost], key: int) -> Cost:
    """Among equals the longest trunk (it is free, and keeps prefixes together), then rendezvous."""
    trunk = max([c.trunk_tokens for c in equals])
    longest = [c for c in equals if c.trunk_tokens == trunk]
    if len(longest) == 1:
        return longest[0]
    return longest[favourite([c.engine_id for c in longest], key)]


def _due_probes(
    candidates: Sequence[Candidate], costs: list[Cost], settings: PolicySettings, prompt_tokens: int
) -> list[Cost]:
    """Engines without work for long; none unless the prompt is cold, so that no saving is given up."""
    interval = settings.probe_interval_s
    due = [c for candidate, c in zip(candidates, costs, strict=True) if candidate.idle_s >= interval]
    if due and max([c.trunk_tokens for c in costs]) > settings.cold_fraction * prompt_tokens:
        return []
    return due


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
