"""A snapshot equals reading every engine again, whatever happened between two decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.fleet.engine_client import Shown
from kvatlas.router.fleet.engine_probe import ApiProbe, EngineProbe
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.index.query_plan import EngineHit, Holders
from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.placement import snapshot as snapshots_of_lists
from kvatlas.router.placement.candidate import Candidate, PolicySettings
from kvatlas.router.placement.cost import choose, score
from kvatlas.router.placement.engine import Accounts, Engine, PromptView
from kvatlas.router.placement.engine_order import EngineOrder
from kvatlas.router.placement.fleet_values import columns
from kvatlas.router.placement.load import Ticket
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.placement.placement import Decision
from kvatlas.router.placement.rates import PrefillSample
from kvatlas.router.placement.saturation import any_room, joins_sibling
from kvatlas.router.placement.snapshot import FleetSnapshot, FleetSnapshots
from kvatlas.router.placement.wait_limit import shortest_wait
from tests.router.placement import full_scan
from tests.router.placement.candidates import make_candidate
from tests.support.examples import examples

GROUPS = (GroupSpec(0, "full_attention", 16),)
SCHEME = HashScheme()
NOTHING = EngineHit("native", alignment=16)
HASHES: list[Any] = list(range(1, 200))


class Asked:
    """A prompt that hashes to ``HASHES``."""

    def behind(self, frontend: str) -> Asked:
        return self

    def hashes(self, scheme: HashScheme) -> list[Any]:
        return HASHES


class World:
    """Some engines with their accounts, and the requests that are open there."""

    def __init__(self, count: int) -> None:
        self.now = 1000.0
        self.accounts = Accounts(lambda: self.now)
        self.engines = [
            Engine(EngineAddress(f"http://e{number}:1", events=f"inproc://{number}"), self.accounts)
            for number in range(count)
        ]
        self.open: list[tuple[Engine, Ticket]] = []
        self.pooled: list[tuple[Engine, Any]] = []
        for engine in self.engines:
            engine.feed = FeedStats(state=FeedState.READY)

    def do(self, step: tuple[Any, ...]) -> None:
        """Carry out one step."""
        name, at, *numbers = step
        engine = self.engines[at % len(self.engines)]
        getattr(self, f"_{name}")(engine, *numbers)

    def _admit(self, engine: Engine, tokens: int, streams: bool, load_s: float, rank: int) -> None:
        expected_s = tokens * engine.rates.prefill_s_per_token(self.now) + load_s
        ticket = engine.load.admit(
            uncached_tokens=tokens,
            now=self.now,
            streams=streams,
            load_s=load_s,
            expected_s=expected_s,
            prompt_tokens=2 * tokens,
            rank_s=float(rank),
        )
        self.open.append((engine, ticket))

    def _reserve(self, engine: Engine, tokens: int) -> None:
        self.open.append((engine, engine.load.reserve(self.now, tokens)))

    def _started(self, engine: Engine, which: int) -> None:
        if self.open:
            engine, ticket = self.open[which % len(self.open)]
            sample = engine.load.first_token(ticket, self.now)
            if sample is not None:
                engine.rates.observe(sample, self.now)

    def _ended(self, engine: Engine, which: int, failed: bool) -> None:
        if self.open:
            engine, ticket = self.open.pop(which % len(self.open))
            (engine.load.fail if failed else engine.load.finish)(ticket, self.now)

    def _unseen(self, engine: Engine, which: int) -> None:
        if self.open:
            engine, ticket = self.open[which % len(self.open)]
            engine.load.unseen(ticket, self.now, lambda: None)

    def _polled(self, engine: Engine, running: int, waiting: int, usage: float) -> None:
        engine.load.report(running=running, waiting=waiting, now=self.now, usage=usage)

    def _pool(self, engine: Engine, blocks: int) -> None:
        engine.load.pages.configure(blocks, GROUPS)
        engine.evictions.configure(blocks, GROUPS)
        engine.load.report(running=0, waiting=0, now=self.now)

    def _sampled(self, engine: Engine, tokens: int, seconds: float, running: int) -> None:
        for _ in range(5):
            engine.rates.observe(PrefillSample(tokens, seconds, running), self.now)

    def _feed(self, engine: Engine, state: FeedState, unconfirmed: bool, missing: int) -> None:
        engine.feed = FeedStats(
            state=state, unconfirmed=unconfirmed, known_batches=9, missing_batches=missing
        )

    def _stores(self, engine: Engine, first: int, count: int) -> None:
        engine.evictions.stored(HASHES[first : first + count], None)

    def _pools(self, engine: Engine, count: int) -> None:
        self.pooled.append((engine, engine.evictions.admit(HASHES[:count], 16 * count)))

    def _seen(self, engine: Engine) -> None:
        """A page of metrics and another router ask for its load."""
        engine.load.current(self.now, OthersLoad(running=1))
        engine.load.own(self.now)

    def _orders(self, engine: Engine, takes: bool) -> None:
        engine.takes_order = takes

    def _probed(self, engine: Engine, share: float) -> None:
        refuted = ApiProbe(Shown("proven"), Shown("refuted", "are wrong"), share)
        engine.probe = EngineProbe("m", {COMPLETION: refuted})

    def _waits(self, engine: Engine, seconds: float) -> None:
        self.now += seconds


_at = st.integers(0, 9) | st.integers(0, 39)
_small = st.integers(0, 6)
STEPS = st.one_of(
    st.tuples(st.just("waits"), _at, st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.1, 3.1, 9.0, 31.0, 700.0])),
    st.tuples(
        st.just("admit"),
        _at,
        st.sampled_from([0, 10, 700, 4000, 30_000]),
        st.booleans(),
        st.sampled_from([0.0, 0.2]),
        _small,
    ),
    st.tuples(st.just("reserve"), _at, st.sampled_from([0, 500])),
    st.tuples(st.just("started"), _at, _at),
    st.tuples(st.just("ended"), _at, _at, st.booleans()),
    st.tuples(st.just("unseen"), _at, _at),
    st.tuples(st.just("polled"), _at, _small, _small, st.sampled_from([0.0, 0.4, 1.0])),
    st.tuples(st.just("pool"), _at, st.sampled_from([0, 40, 400])),
    st.tuples(
        st.just("sampled"), _at, st.sampled_from([20, 2000]), st.sampled_from([0.05, 0.3, 2.0]), _small
    ),
    st.tuples(st.just("feed"), _at, st.sampled_from(list(FeedState)), st.booleans(), _small),
    st.tuples(st.just("stores"), _at, st.integers(0, 60), st.integers(1, 30)),
    st.tuples(st.just("pools"), _at, st.integers(1, 30)),
    st.tuples(st.just("seen"), _at),
    st.tuples(st.just("orders"), _at, st.booleans()),
    st.tuples(st.just("probed"), _at, st.sampled_from([0.0, 0.3, 0.9, 1.0])),
)
_tokens = st.integers(0, 20).map(lambda blocks: 160 * blocks)


@st.composite
def _hits(draw: st.DrawFn) -> EngineHit:
    mode: Any = draw(st.sampled_from(["native", "native", "learned", "assumed", "unknown"]))
    gpu, cpu, storage, more = (draw(_tokens) if draw(st.booleans()) else 0 for _ in range(4))
    return EngineHit(
        mode,
        gpu,
        cpu,
        storage,
        gpu + more,
        16,
        replay_tokens=draw(st.sampled_from([0, 0, 160])),
        stale=draw(st.integers(0, 9)) == 0,
    )


@st.composite
def questions(draw: st.DrawFn, names: list[str]) -> PromptView:
    """A prompt, and what the look-ups said of it."""
    left = list(draw(st.permutations(names)))
    alike: list[Holders] = []
    for _ in range(draw(st.integers(0, 2))):
        count = draw(st.integers(0, len(left)))
        if count:
            hit = msgspec.structs.replace(draw(_hits()), mode="native", cpu_tokens=0, storage_tokens=0)
            alike.append(Holders(hit, tuple(left[:count])))
            left = left[count:]
    some = st.lists(st.sampled_from(names), max_size=3, unique=True)
    others = st.builds(OthersLoad, _small, _small, st.sampled_from([0, 900]), st.sampled_from([0, 5000]))
    by_name = st.dictionaries(st.sampled_from(names), others, max_size=3)
    return PromptView(
        draw(st.sampled_from([0, 1, 100, 1600, 3200, 6000])),
        {name: draw(_hits()) for name in left if draw(st.integers(0, 3)) == 0},
        {name: draw(_tokens) for name in draw(some)},
        {name: draw(_tokens) for name in draw(some)},
        draw(st.none() | st.just({}) | by_name),
        order=draw(st.none() | st.builds(EngineOrder, st.just(1000.0), st.sampled_from([0.0, 2.0]))),
        prompt=draw(st.sampled_from([None, Asked()])),  # type: ignore[arg-type]
        alike=alike,
        nothing=dict.fromkeys(left, NOTHING) if draw(st.booleans()) else {},
    )


@st.composite
def settings_of(draw: st.DrawFn) -> PolicySettings:
    return PolicySettings(
        beta=draw(st.sampled_from([0.0, 0.25])),
        eviction_premium=draw(st.sampled_from([0.0, 0.75])),
        delay=draw(st.sampled_from([0.0, 0.5])),
        spread=draw(st.sampled_from([0.0, 0.1667])),
        probe_interval_s=draw(st.sampled_from([0.5, 30.0])),
    )


def same_decision(found: Any, full: list[Candidate], tokens: int, knobs: PolicySettings, key: int) -> None:
    """All that a decision takes from the candidates is what the full scan takes."""
    chosen, scan = choose(found, tokens, knobs, prompt_key=key), full_scan.score(full, tokens, knobs)
    assert (chosen.index, chosen.reason) == full_scan.pick(scan, key)
    assert chosen.scored.totals.tolist() == scan.totals
    assert chosen.scored.queues.tolist() == scan.queues
    assert chosen.uncached_tokens == tokens - scan.parts[chosen.index][0]
    assert full_scan.waits_least_s([full[shortest_wait(found)]]) == full_scan.waits_least_s(full)
    for saturation_s, requests_max in ((0.1, None), (1.0, 2)):
        has = any_room(found, saturation_s=saturation_s, requests_max=requests_max)
        assert has == full_scan.has_room(full, saturation_s, requests_max)
        joins = joins_sibling(found, tokens, share=0.3, saturation_s=saturation_s)
        assert joins == full_scan.joins(full, tokens, 0.3, saturation_s)
    most, second, first = full_scan.longest(full)
    engines: Any = [one.engine_id for one in full]
    seconds = [one.first_token_s + full[at].interference_s for at, one in enumerate(chosen.costs)]
    places = sorted(chosen.scored.soonest(key % len(full)))
    late = set(range(len(full))) - {*places}
    assert all(seconds[at] <= seconds[other] + 1e-9 for at in places for other in late)
    assert list(columns(found).only(places)) == [full[at] for at in places]
    if places:
        again = choose(columns(found).only(places), tokens, knobs, prompt_key=key)
        scan = full_scan.score([full[at] for at in places], tokens, knobs)
        assert (again.index, again.reason) == full_scan.pick(scan, key)
        assert again.scored.totals.tolist() == scan.totals
    held = Decision(None, tokens, engines, found, chosen).most_held()
    assert held.tokens == most
    assert held.sole == (engines[first] if most > second else None)


@settings(max_examples=examples(150))
@given(st.data())
def test_a_snapshot_equals_reading_the_fleet_again(data: st.DataObject) -> None:
    """Two equal fleets live through the same: one is seen by snapshots only, the other is read whole."""
    # Those with equal hits are a list if they are few, else an array.
    count = data.draw(st.integers(1, 6) | st.sampled_from([20, 40]), "engines")
    one, other = World(count), World(count)
    names = [engine.engine_id for engine in one.engines]
    snapshots = FleetSnapshots(one.accounts.changes)
    for _ in range(data.draw(st.integers(1, 6), "decisions")):
        for step in data.draw(st.lists(STEPS, max_size=6), "steps"):
            one.do(step)
            other.do(step)
        asked = data.draw(questions(names), "asked")
        # Retries and adapters have lists of their own.
        some = data.draw(st.sampled_from([range(count), range(count), range(1, count)])) or range(count)
        found = snapshots.of([one.engines[at] for at in some]).candidates(asked, one.now)
        full = full_scan.candidates([other.engines[at] for at in some], asked, other.now)
        assert list(found) == full
        same_decision(found, full, asked.tokens, data.draw(settings_of()), data.draw(st.integers(0, 99)))


ONE_AFTER_THE_OTHER: list[tuple[Any, ...]] = [
    ("pool", 0, 400),
    ("admit", 0, 4000, True, 0.0, 0),
    ("admit", 0, 700, True, 0.2, 0),
    ("started", 0, 1),
    ("waits", 0, 9.0),
    ("started", 0, 0),
    ("unseen", 0, 0),
    ("ended", 0, 0, False),
    ("ended", 0, 0, True),
    ("admit", 0, 4000, False, 0.0, 0),
    ("reserve", 0, 500),
    ("polled", 0, 3, 2, 0.4),
    ("waits", 0, 31.0),
    ("sampled", 0, 2000, 2.0, 1),
    ("stores", 0, 0, 30),
    ("pools", 0, 30),
    ("feed", 0, FeedState.READY, True, 3),
    ("orders", 0, True),
    ("probed", 0, 0.3),
    ("ended", 0, 0, True),
]


def test_whatever_happens_to_an_engine_shows_in_the_next_decision() -> None:
    one, other = World(2), World(2)
    snapshot = FleetSnapshots(one.accounts.changes).of(one.engines)
    asked = PromptView(1600, {engine.engine_id: EngineHit("native", 800) for engine in one.engines})
    for step in ONE_AFTER_THE_OTHER:
        one.do(step)
        other.do(step)
        found, full = (
            snapshot.candidates(asked, one.now),
            full_scan.candidates(other.engines, asked, other.now),
        )
        assert list(found) == full, step
        same_decision(found, full, asked.tokens, PolicySettings(), 7)


def test_a_hit_is_lowered_by_what_the_prompts_ahead_evict() -> None:
    world = World(1)
    (engine,) = world.engines
    world.do(("pool", 0, 40))
    served = engine.evictions.admit(HASHES[:30], 480, 1)
    assert served is not None
    engine.evictions.stored(HASHES[:30], None)
    engine.evictions.start(served)
    engine.evictions.end(served)
    asked = PromptView(496, {engine.engine_id: EngineHit("native", 480)}, prompt=Asked())  # type: ignore[arg-type]
    snapshot = FleetSnapshots(world.accounts.changes).of(world.engines)
    assert snapshot.candidates(asked, 0.0)[0].hit.gpu_tokens == 480
    others: list[Any] = list(range(1000, 1020))
    engine.evictions.admit(others, 320, 1)
    hit = snapshot.candidates(asked, 0.0)[0].hit
    assert 0 < hit.gpu_tokens < 320
    assert (hit.coming_tokens, hit.evicted_tokens) == (0, 480 - hit.gpu_tokens)


def test_prices_follow_the_settings() -> None:
    """A fleet's values stay for many decisions; a reload may change what they are priced by."""
    found = columns([make_candidate("a", waiting=4, recent_s=2.0), make_candidate("b")])
    values = found.values
    prices, spread = found.prices(0.5, 0.75), values.spread_of(0.25)
    assert found.prices(0.5, 0.75) is prices
    assert values.spread_of(0.25) is spread
    assert (found.prices(1.0, 0.75) / prices).tolist() == [2.0, 2.0]
    assert values.spread_of(0.5).tolist() == (2 * spread).tolist()


