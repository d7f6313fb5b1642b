"""Engines and workers on a virtual clock, for ``benchmarks.workers_virtual``.

The simulated engines, accounts, prompts in flight, gossip of load and the choice are the real ones; sockets,
tokenizers and feeds are left out: what an engine holds is known immediately. Workers tell each other every
2 ms, and poll the engines' gauges every 2 s, as ``kvatlas serve --workers`` does.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.scheduler import Step
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.publisher.simulator.virtual_engine import eventless
from kvatlas.router.placement.candidate import Candidate, Hit, PolicySettings, placement_request
from kvatlas.router.placement.cost import choose
from kvatlas.router.placement.inflight import InflightPrefixes, InflightPrompt, kept_prefixes, kept_rule
from kvatlas.router.placement.load import LoadAccount, Ticket
from kvatlas.router.placement.others import NO_OTHERS, OthersLoad
from kvatlas.router.placement.rates import FleetRates
from kvatlas.router.replication.gossip import GossipedInflight
from kvatlas.router.replication.load_gossip import LoadGossip
from kvatlas.router.simulation.setup import simulated_layout

ENGINES = 4
FLUSH_S, HEARD_S, REPEAT_S, LOAD_S, GAUGES_S = 0.002, 0.0005, 0.05, 0.005, 2.0
TOKENS = 50_000
_STEP_S_MIN = 1e-4
_POLICY = PolicySettings()


class _Numbers:
    """A sampler: any tokens do."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def token(self, index: int, *, ignore_eos: bool) -> int:
        return self._rng.randrange(10, TOKENS)


class _Open(msgspec.Struct, eq=False):
    """A request on its way."""

    worker: Worker
    engine: int
    ticket: Ticket
    flying: InflightPrompt
    request: SimRequest
    streams: bool
    at_s: float
    done: Callable[[SimRequest], None]
    begun: bool = False


class Worker:
    """The books of one worker."""

    def __init__(self, fleet: VirtualFleet, slot: int, count: int) -> None:
        self._fleet, self._name = fleet, str(slot)
        rates = FleetRates()
        self.loads = [LoadAccount(rates.engine()) for _ in fleet.engines]
        self.inflight: InflightPrefixes = InflightPrefixes()
        if count > 1:
            self.inflight = GossipedInflight(self._name, 1, self._tell, publishes_prefills=False)
        self.gossip = LoadGossip(self._name, self._own, started=1)
        self.fields: dict[str, bytes] = {}
        self._entries: list[bytes] = []
        self._load_due_s = 0.0

    def others(self) -> dict[str, OthersLoad]:
        """Messages of the siblings."""
        return self.gossip.others(self.fields, self._fleet.now)

    def poll(self) -> None:
        """The engines' gauges."""
        fleet = self._fleet
        for engine, account in zip(fleet.engines, self.loads, strict=True):
            gauges = engine.scheduler.gauges()
            account.report(running=gauges.num_running, waiting=gauges.num_waiting, now=fleet.now)
        fleet.later(GAUGES_S, self.poll)

    def repeat(self) -> None:
        """Changes without a request."""
        self._flush()
        self._fleet.later(REPEAT_S, self.repeat)

    def _own(self, now: float) -> dict[str, OthersLoad]:
        loads = zip(self._fleet.names, [account.own(now) for account in self.loads], strict=True)
        return {name: load for name, load in loads if load is not None}

    def _tell(self, engine_id: str, entry: bytes) -> bool:
        if not self._entries:
            self._fleet.later(FLUSH_S, self._flush)
        self._entries.append(entry)
        return True

    def _flush(self) -> None:
        now, load = self._fleet.now, None
        if now >= self._load_due_s:
            load, self._load_due_s = self.gossip.field(now), now + LOAD_S
        if load is not None:
            self.gossip.sent(load, now)
        entries, self._entries = self._entries, []
        for sibling in self._fleet.workers:
            if sibling is not self and (entries or load):
                self._fleet.later(HEARD_S, partial(sibling.receive, self._name, entries, load))

    def receive(self, name: str, entries: list[bytes], load: bytes | None) -> None:
        """A sibling's message."""
        if load is not None:
            self.fields[name] = load
        if isinstance(self.inflight, GossipedInflight):
            self.inflight.receive(entries, self._fleet.now)


class _Engine:
    """A pool and its scheduler; the fleet tells the time."""

    def __init__(self, settings: EngineSettings, clock: Callable[[], float]) -> None:
        self.works = False
        self.pool, self.scheduler = eventless(settings, clock)


