"""Peers of kvatlas in comparisons: other routers' choices, each as one function over its knowledge.

Written from the published sources and documents, with their defaults as of November 2026; each docstring
names them. Every function returns the positions of the best engines; ties are not part of the rule and are
drawn by the simulator. Tokens are prompt tokens; blocks are the engines' own.

``PEERS`` has them as variants of a simulated fleet, ``COMPARED`` those of ``kvatlas simulate`` as well.

Omitted in all of them: everything that is equal for identical, healthy engines (filters, breakers, weights
per engine), and temperatures, which are 0 by default.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvatlas.publisher.events import BlockHash
from kvatlas.router.placement.candidate import Candidate, PlacementRequest, PolicySettings
from kvatlas.router.placement.cost import Choice, choose
from kvatlas.router.placement.policies import ArmState
from kvatlas.router.simulation.other_router import OtherRouter, PrefixHit
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.variants import VARIANTS, Variant, ViewName

NO_HIT_NEUTRAL = 0.5
# Prefix, KV usage, queue, no-hit LRU: the weights of llm-d's guide for precise prefix routing.
LLM_D_WEIGHTS = (3.0, 2.0, 2.0, 2.0)
LLM_D_STICKY_SHARE, LLM_D_PENALTY_S, LLM_D_TOKENS_MAX = 0.8, 18.0, 4_194_304
LLM_D_GAUGE_S = 0.05
DYNAMO_QUEUE = 16.0
SMG_MATCH_MIN, SMG_REQUESTS_BEYOND, SMG_RATIO = 0.3, 64, 1.5
SMG_GAUGE_S, SMG_REQUEST_TOKENS, SMG_TOKENS_PER_S, SMG_USAGE_S = 10.0, 1024, 2000.0, 0.15
VLLM_ROUTER_MATCH_MIN, VLLM_ROUTER_REQUESTS_BEYOND, VLLM_ROUTER_RATIO = 0.3, 64, 1.5


class PeerView(msgspec.Struct, frozen=True, kw_only=True):
    """Knowledge of a router about one engine when a prompt arrives; each formula reads part of it."""

    prefix_tokens: int = 0
    """Tokens of the prompt that this router believes to be in the engine's cache."""
    prefilling_tokens: int = 0
    """Tokens of this router's own prompts there that are yet to be prefilled."""
    active_blocks: int = 0
    """Number of distinct blocks of the prompts active there, this prompt's included."""
    requests: int = 0
    """Number of this router's requests there that have not ended."""
    waiting: int = 0
    """The engine's gauge as last polled, like ``usage``."""
    usage: float = 0.0
    dispatched: int = 0
    """Number of requests sent there since that poll."""
    cold_turn: int = 0
    """Sequence number of the last prompt without any hit that was sent there; 0: never."""
    tree_tokens: int = 0
    """Size of this router's history of the engine."""
    tokens_per_s: float = 8000.0
    """Its peak prefill rate, as an operator would measure it."""


# (engines, prompt tokens, tokens per block) -> the best engines, at least one.
Formula = Callable[[Sequence[PeerView], int, int], list[int]]