_candidate = st.builds(
    make_candidate,
    st.uuids().map(str),
    hit_tokens=_tokens,
    cpu_tokens=st.sampled_from([0, 0, 320]),
    shared_prefix_tokens=_tokens,
    coming_tokens=_tokens,
    common_tokens=_tokens,
    queue_s=st.sampled_from([0.0, 0.0, 0.1, 0.25, 0.251, 2.0]),
    running=_small,
    waiting=_small,
    idle_s=st.sampled_from([0.0, 1.0, 40.0]),
    prefill_s_per_token=st.sampled_from([1 / 8000, 1 / 4000]),
    decode_interference_s=st.sampled_from([0.0, 0.001]),
    late_s=st.sampled_from([0.0, 3.0]),
    recent_s=st.sampled_from([0.0, 1.0, 4.0]),
    room_s=st.sampled_from([0.0, 0.0, 3.0]),
)


@settings(max_examples=examples(300))
@given(
    st.lists(_candidate, min_size=1, max_size=8, unique_by=lambda one: one.engine_id),
    st.sampled_from([1, 100, 1600, 3200]),
    settings_of(),
    st.integers(0, 99),
)
def test_lists_score_what_one_candidate_after_the_other_does(
    fleet: list[Candidate], tokens: int, knobs: PolicySettings, key: int
) -> None:
    same_decision(fleet, fleet, tokens, knobs, key)
    scored = score(fleet, tokens, knobs)
    for at, total_s in enumerate(scored.totals):
        assert abs(scored.cost(at).total_s - total_s) < 1e-9


