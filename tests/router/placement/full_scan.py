"""The whole decision by reading every engine again: the oracle of ``FleetSnapshot`` and of scoring by lists.

One loop over the engines makes a candidate of each, a second one scores it, and the choice is among all. It
is how the router decided before it kept snapshots, and states what they must give. The price of one engine's
load is the router's own (``test_cost``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvatlas.router.feeds.base import FeedState
from kvatlas.router.placement.candidate import Candidate, Hit, PolicySettings, Reason
from kvatlas.router.placement.cost import (
    COLD_FRACTION,
    DELAY_MAX_S,
    PROBE_COST_MAX_S,
    TIE_S,
    _load_s,
    favourite,
)
from kvatlas.router.placement.engine import Engine, PromptView
from kvatlas.router.placement.others import NO_OTHERS
from kvatlas.router.placement.saturation import PILE

_READY = FeedState.READY
_SCARCE_AT_S = 5.0


def candidates(engines: Iterable[Engine], asked: PromptView, now: float) -> list[Candidate]:
    """These engines as candidates for one prompt, in order: hit, load and rates of each."""
    by_engine, others = asked.others, None if asked.others is None else NO_OTHERS
    tokens, order = asked.tokens, asked.order
    held_by = {**asked.nothing, **asked.held}
    for hit_of, names in asked.alike:
        held_by.update(dict.fromkeys(names, hit_of))
    found: list[Candidate] = []
    for engine in engines:
        name, feed = engine.engine_id, engine.feed
        held = held_by.get(name)
        hit = engine.hit(asked, held)
        ready = held is not None and feed is not None and feed.state is _READY and held.mode != "unknown"
        if ready and engine.evictions.crowded and hit.soon_tokens:
            hit = engine.after_evictions(hit, asked)
        rate, interference_s = engine.rates.current(now)
        if by_engine:
            others = by_engine.get(name, NO_OTHERS)
        load = engine.load
        queue_s, running, waiting, idle_s, late_s, recent_s, *_ = load.ahead(now, others, rate)
        candidate = Candidate(
            name, hit, queue_s, running, waiting, idle_s, rate, interference_s, late_s, recent_s
        )
        behind_pages = 0
        if order is not None and waiting and engine.takes_order:
            work_s = rate * (tokens - hit.whole_tokens)
            behind_s, behind_pages = load.behind(order.rank_s(work_s), rate)
            candidate.queue_s = max(0.0, queue_s - behind_s)
        if tokens > load.pages.surely_fits_tokens:
            candidate.room_s = load.pages.wait_s(tokens, behind_pages)
        found.append(candidate)
    return found


class Scored(NamedTuple):
    """Costs in the order of the candidates; ``parts``: cached tokens, shared prefix, work, load."""

    candidates: Sequence[Candidate]
    prompt_tokens: int
    settings: PolicySettings
    totals: list[float]
    queues: list[float]
    parts: list[tuple[int, int, float, float]]
    longest_shared_prefix: int


def score(candidates: Sequence[Candidate], prompt_tokens: int, settings: PolicySettings) -> Scored:
    """Score every candidate."""
    most = prompt_tokens - 1
    beta = settings.beta
    requests = sum([candidate.running + candidate.waiting for candidate in candidates]) / len(candidates)
    spread, mean_s = settings.spread, 0.0
    if spread:
        mean_s = math.fsum([candidate.recent_s for candidate in candidates]) / len(candidates)
    totals: list[float] = []
    queues: list[float] = []
    parts: list[tuple[int, int, float, float]] = []
    hit: Hit | None = None
    part = 0, 0, 0.0, 0.0
    longest, loads, by_rate, load_s = 0, False, 0.0, 0.0
    for candidate in candidates:
        if candidate.hit is not hit:
            hit = candidate.hit
            cached, shared_prefix, load_s = hit.whole_tokens, hit.shared_prefix_tokens, 0.0
            cached = min(cached, most)
            if cached > hit.soon_tokens:
                loads, load_s = True, _load_s(hit, cached, settings)
            shared_prefix = min(shared_prefix, most)
            if hit.share < 1.0 and prompt_tokens:
                cached, shared_prefix, load_s = (
                    int(hit.share * cached),
                    int(hit.share * shared_prefix),
                    hit.share * load_s,
                )
            if hit.replay_tokens and cached > hit.replay_tokens:
                cached, shared_prefix = cached - hit.replay_tokens, shared_prefix - hit.replay_tokens
            if shared_prefix > cached:
                by_rate = prompt_tokens - cached - beta * (shared_prefix - cached)
            else:
                shared_prefix, by_rate = cached, prompt_tokens - cached
            longest = max(longest, shared_prefix)
            part = cached, shared_prefix, by_rate, load_s
        queue_s = candidate.queue_s
        if candidate.room_s:
            queue_s = max(queue_s, settings.room_share * candidate.room_s)
        decode_s = candidate.decode_interference_s * candidate.running
        held_up = candidate.waiting + (candidate.running if candidate.room_s > candidate.queue_s else 0)
        price = max(settings.eviction_premium, settings.delay * (requests + held_up))
        computed_s = candidate.prefill_s_per_token * by_rate
        total_s = computed_s + min(price * computed_s, DELAY_MAX_S) + queue_s + load_s + decode_s
        if candidate.recent_s > mean_s:
            total_s += spread * (candidate.recent_s - mean_s)
        totals.append(total_s)
        queues.append(queue_s)
        parts.append(part)
    scored = Scored(candidates, prompt_tokens, settings, totals, queues, parts, longest)
    if loads:
        _add_scarcity(scored)
    return scored


def _add_scarcity(scored: Scored) -> None:
    """Add the prices of sequences (to ``decode_s``) and of scarce pages (to ``delay_s``) if a part of the
    prompt can be loaded."""
    candidates, settings = scored.candidates, scored.settings
    late_s = math.fsum([candidate.late_s for candidate in candidates]) / len(candidates)
    scarcity = settings.scarcity_premium * min(1.0, late_s / _SCARCE_AT_S)
    for index, candidate in enumerate(candidates):
        scored.totals[index] += sum(_beside_loads(candidate, scored.prompt_tokens, settings, scarcity))


def _beside_loads(
    candidate: Candidate, prompt_tokens: int, settings: PolicySettings, scarcity: float
) -> tuple[float, float]:
    """Seconds for the engine's sequences, and for the pages that this prompt takes."""
    soon = min(candidate.hit.soon_tokens, prompt_tokens - 1)
    taken = prompt_tokens - (int(candidate.hit.share * soon) if prompt_tokens else soon)
    sequences_s = settings.sequence_s * (candidate.running + candidate.waiting)
    return sequences_s, scarcity * candidate.prefill_s_per_token * taken


