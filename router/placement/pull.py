"""Pull a prefix from another engine's host memory: a third choice beside waiting for it and computing it.

vLLM 0.32 and later (``vllm/v1/kv_offload/tiering/p2p``) fetches blocks from the host memory of another engine
into its own, and from there into its GPU. For engine e, source s and a prompt of N tokens::

    end     = tokens that the host memory of s holds in every KV cache group, at most N - 1
    missing = end - (tokens e takes from its GPU and its own tiers)
    link    = max(busy(e), busy(s)) + latency + missing * seconds per token
    cost    = cost(e) - prefill, credit and delay of the missing tokens + link + load of the missing tokens
              + premium * page price * prefill of the missing tokens

A pulled prefix takes pages as a loaded one does, and what it evicts stays in host memory: it is loaded again,
not computed. But unfinished requests cannot be evicted, so the page price is the share of the pool that they
hold, and 1 while prompts wait for pages at any engine: there a second copy costs more than the wait that it
saves (benchmarks/results/tiers.md).

A pull is considered only where the transfer is shorter than the source's own wait, and with the load shorter
than computing; it is chosen only where it is cheaper than every engine without a pull. So by the
prediction no first token comes later than by computing on the same engine.

Invariants: a pull ends where the source's host memory ends in its shortest group, so that windows and
recurrent states come with it; the result of ``with_pull`` depends on the arguments alone. A source that has
lost blocks meanwhile, or is gone, costs time and never a wrong answer: vLLM asks for each block by its hash,
and computes what does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol
from urllib.parse import urlsplit

import msgspec

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.addresses import split_address
from kvatlas.router.placement.candidate import Candidate, Cost, Pull
from kvatlas.router.placement.cost import TIE_S, Choice, ScoredCandidates
from kvatlas.router.placement.fleet_values import columns
from kvatlas.router.placement.load import LoadAccount
from kvatlas.router.placement.others import OthersLoad

LATENCY_S: Final = 0.002
"""Latency of one pull: the handshake's and the probe's messages."""
# Of a large fleet, so that a decision does not try each target with each source: sources with the longest
# prefixes, and targets with the shortest queues and the least cost, where the cheapest pull is.
SOURCES_MAX: Final = 32
_SHORTEST_MAX: Final = 48
_CHEAPEST_MAX: Final = 16


def kv_source_of(engine: EngineAddress, port: int) -> tuple[str, int]:
    """Return host and port of the engine's `p2p` tier; ``port`` is the default. Ranks have ports in a row
    (vllm/v1/kv_offload/tiering/p2p/manager.py, 0.32: base + data-parallel index)."""
    host = urlsplit(engine.base_url).hostname or ""
    if engine.kv_source is not None:
        host, port = split_address(engine.kv_source)
    return host, port + (engine.dp_rank or 0)


class PerEngine(Protocol):
    """A value of each candidate, by its place; some are worked out only for those that are looked at."""

    def __getitem__(self, at: int, /) -> float: ...


class AskedOnce(dict[int, float]):
    """Values that are worked out when they are asked for."""

    def __init__(self, value: Callable[[int], float]) -> None:
        super().__init__()
        self._value = value

    def __missing__(self, at: int) -> float:
        found = self[at] = self._value(at)
        return found


class PullSources(msgspec.Struct, frozen=True, gc=False):
    """Prefixes that candidates could give to each other; sequences are in the order of the candidates."""

    held_tokens: Sequence[int]
    """Longest prefix that its host memory alone holds in every group; 0: it is no source."""
    busy_s: PerEngine
    """Seconds until its link is free."""
    s_per_token: float
    """Seconds of link per token."""
    page_prices: PerEngine
    """Price of the pages of pulled tokens there, 0 to 1: ``page_prices``."""
    latency_s: float = 0.0
    allowed: Callable[[int, int], bool] | None = None
    """Whether a target (first) may pull from a source; None: every pair may."""
    serves: Callable[[int], bool] | None = None
    """Whether it may be a source at all; None: every one may."""

    def link_s(self, target: int, source: int, tokens: int) -> float:
        """Seconds of a transfer that is asked for now, with its wait for both links."""
        wait_s = max(self.busy_s[target], self.busy_s[source])
        return wait_s + self.latency_s + tokens * self.s_per_token


def occupy_links(target: LoadAccount, source: LoadAccount, link_s: float, now: float) -> None:
    """Occupy both ends until a pull that begins now is predicted to end, its wait for the links included."""
    target.link_free_s = source.link_free_s = now + link_s


def link_busy_s(load: LoadAccount, others: OthersLoad | None, now: float) -> float:
    """Seconds until an engine's link is free of this router's pulls and of ``others``'; None: unknown."""
    others_s = 0.0 if others is None else others.link_ms / 1000
    return max(0.0, load.link_free_s - now, others_s)


def page_prices(engines: Sequence[LoadAccount], prompt_tokens: int) -> list[float]:
    """Return the price of the pages that pulled tokens of a prompt take at each engine, 0 to 1."""
    if any(load.pages.free < 0 for load in engines):
        return [1.0] * len(engines)
    return [load.pages.used_share(prompt_tokens) for load in engines]


