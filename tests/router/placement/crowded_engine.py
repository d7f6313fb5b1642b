"""A simulated engine in virtual time whose pool holds two or three prompts, and clients that keep it busy.

Each client sends its next request when the last one is answered. A hit is predicted when a request is sent,
from the events so far, as the router does: with ``forecast`` also by ``EvictionForecast``. The events of a
step arrive with its tokens.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from typing import NamedTuple

from kvatlas.publisher.block_hash import block_hashes
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import BlockRemoved, BlockStored, to_block_hash
from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.scheduler import Scheduler, StepCosts
from kvatlas.publisher.simulator.settings import EngineSettings, hash_scheme, resolve_groups
from kvatlas.router.placement.candidate import Hit
from kvatlas.router.placement.evictions import EvictionForecast, PooledPrompt
from kvatlas.router.placement.inflight import InflightPrefixes, InflightPrompt, KeptRule, kept_prefixes
from tests.support.chats import Chats

BLOCK = 16
KEPT = KeptRule(BLOCK, BLOCK, every_block=True, all_full=True)
_EOS = 1


class _Words:
    """Tokens of one answer, different from those of any other."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def token(self, index: int, *, ignore_eos: bool) -> int:
        del index, ignore_eos
        return self._rng.randrange(10, 10_000)


class Outcome(NamedTuple):
    """One request: blocks predicted from the index alone, with the forecast, and hit; all in tokens."""

    indexed: int
    predicted: int
    actual: int


class Sent(NamedTuple):
    client: int
    indexed: int
    predicted: int
    flying: InflightPrompt
    pooled: PooledPrompt
    streams: bool


class CrowdedEngine:
    """One engine and its clients; ``pool_blocks`` counts the null block."""

    def __init__(
        self,
        *,
        pool_blocks: int,
        clients: int,
        seed: int,
        think_s: float = 0.0,
        streams: float = 1.0,
        answer_tokens: tuple[int, int] = (1, 24),
    ) -> None:
        self.rng = random.Random(seed)
        self.settings = EngineSettings(groups="full", num_blocks=pool_blocks, block_size=BLOCK)
        groups = resolve_groups(self.settings)
        self.scheme = hash_scheme(self.settings, groups)
        self.now = 0.0
        self.pool = HybridBlockPool(groups, num_blocks=pool_blocks, scheme=self.scheme)
        self.scheduler = Scheduler(
            self.pool,
            costs=StepCosts(1e-4, 2e-3),
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            clock=lambda: self.now,
        )
        self.inflight = InflightPrefixes()
        self.forecast = EvictionForecast()
        self.forecast.configure(pool_blocks, groups)
        self.copies: Counter[int] = Counter()
        """Of each block, by the events that have arrived: what the index knows."""
        self.outcomes: list[Outcome] = []
        self._think_s, self._streams, self._answer = think_s, streams, answer_tokens
        self._sent: dict[SimRequest, Sent] = {}
        self._due = [(self.rng.random() * 0.05, client) for client in range(clients)]
        heapq.heapify(self._due)
        self._chats = Chats(self.rng, clients, vocabulary=10_000)

    def run(self, requests: int) -> list[Outcome]:
        """Serve this number of requests."""
        while len(self.outcomes) < requests:
            while self._due and self._due[0][0] <= self.now:
                self._send(heapq.heappop(self._due)[1])
            if not self.scheduler.has_work:
                self.now = self._due[0][0]
                continue
            step = self.scheduler.begin_step()
            ends = self.now + step.duration_s
            while self._due and self._due[0][0] <= ends:
                self.now, client = heapq.heappop(self._due)
                self._send(client)
            self.now = ends
            outputs = self.scheduler.end_step(step)
            self._hear()
            for output in outputs:
                self._token(output.request, ended=output.finish_reason is not None)
        return self.outcomes

    def _send(self, client: int) -> None:
        tokens = self._chats.prompt(client)
        hashes = block_hashes(tokens, self.scheme)
        request = SimRequest(
            str(len(self.outcomes)),
            tokens,
            _Words(self.rng.randrange(1 << 30)),
            max_tokens=self.rng.randint(*self._answer),
            eos_id=_EOS,
            ignore_eos=True,
        )
        most = (len(tokens) - 1) // BLOCK
        held = next((i for i, block in enumerate(hashes[:most]) if not self.copies[block]), most)
        coming = self.inflight.common(hashes, self.now, (len(tokens) - 1) // BLOCK).coming.get("e", 0)
        predicted = self.forecast.at_lookup(hashes, len(tokens), held, coming)
        kept = kept_prefixes(KEPT, len(tokens), Hit())
        flying = self.inflight.add("e", hashes, self.now, kept)
        pooled = self.forecast.admit(hashes, len(tokens), request.max_tokens)
        assert pooled is not None
        streams = self.rng.random() < self._streams
        indexed = max(held, coming) * BLOCK
        self._sent[request] = Sent(client, indexed, predicted * BLOCK, flying, pooled, streams)
        self.scheduler.add(request)

    def _hear(self) -> None:
        for event in self.scheduler.take_events():
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                hashes = [to_block_hash(block) for block in event.block_hashes]
                self.copies.update(hashes)
                self.forecast.stored(hashes, None if parent is None else to_block_hash(parent))
            elif isinstance(event, BlockRemoved):
                hashes = [to_block_hash(block) for block in event.block_hashes]
                self.copies.subtract(hashes)
                self.forecast.removed(hashes)

    def _token(self, request: SimRequest, *, ended: bool) -> None:
        sent = self._sent[request]
        if sent.streams:
            sent.pooled.answered_tokens += 1
            if len(request.output) == 1:
                self.inflight.prefilled(sent.flying, self.now)
                self.forecast.start(sent.pooled)
        if ended:
            del self._sent[request]
            self.inflight.end(sent.flying, self.now)
            self.forecast.end(sent.pooled, len(request.output))
            assert request.cached_tokens is not None
            self.outcomes.append(Outcome(sent.indexed, sent.predicted, request.cached_tokens))
            self._chats.answered(sent.client, request.prompt + request.output)
            heapq.heappush(self._due, (self.now + self.rng.random() * self._think_s, sent.client))
