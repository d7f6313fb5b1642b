"""Pull a prefix from another engine's host memory: a third choice beside waiting for it and computing it.

vLLM 0.32 and later (``vllm/v1/kv_offload/tiering/p2p``) fetches blocks from the host memory of another engine
into its own, and from there into its GPU. For engine e, source s and a prompt of N tokens::

    end     = tokens that the host memory of s holds in every KV cache group, at most N - 1
    missing = end - (tokens e takes from its GPU and its own tiers)
    link    = max(busy(e), busy(s)) + latency + missing * seconds per token
    cost    = cost(e) - prefill and credit of the missing tokens + link + load of the missing tokens

The price of pages in ``cost(e)`` stays as it is: a copy takes as many pages as computing does, and others
have to compute again what these held. A pull is considered only where the source's own wait exceeds the
transfer, chosen only where it is cheaper than every engine without a pull, and only within the bound between
queues.

Always true: a pull ends where the source's host memory ends in its shortest group, so that windows and
recurrent states come with it; the result depends on the arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from router.placement.candidate import Cost, Pull
from router.placement.cost import Choice, ScoredCandidates, within_bound


class PullSources(msgspec.Struct, frozen=True, gc=False):
    """Prefixes that candidates could give to each other; sequences are in the order of the candidates."""

    held_tokens: Sequence[int]
    """Longest prefix that its host memory alone holds in every group; 0: it is no source."""
    busy_s: Sequence[float]
    """Seconds until its link is free."""
    s_per_token: float
    """Seconds of link per token."""
    latency_s: float = 0.0
    allowed: Callable[[int, int], bool] | None = None
    """Whether a target (first) may pull from a source; None: every pair may."""


class PullLinks:
    """Predicted time at which each engine's link is free. ``now`` is of one clock and does not go back."""

    def __init__(self) -> None:
        self._free_s: dict[str, float] = {}

    def busy_s(self, engine_id: str, now: float) -> float:
        """Seconds until the link is free."""
        return max(0.0, self._free_s.get(engine_id, now) - now)

    def charge(self, target_id: str, pull: Pull, now: float) -> None:
        """Occupy both ends until a chosen pull is predicted to end."""
        self._free_s = {name: free_s for name, free_s in self._free_s.items() if free_s > now}
        self._free_s[target_id] = self._free_s[pull.source_id] = now + pull.link_s


def with_pull(choice: Choice, sources: PullSources) -> Choice:
    """Return the choice with the cheapest pull, or unchanged if no pull is cheaper than every engine.

    A probe is unchanged: its purpose is the engine. The reason of a pull is ``pull``.
    """
    scored = choice.scored
    settings = scored.settings
    if choice.reason == "probe" or len(scored.totals) < 2:
        return choice
    best_s = min(scored.totals) - settings.tie_s
    shortest = min(range(len(scored.totals)), key=lambda i: (scored.queues[i], scored.totals[i]))
    least, found = scored.cost(shortest), choice
    for target in range(len(scored.totals)):
        pull = _longest(scored, sources, target)
        if pull is None:
            continue
        cost = _pulled(scored, target, pull)
        if cost.total_s < best_s and within_bound(cost, least, settings):
            best_s = cost.total_s
            found = Choice(target, cost.engine_id, "pull", cost.uncached_tokens, cost, scored, pull)
    return found


def _longest(scored: ScoredCandidates, sources: PullSources, target: int) -> Pull | None:
    """The best source of a target: most tokens, then the earliest free link."""
    most = scored.prompt_tokens - 1
    hit = scored.candidates[target].hit
    if hit.replay_tokens:  # with a window that is computed again the pulled prefix would be incomplete
        return None
    best: Pull | None = None
    for source, held in enumerate(sources.held_tokens):
        end = min(held, most)
        tokens = end - min(hit.whole_tokens, most)
        if source == target or tokens <= 0 or (best is not None and tokens < best.tokens):
            continue
        if sources.allowed is not None and not sources.allowed(target, source):
            continue
        wait_s = max(sources.busy_s[target], sources.busy_s[source])
        link_s = wait_s + sources.latency_s + tokens * sources.s_per_token
        holder = scored.candidates[source]
        if max(holder.queue_s, holder.room_s) <= link_s:
            continue  # the source itself would serve the prompt sooner
        if best is None or tokens > best.tokens or link_s < best.link_s:
            best = Pull(source, holder.engine_id, tokens, end, link_s)
    return best


def _pulled(scored: ScoredCandidates, target: int, pull: Pull) -> Cost:
    """The cost of the target with a pull: less to compute, more to load, the same pages."""
    cost, settings = scored.cost(target), scored.settings
    rate = scored.candidates[target].prefill_s_per_token
    uncached = scored.prompt_tokens - pull.end
    prefill_s = rate * uncached
    credit_s = settings.beta * rate * max(0, cost.shared_prefix_tokens - pull.end)
    more_s = pull.link_s + settings.load_s_per_token * pull.tokens
    return msgspec.structs.replace(
        cost,
        prefill_s=prefill_s,
        load_s=cost.load_s + more_s,
        credit_s=credit_s,
        total_s=cost.total_s - (cost.prefill_s - prefill_s) + (cost.credit_s - credit_s) + more_s,
        uncached_tokens=uncached,
        shared_prefix_tokens=max(cost.shared_prefix_tokens, pull.end),
    )
