"""A random load on a block pool under vLLM's scheduling, the same each time for a family and a seed.

Prompts branch, go on from answers and repeat; requests are aborted and preempted; the cache is reset.
``Alone`` runs it on our pool and keeps a digest of all that can be seen: schedules, hits, the bytes of every
step's events and the free blocks in order of reuse. The driver beside the vLLM tests runs vLLM's scheduler on
the same load and writes the digests down once both agreed.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from kvatlas.publisher.block_hash import DEFAULT_SEED, HashScheme, MultimodalItem, PromptExtras
from kvatlas.publisher.block_pool import HybridBlockPool, PoolRequest
from kvatlas.publisher.events import Event, encode_batch
from tests.publisher.pool.layouts import Layout

VOCAB_TOKENS = 2000
ADAPTERS = ("adapter", "sql", "poet")
ARRIVAL_CHANCE = 0.3
PROBE_CHANCE = 0.5
ABORT_CHANCE = 0.01
RESET_CHANCE = 0.02


@dataclass(frozen=True)
class PlacementRequest:
    """A prompt and what else enters its hashes; ``mm`` is (identifier, offset, length) per item."""

    token_ids: list[int]
    lora_name: str | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    mm: tuple[tuple[str, int, int], ...] = ()


class PoolScheduler:
    """vLLM's first-come-first-served scheduling on our pool: running requests first, preempting the last."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        scheme = HashScheme(
            algo=layout.hash_algo, seed=layout.seed or DEFAULT_SEED, hash_block_size=layout.hash_block_size
        )
        self.pool = HybridBlockPool(
            layout.specs,
            num_blocks=layout.num_blocks,
            scheme=scheme,
            retention_interval=layout.retention_interval,
            dcp_world_size=layout.dcp,
            int_hashes=layout.int_hashes,
            chunk_tokens_max=layout.max_num_batched_tokens,
            lora_ids=dict.fromkeys(ADAPTERS, 1),
        )
        self.waiting: deque[PoolRequest] = deque()
        self.running: list[PoolRequest] = []
        self.limits: dict[int, int] = {}
        self.preemptions = 0

    def request(self, ask: PlacementRequest) -> PoolRequest:
        items = tuple(MultimodalItem(*item) for item in ask.mm)
        extras = PromptExtras(ask.lora_name, ask.lora_path, ask.cache_salt, items)
        return self.pool.request(ask.token_ids, extras)

    def add(self, ask: PlacementRequest, max_tokens: int) -> PoolRequest:
        request = self.request(ask)
        self.limits[id(request)] = len(ask.token_ids) + max_tokens
        self.waiting.append(request)
        return request

    def abort(self, request: PoolRequest) -> None:
        self.pool.finish(request)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def step(self) -> list[tuple[PoolRequest, int]]:
        """Schedule one step and give every request that is up to date its next token."""
        self.pool.end_step()
        scheduled = self._schedule()
        for request, _ in scheduled:
            if request.num_computed < request.num_tokens:
                continue
            request.append(sample(request.token_ids))
            if request.num_tokens >= self.limits[id(request)]:
                self.running.remove(request)
                self.pool.finish(request)
        return scheduled

    def _schedule(self) -> list[tuple[PoolRequest, int]]:
        budget = self.layout.max_num_batched_tokens
        scheduled: list[tuple[PoolRequest, int]] = []
        position = 0
        preempted = False
        while position < len(self.running) and budget:
            request = self.running[position]
            chunk = self.pool.next_chunk(request, budget)
            if chunk:
                while not self.pool.compute(request, chunk):
                    preempted = True
                    victim = self.running.pop()
                    self.pool.preempt(victim)
                    self.preemptions += 1
                    self.waiting.appendleft(victim)
                    if victim is request:
                        return scheduled
                scheduled.append((request, chunk))
                budget -= chunk
            position += 1
        while self.waiting and budget and not preempted and len(self.running) < self.layout.max_num_seqs:
            request = self.waiting[0]
            if self.pool.start(request, budget) is None:
                break
            chunk = self.pool.next_chunk(request, budget)
            if not self.pool.compute(request, chunk):
                raise AssertionError("the first chunk of a started request did not fit")
            self.waiting.popleft()
            self.running.append(request)
            scheduled.append((request, chunk))
            budget -= chunk
        return scheduled


def sample(token_ids: list[int]) -> int:
    """The next token of a text: what the fake model of the real scheduler's tests gives."""
    return 3 + (sum(token_ids[-3:]) * 31 + len(token_ids) * 7) % 997


