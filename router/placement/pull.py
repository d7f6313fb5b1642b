"""Pull a prefix from another engine's host memory: a third choice beside waiting for it and computing it.

vLLM 0.32 and later (``vllm/v1/kv_offload/tiering/p2p``) fetches blocks from the host memory of another engine
into its own, and from there into its GPU. For engine e, source s and a prompt of N tokens::

    end     = tokens that the host memory of s holds in every KV cache group, at most N - 1
    missing = end - (tokens e takes from its GPU and its own tiers)
    link    = max(busy(e), busy(s)) + latency + missing * seconds per token
    cost    = cost(e) - prefill and credit of the missing tokens + link + load of the missing tokens
              - (1 - page price) * eviction premium of the missing tokens

A pulled prefix takes pages as a loaded one does, and what it evicts stays in host memory: it is loaded again,
not computed. But unfinished requests cannot be evicted, so the page price is the share of the pool that they
hold, and 1 while prompts wait for pages at any engine: there a second copy costs more than the wait that it
saves (benchmarks/results/tiers.md).

A pull is considered only where the transfer is shorter than the source's own wait, and with the load shorter
than computing; it is chosen only where it is cheaper than every engine without a pull, and only within the
bound between queues. So by the prediction no first token comes later than by computing on the same engine.

Invariants: a pull ends where the source's host memory ends in its shortest group, so that windows and
recurrent states come with it; the result of ``with_pull`` depends on the arguments alone. A source that has
lost blocks meanwhile, or is gone, costs time and never a wrong answer: vLLM asks for each block by its hash,
and computes what does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from router.feeds.base import FeedState
from router.fleet.engines import EngineAddress, EngineId
from router.http.sockets import split_address
from router.openai.members import TooManyStepsError, run_cooperatively
from router.openai.request import InboundRequest
from router.pd.bodies import SplitBody, split_body
from router.pd.transfer import KvSource
from router.placement.candidate import Candidate, Cost, Hit, Pull, PullSettings, columns
from router.placement.cost import TIE_S, Choice, ScoredCandidates, within_bound
from router.placement.engine import Engine
from router.placement.load import LoadAccount
from router.placement.others import OthersLoad, others_at
from router.prompts.prompt import Prompt

LATENCY_S: Final = 0.002
"""Latency of one pull: the handshake's and the probe's messages."""


def kv_source_of(engine: EngineAddress, port: int) -> tuple[str, int]:
    """Return host and port of the engine's `p2p` tier; ``port`` is the default. Ranks have ports in a row
    (vllm/v1/kv_offload/tiering/p2p/manager.py, 0.32: base + data-parallel index)."""
    host = urlsplit(engine.base_url).hostname or ""
    if engine.kv_source is not None:
        host, port = split_address(engine.kv_source)
    return host, port + (engine.dp_rank or 0)


class PullSources(msgspec.Struct, frozen=True, gc=False):
    """Prefixes that candidates could give to each other; sequences are in the order of the candidates."""

    held_tokens: Sequence[int]
    """Longest prefix that its host memory alone holds in every group; 0: it is no source."""
    busy_s: Sequence[float]
    """Seconds until its link is free."""
    s_per_token: float
    """Seconds of link per token."""
    page_prices: Sequence[float]
    """Share of the eviction premium that pulled tokens cost there: ``page_prices``."""
    latency_s: float = 0.0
    allowed: Callable[[int, int], bool] | None = None
    """Whether a target (first) may pull from a source; None: every pair may."""

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
    """Return the share of the eviction premium that pulled tokens of a prompt cost at each engine."""
    if any(load.pages.free < 0 for load in engines):
        return [1.0] * len(engines)
    return [load.pages.used_share(prompt_tokens) for load in engines]


def with_pull(choice: Choice, sources: PullSources) -> Choice:
    """Return the choice with the cheapest pull, or unchanged if no pull is cheaper than every engine.

    A probe is unchanged: its purpose is the engine. The reason of a pull is ``pull``.
    """
    scored = choice.scored
    settings = scored.settings
    if choice.reason == "probe" or len(scored.totals) < 2:
        return choice
    best_s = min(scored.totals) - TIE_S
    shortest = min(range(len(scored.totals)), key=lambda i: (scored.queues[i], scored.totals[i]))
    least, found = scored.cost(shortest), choice
    held = [
        (source, min(tokens, scored.prompt_tokens - 1)) for source, tokens in enumerate(sources.held_tokens)
    ]
    held = [(source, end) for source, end in held if end > 0]
    for target in range(len(scored.totals)):
        pull = _longest(scored, sources, held, target)
        if pull is None:
            continue
        cost = _pulled(scored, target, pull, sources.page_prices[target])
        if cost.total_s < best_s and within_bound(cost, least, settings):
            best_s = cost.total_s
            found = Choice(target, cost.engine_id, "pull", cost.uncached_tokens, cost, scored, pull)
    return found


def any_waits(candidates: Sequence[Candidate]) -> bool:
    """Whether any engine has a wait that the shortest transfer could undercut: else nothing is looked up."""
    found = columns(candidates)
    return max(found.queue_s) > LATENCY_S or any(room_s > LATENCY_S for room_s, _ in found.rooms.values())


def _longest(
    scored: ScoredCandidates, sources: PullSources, held: Sequence[tuple[int, int]], target: int
) -> Pull | None:
    """The best source of a target: most tokens, then the earliest free link. ``held``: engines that hold a
    part of the prompt, and where it ends."""
    most = scored.prompt_tokens - 1
    hit = scored.candidates[target].hit
    if hit.replay_tokens:  # with a window that is computed again the pulled prefix would be incomplete
        return None
    best: Pull | None = None
    saved_s_per_token = scored.candidates[target].prefill_s_per_token - scored.settings.load_s_per_token
    for source, end in held:
        tokens = end - min(hit.whole_tokens, most)
        if source == target or tokens <= 0 or (best is not None and tokens < best.tokens):
            continue
        if sources.allowed is not None and not sources.allowed(target, source):
            continue
        link_s = sources.link_s(target, source, tokens)
        holder = scored.candidates[source]
        # Otherwise the source itself would serve the prompt sooner, or the target would compute it sooner.
        if link_s >= min(max(holder.queue_s, holder.room_s), saved_s_per_token * tokens):
            continue
        if best is None or tokens > best.tokens or link_s < best.link_s:
            best = Pull(source, holder.engine_id, tokens, end, link_s)
    return best


def _pulled(scored: ScoredCandidates, target: int, pull: Pull, page_price: float) -> Cost:
    """The cost of the target with a pull: less to compute, more to load, pages at ``page_price``."""
    cost, settings = scored.cost(target), scored.settings
    rate = scored.candidates[target].prefill_s_per_token
    uncached = scored.prompt_tokens - pull.end
    prefill_s = rate * uncached
    credit_s = settings.beta * rate * max(0, cost.shared_prefix_tokens - pull.end)
    more_s = pull.link_s + settings.load_s_per_token * pull.tokens
    computed_s = cost.prefill_s - prefill_s - (cost.credit_s - credit_s)
    cheaper_s = settings.eviction_premium * (1.0 - page_price) * computed_s
    return msgspec.structs.replace(
        cost,
        prefill_s=prefill_s,
        load_s=cost.load_s + more_s,
        credit_s=credit_s,
        eviction_s=cost.eviction_s - cheaper_s,
        total_s=cost.total_s - computed_s - cheaper_s + more_s,
        uncached_tokens=uncached,
        shared_prefix_tokens=max(cost.shared_prefix_tokens, pull.end),
    )


# The router's own pulls: who may pull from whom, what came of it, and pairs that are left alone.


PullOutcome = Literal["complete", "partial", "missed", "late", "failed", "unreported"]
_BAD: Final = frozenset({"missed", "late", "failed"})
_REST_S: Final = 10.0
_REST_S_MAX: Final = 600.0
"""A pair rests after a bad pull, twice as long after each further one in a row."""
_PAIRS_MAX: Final = 4096


class PullStats(msgspec.Struct):
    """Counters of pulls between engines."""

    pulls: Annotated[dict[str, int], "kvatlas_pulls_total{outcome}"] = msgspec.field(default_factory=dict)
    """Pulls by outcome: `complete`; `partial`: at least half of the tokens came; `missed`: less; `late`: the
    first token came later than it would have by computing; `failed`: the engine gave no answer; `unreported`:
    the answer does not say how many tokens were cached."""
    not_possible: Annotated[dict[str, int], "kvatlas_pulls_not_possible_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Requests for which no pull was considered, by the field of the request that forbids it."""
    promised_tokens: Annotated[int, "kvatlas_pull_promised_tokens_total"] = 0
    """Tokens that decisions expected to be pulled, of pulls with a report."""
    pulled_tokens: Annotated[int, "kvatlas_pull_tokens_total"] = 0
    """Of these, tokens that came."""
    link_s: Annotated[float, "kvatlas_pull_link_seconds_total"] = 0.0
    """Predicted seconds of transfers, with their waits for a link."""
    rests: Annotated[int, "kvatlas_pull_pair_rests_total"] = 0
    """Times that a pair of engines was left alone after a bad pull."""


