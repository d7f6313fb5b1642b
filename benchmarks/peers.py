"""Peers of kvatlas in comparisons: other routers' choices, each as one function over its knowledge.

Written from the published sources and documents, read in August 2026, with their defaults. Every function
returns the positions of the best engines; ties are not part of the rule and are drawn by the simulator.
Tokens are prompt tokens; blocks are the engines' own.

``COMPARED`` has them as variants of a simulated fleet, beside those of ``kvatlas simulate``.

Omitted in all of them: everything that is equal for identical, healthy engines (filters, breakers, weights
per engine), and temperatures, which are 0 by default.
"""

from __future__ import annotations

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
from kvatlas.router.simulation.variants import VARIANTS, Variant, ViewName

REGRESSION = "ttft-regression"
NO_HIT_NEUTRAL = 0.5
# Prefix, KV usage, queue, no-hit LRU: the weights of llm-d's guide for precise prefix routing.
LLM_D_WEIGHTS = (3.0, 2.0, 2.0, 2.0)
SMG_MATCH_MIN, SMG_REQUESTS_BEYOND, SMG_RATIO = 0.5, 32, 1.1
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
    cold_turn: int = 0
    """Sequence number of the last prompt without any hit that was sent there; 0: never."""
    tree_tokens: int = 0
    """Size of this router's history of the engine."""


# (engines, prompt tokens, tokens per block) -> the best engines, at least one.
Formula = Callable[[Sequence[PeerView], int, int], list[int]]


