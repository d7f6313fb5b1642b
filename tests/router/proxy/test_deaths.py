"""A request that was on an engine when it died ends no second one, whatever its client and the other routers
do; one whose engine is well is tried elsewhere as ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from kvatlas.router.openai.apis import COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.proxy.deaths import DIGEST_BYTES, Deaths, Suspects, digest_of
from kvatlas.router.proxy.settings import ProxySettings, ProxyStats
from kvatlas.router.replication.gossip import GossipedInflight
from tests.router.proxy.split.test_legs import Numbered, PairPlanner, all_over
from tests.router.proxy.test_first_token import error_of
from tests.support.api_streams import STREAMS, event_of
from tests.support.proxy_rig import (
    END,
    SSE_HEAD,
    Call,
    Engine,
    FakePlacement,
    FakePlanner,
    Rig,
    Script,
    answer,
    ask,
    chunk,
    request,
    reset,
    routing,
    says,
    writes,
)
from tests.support.waiting import until

SETTINGS = ProxySettings(suspect_s=300.0)
DEAD = "http://127.0.0.1:9"


class Fleet:
    """Engines whose id is their address; those that are to go leave."""

    def __init__(self) -> None:
        self.leaving: set[str] = set()
        self.gone: set[str] = set()

    def base_url(self, engine_id: str) -> str | None:
        return None if engine_id in self.gone else engine_id

    def leaves(self, engine_id: str) -> bool:
        return engine_id in self.leaving


def mortal(how: str) -> Script:
    """Dies of a body that says "poison"; of others, and of looks at its health, it does not."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if b"poison" not in call.body:
            writer.write(answer(200, b'{"good": 1}', "content-type: application/json"))
            return
        if how == "comments":
            writer.write(SSE_HEAD + chunk(b": keep-alive\n\n"))
            await writer.drain()
        elif how == "text":
            writer.write(SSE_HEAD + chunk(event_of(STREAMS[COMPLETION].token)))
            await writer.drain()
            await asyncio.sleep(0.002)  # only so that it comes in a packet of its own
        elif how == "status":
            writer.write(answer(500, b'{"error": {"message": "EngineCore died"}}'))
            await writer.drain()
        elif how == "error event":
            writer.write(SSE_HEAD + chunk(event_of(STREAMS[COMPLETION].error)) + END)
            await writer.drain()
        engine.server.close()
        if how != "status":
            reset(writer)

    return script


async def back(engine: Engine) -> None:
    """Start it again at its address."""
    engine.server = await asyncio.start_server(engine._serve, "127.0.0.1", engine.port, limit=2**24)


def asked(engine: Engine) -> list[bytes]:
    """The bodies that it was given."""
    return [call.body for call in engine.calls if call.head.first[0] == "POST"]


def body(word: str, path: str = COMPLETION, *, stream: bool = False) -> bytes:
    return request(json.dumps({**STREAMS[path].body, "user": word, "stream": stream}).encode(), target=path)


@contextlib.asynccontextmanager
async def routed(
    *scripts: Script, now: Callable[[], float] | None = None, settings: ProxySettings = SETTINGS
) -> AsyncIterator[tuple[Rig, list[Engine], Fleet]]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(script)) for script in scripts]
        planner, fleet = FakePlanner(*[engine.url for engine in engines]), Fleet()
        clock: dict[str, Any] = {} if now is None else {"clock": now}
        if now is not None:
            planner.now = now
        rig = await stack.enter_async_context(
            routing(planner=planner, settings=settings, watched=fleet, **clock)
        )
        yield rig, engines, fleet