class PullPairs:
    """Pairs of target and source whose latest pulls were bad: each rests for a while. Bounded; times are of
    one clock."""

    def __init__(self) -> None:
        self._bad: dict[tuple[str, str], tuple[int, float]] = {}

    def allows(self, target_id: str, source_id: str, now: float) -> bool:
        """Whether this pair does not rest."""
        found = self._bad.get((target_id, source_id))
        return found is None or now >= found[1]

    def good(self, target_id: str, source_id: str) -> None:
        """Forget the bad pulls of a pair."""
        self._bad.pop((target_id, source_id), None)

    def bad(self, target_id: str, source_id: str, now: float) -> None:
        """Let a pair rest."""
        pair = target_id, source_id
        count, _ = self._bad.pop(pair, (0, 0.0))
        if len(self._bad) >= _PAIRS_MAX:
            del self._bad[next(iter(self._bad))]
        rest_s = min(_REST_S_MAX, _REST_S * 2.0 ** min(count, 16))
        self._bad[pair] = count + 1, now + rest_s


class PullOrder(msgspec.Struct, frozen=True, gc=False):
    """A chosen pull. ``hit``: of the target, with the pulled prefix; ``saved_s``: predicted seconds by which
    the first token comes sooner than by computing."""

    pull: Pull
    source: Engine
    kv_source: KvSource
    hit: Hit
    saved_s: float

    def came_tokens(self, cached: int | None) -> int | None:
        """Tokens that the engine reports as ``cached`` beyond those that it held itself, at most those of the
        pull; None without a report."""
        if cached is None:
            return None
        own = self.hit.whole_tokens - self.pull.tokens
        return min(self.pull.tokens, max(0, cached - own))


