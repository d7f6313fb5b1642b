"""A fleet behind one variant: arrivals, placements and engines in one order of virtual time.

The placement is the router's own code: its ``Engine`` stands for each engine, its ``FleetSnapshot`` gives the
candidates, the policy and the service level choose, and the load account and the prompts in flight are kept
as for real requests. Only the engines (``engine``) and the immediate arrival of events are simulated. A
run depends only on its inputs and the seed."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import BlockHash, BlockRemoved, BlockStored
from kvatlas.publisher.groups import Family
from kvatlas.publisher.pool.retention_order import RetentionHint
from kvatlas.router.admission.fair_queue import GENERATED_WORTH
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.status import Frontend
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.index.model import HashedPrompt
from kvatlas.router.index.query_plan import EngineHit, Mode
from kvatlas.router.index.search_order import hits_behind
from kvatlas.router.placement.candidate import Candidate, PlacementRequest, placement_request
from kvatlas.router.placement.cost import Choice, make_choice, score
from kvatlas.router.placement.engine import NO_PEER_SNAPSHOT, Accounts, Engine, PeerSnapshot, PromptView
from kvatlas.router.placement.engine_order import EngineOrder, order_of
from kvatlas.router.placement.evictions import PooledPrompt
from kvatlas.router.placement.inflight import InflightPrompt, kept_prefixes, kept_rule
from kvatlas.router.placement.load import Ticket
from kvatlas.router.placement.policies import ArmState, policy
from kvatlas.router.placement.pull import PullSources, link_busy_s, occupy_links, page_prices, with_pull
from kvatlas.router.placement.rates import FleetRates, RateSettings
from kvatlas.router.placement.retention import RetentionHints
from kvatlas.router.placement.service_level import decide
from kvatlas.router.placement.snapshot import FleetSnapshots
from kvatlas.router.placement.wait_limit import late_first_token, long_wait, predicted_wait_s
from kvatlas.router.simulation.disaggregation import Leg, Roles
from kvatlas.router.simulation.engine import SimEngine
from kvatlas.router.simulation.event_times import Arrivals, Calendar
from kvatlas.router.simulation.holding import Holding
from kvatlas.router.simulation.other_router import seen_of
from kvatlas.router.simulation.outcome import FleetRun, Row
from kvatlas.router.simulation.request_run import RequestRun
from kvatlas.router.simulation.requests import Request, block_hashes
from kvatlas.router.simulation.router_view import router_view
from kvatlas.router.simulation.setup import FleetSetup, simulated_layout, simulated_scheme
from kvatlas.router.simulation.tiers import tiers_of
from kvatlas.router.simulation.variants import Variant

Progress = Callable[[int], None]
PROGRESS_EVERY = 256
_NORMAL = 1  # class of every request
_BY_FIRST_TOKEN = 2  # ``Variant.refuses``


class _Open(msgspec.Struct, eq=False):
    """A request in progress."""

    engine: int
    ticket: Ticket
    prefix: InflightPrompt | None
    prompt_tokens: int
    hashes: Sequence[BlockHash]
    predicted: int
    arrived_s: float
    tenant: str
    leg: Leg | None = None
    """Where the prompt is computed, if elsewhere."""
    promised: int = 0
    """Tokens to be pulled from another engine."""
    pooled: PooledPrompt | None = None
    """Its entry in the forecast of evictions."""


class _Hashes(NamedTuple):
    """Hashes of a prompt (``kvatlas.router.placement.engine.Hashed``)."""

    known: Sequence[BlockHash]

    def behind(self, frontend: Frontend) -> _Hashes:
        return self

    def hashes(self, scheme: HashScheme) -> Sequence[BlockHash]:
        return self.known


class _Known(NamedTuple):
    """Knowledge about each engine from its events (``kvatlas.router.placement.engine.SharedView``)."""

    known_scheme: HashScheme
    known_layout: CacheLayout

    def scheme(self, engine_id: str) -> HashScheme:
        return self.known_scheme

    def layout(self, engine_id: str) -> CacheLayout:
        return self.known_layout

    def feed_state(self, engine_id: str) -> str:
        return FeedState.READY

    async def look(
        self, prompt: HashedPrompt | None, engines: Mapping[str, str], *, detail: bool = False
    ) -> PeerSnapshot:
        return NO_PEER_SNAPSHOT


class FleetSim:
    """Runs one variant over one workload, once."""

    def __init__(self, setup: FleetSetup, variant: Variant) -> None:
        self._setup, self._variant = setup, variant
        self._knobs = msgspec.structs.replace(setup.policy, **dict(variant.settings))
        if variant.prefill >= setup.engines:
            raise ValueError(f"prefill={variant.prefill} leaves none of {setup.engines} engines to decode")
        self._roles = Roles(variant.prefill, setup.groups, setup.pd) if variant.prefill else None
        self._policy = policy(variant.policy) if isinstance(variant.policy, str) else variant.policy
        self._state = ArmState()
        self._accounts = Accounts(lambda: self._now, lambda: self._now)
        self._accounts.rates = FleetRates(RateSettings(prefill_s_per_token=setup.timing.prefill_s_per_token))
        self._scheme = simulated_scheme(setup.groups)
        self._pull_s_per_token = 0.0
        if setup.tiers is not None and setup.tiers.pull_bytes_per_s and variant.pulls:
            self._pull_s_per_token = setup.tiers.load_s_per_token("PEER", setup.groups)
        self._hints = RetentionHints()
        self._alone: list[int] = []  # hits of the last prompt looked up, in host memory alone
        self._all_full = all(group.family is Family.FULL for group in setup.groups)
        self._layout = simulated_layout(setup.groups)
        self._hits_behind = hits_behind(self._layout)
        self._fleet = [self._engine(place) for place in range(setup.engines)]
        follows = variant.view == "truth" and variant.in_flight and variant.evictions and not variant.prefill
        self._forecasts = follows and self._fleet[0].evictions.blocks > 0
        pools = [
            HybridBlockPool(
                setup.groups,
                num_blocks=setup.num_blocks,
                scheme=self._scheme,
                retention_interval=setup.retention,
                chunk_tokens_max=setup.timing.chunk_tokens,
                events=self._forecasts,
            )
            for _ in range(setup.engines)
        ]
        self._tiers = tiers_of(setup.tiers, pools)
        if setup.tiers is not None and setup.tiers.any:
            self._knobs = msgspec.structs.replace(
                self._knobs,
                load_s_per_token=setup.tiers.load_s_per_token("CPU", setup.groups),
                storage_load_s_per_token=setup.tiers.load_s_per_token("STORAGE", setup.groups),
            )
        self._snapshots = FleetSnapshots(self._accounts.changes)
        self._engines = [
            SimEngine(
                pool,
                setup.timing,
                first_token=self._first_token,
                ended=self._ended,
                refused=self._refused,
                fetched=self._fetched,
                tiers=outside,
            )
            for pool, outside in zip(pools, self._tiers, strict=True)
        ]
        self._view = router_view(variant, setup, pools, self._tiers)
        timing = setup.timing
        self._loads = [engine.load for engine in self._fleet]
        self._holding = None if variant.hold is None else Holding(variant.hold, self._loads, timing.seqs_max)
        self._inflight = self._accounts.inflight
        self._open: dict[int, _Open] = {}
        self._rows: dict[int, Row] = {}
        self._other = None
        if variant.other is not None:
            unit = self._scheme.hash_block_size
            self._other = variant.other(setup, unit, random.Random(setup.seed))
        self._queued: deque[tuple[int, Request]] = deque()  # in another router
        self._gauge_s = setup.gauge_s if self._other is None else self._other.gauge_s
        self._gauges_s = self._gauge_s
        self._calendar = Calendar(setup.engines)
        self._arrivals = Arrivals((), speed=1.0, closed=False)
        self._now = 0.0

    def _engine(self, place: int) -> Engine:
        """Return an engine as the router has it: its events have all been received, and its layout is known.
        What it holds comes from the variant's view."""
        # Nothing is sent there: the address is its name.
        engine = Engine(
            EngineAddress(f"engine-{place}"),
            self._accounts,
            elsewhere=_Known(self._scheme, self._layout),
        )
        engine.feed = FeedStats(FeedState.READY)
        engine.load.pages.configure(self._setup.num_blocks, self._setup.groups)
        engine.evictions.configure(self._setup.num_blocks, self._setup.groups)
        return engine

    def run(self, requests: Sequence[Request], progress: Progress | None = None) -> FleetRun:
        """Run all requests to their end. ``progress`` is called periodically with the number placed since."""
        self._arrivals = Arrivals(requests, speed=self._setup.speed, closed=self._setup.closed)
        placed = 0
        while True:
            self._advance()
            if self._arrivals.next_s() == math.inf:
                break
            self._now = self._arrivals.next_s()
            index = self._arrivals.take()
            self._arrive(index, requests[index])
            placed += 1
            if progress is not None and placed % PROGRESS_EVERY == 0:
                progress(PROGRESS_EVERY)
        if progress is not None:
            progress(placed % PROGRESS_EVERY)
        return FleetRun(
            [self._rows[index] for index in range(len(requests))],
            [engine.busy_s for engine in self._engines],
            [engine.computed_tokens for engine in self._engines],
            sum(engine.preemptions for engine in self._engines),
            self._now,
            sum(outside.moved_bytes for outside in self._tiers if outside is not None),
            sum(outside.left_out_blocks for outside in self._tiers if outside is not None),
        )

    def _arrive(self, index: int, request: Request) -> None:
        holding = self._holding
        if self._queued or (self._other is not None and self._other.full()):
            self._queued.append((index, request))
            return
        if holding is None:
            self._place(index, request)
            return
        tokens, unit = request.input_tokens, self._scheme.hash_block_size
        candidates = self._candidates(tokens, block_hashes(request, unit)[: tokens // unit], self._now)
        if holding.holds(request, candidates, self._now):
            holding.add(index, request, candidates, self._now)
        else:
            self._place(index, request)

    def _place(self, index: int, request: Request) -> None:
        now, tokens = self._now, request.input_tokens
        unit = self._scheme.hash_block_size
        whole = block_hashes(request, unit)
        hashes = whole[: tokens // unit]
        order = order_of(_NORMAL, now, self._knobs.engine_priority)
        candidates = self._candidates(tokens, hashes, now, order)
        arrived_s = self._arrivals.arrived_s(index)
        left_s = arrived_s + self._variant.slo_s - now
        question = self._ask(request, hashes)
        place, choice, helper = 0, None, None
        if not self._waits_too_long(tokens, hashes, candidates, left_s):
            place, choice, helper = self._choose(index, candidates, question, hashes, left_s)
        if choice is None or self._is_late(place, choice, left_s):
            self._rows[index] = Row(index, arrived_s, 0, tokens, 0, 0, -1.0, 0.0, 0)
            self._arrivals.ended(index, now)
            return
        leg, rank_s = None, 0.0
        if helper is not None:
            leg = self._leg(index, request, hashes, candidates[helper], helper, choice)
            ticket = self._loads[place].admit(uncached_tokens=0, now=now, prompt_tokens=tokens)
        else:
            if order is not None:
                rank_s = self._rank_s(order, candidates[place], choice, hashes)
            ticket = self._admit(place, choice, tokens, rank_s)
        prefix = None
        if leg is None or self._all_full:
            prefix = self._in_flight(candidates[place], tokens, hashes, rank_s)
        predicted = max(0, tokens - choice.uncached_tokens)
        self._open[index] = _Open(
            place, ticket, prefix, tokens, hashes, predicted, arrived_s, request.tenant, leg
        )
        if choice.pull is not None:
            self._open[index].promised = choice.pull.tokens
        if self._forecasts:
            self._open[index].pooled = self._fleet[place].evictions.admit(hashes, tokens)
        if self._holding is not None:
            self._holding.charge(request.tenant, choice.uncached_tokens)
        if leg is not None:
            self._send(leg.engine, leg.run)
        else:
            source = None
            if choice.pull is not None:
                sender = choice.pull.source
                occupy_links(self._loads[place], self._loads[sender], choice.pull.link_s, now)
                source = self._tiers[sender]
            run = self._run(place, index, tokens, whole, request.output_tokens)
            run.rank_s, run.source, run.hint = rank_s, source, self._hint(request)
            self._send(place, run)

    def _run(
        self, place: int, index: int, tokens: int, whole: Sequence[BlockHash], output_tokens: int
    ) -> RequestRun:
        """Make a request of an engine; of its tokens only the hashes count."""
        pool_request = self._engines[place].pool.request([0] * tokens, hashes=whole)
        return RequestRun(index, pool_request, tokens, output_tokens, self._now)

    def _hint(self, request: Request) -> RetentionHint | None:
        tiers = self._setup.tiers
        if tiers is None or not tiers.hint_share:
            return None
        found = self._hints.predict(self._now, session=request.session)
        return None if found is None else RetentionHint(found[1].ttl_s, found[1].value, request.tenant)

    def _waits_too_long(
        self, tokens: int, hashes: Sequence[BlockHash], candidates: Sequence[Candidate], left_s: float
    ) -> bool:
        """Whether the request is refused by what every engine is predicted to take."""
        variant = self._variant
        if self._other is not None:
            return variant.refuses > 0 and self._other.misses(tokens, hashes, seen_of(candidates), left_s)
        admit_s = min(variant.admit_s, max(0.0, left_s)) if variant.refuses else variant.admit_s
        return long_wait(predicted_wait_s(candidates, self._fleet), admit_s) is not None

    def _is_late(self, place: int, choice: Choice, left_s: float) -> bool:
        """Whether the request is refused by its first token at the chosen engine."""
        if self._variant.refuses != _BY_FIRST_TOKEN or self._other is not None or self._roles is not None:
            return False
        parts = self._fleet[place].first_token(choice.candidate, choice.cost, choice.scored.prompt_tokens)
        return late_first_token(parts.total_s, parts.queue_s + parts.pages_s, left_s) is not None

    def _admit(self, place: int, choice: Choice, tokens: int, rank_s: float = 0.0) -> Ticket:
        cost = choice.cost
        return self._loads[place].admit(
            uncached_tokens=choice.uncached_tokens,
            now=self._now,
            load_s=cost.load_s,
            expected_s=cost.first_token_s,
            prompt_tokens=tokens,
            rank_s=rank_s,
        )

    def _choose(
        self,
        index: int,
        candidates: Sequence[Candidate],
        question: PlacementRequest,
        hashes: Sequence[BlockHash],
        left_s: float,
    ) -> tuple[int, Choice, int | None]:
        """Return the engine that answers, the choice of the one that computes the prompt, and that engine if
        it is another."""
        if self._other is not None:
            tokens = question.prompt_tokens
            place, cached = self._other.place(index, tokens, hashes, seen_of(candidates), self._now)
            choice = make_choice(score(candidates, tokens, self._knobs), place, "policy")
            choice = msgspec.structs.replace(choice, uncached_tokens=max(1, tokens - cached))
            return place, choice, None

        def pick(some: Sequence[Candidate]) -> Choice:
            return self._policy(some, question, self._knobs, self._state)

        if self._roles is not None:
            return self._roles.choose(candidates, question, pick, self._knobs, left_s)
        chosen = decide(self._fleet, candidates, pick, left_s, self._accounts.slo_stats)
        choice = chosen.choice
        if chosen.skipped:
            return self._fleet.index(chosen.engines[choice.index]), choice, None
        if self._pull_s_per_token:
            choice = with_pull(choice, self._sources(question.prompt_tokens))
        return choice.index, choice, None

    def _sources(self, prompt_tokens: int = 0) -> PullSources:
        """Return the engines as sources of pulls, for the prompt looked up last."""
        tiers = self._setup.tiers
        return PullSources(
            self._alone,
            [link_busy_s(account, None, self._now) for account in self._loads],
            self._pull_s_per_token,
            page_prices(self._loads, prompt_tokens),
            0.0 if tiers is None else tiers.pull_latency_s,
        )

    def _leg(
        self,
        index: int,
        request: Request,
        hashes: Sequence[BlockHash],
        candidate: Candidate,
        place: int,
        choice: Choice,
    ) -> Leg:
        """Start a prompt at the engine that computes it for another."""
        tokens = request.input_tokens
        ticket = self._admit(place, choice, tokens)
        whole = block_hashes(request, self._scheme.hash_block_size)
        run = self._run(place, index, tokens, whole, 1)
        run.keeps = True
        prefix = self._in_flight(candidate, tokens, hashes)
        return Leg(place, ticket, prefix, run, whole, request.output_tokens)

    def _in_flight(
        self, candidate: Candidate, tokens: int, hashes: Sequence[BlockHash], rank_s: float = 0.0
    ) -> InflightPrompt | None:
        if not self._variant.in_flight:
            return None
        kept = kept_prefixes(kept_rule(self._layout), tokens, candidate.hit, self._setup.retention)
        return self._inflight.add(candidate.engine_id, hashes, self._now, kept, rank_s)

    def _rank_s(
        self, order: EngineOrder, candidate: Candidate, choice: Choice, hashes: Sequence[BlockHash]
    ) -> float:
        """Key in the engine's order: behind the prompt whose blocks it will hit."""
        work_s, unit = choice.cost.prefill_s, self._scheme.hash_block_size
        rank_s = order.rank_s(work_s)
        passed = self._inflight.passed(candidate.engine_id, hashes, candidate.hit, unit, rank_s)
        return rank_s if passed is None else order.rank_s(order.work_behind(work_s, passed))

    def _send(self, place: int, run: RequestRun) -> None:
        self._engines[place].arrive(run, self._now)
        self._note(place)

    def _ask(self, request: Request, hashes: Sequence[BlockHash]) -> PlacementRequest:
        question = placement_request(request.input_tokens, hashes, fallback_key=request.ids[0])
        if self._variant.by_session:
            question = msgspec.structs.replace(question, prefix_key=request.session)
        return question

    def _candidates(
        self, tokens: int, hashes: Sequence[BlockHash], now: float, order: EngineOrder | None = None
    ) -> Sequence[Candidate]:
        """Return the engines as the router sees them for one prompt."""
        seen = self._view.look(tokens, hashes, now)
        self._alone = [held.alone for held in seen]
        mode: Mode = "native" if self._variant.view == "truth" else "shadow"
        hits = {
            held: EngineHit(mode, held.hit, held.cpu, held.storage, held.shared_prefix) for held in set(seen)
        }
        asked = PromptView(
            tokens,
            {engine.engine_id: hits[held] for engine, held in zip(self._fleet, seen, strict=True)},
            order=order,
        )
        if self._variant.in_flight:
            unit, last = self._scheme.hash_block_size, tokens - 1
            found = self._inflight.common(hashes, now, (tokens if self._hits_behind else last) // unit)
            asked.common = {name: min(count * unit, last) for name, count in found.blocks.items()}
            asked.coming = {name: count * unit for name, count in found.coming.items()}
            asked.prompt = _Hashes(hashes) if self._forecasts else None
        return self._snapshots.of(self._fleet).candidates(asked, now)

    def _advance(self) -> None:
        """Process all events of the engines before the next arrival."""
        calendar, holding, arrivals = self._calendar, self._holding, self._arrivals
        while True:
            until_s = arrivals.next_s()
            wake_s = float("inf") if holding is None else holding.wake_s(self._now)
            engine_s = calendar.next_s()
            next_s = min(wake_s, engine_s)
            if self._gauges_s <= min(next_s, until_s) < math.inf:
                self._report(min(next_s, until_s))
                continue
            if next_s > until_s or next_s == float("inf"):
                return
            self._now = next_s
            if wake_s > next_s:
                engine = calendar.take()
                self._engines[engine].advance()
                self._note(engine)
            if holding is not None:
                holding.release(self._now, self._place)
            while self._queued and self._other is not None and not self._other.full():
                self._place(*self._queued.popleft())

    def _report(self, until_s: float) -> None:
        """Poll every engine's gauges, as the router does. Nothing changes before ``until_s``."""
        if self._other is not None:
            # So the last poll before then says all.
            self._gauges_s += self._gauge_s * math.floor((until_s - self._gauges_s) / self._gauge_s)
        now = self._gauges_s
        for place, (engine, account) in enumerate(zip(self._engines, self._loads, strict=True)):
            if self._other is not None:
                self._other.polled(place, engine.num_waiting, engine.usage)
            else:
                account.report(
                    running=engine.num_running, waiting=engine.num_waiting, now=now, usage=engine.usage
                )
        self._gauges_s += self._gauge_s

    def _note(self, engine: int) -> None:
        self._calendar.note(engine, self._engines[engine].next_s)
        if self._forecasts:
            self._follow(engine)

    def _follow(self, engine: int) -> None:
        """Pass the events of an engine's pool on to the forecast of its evictions."""
        forecast = self._fleet[engine].evictions
        for event in self._engines[engine].pool.take_events():
            # As given to the pool: numbers.
            if isinstance(event, BlockStored):
                parent = cast("BlockHash | None", event.parent_block_hash)
                forecast.stored(cast("list[BlockHash]", event.block_hashes), parent)
            elif isinstance(event, BlockRemoved):
                forecast.removed(cast("list[BlockHash]", event.block_hashes))

    def _first_token(self, run: RequestRun, now: float) -> None:
        opened = self._open[run.index]
        work: _Open | Leg = opened.leg if opened.leg is not None and run.keeps else opened
        account = self._loads[work.engine]
        sample = account.first_token(work.ticket, now)
        if self._setup.learn_rates and (run.keeps or opened.leg is None):
            account.rates.learn(sample, account.timed(work.ticket), now - work.ticket.sent_s, now)
        if work.prefix is not None:
            self._inflight.prefilled(work.prefix, self._now)
        if opened.pooled is not None:
            self._follow(opened.engine)
            self._fleet[opened.engine].evictions.start(opened.pooled)
        self._view.prefilled(work.engine, opened.prompt_tokens, opened.hashes)
        if self._other is not None:
            self._other.first_token(run.index, now)

    def _ended(self, run: RequestRun, now: float) -> None:
        opened = self._open[run.index]
        if run.keeps and opened.leg is not None and self._roles is not None:
            self._end_leg(opened.leg, now)
            tokens, leg = opened.prompt_tokens, opened.leg
            decode = self._run(opened.engine, run.index, tokens, leg.whole, leg.answer_tokens)
            decode.arrived_s, decode.fetch = now, self._roles.fetch(tokens)
            self._send(opened.engine, decode)
            return
        opened = self._close(run, run.first_token_s)
        self._loads[opened.engine].finish(opened.ticket, now)
        if self._holding is not None:
            self._holding.charge(opened.tenant, GENERATED_WORTH * run.output_tokens)
        if opened.prefix is not None:
            self._inflight.end(opened.prefix, now)
        if opened.pooled is not None:
            self._follow(opened.engine)
            self._fleet[opened.engine].evictions.end(opened.pooled, run.output_tokens)

    def _end_leg(self, leg: Leg, now: float) -> None:
        self._loads[leg.engine].finish(leg.ticket, now)
        if leg.prefix is not None:
            self._inflight.end(leg.prefix, now)

    def _fetched(self, run: RequestRun, now: float) -> None:
        leg = self._open[run.index].leg
        if leg is not None and leg.run.kept:
            self._engines[leg.engine].release(leg.run, now)
            self._note(leg.engine)

    def _refused(self, run: RequestRun, now: float) -> None:
        opened = self._close(run, None)
        if run.keeps and opened.leg is not None:
            self._end_leg(opened.leg, now)
        self._loads[opened.engine].fail(opened.ticket, now)
        if opened.prefix is not None:
            self._inflight.drop(opened.prefix)
        if opened.pooled is not None:
            self._fleet[opened.engine].evictions.end(opened.pooled, computed=False)

    def _close(self, run: RequestRun, first_token_s: float | None) -> _Open:
        opened = self._open.pop(run.index)
        self._arrivals.ended(run.index, self._now + self._setup.timing.request_s)
        if self._other is not None:
            self._other.ended(run.index)
        asked = run if opened.leg is None else opened.leg.run
        answered, request_s = first_token_s is not None, self._setup.timing.request_s
        self._rows[run.index] = Row(
            run.index,
            opened.arrived_s,
            opened.engine,
            opened.prompt_tokens,
            opened.predicted,
            asked.hit,
            -1.0 if first_token_s is None else first_token_s - opened.arrived_s + request_s,
            max(0.0, asked.started_s - opened.arrived_s),
            run.preempted,
            run.loaded if run.medium == "CPU" else 0,
            run.loaded if run.medium == "STORAGE" else 0,
            run.ended_s - opened.arrived_s + request_s if answered else -1.0,
            (run.ended_s - run.first_token_s) / (run.output_tokens - 1)
            if answered and run.output_tokens > 1
            else -1.0,
            0 if opened.leg is None else run.loaded,
            opened.promised,
            run.pulled,
        )
        return opened
