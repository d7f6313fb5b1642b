"""Whom a router probes and when, and what it takes over from others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvatlas.router.fleet.engine_client import Shown
from kvatlas.router.fleet.engine_probe import PROBED, ApiProbe, EngineProbe
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.fleet.status import Fleet, ModelCard
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.openai.apis import CHAT
from kvatlas.router.openai.errors import no_ready_engine
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.placement.engine_order import BAND_MS, EngineOrder
from kvatlas.router.placement.own_pulls import Pulls
from kvatlas.router.placement.probing import LOOK_S, TELL_EVERY_S, Probes, may_be_probed
from kvatlas.router.placement.seconds import FirstTokenWork
from kvatlas.router.replication.gossip import GossipedInflight
from tests.world.seams import run

REFUTED = EngineProbe(
    "m", {CHAT: ApiProbe(Shown("proven"), Shown("refuted", "are wrong"), 0.5)}, Shown("proven")
)


class Unreadable:
    """No prompt can be read here."""

    async def read(self, *_: Any) -> Any:
        raise no_ready_engine("no tokenizer")


def keeping(entries: list[bytes]) -> Callable[[str, bytes], bool]:
    """A stream between routers."""

    def publish(engine_id: str, entry: bytes) -> bool:
        entries.append(entry)
        return True

    return publish


class World:
    """Engines without events that answer every prompt after 10 ms, and the router that probes them."""

    def __init__(self, count: int, **settings: Any) -> None:
        self.now: Callable[[], float] = asyncio.get_running_loop().time
        accounts = Accounts(self.now)
        addresses = [EngineAddress(f"http://e{number}:1") for number in range(count)]
        self.fleet: Fleet[Engine] = Fleet(
            addresses,
            lambda address, *, fleet_changed: Engine(address, accounts, fleet_changed=fleet_changed),
        )
        for engine in self.fleet:
            engine.models, engine.up = (ModelCard("m", max_model_len=4096),), True
        self.leads = True
        self.asked: Counter[str] = Counter()
        self.running = self.most = 0
        self.probes = Probes(
            self.fleet,
            ModelIndexes(lambda model: ModelFacts()),
            Unreadable(),  # type: ignore[arg-type]
            accounts,
            Pulls(),
            FleetSettings(probe=True, **settings),
            send=self._send,
            shared=None,
            leads=lambda: self.leads,
            ordered=lambda: self.ordered,
        )
        self.ordered = self.refuses_order = False
        self.priorities: Counter[str | None] = Counter()

    async def _send(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        if method == "GET":
            return 404, b""
        priority = headers.get("x-vllm-priority")
        self.priorities[priority] += 1
        if priority and self.refuses_order:
            return 400, b"{}"
        self.asked[url.partition("/v1")[0]] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return 200, b'{"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 16}}}'

    @property
    def engine(self) -> Engine:
        return next(iter(self.fleet))

    async def for_s(self, seconds: float) -> None:
        """Run the router for a while."""
        task = asyncio.create_task(self.probes.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("probes_max", [1, 2, 7])
def test_a_thousand_engines_that_join_at_once_are_asked_a_few_at_a_time(probes_max: int) -> None:
    async def main() -> None:
        world = World(1000, probes_max=probes_max)
        await world.for_s(20 * LOOK_S)
        assert world.most == probes_max
        probed = [engine for engine in world.fleet if engine.probe is not None]
        assert len(probed) >= 15 * probes_max
        assert set(world.asked.values()) <= {*range(1, 2 * len(PROBED) + 1)}
        assert world.probes.stats.requests == world.asked.total()

    run(main())


def test_an_outcome_is_reported_at_once() -> None:
    async def main() -> None:
        world, entries = World(1), list[bytes]()
        world.probes.publish = GossipedInflight("a", 1, keeping(entries)).publish_probe
        await world.for_s(3 * LOOK_S)
        assert world.engine.probe is not None
        assert 3 * LOOK_S < TELL_EVERY_S
        assert len(entries) == 1

    run(main())


def test_a_router_that_does_not_lead_asks_no_engine() -> None:
    async def main() -> None:
        world = World(3)
        world.leads = False
        await world.for_s(10 * LOOK_S)
        assert not world.asked
        world.leads = True
        await world.for_s(10 * LOOK_S)
        assert len(world.asked) == 3

    run(main())


@pytest.mark.parametrize("refuses", [False, True])
def test_where_engines_get_priorities_a_probe_goes_last(*, refuses: bool) -> None:
    async def main() -> None:
        world = World(1)
        world.ordered, world.refuses_order = True, refuses
        await world.for_s(3.0)
        low = EngineOrder(1.8e9, 1.0, band=1).priority(3600.0)
        assert all(int(one) > low for one in world.priorities if one is not None)
        assert world.engine.probe is not None
        assert world.engine.probe.apis[CHAT].reports.verdict == "proven"
        asked = world.asked["http://e0:1"]
        assert world.priorities == (
            {str(2 * BAND_MS): 1, None: asked} if refuses else {str(2 * BAND_MS): asked}
        )

    run(main())


def waits(engine: Engine, now: float) -> None:
    engine.load.report(running=2, waiting=1, now=now)


def held(engine: Engine, now: float) -> None:
    engine.held = "drained by ann"


def asleep(engine: Engine, now: float) -> None:
    engine.asleep = True


def down(engine: Engine, now: float) -> None:
    engine.up = False


def broken(engine: Engine, now: float) -> None:
    for _ in range(100):
        engine.breaker.record(False, now)


def behind(engine: Engine, now: float) -> None:
    """It publishes events, of which none has come yet."""
    engine.engine = msgspec.structs.replace(engine.engine, events="tcp://e:2")


@pytest.mark.parametrize("change", [waits, held, asleep, down, broken, behind])
def test_an_engine_that_has_no_time_is_left_in_peace(change: Callable[[Engine, float], None]) -> None:
    async def main() -> None:
        world = World(1)
        assert may_be_probed(world.engine, world.now())
        change(world.engine, world.now())
        assert not may_be_probed(world.engine, world.now())
        await world.for_s(0.5 * LOOK_S)
        assert not world.asked

    run(main())


def test_a_request_that_comes_meanwhile_goes_first() -> None:
    async def main() -> None:
        world = World(1)

        def comes(now: float) -> None:
            world.engine.load.report(running=9, waiting=3, now=now)

        asyncio.get_running_loop().call_later(0.025, lambda: comes(world.now()))
        await world.for_s(3.0)
        assert 1 <= world.asked["http://e0:1"] <= 3, "those before it came"

    run(main())


def test_the_times_of_its_answers_are_the_guess_it_begins_with() -> None:
    """Of an engine that says what is cached: 10 ms for 24 of 40 tokens."""

    async def main() -> None:
        world, other = World(1), World(1)
        await world.for_s(5.0)
        engine = world.engine
        assert engine.probe is not None
        assert engine.probe.timed == [(24, pytest.approx(0.01, rel=0.01))] * 2 * len(PROBED)
        assert engine.rates.model.guessed
        assert sum(engine.rates.model.seconds(FirstTokenWork(24))) == pytest.approx(0.01, rel=0.01)
        other.probes.learn(engine.engine_id, msgspec.msgpack.encode(engine.probe))
        assert other.engine.rates.model.parts == engine.rates.model.parts

    run(main())


def test_answers_beside_other_requests_tell_no_times() -> None:
    async def main() -> None:
        world = World(1)
        ticket = world.engine.load.admit(uncached_tokens=10, now=world.now())
        before = world.engine.rates.model.parts
        await world.for_s(5.0)
        world.engine.load.finish(ticket, world.now())
        assert world.engine.probe is not None
        assert not world.engine.probe.timed
        assert world.engine.rates.model.parts == before

    run(main())


def test_a_proven_engine_is_not_asked_again_but_a_new_process_is() -> None:
    async def main() -> None:
        world = World(1)
        await world.for_s(5.0)
        (asked,) = world.asked.values()
        await world.for_s(600.0)
        assert world.asked["http://e0:1"] == asked
        world.engine.forget_probe()
        assert world.engine.probe is None
        await world.for_s(5.0)
        assert world.asked["http://e0:1"] == 2 * asked

    run(main())


def test_others_learn_the_outcome_also_those_that_join_later() -> None:
    async def main() -> None:
        leader, other = World(2), World(2)
        entries: list[bytes] = []
        told = GossipedInflight("a", 1, keeping(entries))
        heard = GossipedInflight("b", 1, lambda _engine, _entry: True)
        leader.probes.publish, heard.probed = told.publish_probe, other.probes.learn
        leader.engine.probe = REFUTED
        leader.engine.held = "drained by ann"
        other.leads = False
        await leader.for_s(LOOK_S)
        heard.receive(entries, other.now())
        assert other.engine.probe == REFUTED
        assert other.engine.hit_share == 0.5
        assert heard.gossip_stats.malformed == 0
        entries.clear()
        await leader.for_s(2 * TELL_EVERY_S)
        assert len(entries) >= 2
        other.leads = True
        await other.for_s(3 * LOOK_S)
        assert "http://e0:1" in other.asked, "a doubt is tried again by the next one that leads"

    run(main())


@pytest.mark.parametrize("told", [b"", b"x", b"\xc1", msgspec.msgpack.encode(["m"] * 3), bytes(1 << 20)])
def test_an_outcome_that_cannot_be_read_is_counted(told: bytes) -> None:
    async def main() -> None:
        world = World(1)
        with pytest.raises(ValueError, match=r".+"):
            world.probes.learn("http://e0:1", told)
        heard = GossipedInflight("b", 1, lambda _engine, _entry: True)
        heard.probed = world.probes.learn
        entries: list[bytes] = []
        GossipedInflight("a", 1, keeping(entries)).publish_probe("http://e0:1", told)
        heard.receive(entries, 0.0)
        assert heard.gossip_stats.malformed == bool(told)
        assert world.engine.probe is None

    run(main())


@pytest.mark.parametrize(
    ("engine_id", "probe"), [("http://gone:1", REFUTED), ("http://e0:1", EngineProbe("another model"))]
)
def test_an_outcome_of_another_engine_or_model_is_ignored(engine_id: str, probe: EngineProbe) -> None:
    async def main() -> None:
        world = World(1)
        world.probes.learn(engine_id, msgspec.msgpack.encode(probe))
        assert world.engine.probe is None

    run(main())