def with_pull(choice: Choice, sources: PullSources) -> Choice:
    """Return the choice with the cheapest pull, or unchanged if no pull is cheaper than every engine.

    A probe is unchanged: its purpose is the engine. The reason of a pull is ``pull``.
    """
    scored = choice.scored
    if choice.reason == "probe" or len(scored.totals) < 2:
        return choice
    best_s = scored.totals.item(scored.totals.argmin()) - TIE_S
    found = choice
    held = _likeliest_sources(scored, sources)
    for target in _likeliest_targets(scored) if held else ():
        pull = _longest(scored, sources, held, target)
        if pull is None:
            continue
        cost = _pulled(scored, target, pull, sources.page_prices[target])
        if cost.total_s < best_s:
            best_s = cost.total_s
            taker, uncached = scored.candidates[target], cost.uncached_tokens
            found = Choice(target, cost.engine_id, "pull", uncached, cost, taker, scored, pull)
    return found


def _wait_s(scored: ScoredCandidates, at: int) -> float:
    """Seconds until an engine would begin with the prompt itself."""
    candidates = scored.candidates
    return max(candidates.queue_s.item(at), candidates.rooms.get(at, 0.0))


def _likeliest_sources(scored: ScoredCandidates, sources: PullSources) -> list[tuple[int, int]]:
    """Return engines that hold a part of the prompt, and where it ends: the longest first, and of these those
    whose link is free first."""
    ends, found = sources.held_tokens, []
    for at in sorted([at for at, end in enumerate(ends) if end > 0], key=ends.__getitem__, reverse=True):
        if _wait_s(scored, at) <= sources.latency_s or not (sources.serves is None or sources.serves(at)):
            continue  # it would serve the prompt itself
        found.append((at, min(ends[at], scored.prompt_tokens - 1)))
        if len(found) == SOURCES_MAX:
            break
    return sorted(found, key=lambda one: (-one[1], sources.busy_s[one[0]]))


def _likeliest_targets(scored: ScoredCandidates) -> Sequence[int]:
    """Return the engines where a pull can be cheaper than all else, in order."""
    every = range(len(scored.totals))
    if len(every) <= _SHORTEST_MAX + _CHEAPEST_MAX:
        return every
    shortest = scored.queues.argsort(kind="stable")[:_SHORTEST_MAX].tolist()
    return sorted({*shortest, *scored.totals.argsort(kind="stable")[:_CHEAPEST_MAX].tolist()})


def any_waits(candidates: Sequence[Candidate]) -> bool:
    """Whether any engine has a wait that the shortest transfer could undercut: else nothing is looked up."""
    found = columns(candidates)
    return found.queue_s.max() > LATENCY_S or any(room_s > LATENCY_S for room_s in found.rooms.values())


def _longest(
    scored: ScoredCandidates, sources: PullSources, held: Sequence[tuple[int, int]], target: int
) -> Pull | None:
    """The best source of a target: most tokens, then the earliest free link. ``held``: in this order."""
    most = scored.prompt_tokens - 1
    hit = scored.candidates[target].hit
    if hit.replay_tokens:  # with a window that is computed again the pulled prefix would be incomplete
        return None
    own = min(hit.whole_tokens, most)
    saved_s_per_token = scored.candidates[target].prefill_s_per_token - scored.settings.load_s_per_token
    for source, end in held:
        tokens = end - own
        if tokens <= 0:
            break
        if source == target or not (sources.allowed is None or sources.allowed(target, source)):
            continue
        link_s = sources.link_s(target, source, tokens)
        # Otherwise the source itself would serve the prompt sooner, or the target would compute it sooner.
        if link_s < min(_wait_s(scored, source), saved_s_per_token * tokens):
            return Pull(source, scored.candidates.engine_ids[source], tokens, end, link_s)
    return None


def _pulled(scored: ScoredCandidates, target: int, pull: Pull, page_price: float) -> Cost:
    """The cost of the target with a pull: less to compute and to delay, more to load, pages at
    ``page_price``."""
    cost, settings = scored.cost(target), scored.settings
    rate = scored.candidates[target].prefill_s_per_token
    uncached = scored.prompt_tokens - pull.end
    prefill_s = rate * uncached
    credit_s = settings.beta * rate * max(0, cost.shared_prefix_tokens - pull.end)
    more_s = pull.link_s + settings.load_s_per_token * pull.tokens
    computed_s = cost.prefill_s - prefill_s - (cost.credit_s - credit_s)
    # What is pulled delays no other prompt, but takes pages that others lose.
    less_s = scored.delay_s(target, cost.prefill_s - cost.credit_s)
    less_s -= scored.delay_s(target, prefill_s - credit_s)
    less_s -= settings.eviction_premium * page_price * computed_s
    return msgspec.structs.replace(
        cost,
        prefill_s=prefill_s,
        load_s=cost.load_s + more_s,
        credit_s=credit_s,
        delay_s=cost.delay_s - less_s,
        total_s=cost.total_s - computed_s - less_s + more_s,
        uncached_tokens=uncached,
        shared_prefix_tokens=max(cost.shared_prefix_tokens, pull.end),
    )
