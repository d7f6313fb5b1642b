"""Engines that are busy or sick are left alone: Retry-After, the breaker at work, and its recovery."""

from __future__ import annotations

import asyncio

from kvatlas.router.proxy.breaker import BreakerSettings
from kvatlas.router.proxy.settings import ProxySettings
from tests.support.ports import free_port
from tests.support.proxy_rig import STREAM, Call, Engine, answer, ask, request, routing, says, served
from tests.support.waiting import until

GOOD = says(200, b"{}")


def different(number: int) -> bytes:
    """A chat that no other number makes."""
    return b'{"model": "m", "messages": [{"role": "user", "content": "%d"}]}' % number


async def test_retry_after_keeps_the_engine_out_for_that_time() -> None:
    async with served(says(429, b"busy", "retry-after: 1"), GOOD) as (busy, _, rig):
        for number in range(5):
            assert (await ask(rig, request(different(number)))).status == 200
        assert len(busy.calls) == 2  # the second refusal shows that it was not the request
        await until(lambda: rig.planner.available(busy.url), "the time is over")
        await ask(rig)
        assert len(busy.calls) == 3


async def test_one_refused_request_keeps_no_other_away() -> None:
    async def moody(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        bad = b"evil" in call.body
        writer.write(answer(429, b"no", "retry-after: 60") if bad else answer(200, b"{}"))

    async with Engine(moody) as engine, routing(engine.url) as rig:
        rig.planner.now = lambda: 0.0  # all of it happens at the same time
        for number in range(20):
            assert (await ask(rig, request(b'{"model": "m", "messages": "evil"}'))).status == 429
            assert (await ask(rig, request(different(number)))).status == 200
            for more in range(3):
                assert (await ask(rig, request(b'{"model": "m", "evil": %d}' % more))).status == 429


async def test_refusals_without_a_time_do_not_count_towards_one_with_a_time() -> None:
    async def busy(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        timed = b'"last"' in call.body
        bad = timed or len(engine.calls) <= BreakerSettings().refusals_min
        more = ["retry-after: 60"] if timed else []
        writer.write(answer(429, b"no", *more) if bad else answer(200, b"{}"))

    async with Engine(busy) as engine, routing(engine.url) as rig:
        rig.planner.now = lambda: 0.0
        for number in range(BreakerSettings().refusals_min):
            assert (await ask(rig, request(different(number)))).status == 429
        assert (await ask(rig, request(b'{"model": "m", "messages": "last"}'))).status == 429
        assert (await ask(rig, request(different(99)))).status == 200


async def test_a_client_that_is_refused_again_and_again_locks_no_other_out() -> None:
    async def moody(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        bad = b"evil" in call.body
        writer.write(answer(429, b"no", "retry-after: 60") if bad else answer(200, b"{}"))

    async with Engine(moody) as one, Engine(moody) as two, routing(one.url, two.url) as rig:
        now = 0.0
        rig.planner.now = lambda: now
        for number in range(20):
            for evil in range(10):  # no other request succeeds for so long that a pause may hold
                now += 0.3
                body = b'{"model": "m", "evil": %d}' % (10 * number + evil)
                got = await ask(rig, request(body, "x-forwarded-for: 10.0.0.6"))
                assert got.status in (429, 503)
            got = await ask(rig, request(different(number), "x-forwarded-for: 10.0.0.7"))
            assert got.status == 200


async def test_too_many_requests_without_a_time_is_no_failure() -> None:
    async with Engine(says(429, b"busy")) as busy, Engine(GOOD) as good, routing(busy.url, good.url) as rig:
        for _ in range(30):
            assert (await ask(rig)).status == 200
        assert len(busy.calls) == 30
        assert rig.planner.available(busy.url)


async def test_all_busy_passes_the_last_answer_with_its_time() -> None:
    async with (
        Engine(says(429, b"one", "retry-after: 7")) as one,
        Engine(says(429, b"two", "retry-after: 9")) as two,
        routing(one.url, two.url) as rig,
    ):
        got = await ask(rig)
        assert (got.status, got.body, got.head["retry-after"]) == (429, b"two", "9")
        assert [p.told for p in rig.planner.placements] == [["status"], ["status"]]


async def test_retry_after_is_bounded() -> None:
    settings = ProxySettings(retry_after_s_max=0.2)
    async with served(says(503, b"x", "retry-after: 86400"), GOOD, settings=settings) as (one, _, rig):
        await ask(rig)
        await ask(rig, request(different(1)))
        assert len(one.calls) == 2
        await until(lambda: rig.planner.available(one.url), "back")


async def test_dead_engine_is_left_out_and_used_again_soon_after_its_return() -> None:
    port = free_port()
    async with Engine(GOOD) as good, routing(f"http://127.0.0.1:{port}", good.url) as rig:
        clock = rig.planner.now
        at_once = clock()
        rig.planner.now = lambda: at_once
        for _ in range(10):
            assert (await ask(rig)).status == 200
        assert rig.stats.engine_failures == {"refused": 3}
        rig.planner.now = clock
        back = Engine(GOOD)
        server = await asyncio.start_server(back._serve, "127.0.0.1", port)
        while not back.calls:
            assert (await ask(rig, request(STREAM))).status == 200
        await until(lambda: len(back.calls) == 1, "asked again")
        assert rig.planner.available(f"http://127.0.0.1:{port}")
        server.close()
        for writer in list(back._writers):
            writer.transport.abort()
        for task in list(back._tasks):
            task.cancel()
        await asyncio.gather(*back._tasks, return_exceptions=True)


async def test_poisonous_requests_do_not_close_the_fleet() -> None:
    async with served(says(500, b"boom"), says(500, b"boom")) as (one, two, rig):
        for _ in range(5):
            assert (await ask(rig)).status == 500
        assert rig.planner.available(one.url)
        assert rig.planner.available(two.url)