class VirtualFleet:
    """Engines and workers in one order of virtual time; ``rows``: when, prompt tokens, cached, engine."""

    def __init__(self, settings: EngineSettings, workers: int, seed: int) -> None:
        self.engines = [_Engine(settings, lambda: self.now) for _ in range(ENGINES)]
        self.names = [f"http://engine-{number}:8000" for number in range(ENGINES)]
        self.now = 0.0
        self.workers: list[Worker] = []
        self.rows: list[tuple[float, int, int, int]] = []
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._open: dict[str, _Open] = {}
        self.workers += [Worker(self, slot, workers) for slot in range(workers)]
        rng = random.Random(seed)
        for worker in self.workers:
            self.later(rng.uniform(0, GAUGES_S), worker.poll)
            if workers > 1:
                self.later(rng.uniform(0, REPEAT_S), worker.repeat)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Let this happen in this many seconds."""
        heapq.heappush(self._calendar, (self.now + seconds, next(self._order), what))

    def run(self, until_s: float) -> None:
        """Everything up to ``until_s``, and requests under way to their end."""
        while self.now < until_s or self._open:
            at_s, _, what = heapq.heappop(self._calendar)
            self.now = at_s
            what()

    def ask(
        self,
        worker: Worker,
        tokens: list[int],
        answer_tokens: int,
        *,
        streams: bool,
        done: Callable[[SimRequest], None] = lambda request: None,
    ) -> SimRequest:
        """One request, placed by this worker."""
        now, number = self.now, next(self._order)
        pool = self.engines[0].pool
        hashes = pool.request(tokens).known_hashes()
        candidates = self._candidates(worker, tokens, hashes)
        question = placement_request(len(tokens), hashes)
        choice = choose(candidates, len(tokens), _POLICY, prompt_key=question.prompt_key)
        place, chosen = choice.index, candidates[choice.index]
        ticket = worker.loads[place].admit(
            uncached_tokens=choice.uncached_tokens,
            now=now,
            streams=streams,
            expected_s=choice.cost.first_token_s,
            running=chosen.running,
            waiting=chosen.waiting,
        )
        kept = kept_prefixes(kept_rule(simulated_layout(pool.layout.groups)), len(tokens), chosen.hit)
        flying = worker.inflight.add(chosen.engine_id, hashes, now, kept)
        request = SimRequest(
            str(number), tokens, _Numbers(number), max_tokens=answer_tokens, eos_id=0, ignore_eos=True
        )
        self._open[request.request_id] = _Open(worker, place, ticket, flying, request, streams, now, done)
        engine = self.engines[place]
        engine.scheduler.add(request)
        if not engine.works:
            self._begin(place)
        return request

    def _candidates(self, worker: Worker, tokens: list[int], hashes: list[BlockHash]) -> list[Candidate]:
        now, last = self.now, len(tokens) - 1
        unit = self.engines[0].pool.scheme.hash_block_size
        common, others, found = worker.inflight.common(hashes, now, last // unit), worker.others(), []
        for name, engine, account in zip(self.names, self.engines, worker.loads, strict=True):
            hit, shared_prefix = engine.pool.find_prefix(engine.pool.request(tokens, hashes=hashes))
            rate, interference_s = account.rates.current(now)
            load = account.ahead(now, others.get(name, NO_OTHERS), rate)
            queue_s, running, waiting, idle_s, late_s, recent_s, *_ = load
            shared = min(common.blocks.get(name, 0) * unit, last)
            coming = common.coming.get(name, 0) * unit
            held = Hit(hit, 0, 0, max(hit, shared_prefix, shared), coming, "exact", shared)
            found.append(
                Candidate(
                    name, held, queue_s, running, waiting, idle_s, rate, interference_s, late_s, recent_s
                )
            )
        return found

    def _begin(self, place: int) -> None:
        engine = self.engines[place]
        engine.works = engine.scheduler.has_work
        if engine.works:
            step = engine.scheduler.begin_step()
            self.later(max(step.duration_s, _STEP_S_MIN), partial(self._end_step, place, step))

    def _end_step(self, place: int, step: Step) -> None:
        for output in self.engines[place].scheduler.end_step(step):
            opened = self._open[output.request.request_id]
            if not opened.begun:
                self._first_token(opened)
            if output.finish_reason is not None:
                self._ended(opened)
        self._begin(place)

    def _first_token(self, opened: _Open) -> None:
        opened.begun = True
        if opened.streams:
            account = opened.worker.loads[opened.engine]
            sample = account.first_token(opened.ticket, self.now)
            if sample is not None:
                account.rates.observe(sample, self.now)
            opened.worker.inflight.prefilled(opened.flying, self.now)

    def _ended(self, opened: _Open) -> None:
        request = opened.request
        del self._open[request.request_id]
        opened.worker.loads[opened.engine].finish(opened.ticket, self.now)
        opened.worker.inflight.end(opened.flying, self.now)
        self.rows.append((opened.at_s, len(request.prompt), request.cached_tokens or 0, opened.engine))
        opened.done(request)