def _read_again(world: World, snapshot: FleetSnapshot, count: Callable[[], int]) -> int:
    before = count()
    snapshot.candidates(PromptView(100), world.now)
    return count() - before


def test_only_engines_that_changed_are_read_again() -> None:
    world = World(50)
    reads = 0

    def counting(ahead: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            return ahead(*args)

        return counted

    snapshot = FleetSnapshots(world.accounts.changes).of(world.engines)
    for engine in world.engines:
        account: Any = engine.load
        engine.load = _Counted(account, counting(account.ahead))  # type: ignore[assignment]
    assert _read_again(world, snapshot, lambda: reads) == 50
    assert _read_again(world, snapshot, lambda: reads) == 0
    world.do(("admit", 3, 4000, True, 0.0, 0))
    world.do(("polled", 7, 1, 0, 0.1))
    assert _read_again(world, snapshot, lambda: reads) == 2
    world.now += 0.1  # the queue falls, and needs no reading
    assert _read_again(world, snapshot, lambda: reads) == 0
    world.now += 100.0  # its head is overdue
    assert 1 <= _read_again(world, snapshot, lambda: reads) <= 2


class _Counted:
    """An account that counts how often it is read."""

    def __init__(self, account: Any, ahead: Callable[..., Any]) -> None:
        self._account = account
        self.ahead = ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._account, name)


def test_lists_with_the_same_engines_share_a_snapshot() -> None:
    world = World(3)
    snapshots = FleetSnapshots(world.accounts.changes)
    first = snapshots.of(world.engines)
    assert snapshots.of(list(world.engines)) is first
    assert snapshots.of(world.engines[1:]) is not first
    assert snapshots.of(world.engines) is first


def test_snapshots_of_more_lists_than_are_kept_leave_no_reader() -> None:
    world = World(4)
    snapshots = FleetSnapshots(world.accounts.changes)
    lists = [world.engines[:number] for number in (1, 2, 3, 4)]
    for _ in range(20):
        for engines in lists:
            for _ in range(snapshots_of_lists._SNAPSHOTS_MAX):
                snapshots.of([*engines, *world.engines[: len(snapshots._kept) % 3]])
    assert len(world.accounts.changes._readers) == len(snapshots._kept) <= snapshots_of_lists._SNAPSHOTS_MAX


def test_the_earliest_breaker_decides_when_breakers_are_asked_again() -> None:
    accounts = World(2).accounts
    accounts.free_until = 50.0
    accounts.breaker_changed(20.0)
    assert accounts.free_until == 20.0
    accounts.breaker_changed(30.0)
    assert accounts.free_until == 20.0