class Alone:
    """The load's view of our pool; ``name`` counts requests from 1 in order of arrival."""

    def __init__(self, layout: Layout, rng: random.Random) -> None:
        self.ours = PoolScheduler(layout)
        self.rng = rng
        self.live: dict[int, PoolRequest] = {}
        self.texts: list[PlacementRequest] = []
        self.counts = {"steps": 0, "events": 0, "probes": 0, "hit_tokens": 0, "preemptions": 0}
        self._digest = hashlib.sha256()
        self._arrived = 0

    @property
    def busy(self) -> bool:
        return bool(self.ours.running or self.ours.waiting)

    @property
    def digest(self) -> str:
        """Of everything seen so far."""
        return self._digest.hexdigest()[:24]

    def add(self, ask: PlacementRequest, max_tokens: int) -> int:
        self._arrived += 1
        self.live[self._arrived] = self.ours.add(ask, max_tokens)
        return self._arrived

    def probe(self, ask: PlacementRequest) -> int:
        pool, request = self.ours.pool, self.ours.request(ask)
        hit, found = pool.find_hit(request), pool.find_prefix(request)
        assert pool.find_prefix_of(request.known_hashes(), request.num_tokens) == found
        self.counts["probes"] += 1
        self.counts["hit_tokens"] += hit
        self._digest.update(f"hit {hit}".encode())
        return hit

    def step(self) -> tuple[list[tuple[int, int]], list[Event], list[int]]:
        """One step; returns the schedule, the events and the free blocks in order of reuse."""
        names = {id(request): name for name, request in self.live.items()}
        scheduled = [(names[id(request)], chunk) for request, chunk in self.ours.step()]
        events = self.ours.pool.take_events()
        free = self.ours.pool._store._free_queue()
        self._digest.update(repr(scheduled).encode() + encode_batch(0.0, events) + repr(free).encode())
        self.counts["steps"] += 1
        self.counts["events"] += len(events)
        self.counts["preemptions"] = self.ours.preemptions
        for name, request in list(self.live.items()):
            if request not in self.ours.running and request not in self.ours.waiting:
                del self.live[name]
                self.texts.append(_ask_of(request))
        return scheduled, events, free

    def abort(self) -> int:
        name = self.rng.choice(list(self.live))
        self.ours.abort(self.live.pop(name))
        return name

    def reset(self) -> bool:
        return self.ours.pool.reset()


def _ask_of(request: PoolRequest) -> PlacementRequest:
    extras = request.extras
    items = tuple((item.identifier, item.offset, item.length) for item in extras.multimodal)
    return PlacementRequest(
        request.token_ids.copy(), extras.lora_name, extras.lora_path, extras.cache_salt, items
    )


def new_ask(
    rng: random.Random, texts: list[PlacementRequest], roots: list[list[int]], longest: int
) -> PlacementRequest:
    """Fresh, from a shared root, a branch or a continuation of an earlier text, or that text again."""
    kind = rng.random()
    fresh = [rng.randrange(3, VOCAB_TOKENS) for _ in range(rng.randint(1, 80))]
    if kind < 0.3 or not texts:
        root = rng.choice(roots)
        prompt = PlacementRequest(root[: rng.randint(0, len(root))] + fresh, **random_extras(rng))
    else:
        old = rng.choice(texts[-12:])
        keep = len(old.token_ids)
        if kind < 0.55:
            keep = rng.randint(1, keep)
        elif kind < 0.7:
            keep -= keep % 16
            fresh = []
        tokens = (old.token_ids[:keep] + fresh) or fresh or [3]
        prompt = PlacementRequest(tokens, old.lora_name, old.lora_path, old.cache_salt, old.mm)
    tokens = prompt.token_ids[:longest]
    items = tuple(item for item in prompt.mm if item[1] + item[2] <= len(tokens))
    return PlacementRequest(tokens, prompt.lora_name, prompt.lora_path, prompt.cache_salt, items)


def random_extras(rng: random.Random) -> dict[str, Any]:
    """Mostly nothing; else a LoRA adapter, a salt, or images."""
    match rng.randrange(12):
        case 0:
            return {"lora_name": "adapter", "lora_path": "/adapters/a"}
        case 1:
            return {"cache_salt": "pepper"}
        case 2:
            first = rng.randint(0, 20)
            return {"mm": (("image-a", first, 30), ("image-b", first + 40, 25))}
        case _:
            return {}


def run_load(side: Alone, requests: int) -> None:
    """Put ``requests`` random requests on a side and step it until all are done."""
    rng = side.rng
    roots = [[rng.randrange(3, VOCAB_TOKENS) for _ in range(150)] for _ in range(3)]
    left = requests
    while left or side.busy:
        while left and (rng.random() < ARRIVAL_CHANCE or not side.busy):
            side.add(new_ask(rng, side.texts, roots, 300), rng.randint(1, 45))
            left -= 1
        if rng.random() < PROBE_CHANCE:
            side.probe(new_ask(rng, side.texts, roots, 400))
        side.step()
        if side.live and rng.random() < ABORT_CHANCE:
            side.abort()
        if rng.random() < RESET_CHANCE:
            side.reset()
        assert side.counts["steps"] <= 200 * requests, "the load never ends"


def load_rng(family: str, seed: int) -> random.Random:
    return random.Random(f"{family}/{seed}")
