"""A tiny fleet on a virtual clock: true block pools behind the router's own policy code.

Each engine prefills first in, first out at ``RATE`` seconds per uncached token, takes its hit when it
begins with a prompt, and holds the blocks until the answer has been generated. The router sees what an
exact index would: the pools themselves. Tokens are scaled 1/8 (window, prompts, rate alike).
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from publisher.block_hash import HashScheme, block_hashes
from publisher.block_pool import HybridBlockPool, PoolRequest
from publisher.events import BlockHash
from publisher.groups import GroupSpec
from router.placement.candidate import Candidate, Choice, Hit, PolicySettings, ask
from router.placement.inflight import InflightPrefixes, InflightPrompt, keeps
from router.placement.load import LoadAccount, Ticket
from router.placement.policies import ArmState, policy
from router.placement.rates import FleetRates, RateSettings

RATE = 1 / 1000
DECODE_S = 0.05
BLOCK = 16
SCHEME = HashScheme(algo="sha256_cbor", hash_block_size=BLOCK)
GPT_OSS = (
    GroupSpec(0, "full_attention", BLOCK),
    GroupSpec(1, "sliding_window", BLOCK, sliding_window=BLOCK),
)


@dataclass(frozen=True)
class Request:
    at_s: float
    prompt: list[int]
    answer: list[int]
    hashes: list[BlockHash]


@dataclass
class Open:
    """A request on its way through one engine."""

    request: Request
    engine_id: str
    ticket: Ticket
    prefix: InflightPrompt
    pool_request: PoolRequest


@dataclass
class Engine:
    pool: HybridBlockPool
    waiting: list[Open] = field(default_factory=list)
    busy: bool = False


@dataclass
class Outcome:
    hit_tokens: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    waits_s: list[float] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    queues: list[list[float]] = field(default_factory=list)


def agents(seed: int, *, tenants: int = 12, seconds: float = 60.0, count: int = 300) -> list[Request]:
    """Shared system prompts, several turns, and turns that fan out within a second into siblings which share
    the context but not the turn's own text: the junction lies inside the prompt."""
    rng = random.Random(seed)
    systems = [_text(rng, rng.randint(256, 1536)) for _ in range(tenants)]
    found: list[tuple[float, list[int], list[int]]] = []
    while len(found) < count:
        at_s, context = rng.uniform(0, seconds), rng.choice(systems)
        for _ in range(rng.randint(1, 5)):
            if rng.random() < 0.35:
                for _ in range(rng.randint(3, 6)):
                    branch = context + _text(rng, rng.randint(24, 192))
                    found.append((at_s + rng.uniform(0.05, 1.0), branch, _text(rng, 16)))
            context = context + _text(rng, rng.randint(16, 128))
            answer = _text(rng, rng.randint(8, 64))
            found.append((at_s, context, answer))
            context = context + answer
            at_s += 2 + rng.expovariate(1 / 4)
    return _trace(found, count)


def tenants(seed: int, *, num: int = 40, seconds: float = 60.0, count: int = 300) -> list[Request]:
    """Single questions behind shared system prompts, the first tenants more often than the last."""
    rng = random.Random(seed)
    systems = [_text(rng, rng.randint(256, 1536)) for _ in range(num)]
    weights = [1 / (i + 1) ** 0.9 for i in range(num)]
    found = [
        (
            rng.uniform(0, seconds),
            rng.choices(systems, weights)[0] + _text(rng, rng.randint(32, 256)),
            _text(rng, 16),
        )
        for _ in range(count)
    ]
    return _trace(found, count)


def _text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(count)]


def _trace(found: list[tuple[float, list[int], list[int]]], count: int) -> list[Request]:
    found.sort(key=lambda item: item[0])
    return [
        Request(at_s, prompt, answer, block_hashes(prompt + answer, SCHEME))
        for at_s, prompt, answer in found[:count]
    ]