@pytest.mark.parametrize(
    ("how", "stream"),
    [(how, stream) for how in ("reset", "status") for stream in (False, True)]
    + [("comments", True), ("error event", True)],
)
@pytest.mark.parametrize("path", [COMPLETION, MESSAGES, RESPONSES])
async def test_a_request_that_ends_an_engine_ends_one(how: str, stream: bool, path: str) -> None:
    async with routed(mortal(how), mortal(how), mortal(how)) as (rig, engines, _):
        for _ in range(4):
            got = await ask(rig, body("poison", path, stream=stream))
            if got.status == 200:
                error = error_of(path, got.body)
            else:
                assert got.status == 503
                error = got.json()["error"]
                assert int(got.head["retry-after"]) > 0
            assert error["code"] == "engine_died"
        assert [len(asked(engine)) for engine in engines] == [1, 0, 0]
        assert (rig.stats.suspects_noted, rig.stats.suspects_current) == (1, 1)
        assert rig.stats.suspects_refused == {"waits": 4}
        # One that is held back takes no place, not even while its engine is looked at.
        assert len(rig.planner.placements) == 1
        # Others are served as ever.
        assert (await ask(rig, body("well", path))).status == 200
        assert all_over(rig)


@pytest.mark.parametrize("others", [0, 1])
async def test_a_request_that_becomes_a_suspect_while_it_waits_for_a_place_gives_the_place_back(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """``others``: suspects that are known before."""
    async with routed(says(200, b"{}"), says(200, b"{}")) as (rig, engines, fleet):
        deaths = rig.app.deaths
        assert deaths is not None
        place = rig.planner.place

        async def slow(request: Any, **more: Any) -> Any:
            digest = digest_of(request.tenant, request.path, request.body)
            if len(rig.planner.placements) < 1:
                deaths.learn(DEAD, digest)
            return await place(request, **more)

        monkeypatch.setattr(rig.planner, "place", slow)
        for number in range(others):
            deaths.learn(DEAD, bytes([number]) * 16)
        assert (await ask(rig, body("x"))).json()["error"]["code"] == "engine_died"
        assert len(rig.planner.placements) == 1
        assert all_over(rig)
        assert asked(engines[0]) == asked(engines[1]) == []
        fleet.gone.add(DEAD)
        assert (await ask(rig, body("x"))).status == 200


async def test_a_stream_that_broke_off_with_its_engine_is_a_suspect_too() -> None:
    async with routed(mortal("text"), mortal("text")) as (rig, engines, _):
        got = await ask(rig, body("poison", stream=True))
        assert error_of(COMPLETION, got.body)["code"] == "engine_stream_broken"
        assert (await ask(rig, body("poison", stream=True))).json()["error"]["code"] == "engine_died"
        assert [len(asked(engine)) for engine in engines] == [1, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_breaks_off_is_cut_before_its_engine_is_looked_at(stream: bool) -> None:
    async def hangs(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if call.head.first[0] == "GET":
            await engine.go.wait()
        elif stream:
            writer.write(SSE_HEAD + chunk(event_of(STREAMS[COMPLETION].token)))
        else:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900000\r\n\r\n"
            )
            writer.write(b"x" * 300_000)
        await writer.drain()
        await asyncio.sleep(0.002)  # only so that the end comes in a packet of its own
        reset(writer)

    async with routed(hangs, says(200, b"{}")) as (rig, (first, second), _):
        assert rig.app.deaths is not None
        got = await ask(rig, body("poison", stream=stream))
        assert (got.status, got.whole) == (200, stream)
        assert (rig.stats.suspects_current, rig.stats.suspects_noted) == (1, 0)
        first.server.close()
        # What comes meanwhile waits for the look.
        got = await ask(rig, body("poison", stream=stream))
        assert (got.status, got.json()["error"]["code"]) == (503, "engine_died")
        assert (asked(second), rig.stats.suspects_noted) == ([], 1)


async def test_after_two_deaths_no_engine_gets_it_for_minutes() -> None:
    now = [1000.0]
    async with routed(mortal("reset"), mortal("reset"), mortal("reset"), now=lambda: now[0]) as (
        rig,
        engines,
        _,
    ):
        assert (await ask(rig, body("poison"))).json()["error"]["code"] == "engine_died"
        await back(engines[0])
        rig.planner.urls = [engine.url for engine in engines[1:]]
        # The first one is known to be alive, so another one may be asked; it dies as well.
        now[0] += 20.0
        assert (await ask(rig, body("poison"))).json()["error"]["code"] == "engine_died"
        await back(engines[1])
        rig.planner.urls = [engine.url for engine in engines]
        for _ in range(3):
            now[0] += 90.0
            got = await ask(rig, body("poison"))
            assert (got.status, got.json()["error"]["code"]) == (503, "request_ends_engines")
            assert got.head["x-should-retry"] == "false"
            assert 0 < int(got.head["retry-after"]) <= 300
        assert [len(asked(engine)) for engine in engines] == [1, 1, 0]
        assert rig.stats.suspects_refused == {"waits": 2, "twice": 3}
        now[0] += 31.0  # 300 s after the second death
        assert (await ask(rig, body("poison"))).json()["error"]["code"] == "engine_died"
        assert all_over(rig)


async def test_a_request_whose_engine_came_back_and_that_is_answered_is_no_suspect() -> None:
    now = [1000.0]
    good = says(200, b'{"good": 1}')
    async with routed(mortal("reset"), good, now=lambda: now[0]) as (rig, (first, second), _):
        assert (await ask(rig, body("poison"))).status == 503
        await back(first)
        now[0] += 1.0  # a look at it counts for half a second
        rig.planner.urls = [second.url]
        assert (await ask(rig, body("poison"))).status == 200
        assert rig.stats.suspects_current == 0


@pytest.mark.parametrize("script", ["reset", "500"])
async def test_a_request_whose_engine_is_well_goes_to_another_one(script: str) -> None:
    async def breaks(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if call.head.first[0] == "GET":
            writer.write(answer(200, b""))
        elif script == "reset":
            reset(writer)
        else:
            writer.write(answer(500, b"oops"))

    async with routed(breaks, says(200, b'{"good": 1}')) as (rig, (first, second), _):
        got = await ask(rig, body("x"))
        assert (got.status, got.body) == (200, b'{"good": 1}')
        assert (len(asked(first)), len(asked(second))) == (1, 1)
        assert rig.stats.suspects_noted == 0


@pytest.mark.parametrize(("status", "looks"), [(500, 503), (502, 502), (504, 504), (502, 503)])
async def test_a_server_whose_core_is_dead_is_not_alive(status: int, looks: int) -> None:
    """vLLM's answers ``/health`` with 503 then, a proxy in front of it with 502 or 504."""

    async def dead(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(looks if call.head.first[0] == "GET" else status, b"dead"))

    async with routed(dead, says(200, b"{}")) as (rig, (_, second), _):
        assert (await ask(rig, body("x"))).json()["error"]["code"] == "engine_died"
        assert asked(second) == []


async def test_the_end_of_an_engine_that_was_to_go_says_nothing() -> None:
    async with routed(mortal("reset"), says(200, b"{}")) as (rig, (first, _), fleet):
        fleet.leaving.add(first.url)
        assert (await ask(rig, body("poison"))).status == 200
        assert rig.stats.suspects_noted == 0


async def test_after_an_engine_that_left_the_fleet_one_more_is_asked() -> None:
    """Its pod was replaced: it never comes back under its id."""
    async with routed(mortal("reset"), mortal("reset"), says(200, b"{}")) as (rig, engines, fleet):
        first, second, third = engines
        assert (await ask(rig, body("poison"))).status == 503
        fleet.gone.add(first.url)
        rig.planner.urls = [second.url, third.url]
        assert (await ask(rig, body("poison"))).json()["error"]["code"] == "engine_died"
        fleet.gone.add(second.url)
        assert (await ask(rig, body("poison"))).json()["error"]["code"] == "request_ends_engines"
        assert [len(asked(engine)) for engine in engines] == [1, 1, 0]


async def test_without_the_memory_the_next_engine_is_asked_immediately() -> None:
    settings = ProxySettings(suspect_s=0.0)
    async with routed(mortal("reset"), says(200, b"{}"), settings=settings) as (rig, _, _):
        assert (await ask(rig, body("poison"))).status == 200


@pytest.mark.parametrize("how", ["reset", "status"])
async def test_a_request_that_ends_a_prefill_engine_ends_no_other(how: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Engine(script))
            for script in (mortal(how), Numbered().script(), says(200, b"{}"))
        ]
        planner = PairPlanner([engines[0].url, engines[1].url], [engines[2].url])
        rig = await stack.enter_async_context(routing(planner=planner, settings=SETTINGS, watched=Fleet()))
        for _ in range(3):
            assert (await ask(rig, body("poison"))).json()["error"]["code"] == "engine_died"
        assert [len(asked(engine)) for engine in engines] == [1, 0, 0]
        assert all_over(rig)


async def test_a_decode_engine_that_dies_of_what_it_fetched_ends_no_other() -> None:
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Engine(script))
            for script in (Numbered().script(), mortal("status"), says(200, b"{}"))
        ]
        planner = PairPlanner([engines[0].url], [engines[1].url, engines[2].url])
        rig = await stack.enter_async_context(routing(planner=planner, settings=SETTINGS, watched=Fleet()))
        assert (await ask(rig, body("poison"))).json()["error"]["code"] == "engine_died"
        assert [len(asked(engine)) for engine in engines] == [1, 1, 0]
        assert all_over(rig)


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_decode_engine_that_dies_on_a_kept_connection_ends_no_other(how: str) -> None:
    """The engine may have closed the connection for another reason; whether it lives decides."""

    async def dies(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if b"poison" not in call.body:
            writer.write(answer(200, b"{}", "content-type: application/json"))
            return
        engine.server.close()
        if how == "reset":
            reset(writer)
        else:
            writer.close()

    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Engine(script))
            for script in (Numbered().script(), dies, says(200, b"{}"))
        ]
        planner = PairPlanner([engines[0].url], [engines[1].url, engines[2].url])
        rig = await stack.enter_async_context(routing(planner=planner, settings=SETTINGS, watched=Fleet()))
        assert (await ask(rig, body("well"))).status == 200
        assert (await ask(rig, body("poison"))).json()["error"]["code"] == "engine_died"
        assert [len(asked(engine)) for engine in engines] == [2, 2, 0]
        assert engines[1].connections == 1
        assert all_over(rig)