class Pulls:
    """Pulls of one router. ``enabled``: they are considered."""

    def __init__(self) -> None:
        self.others: Mapping[str, OthersLoad] | None = {}
        """Latest load of other routers, with their use of links."""
        self.pairs = PullPairs()
        self.stats = PullStats()
        self.configure(PullSettings(), 0)

    def configure(self, settings: PullSettings, port: int) -> None:
        """Set the settings of later decisions; ``port``: of engines whose ``p2p`` tier has no other."""
        self._s_per_token, self.enabled, self._port = settings.s_per_token, settings.enabled, port

    async def body(
        self, request: InboundRequest, messages: Sequence[msgspec.Raw], read: Prompt
    ) -> SplitBody | None:
        """Return the body to which a source can be added; None: the request cannot pull. Those that cannot be
        split over two engines cannot pull either: children of one request would end each other's transfers,
        and vLLM loads nothing where prompt log-probabilities are asked for."""
        if request.carried == "gateway" or request.pinned is not None or read.skips_cache or read.variants:
            return None
        try:
            found = await run_cooperatively(split_body(request.path, request.body, messages))
        except TooManyStepsError:
            return None
        if not found.whole:
            return found
        self.stats.not_possible[found.whole] = self.stats.not_possible.get(found.whole, 0) + 1
        return None

    def apply(
        self,
        choice: Choice,
        engines: Sequence[Engine],
        held: Mapping[str, int],
        body: SplitBody,
        now: float,
        *,
        by_header: bool = False,
    ) -> tuple[Choice, PullOrder | None]:
        """Return the choice, with a pull if one is cheaper. ``held``: tokens of the prompt that host memories
        hold by themselves. ``by_header``: a sidecar is given the source."""
        tokens = [
            held.get(engine.engine_id, 0)
            if _serves(engine) and (not by_header or self._can_be_named(engine))
            else 0
            for engine in engines
        ]
        if not any(tokens):
            return choice, None

        def allowed(target: int, source: int) -> bool:
            to, of = engines[target], engines[source]
            return _alike(to, of) and self.pairs.allows(to.engine_id, of.engine_id, now)

        busy = [self._busy_s(engine, now) for engine in engines]
        prices = page_prices([engine.load for engine in engines], choice.scored.prompt_tokens)
        sources = PullSources(tokens, busy, self._s_per_token, prices, LATENCY_S, allowed)
        found = with_pull(choice, sources)
        pull = found.pull
        if pull is None:
            return choice, None
        source, candidate = engines[pull.source], found.scored.candidates[found.index]
        host, port = kv_source_of(source.engine, self._port)
        hit = candidate.hit
        return found, PullOrder(
            pull,
            source,
            KvSource(body, host, port),
            msgspec.structs.replace(
                hit,
                cpu_tokens=pull.end - hit.gpu_tokens,
                storage_tokens=0,
                shared_prefix_tokens=max(pull.end, hit.shared_prefix_tokens),
            ),
            (candidate.prefill_s_per_token - found.scored.settings.load_s_per_token) * pull.tokens
            - pull.link_s,
        )

    def _can_be_named(self, engine: Engine) -> bool:
        """Whether a sidecar finds its ``p2p`` tier by its host alone."""
        host = urlsplit(engine.engine.base_url).hostname
        return engine.engine.dp_rank is None and kv_source_of(engine.engine, self._port) == (host, self._port)

    def _busy_s(self, engine: Engine, now: float) -> float:
        """Seconds until the engine's link is free."""
        return link_busy_s(engine.load, others_at(engine.engine_id, self.others), now)

    def begin(self, target: Engine, order: PullOrder, now: float) -> None:
        """Note that the target is asked now."""
        occupy_links(target.load, order.source.load, order.pull.link_s, now)
        self.stats.link_s += order.pull.link_s

    def end(self, target_id: EngineId, order: PullOrder, outcome: PullOutcome, now: float) -> None:
        """Note the end of a pull."""
        stats, source_id = self.stats, order.source.engine_id
        stats.pulls[outcome] = stats.pulls.get(outcome, 0) + 1
        if outcome in _BAD:
            stats.rests += 1
            self.pairs.bad(target_id, source_id, now)
        elif outcome != "unreported":
            self.pairs.good(target_id, source_id)

    def judge(
        self, order: PullOrder, came: int | None, predicted_s: float | None, measured_s: float | None
    ) -> PullOutcome:
        """Return the outcome, and count the tokens. ``came``: tokens, None without a report; then the seconds
        to the first token, None if unknown."""
        promised = order.pull.tokens
        if came is None:
            return "unreported"
        self.stats.promised_tokens += promised
        self.stats.pulled_tokens += came
        # Prompts that wait lose blocks to eviction: half of them speak for the pair.
        if 2 * came < promised:
            return "missed"
        if predicted_s is not None and measured_s is not None and measured_s > predicted_s + order.saved_s:
            return "late"
        return "complete" if came == promised else "partial"


def _serves(engine: Engine) -> bool:
    """Whether what its host memory holds is known, and others may fetch it: vLLM with events that were all
    received."""
    feed = engine.feed
    known = feed is not None and feed.state is FeedState.READY and not feed.unconfirmed
    return known and engine.frontend != "sglang" and not engine.closed


def _alike(target: Engine, source: Engine) -> bool:
    """Whether an engine can use another one's blocks: of the same version, model and groups, under the same
    hashes. vLLM compares dtypes and parallelism itself when the two connect (p2p/session/session.py
    ``_on_connect``, 0.32)."""
    layout = target.layout
    return (
        target.version is not None
        and target.version == source.version
        and target.base_model == source.base_model
        and layout is not None
        and layout == source.layout
        and target.scheme == source.scheme
    )