class Fleet:
    """Runs one arm over one trace."""

    def __init__(self, arm: str, *, engines: int, num_blocks: int, knobs: PolicySettings) -> None:
        self.knobs, self.arm, self.state = knobs, policy(arm), ArmState(random.Random(1))
        self.engines = {
            f"engine-{i}": Engine(
                HybridBlockPool(GPT_OSS, num_blocks=num_blocks, scheme=SCHEME, events=False)
            )
            for i in range(engines)
        }
        rates = FleetRates(RateSettings(prefill_s_per_token=RATE, long_tokens_min=64, cached_tokens_max=8))
        self.loads = {engine_id: LoadAccount(rates.engine()) for engine_id in self.engines}
        self.inflight = InflightPrefixes()
        self.outcome = Outcome()
        self._events: list[tuple[float, int, str, Open]] = []
        self._order = 0

    def run(self, requests: list[Request]) -> Outcome:
        for request in requests:
            self._until(request.at_s)
            self._place(request)
        self._until(float("inf"))
        assert all(load.check_integrity() == [] for load in self.loads.values())
        assert self.inflight.check_integrity() == []
        for engine in self.engines.values():
            engine.pool.check_integrity()
        return self.outcome

    def _place(self, request: Request) -> None:
        now, tokens = request.at_s, len(request.prompt)
        hashes = request.hashes[: tokens // BLOCK]
        probe = next(iter(self.engines.values())).pool.request(request.prompt, hashes=hashes)
        common = self.inflight.common(hashes, now)
        candidates: list[Candidate] = []
        for engine_id, engine in self.engines.items():
            hit, trunk = engine.pool.find_prefix(probe)
            account = self.loads[engine_id]
            load = account.at(now)
            candidates.append(
                Candidate(
                    engine_id,
                    Hit(
                        hit,
                        trunk_tokens=max(trunk, common.blocks.get(engine_id, 0) * BLOCK),
                        coming_tokens=common.coming.get(engine_id, 0) * BLOCK,
                        confidence="exact",
                    ),
                    queue_s=load.queue_s,
                    running=load.running,
                    waiting=load.waiting,
                    idle_s=load.idle_s,
                    prefill_s_per_token=account.rates.prefill_s_per_token(now),
                    decode_interference_s=account.rates.decode_interference_s,
                )
            )
        prompt = ask(tokens, hashes, prefix_blocks=self.knobs.prefix_blocks)
        choice = self.arm(candidates, prompt, self.knobs, self.state)
        ticket = self.loads[choice.engine_id].admit(uncached_tokens=choice.uncached_tokens, now=now)
        kept = keeps(
            tokens, candidates[choice.index].hit.trunk_tokens, alignment=BLOCK, hash_block_size=BLOCK
        )
        prefix = self.inflight.add(choice.engine_id, hashes, now, kept)
        engine = self.engines[choice.engine_id]
        pool_request = engine.pool.request(request.prompt, hashes=request.hashes)
        engine.waiting.append(Open(request, choice.engine_id, ticket, prefix, pool_request))
        self.outcome.choices.append(choice)
        self.outcome.queues.append([load.queue_ahead_s(now) for load in self.loads.values()])
        self._begin(engine, now)

    def _begin(self, engine: Engine, now: float) -> None:
        """The engine takes up its next prompt, as soon as its blocks fit."""
        if engine.busy or not engine.waiting:
            return
        opened = engine.waiting[0]
        hit = engine.pool.start(opened.pool_request)
        if hit is None:
            return  # tried again when a running request frees its blocks
        del engine.waiting[0]
        tokens = len(opened.request.prompt)
        assert engine.pool.compute(opened.pool_request, tokens - hit)
        engine.pool.end_step()
        engine.busy = True
        self.outcome.requests += 1
        self.outcome.hit_tokens += hit
        self.outcome.prompt_tokens += tokens
        self._at(now + (tokens - hit) * RATE, "first_token", opened)

    def _until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            now, _, what, opened = heapq.heappop(self._events)
            engine = self.engines[opened.engine_id]
            if what == "first_token":
                self.outcome.waits_s.append(now - opened.request.at_s)
                account = self.loads[opened.engine_id]
                sample = account.first_token(opened.ticket, now)
                if sample is not None:
                    account.rates.observe(sample, now)
                self.inflight.prefilled(opened.prefix)
                engine.busy = False
                self._at(now + len(opened.request.answer) * DECODE_S, "finish", opened)
            else:
                answer = opened.request.answer
                engine.pool.extend(opened.pool_request, answer)
                engine.pool.compute(opened.pool_request, len(answer))
                engine.pool.finish(opened.pool_request)
                self.loads[opened.engine_id].finish(opened.ticket, now)
                self.inflight.end(opened.prefix, now)
            self._begin(engine, now)

    def _at(self, when_s: float, what: str, opened: Open) -> None:
        self._order += 1
        heapq.heappush(self._events, (when_s, self._order, what, opened))