async def test_a_prefill_engine_that_restarts_with_a_request_has_died_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another engine gets it; a second death counts."""
    cancels: dict[str, Callable[[], object]] = {}
    monkeypatch.setattr(
        FakePlacement, "awaited", lambda self, cancel: cancels.update({self.engine_id: cancel})
    )
    async with contextlib.AsyncExitStack() as stack:
        hangs = writes(then="hang")
        first, second, last = [
            await stack.enter_async_context(Engine(script)) for script in (hangs, hangs, says(200, b"{}"))
        ]
        planner = PairPlanner([first.url, second.url], [last.url])
        rig = await stack.enter_async_context(routing(planner=planner, settings=SETTINGS, watched=Fleet()))
        task = asyncio.create_task(ask(rig, body("poison")))
        for engine in (first, second):
            await until(lambda: asked(engine), "it is asked")  # noqa: B023  # awaited here
            placement = next(one for one in planner.placements if one.engine_id == engine.url)
            placement.abandoned = placement.blameless = placement.died = True
            cancels[engine.url]()
        assert (await task).json()["error"]["code"] == "request_ends_engines"
        assert asked(last) == []
        assert (rig.stats.suspects_noted, rig.stats.suspects_refused) == (1, {"twice": 1})
        assert all_over(rig)


async def test_routers_tell_each_other() -> None:
    """By the entries that they exchange of prompts in flight, among workers and among replicas."""
    sent: list[bytes] = []

    def publish(engine_id: str, entry: bytes) -> bool:
        sent.append(entry)
        return True

    def joined(rig: Rig, name: str) -> GossipedInflight:
        gossip = GossipedInflight(name, 1, publish)
        assert rig.app.deaths is not None
        gossip.died, rig.app.deaths.publish = rig.app.deaths.learn, gossip.publish_death
        return gossip

    async with (
        routed(mortal("reset"), mortal("reset")) as (one, engines, _),
        routed(mortal("reset")) as (other, _, _),
    ):
        other.planner.urls = [engine.url for engine in engines]
        first, second = joined(one, "a"), joined(other, "b")
        assert (await ask(one, body("poison"))).status == 503
        first.receive(sent, 0.0)
        second.receive([*sent, msgspec.msgpack.encode(["x", 1, 1, 4, "e", [], b"short"])], 0.0)
        assert second.gossip_stats.malformed == 1
        assert (await ask(other, body("poison"))).json()["error"]["code"] == "engine_died"
        assert (one.stats.suspects_learned, other.stats.suspects_learned) == (0, 1)
        assert [len(asked(engine)) for engine in engines] == [1, 0]


def test_tenants_and_paths_have_bodies_of_their_own() -> None:
    names = [
        digest_of(*one) for one in (("a", "/x", b"b"), ("", "/x", b"b"), ("a", "/y", b"b"), ("a", "/x", b"c"))
    ]
    assert len({*names, digest_of("a/", "x", b"b")}) == 5
    assert {len(name) for name in names} == {DIGEST_BYTES}


def test_the_rules_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = ProxyStats()
    suspects = Suspects(stats)
    assert suspects.died(b"x", "a", 0.0)
    assert not suspects.died(b"x", "a", 4.0)  # many clients with one body: one death
    found = suspects.find(b"x", 5.0, 300.0)
    assert found is not None
    assert found.deaths == 1
    assert suspects.died(b"x", "a", 60.0)  # it has started again, and died again
    assert suspects.died(b"x", "b", 61.0)
    # Sent before that death, however late they fail; then after it.
    assert not suspects.died(b"x", "b", 90.0, 60.5)
    assert not suspects.died(b"x", "b", 90.0, 61.0)
    found = suspects.find(b"x", 62.0, 300.0)
    assert found is not None
    assert (found.deaths, found.engine_id) == (3, "b")
    assert suspects.find(b"y", 62.0, 300.0) is None
    assert suspects.find(b"x", 361.0, 300.0) is None
    monkeypatch.setattr("kvatlas.router.proxy.deaths._SUSPECTS_MAX", 3)
    for number in range(5):
        suspects.died(b"%d" % number, "a", 400.0 + number)
    assert [suspects.find(b"%d" % number, 405.0, 300.0) is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert (stats.suspects_forgotten, stats.suspects_current) == (2, 3)
    assert suspects.died(b"2", "b", 405.0)
    assert suspects.died(b"5", "a", 406.0)
    assert suspects.find(b"2", 406.0, 300.0) is not None, "the latest to die is not the first to be forgotten"
    assert suspects.find(b"3", 406.0, 300.0) is None


class Looks:
    """Looks that the test answers."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[bool | None]] = []
        self.stats = ProxyStats()
        self.deaths = Deaths(Fleet(), self, self.stats, lambda: 0.0)

    async def __call__(self, base_url: str) -> bool | None:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    async def ended(self, *names: int) -> list[asyncio.Task[bool]]:
        """Bodies that failed at one engine, seen to wait."""
        waits = [asyncio.create_task(self.deaths.ended(b"%d" % name, "a", 0.0)) for name in names]
        await self.settled()
        return waits

    async def settled(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def said(self, number: int, alive: bool | None) -> None:
        """The look of this number ends."""
        self.asked[number].set_result(alive)
        await self.settled()


@pytest.mark.parametrize("first", [True, None, False])
async def test_all_that_an_engine_died_with_share_the_looks_and_no_look_from_before_counts(
    first: bool | None,
) -> None:
    """A look that began before a failure counts only if the engine was dead."""
    looks = Looks()
    early = await looks.ended(*range(500))
    late = await looks.ended(*range(500, 1000))
    assert (len(looks.asked), looks.stats.suspects_current) == (1, 1000)
    await looks.said(0, first)
    if first is not False:
        await looks.said(1, False)
    assert len(looks.asked) == (1 if first is False else 2)
    assert await asyncio.gather(*early) == [first is False] * 500
    assert await asyncio.gather(*late) == [True] * 500
    assert looks.stats.suspects_noted == (1000 if first is False else 500)
    # Known for a moment: nothing more is asked.
    assert await asyncio.gather(*await looks.ended(2000)) == [True]
    assert len(looks.asked) == (1 if first is False else 2)


async def test_a_look_goes_on_without_its_client_and_holds_back_meanwhile() -> None:
    looks = Looks()
    (client,) = await looks.ended(1)
    client.cancel()
    check = asyncio.ensure_future(looks.deaths.check(b"1", 300.0))
    other = asyncio.ensure_future(looks.deaths.check(b"2", 300.0))
    await looks.settled()
    assert (check.done(), other.done(), looks.stats.suspects_noted) == (False, True, 0)
    await looks.said(0, False)
    with pytest.raises(ApiError, match="may have"):
        await check
    assert looks.stats.suspects_noted == 1


async def test_a_request_answered_during_a_look_is_no_suspect() -> None:
    looks = Looks()
    await looks.ended(1)
    looks.deaths.cleared(b"1")
    assert looks.stats.suspects_current == 0
    await looks.said(0, False)
    assert looks.stats.suspects_noted == 0


async def test_the_bodies_that_wait_for_looks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.proxy.deaths._SUSPECTS_MAX", 3)
    looks = Looks()
    waits = await looks.ended(*range(5))
    await looks.said(0, False)
    assert await asyncio.gather(*waits) == [True] * 5
    assert (looks.stats.suspects_noted, looks.stats.suspects_forgotten) == (3, 2)


async def test_the_looks_end_with_the_router() -> None:
    looks = Looks()
    waits = await looks.ended(1, 2)
    later = await looks.ended(3)
    looks.deaths.close()
    assert await asyncio.gather(*waits, *later) == [False] * 3
    assert (looks.stats.suspects_current, looks.stats.suspects_noted) == (0, 0)


async def test_our_own_limits_make_no_request_a_suspect() -> None:
    async def breaks(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(500, b"oops"))

    settings = ProxySettings(suspect_s=300.0, engine_connections_max=1)
    async with routed(breaks, says(200, b"{}"), settings=settings) as (rig, (first, _), _):
        assert (await ask(rig, body("x"))).status == 200
        assert (len(first.calls), rig.stats.engine_pool_overflows, rig.stats.suspects_noted) == (1, 1, 0)


async def test_all_that_fail_of_one_death_count_as_one_however_late() -> None:
    now = [0.0]

    async def pulse(base_url: str) -> bool:
        return False

    deaths = Deaths(Fleet(), pulse, ProxyStats(), lambda: now[0])
    said: list[str] = []
    deaths.publish = lambda engine_id, digest: said.append(engine_id)
    for now[0], sent_s in ((100.0, 90.0), (104.0, 91.0), (112.0, 95.0), (130.0, 100.0)):
        assert await deaths.ended(b"x", "a", sent_s)
    suspect = deaths.suspects.find(b"x", now[0], 300.0)
    assert suspect is not None
    assert (suspect.deaths, said) == (1, ["a"])
    now[0] = 131.0
    assert await deaths.ended(b"x", "a", 130.5)
    suspect = deaths.suspects.find(b"x", now[0], 300.0)
    assert suspect is not None
    assert (suspect.deaths, said) == (2, ["a", "a"])