def llm_d(views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
    """Choose the least uncached tokens not answered yet, this prompt's included, among the engines that hold
    most of the prompt; among all while none does, or while those are busier by 18 s of prefill.

    llm-d's recommended default, "sticky until saturated": https://github.com/llm-d/llm-d, guide
    ``optimized-baseline`` (``router/optimized-baseline.values.yaml``), with ``prefix-cache-affinity-filter``
    and ``token-load-scorer`` of https://github.com/llm-d/llm-d-router at ebab6879 (22 Aug 2026). The filter
    compares the least loaded holder of at least 0.80 of the prompt's blocks with the least loaded other
    engine, by its ``peakPrefillThroughput``, which the guide says to measure.
    """
    # The prompt's tokens count until its first token comes (``inflight-load-producer``). Cached blocks are
    # those of ``approx-prefix-cache-producer``, which keeps a history of its own and reads no events.
    whole = max(1, prompt_tokens // block_tokens) * block_tokens
    sticky = [at for at, view in enumerate(views) if view.prefix_tokens >= LLM_D_STICKY_SHARE * whole]
    others = [at for at in range(len(views)) if at not in sticky]
    places = sticky or others
    if sticky and others:
        held_s, free_s = (
            min(views[at].prefilling_tokens / views[at].tokens_per_s for at in some)
            for some in (sticky, others)
        )
        if held_s - free_s > LLM_D_PENALTY_S:
            places = list(range(len(views)))
    loads = [
        min(LLM_D_TOKENS_MAX, views[at].prefilling_tokens + max(0, prompt_tokens - views[at].prefix_tokens))
        for at in places
    ]
    return [places[at] for at in _lowest(loads)]


def llm_d_lmetric(views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
    """Choose the lowest product of the prompt's uncached tokens and the requests there, this one included.

    https://github.com/llm-d/llm-d-router, ``lmetric-scorer`` (added after ebab6879 of 22 Aug 2026), as in
    llm-d's guide ``precise-prefix-cache-routing`` (``router/lmetric.values.yaml``): cached blocks from
    events and prompts in flight.
    """
    whole = prompt_tokens // block_tokens * block_tokens
    return _lowest(max(0, whole - view.prefix_tokens) * (view.requests + 1) for view in views)


def llm_d_precise(views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
    """Choose the highest weighted sum of scores between 0 and 1: prefix share, free KV cache, queue, no-hit
    LRU.

    llm-d's guide ``precise-prefix-cache-routing`` (its ``values.yaml``: weights 3, 2, 2, 2), with the scorers
    ``precise-prefix-cache``, ``kv-cache-utilization``, ``queue`` and ``no-hit-lru`` of
    https://github.com/llm-d/llm-d-router at ebab6879 (22 Aug 2026). Gauges are read every 50 ms
    (``--refresh-metrics-interval``), cached blocks come from events and prompts in flight.
    """
    # The queue's score is the waiting count between the longest (0) and the shortest (1). A prompt held by no
    # engine goes to engines that never had such a prompt, then to the least recently used.
    prefix_weight, usage_weight, queue_weight, lru_weight = LLM_D_WEIGHTS
    shortest, longest = min(v.waiting for v in views), max(v.waiting for v in views)
    order = sorted(range(len(views)), key=lambda i: views[i].cold_turn)
    ranks = {place: rank for rank, place in enumerate(order)}
    cold = not any(view.prefix_tokens for view in views)

    def score(place: int) -> float:
        view = views[place]
        queue = (longest - view.waiting) / (longest - shortest) if longest > shortest else 1.0
        lru = NO_HIT_NEUTRAL
        if cold:
            lru = 1 - ranks[place] / (len(views) - 1) if len(views) > 1 else 1.0
        return (
            prefix_weight * view.prefix_tokens / prompt_tokens
            + usage_weight * (1 - view.usage)
            + queue_weight * queue
            + lru_weight * lru
        )

    return _lowest(-score(place) for place in range(len(views)))


def dynamo(views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
    """Choose the lowest number of blocks to prefill and to decode, including this prompt's.

    https://github.com/ai-dynamo/dynamo, ``lib/kv-router/src/scheduling/selector/default.rs``, defaults of
    ``config.rs``, and the pages of version 1.7.0 at docs.nvidia.com/dynamo (Nov 2026): overlap credit 1 and
    its decay 0, prefill load scale 1, active request weight 0.

    Its queue (``queue.rs``, ``--router-queue-threshold``) is off by default since 1.4.0 of 14 Aug 2026
    (pull request 11599); ``dynamo-queue`` has it at 16, the default before: while every engine has more than
    16 steps' tokens yet to be prefilled, prompts wait in the router, first come, first served.
    """

    # Prompt tokens count as to be prefilled until the first token; generated tokens are not tracked (the
    # default).
    def blocks(view: PeerView) -> float:
        prefill = max(0, view.prefilling_tokens + prompt_tokens - view.prefix_tokens)
        return prefill / block_tokens + view.active_blocks

    return _lowest(map(blocks, views))


def smg(views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
    """Choose the shortest expected wait among the holders of the deepest match, if it is deep and they have
    not far more requests than the fleet's mean; otherwise among all engines that have not.

    https://github.com/smg-project/smg 1.13 (Oct 2026), ``policies/cache_aware.rs`` and ``least_load.rs``
    after pull requests 2161 and 2341 (16 and 27 Aug 2026), defaults of its command line: 0.3, 64 and 1.5. A
    match is a share of the prompt in the router's own history. The expected wait is that of HTTP workers
    whose gauges show no tokens: 1,024 tokens for each request that waits or was sent since the last poll
    (10 s), at 2,000 tokens/s, and 0.15 s times usage / (1 - usage).
    """
    deepest = max(view.prefix_tokens for view in views)
    mean = sum(view.requests for view in views) / len(views)
    cool = [
        at
        for at, view in enumerate(views)
        if not (view.requests > mean + SMG_REQUESTS_BEYOND and view.requests > SMG_RATIO * mean)
    ]
    places = list(range(len(views)))
    if deepest > SMG_MATCH_MIN * prompt_tokens:
        places = [at for at in cool if views[at].prefix_tokens == deepest] or cool or places
    waits_s = []
    for at in places:
        view, usage = views[at], min(views[at].usage, 0.999)
        tokens = SMG_REQUEST_TOKENS * (view.waiting + view.dispatched)
        waits_s.append(tokens / SMG_TOKENS_PER_S + SMG_USAGE_S * usage / (1 - usage))
    return [places[at] for at in _lowest(waits_s)]


def vllm_router(views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
    """Choose a holder of the deepest match, or the engine with the smallest history; by load only if very
    uneven.

    https://github.com/vllm-project/router 0.1.17 (Aug 2026), policy ``cache_aware``, defaults 0.3, 64 and
    1.5: the fleet is uneven if the most and the fewest requests differ by more than 64 and by more than half.
    """
    fewest, most = min(v.requests for v in views), max(v.requests for v in views)
    if most - fewest > VLLM_ROUTER_REQUESTS_BEYOND and most > VLLM_ROUTER_RATIO * fewest:
        return _lowest(view.requests for view in views)
    deepest = max(view.prefix_tokens for view in views)
    if deepest > VLLM_ROUTER_MATCH_MIN * prompt_tokens:
        return [place for place, view in enumerate(views) if view.prefix_tokens == deepest]
    return _lowest(view.tree_tokens for view in views)


class FirstTokenRegression:
    """Linear regression of the time to first token on what a gateway sees, trained on every first token.

    The kind of model that llm-d's latency predictor and others train (prompt length, prefix share, queue,
    running requests, KV usage); least squares over all samples with weights that halve every ``MEMORY``
    samples. Before ``SAMPLES_MIN`` samples it predicts by the uncached tokens alone.
    """

    MEMORY, SAMPLES_MIN, REFIT_EVERY = 500, 20, 8

    def __init__(self) -> None:
        self._xtx = np.eye(6) * 1e-6
        self._xty = np.zeros(6)
        self._weights: npt.NDArray[np.float64] | None = None
        self._samples = 0

    @property
    def trained(self) -> bool:
        """Whether it predicts by its samples."""
        return self._weights is not None

    @staticmethod
    def features(view: PeerView, prompt_tokens: int) -> tuple[float, ...]:
        """In thousands of tokens where they are tokens."""
        uncached = max(0, prompt_tokens - view.prefix_tokens)
        ahead = view.prefilling_tokens
        return 1.0, uncached / 1e3, ahead / 1e3, float(view.requests), float(view.waiting), view.usage

    def predict(self, view: PeerView, prompt_tokens: int) -> float:
        """Seconds to the first token."""
        found = self.features(view, prompt_tokens)
        if self._weights is None:
            return found[1] + found[2]
        return float(self._weights @ np.array(found))

    def shortest(self, views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
        """Implement ``Formula``: lowest predicted time to first token."""
        return _lowest(self.predict(view, prompt_tokens) for view in views)

    def learn(self, found: Sequence[float], seconds: float) -> None:
        """Add a sample."""
        decay, row = 0.5 ** (1 / self.MEMORY), np.array(found)
        self._xtx = decay * self._xtx + np.outer(row, row)
        self._xty = decay * self._xty + seconds * row
        self._samples += 1
        if self._samples >= self.SAMPLES_MIN and self._samples % self.REFIT_EVERY == 0:
            self._weights = np.asarray(np.linalg.solve(self._xtx, self._xty), np.float64)


def _lowest(values: Iterable[float]) -> list[int]:
    found = list(values)
    best = min(found)
    return [place for place, value in enumerate(found) if value == best]


# Another router in front of the simulated fleet: its knowledge of engines, and the delay of that.
#
# It knows its own requests immediately, an engine's gauges as of its own last poll, and cached blocks either
# from the engines' events (without delay) or from a history of its own, as large as that router's.

# Sizes of trees by default: 2^24 characters for each engine of vllm-router, 2^26 for all of smg's together.
TREE_TOKENS_MAX, SMG_TREE_TOKENS_MAX = 4 << 20, 16 << 20


def _leading(held: Container[BlockHash], hashes: Sequence[BlockHash]) -> int:
    """Number of leading blocks that are held."""
    count = 0
    for block_hash in hashes:
        if block_hash not in held:
            break
        count += 1
    return count


class History:
    """A prefix tree of sent prompts, as kept by routers without events: full attention, no groups.

    ``blocks_max`` per engine limits it, least recently used first; None: no limit. A prompt counts from its
    placement. The tree needs no nodes: a block hash identifies its whole prefix. ``flat``: a plain list of
    blocks, in which the start of a prefix is the oldest, as in llm-d's ``approx-prefix-cache-producer``.
    """

    def __init__(
        self, engines: int, block_tokens: int, blocks_max: int | None, *, flat: bool = False
    ) -> None:
        self._held: list[OrderedDict[BlockHash, None]] = [OrderedDict() for _ in range(engines)]
        self._block_tokens = block_tokens
        self._blocks_max = blocks_max
        self._flat = flat

    def look(self, prompt_tokens: int, hashes: Sequence[BlockHash]) -> list[PrefixHit]:
        most = (prompt_tokens - 1) // self._block_tokens * self._block_tokens
        lengths = [min(_leading(held, hashes) * self._block_tokens, most) for held in self._held]
        return [PrefixHit(tokens, tokens) for tokens in lengths]

    def placed(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        held = self._held[engine]
        # In a tree the start of a prefix is evicted last.
        for block_hash in hashes if self._flat else reversed(hashes):
            held[block_hash] = None
            held.move_to_end(block_hash)
        if self._blocks_max is not None:
            while len(held) > self._blocks_max:
                held.popitem(last=False)

    def sizes(self) -> list[int]:
        """Return the number of blocks per engine."""
        return [len(held) for held in self._held]


class _Sent(msgspec.Struct, eq=False):
    engine: int
    hashes: Sequence[BlockHash]
    prefilling_tokens: int
    features: tuple[float, ...] = ()
    asked_s: float = 0.0


class _Engine(msgspec.Struct, eq=False):
    prefilling_tokens: int = 0
    requests: int = 0
    waiting: int = 0
    usage: float = 0.0
    dispatched: int = 0
    cold_turn: int = 0
    active: Counter[BlockHash] = msgspec.field(default_factory=Counter)
    """Number of requests there that have each block."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One other router: how it chooses, and where its knowledge comes from."""

    what: str
    formula: Formula | None
    """None: a regression, which the router trains."""
    view: ViewName = "truth"
    gauge_s: float = math.inf
    """Seconds between two polls of gauges; infinite: none are read."""
    counts_in_flight: bool = False
    """Whether blocks of prompts in flight count as cached."""
    history: Callable[[FleetSetup, int], History] | None = None
    """Its own history instead of events, by the tokens per block."""
    queue: float | None = None
    """Prompts wait in the router while every engine has this many steps' tokens yet to be prefilled."""


def _flat(setup: FleetSetup, unit: int) -> History:
    # autoTune: as many blocks as the engine says that it has.
    return History(setup.engines, unit, setup.num_blocks, flat=True)


def _tree(setup: FleetSetup, unit: int) -> History:
    return History(setup.engines, unit, TREE_TOKENS_MAX // unit)


def _common_tree(setup: FleetSetup, unit: int) -> History:
    return History(setup.engines, unit, SMG_TREE_TOKENS_MAX // unit // setup.engines)


_PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "llm-d": Peer(
            what="llm-d's optimized baseline: sticky until saturated, then least token load",
            formula=llm_d,
            view="blind",
            history=_flat,
        ),
        "llm-d-lmetric": Peer(
            what="llm-d's lmetric scorer: uncached tokens times requests",
            formula=llm_d_lmetric,
            counts_in_flight=True,
        ),
        "llm-d-precise": Peer(
            what="llm-d's precise routing: prefix share, KV usage, waiting, no-hit LRU",
            formula=llm_d_precise,
            gauge_s=LLM_D_GAUGE_S,
            counts_in_flight=True,
        ),
        "dynamo": Peer(what="Dynamo's formula: blocks to prefill and to decode", formula=dynamo),
        "dynamo-queue": Peer(
            what="Dynamo's formula with its queue in the router", formula=dynamo, queue=DYNAMO_QUEUE
        ),
        "smg": Peer(
            what="smg's cache_aware",
            formula=smg,
            view="blind",
            gauge_s=SMG_GAUGE_S,
            history=_common_tree,
        ),
        "ttft-regression": Peer(
            what="lowest first token by a regression on prompt, hit and queue",
            formula=None,
            gauge_s=LLM_D_GAUGE_S,
        ),
        "vllm-router": Peer(
            what="vllm-router's cache_aware", formula=vllm_router, view="blind", history=_tree
        ),
    }
)


class PeerRouter(OtherRouter):
    """State of one other router. Requests are identified by ``index``; ties are drawn by ``rng``."""

    def __init__(self, name: str, setup: FleetSetup, block_tokens: int, rng: random.Random) -> None:
        peer, timing = _PEERS[name], setup.timing
        self._tokens_per_s = 1 / timing.prefill_s_per_token
        self.gauge_s = peer.gauge_s
        regression = FirstTokenRegression()
        self._regression = regression if peer.formula is None else None
        self._formula = peer.formula or regression.shortest
        self._counts_in_flight = peer.counts_in_flight
        self._block_tokens = block_tokens
        self._queue_tokens = math.inf if peer.queue is None else peer.queue * timing.chunk_tokens
        self._rng = rng
        self._engines = [_Engine() for _ in range(setup.engines)]
        self._tree = None if peer.history is None else peer.history(setup, block_tokens)
        self._sent: dict[int, _Sent] = {}
        self._cold = 0

    def place(
        self,
        index: int,
        prompt_tokens: int,
        hashes: Sequence[BlockHash],
        seen: Sequence[PrefixHit],
        now: float,
    ) -> tuple[int, int]:
        """Return the engine that gets the request, and the number of prompt tokens believed cached there.

        ``seen``: state of each engine from events; routers with a history of their own ignore it.
        """
        prefixes = self._prefixes(prompt_tokens, hashes, seen)
        views = self._views(prefixes, hashes)
        best = self._formula(views, prompt_tokens, self._block_tokens)
        place = best[0] if len(best) == 1 else self._rng.choice(best)
        engine = self._engines[place]
        if not any(prefixes):
            self._cold += 1
            engine.cold_turn = self._cold
        sent = _Sent(place, hashes, max(0, prompt_tokens - prefixes[place]))
        if self._regression is not None:
            sent.features, sent.asked_s = self._regression.features(views[place], prompt_tokens), now
        self._sent[index] = sent
        engine.requests += 1
        engine.dispatched += 1
        engine.prefilling_tokens += sent.prefilling_tokens
        engine.active.update(hashes)
        if self._tree is not None:
            self._tree.placed(place, prompt_tokens, hashes)
        return place, prefixes[place]

    def misses(
        self, prompt_tokens: int, hashes: Sequence[BlockHash], seen: Sequence[PrefixHit], left_s: float
    ) -> bool:
        """Whether every engine is predicted to give the first token later than in ``left_s``."""
        # Never before the regression is trained, nor with an engine without requests: a fleet that refuses
        # everything would give no samples to correct it.
        regression = self._regression
        if regression is None or not regression.trained:
            return False
        views = self._views(self._prefixes(prompt_tokens, hashes, seen), hashes)
        return all(view.requests and regression.predict(view, prompt_tokens) > left_s for view in views)

    def first_token(self, index: int, now: float | None = None) -> None:
        """Record that the request's prompt is computed."""
        sent = self._sent[index]
        if self._regression is not None and now is not None:
            self._regression.learn(sent.features, now - sent.asked_s)
        self._engines[sent.engine].prefilling_tokens -= sent.prefilling_tokens
        sent.prefilling_tokens = 0

    def ended(self, index: int) -> None:
        """Record that the request was answered, or has failed."""
        self.first_token(index)
        sent = self._sent.pop(index)
        engine = self._engines[sent.engine]
        engine.requests -= 1
        for block in sent.hashes:
            engine.active[block] -= 1
            if not engine.active[block]:
                del engine.active[block]

    def polled(self, engine: int, waiting: int, usage: float) -> None:
        state = self._engines[engine]
        state.waiting, state.usage, state.dispatched = waiting, usage, 0

    def full(self) -> bool:
        return all(engine.prefilling_tokens > self._queue_tokens for engine in self._engines)

    def _prefixes(
        self, prompt_tokens: int, hashes: Sequence[BlockHash], seen: Sequence[PrefixHit]
    ) -> list[int]:
        if self._tree is not None:
            return [one.shared_prefix for one in self._tree.look(prompt_tokens, hashes)]
        found = [one.shared_prefix for one in seen]
        if self._counts_in_flight:
            flying = [_leading(engine.active, hashes) * self._block_tokens for engine in self._engines]
            return [max(one, other) for one, other in zip(found, flying, strict=True)]
        return found

    def _views(self, prefixes: Sequence[int], hashes: Sequence[BlockHash]) -> list[PeerView]:
        sizes = [0] * len(self._engines) if self._tree is None else self._tree.sizes()
        own = set(hashes)
        return [
            PeerView(
                prefix_tokens=prefix,
                prefilling_tokens=engine.prefilling_tokens,
                active_blocks=len(engine.active) + sum(block not in engine.active for block in own),
                requests=engine.requests,
                waiting=engine.waiting,
                usage=engine.usage,
                dispatched=engine.dispatched,
                cold_turn=engine.cold_turn,
                tree_tokens=size * self._block_tokens,
                tokens_per_s=self._tokens_per_s,
            )
            for engine, prefix, size in zip(self._engines, prefixes, sizes, strict=True)
        ]


PEERS: Mapping[str, Variant] = MappingProxyType(
    {
        name: Variant(
            policy="kvatlas",
            view=peer.view,
            in_flight=False,
            other=partial(PeerRouter, name),
            predicts=peer.formula is None,
            what=peer.what,
        )
        for name, peer in _PEERS.items()
    }
)


def exact(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """Lowest cost by current contents only: no shared prefix, no credit, no prompts in flight."""
    blind = [
        replace(one, hit=replace(one.hit, shared_prefix_tokens=0, coming_tokens=0)) for one in candidates
    ]
    alone = replace(settings, eviction_premium=0.0, delay=0.0, scarcity_premium=0.0)
    return choose(blind, prompt.prompt_tokens, alone, prompt_key=prompt.prompt_key)


COMPARED: Mapping[str, Variant] = MappingProxyType(
    {
        **VARIANTS,
        **PEERS,
        "exact": Variant(policy=exact, view="truth", in_flight=False, what="kvatlas by the exact hit alone"),
    }
)