def pick(scored: Scored, key: int) -> tuple[int, Reason]:
    """Position of the choice, and the reason; candidates are given by their positions."""
    candidates, settings, totals = scored.candidates, scored.settings, scored.totals
    if len(totals) == 1:
        return 0, "only"
    best = min(totals)
    if scored.longest_shared_prefix <= COLD_FRACTION * scored.prompt_tokens:
        dearest, interval_s = best + PROBE_COST_MAX_S, settings.probe_interval_s
        due = [
            i
            for i, one in enumerate(candidates)
            if totals[i] <= dearest and one.idle_s >= interval_s and scored.queues[i] <= min(scored.queues)
        ]
        if due:
            return _settle(scored, due, key), "probe"
    equals = [i for i, total_s in enumerate(totals) if total_s <= best + TIE_S]
    if len(equals) == 1:
        return equals[0], "cheapest"
    return _settle(scored, equals, key), "tie"


def _settle(scored: Scored, equals: list[int], key: int) -> int:
    """Break a tie: the longest shared prefix (it is free, and keeps prefixes together), then rendezvous."""
    shared_prefixes = [scored.parts[i][1] for i in equals]
    longest_shared_prefix = max(shared_prefixes)
    longest = [
        i
        for i, shared_prefix in zip(equals, shared_prefixes, strict=True)
        if shared_prefix == longest_shared_prefix
    ]
    if len(longest) == 1:
        return longest[0]
    return longest[favourite([scored.candidates[i].engine_id for i in longest], key)]


def waits_least_s(candidates: Sequence[Candidate]) -> float:
    """Of the engine that is ``shortest_wait``."""
    return min(
        max(one.queue_s, one.room_s) if one.running or one.waiting else one.queue_s for one in candidates
    )


def has_room(candidates: Sequence[Candidate], saturation_s: float, requests_max: int | None) -> bool:
    """``any_room``."""
    return any(
        one.queue_s <= saturation_s and (requests_max is None or one.running + one.waiting < requests_max)
        for one in candidates
    )


def joins(candidates: Sequence[Candidate], tokens: int, share: float, saturation_s: float) -> bool:
    """``joins_sibling``."""
    least = max(1.0, share * tokens)
    return any(one.hit.common_tokens >= least and one.queue_s <= PILE * saturation_s for one in candidates)


def longest(candidates: Sequence[Candidate]) -> tuple[int, int, int]:
    """Tokens of the longest hit and of the next, and the first engine that has it."""
    tokens = [one.hit.whole_tokens for one in candidates]
    most, second = sorted([0, *tokens])[:-3:-1]
    return most, second, tokens.index(most) if most else 0
