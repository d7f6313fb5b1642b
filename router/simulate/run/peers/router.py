"""Another router in front of the simulated fleet: what it knows of engines, and when.

It knows its own requests at once, an engine's gauges as of the last poll, and what is cached either from the
engines' events (which come without delay) or from a history of its own, as large as that router keeps it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from publisher.events import BlockHash
from router.simulate.run.peers.formulas import FORMULAS, PeerView
from router.simulate.run.router_view import History, PrefixHit

TREE_TOKENS_MAX = 4 << 20
"""Of an approximate tree, per engine, least recently used first: 2^24 characters, the default of both."""


class _Sent(msgspec.Struct, eq=False):
    engine: int
    hashes: Sequence[BlockHash]
    prefilling_tokens: int


class _Engine(msgspec.Struct, eq=False):
    prefilling_tokens: int = 0
    requests: int = 0
    waiting: int = 0
    usage: float = 0.0
    cold_turn: int = 0
    active: Counter[BlockHash] = msgspec.field(default_factory=Counter)
    """How many of the requests there have each block."""


class PeerRouter:
    """The memory of one other router. Requests are told apart by ``index``; ties are drawn by ``rng``."""

    def __init__(self, name: str, engines: int, block_tokens: int, rng: random.Random) -> None:
        self._formula = FORMULAS[name]
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
        self, index: int, prompt_tokens: int, hashes: Sequence[BlockHash], seen: Sequence[PrefixHit]
    ) -> tuple[int, int]:
        """The engine that gets the request, and how many prompt tokens are believed cached there.

        ``seen``: what events say of each engine; routers with a history of their own do not look at it.
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
        self._sent[index] = sent
        engine.requests += 1
        engine.prefilling_tokens += sent.prefilling_tokens
        engine.active.update(hashes)
        if self._tree is not None:
            self._tree.placed(place, prompt_tokens, hashes)
        return place, prefixes[place]

    def first_token(self, index: int) -> None:
        """The request's prompt is computed."""
        sent = self._sent[index]
        self._engines[sent.engine].prefilling_tokens -= sent.prefilling_tokens
        sent.prefilling_tokens = 0

    def ended(self, index: int) -> None:
        """The request has its answer, or has failed."""
        self.first_token(index)
        sent = self._sent.pop(index)
        engine = self._engines[sent.engine]
        engine.requests -= 1
        for block in sent.hashes:
            engine.active[block] -= 1
            if not engine.active[block]:
                del engine.active[block]

    def polled(self, engine: int, waiting: int, usage: float) -> None:
        """An engine's gauges have been read."""
        self._engines[engine].waiting, self._engines[engine].usage = waiting, usage

    def _prefixes(
        self, prompt_tokens: int, hashes: Sequence[BlockHash], seen: Sequence[PrefixHit]
    ) -> list[int]:
        if self._tree is not None:
            return [one.trunk for one in self._tree.look(prompt_tokens, hashes, 0.0)]
        found = [one.trunk for one in seen]
        if self._counts_in_flight:
            flying = [self._leading(engine.active, hashes) for engine in self._engines]
            return [max(one, other) for one, other in zip(found, flying, strict=True)]
        return found

    def _leading(self, active: Counter[BlockHash], hashes: Sequence[BlockHash]) -> int:
        """Tokens at the prompt's start that prompts in flight have too."""
        count = 0
        for block in hashes:
            if block not in active:
                break
            count += 1
        return count * self._block_tokens

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


TREES = frozenset({"cache-aware", "vllm-router"})
"""Routers that know nothing of events."""