def dynamo(views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
    """Choose the lowest number of blocks to prefill and to decode, including this prompt's.

    ai-dynamo/dynamo, ``lib/kv-router/src/scheduling/selector`` and ``config.rs``: overlap weight 1.
    """

    # Prompt tokens count as to be prefilled until the first token; generated tokens are not tracked (the
    # default).
    def blocks(view: PeerView) -> float:
        prefill = max(0, view.prefilling_tokens + prompt_tokens - view.prefix_tokens)
        return prefill / block_tokens + view.active_blocks

    return _lowest(map(blocks, views))


def llm_d(views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
    """Choose the highest weighted sum of scores between 0 and 1: prefix share, free KV cache, queue, no-hit
    LRU.

    llm-d/llm-d-router, the scorers ``precise-prefix-cache``, ``kv-cache-utilization``, ``queue`` and
    ``no-hit-lru``.
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


def cache_aware(views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
    """Choose the least loaded of those with the deepest match, if it is deep and the load balanced enough.

    lightseekorg/smg, ``cache_aware.rs`` (1.13), defaults 0.5, 32 and 1.1: a match is a share of the prompt in
    the router's own history; load is the number of its requests. Otherwise the engine with fewest requests.
    """
    deepest = max(view.prefix_tokens for view in views)
    if deepest > SMG_MATCH_MIN * prompt_tokens:
        holders = [place for place, view in enumerate(views) if view.prefix_tokens == deepest]
        fewest = min(views[place].requests for place in holders)
        mean = sum(view.requests for view in views) / len(views)
        if not (fewest > mean + SMG_REQUESTS_BEYOND and fewest > SMG_RATIO * mean):
            return [place for place in holders if views[place].requests == fewest]
    return _lowest(view.requests for view in views)


def vllm_router(views: Sequence[PeerView], prompt_tokens: int, block_tokens: int) -> list[int]:
    """Choose a holder of the deepest match, or the engine with the smallest history; by load only if very
    uneven.

    vllm-project/router 0.1.17, policy ``cache_aware``, defaults 0.3, 64 and 1.5: the fleet is uneven if the
    most and the fewest requests differ by more than 64 and by more than half.
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


FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {"dynamo": dynamo, "llm-d": llm_d, "cache-aware": cache_aware, "vllm-router": vllm_router}
)


def _lowest(values: Iterable[float]) -> list[int]:
    found = list(values)
    best = min(found)
    return [place for place, value in enumerate(found) if value == best]


# Another router in front of the simulated fleet: its knowledge of engines, and the delay of that.
#
# It knows its own requests immediately, an engine's gauges as of the last poll, and cached blocks either from
# the engines' events (without delay) or from a history of its own, as large as that router's.


# Size of an approximate tree per engine, least recently used first: 2^24 characters, both routers' default.
TREE_TOKENS_MAX = 4 << 20


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
    placement. The tree needs no nodes: a block hash identifies its whole prefix.
    """

    def __init__(self, engines: int, block_tokens: int, blocks_max: int | None) -> None:
        self._held: list[OrderedDict[BlockHash, None]] = [OrderedDict() for _ in range(engines)]
        self._block_tokens = block_tokens
        self._blocks_max = blocks_max

    def look(self, prompt_tokens: int, hashes: Sequence[BlockHash]) -> list[PrefixHit]:
        most = (prompt_tokens - 1) // self._block_tokens * self._block_tokens
        lengths = [min(_leading(held, hashes) * self._block_tokens, most) for held in self._held]
        return [PrefixHit(tokens, tokens) for tokens in lengths]

    def placed(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        held = self._held[engine]
        # The start of a prefix is evicted last.
        for block_hash in reversed(hashes):
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
    cold_turn: int = 0
    active: Counter[BlockHash] = msgspec.field(default_factory=Counter)
    """Number of requests there that have each block."""


class PeerRouter(OtherRouter):
    """State of one other router. Requests are identified by ``index``; ties are drawn by ``rng``."""

    def __init__(self, name: str, engines: int, block_tokens: int, rng: random.Random) -> None:
        self._regression = FirstTokenRegression() if name == REGRESSION else None
        self._formula = FORMULAS[name] if self._regression is None else self._regression.shortest
        self._counts_in_flight = name == "llm-d"
        self._block_tokens = block_tokens
        self._rng = rng
        self._engines = [_Engine() for _ in range(engines)]
        self._tree: History | None = None
        if name in TREES:
            self._tree = History(engines, block_tokens, TREE_TOKENS_MAX // block_tokens)
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
        self._engines[engine].waiting, self._engines[engine].usage = waiting, usage

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
                cold_turn=engine.cold_turn,
                tree_tokens=size * self._block_tokens,
            )
            for engine, prefix, size in zip(self._engines, prefixes, sizes, strict=True)
        ]


# Routers without events.
TREES = frozenset({"cache-aware", "vllm-router"})


def _other(name: str, view: ViewName, what: str, *, predicts: bool = False) -> Variant:
    other = partial(PeerRouter, name)
    return Variant(policy="kvatlas", view=view, in_flight=False, other=other, predicts=predicts, what=what)


PEERS: Mapping[str, Variant] = MappingProxyType(
    {
        "dynamo": _other("dynamo", "truth", "Dynamo's formula: blocks to prefill and to decode"),
        "llm-d": _other("llm-d", "truth", "llm-d's scores: prefix share, KV usage, waiting, no-hit LRU"),
        "cache-aware": _other("cache-aware", "blind", "smg's cache_aware"),
        REGRESSION: _other(
            REGRESSION,
            "truth",
            "lowest first token by a regression on prompt, hit and queue",
            predicts=True,
        ),
        "vllm-router": _other("vllm-router", "blind", "vllm-router's cache_aware"),
    }
)


def exact(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """Lowest cost by current contents only: no shared prefix, no credit, no prompts in flight."""
    blind = [
        replace(one, hit=replace(one.hit, shared_prefix_tokens=0, coming_tokens=0)) for one in candidates
    ]
    alone = replace(settings, eviction_premium=0.0, scarcity_premium=0.0)
    return choose(blind, prompt.prompt_tokens, alone, prompt_key=prompt.prompt_key)


COMPARED: Mapping[str, Variant] = MappingProxyType(
    {
        **VARIANTS,
        **PEERS,
        "exact": Variant(policy=exact, view="truth", in_flight=False, what="kvatlas by the exact hit alone"),
    }
)
