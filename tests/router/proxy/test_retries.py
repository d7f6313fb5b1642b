"""Another engine is asked before the first byte has been given, never the failed one, and not for ever."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import structlog

from kvatlas.router.proxy.settings import ProxySettings
from tests.support.ports import free_port
from tests.support.proxy_rig import (
    CHAT,
    SSE_HEAD,
    Call,
    Engine,
    Script,
    answer,
    ask,
    request,
    reset,
    routing,
    says,
    served,
    writes,
)
from tests.support.waiting import until

GOOD = says(200, b'{"good": 1}')


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (writes(then="reset"), "reset"),
        (writes(then="close"), "reset"),
        (writes(b"HTTP/1.1 200 OK\r\ncontent-le", then="close"), "reset"),
        (writes(b"SSH-2.0-OpenSSH_9.2\r\n", then="hang"), "reset"),
        (writes(b"HTTP/1.1 000 None\r\ncontent-length: 0\r\n\r\n", then="hang"), "reset"),
        (writes(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", then="reset"), "broken_stream"),
        (writes(SSE_HEAD, then="reset"), "broken_stream"),
        (says(500, b"oops"), "status"),
        (says(502, b"oops"), "status"),
        (says(503, b"oops"), "status"),
        (says(504, b"oops"), "status"),
        (says(429, b"busy"), "status"),
    ],
)
async def test_failure_before_the_first_byte_goes_to_another_engine(script: Script, reason: str) -> None:
    async with Engine(script) as bad, Engine(GOOD) as good, routing(bad.url, good.url) as rig:
        got = await ask(rig)
        assert (got.status, got.body) == (200, b'{"good": 1}')
        assert len(bad.calls) == len(good.calls) == 1
        assert bad.calls[0].body == good.calls[0].body
        first, second = rig.planner.placements
        assert first.told == [reason]
        assert second.told == ["first_byte", "finished"]
        assert rig.stats.retries == 1
        assert rig.stats.engine_failures == {reason: 1}


async def test_refused_connection_goes_to_another_engine() -> None:
    async with Engine(GOOD) as good, routing(f"http://127.0.0.1:{free_port()}", good.url) as rig:
        assert (await ask(rig)).status == 200
        assert rig.planner.placements[0].told == ["refused"]


async def test_unresolvable_name_is_a_refusal() -> None:
    async with Engine(GOOD) as good, routing("http://engine.invalid:8000", good.url) as rig:
        assert (await ask(rig)).status == 200
        assert rig.planner.placements[0].told == ["refused"]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 501])
async def test_answers_to_the_client_are_not_retried(status: int) -> None:
    async with Engine(says(status, b"no")) as one, Engine(GOOD) as two, routing(one.url, two.url) as rig:
        assert (await ask(rig)).status == status
        assert not two.calls


async def test_attempts_are_bounded_and_the_last_answer_is_passed_on() -> None:
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Engine(says(503, b"from %d" % i, f"x-from: {i}")))
            for i in range(4)
        ]
        rig = await stack.enter_async_context(routing(*[engine.url for engine in engines]))
        got = await ask(rig)
        assert (got.status, got.body, got.head["x-from"]) == (503, b"from 2", "2")
        assert [len(engine.calls) for engine in engines] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "script",
    [
        says(500, b"boom"),
        says(502, b"bad gateway"),
        says(504, b"too late"),
        writes(then="close"),
        writes(SSE_HEAD, then="reset"),
    ],
    ids=["error", "its proxy lost it", "its proxy timed out", "close", "reset"],
)
async def test_a_request_that_breaks_engines_meets_two_of_them(script: Script) -> None:
    with structlog.testing.capture_logs() as lines:
        async with contextlib.AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(Engine(script)) for _ in range(4)]
            rig = await stack.enter_async_context(routing(*[engine.url for engine in engines]))
            assert (await ask(rig, request(CHAT, "x-request-id: poison-7"))).status in (500, 502, 504)
            assert [len(engine.calls) for engine in engines] == [1, 1, 0, 0]
            assert (rig.stats.engines_broken, rig.stats.requests_quarantined) == (2, 1)
    told = [line for line in lines if line.get("request_id") == "poison-7"]
    assert [line["log_level"] for line in told] == ["warning"] * 2
    assert "not sent to another" in told[1]["event"]


async def test_a_request_that_ends_an_engine_over_a_kept_connection_counts_too() -> None:
    """The engine takes the request on an old connection, ends, and refuses new ones: this was no refusal."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(GOOD)) for _ in range(4)]

        async def mortal(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
            if b"poison" in call.body:
                engine.server.close()
                reset(writer)
            else:
                writer.write(answer(200, b"{}"))

        for engine in engines:
            engine.script = mortal
        rig = await stack.enter_async_context(routing(*[engine.url for engine in engines]))
        for index in range(4):  # a kept connection to each
            rig.planner.urls = [engine.url for engine in engines[index:]]
            assert (await ask(rig)).status == 200
        rig.planner.urls = [engine.url for engine in engines]
        assert (await ask(rig, request(b'{"model": "poison"}'))).status == 502
        assert [len(engine.calls) for engine in engines] == [2, 2, 1, 1]
        assert rig.stats.requests_quarantined == 1


async def test_no_engine_left_passes_the_only_answer_on() -> None:
    async with Engine(says(503, b'{"e":1}', "retry-after: 3")) as engine, routing(engine.url) as rig:
        got = await ask(rig)
        assert (got.status, got.body, got.head["retry-after"]) == (503, b'{"e":1}', "3")


async def test_all_refuse() -> None:
    ports = [free_port(), free_port()]
    async with routing(*[f"http://127.0.0.1:{port}" for port in ports]) as rig:
        got = await ask(rig)
        error = got.json()["error"]
        assert (got.status, error["code"]) == (502, "engine_unreachable")
        assert error["type"] == "service_unavailable_error"
        assert not any(str(port).encode() in got.body for port in ports)
        assert b"127.0.0.1" not in got.body


async def test_the_planner_decides_that_no_engine_is_left() -> None:
    async with routing() as rig:
        got = await ask(rig)
        assert (got.status, got.json()["error"]["code"]) == (503, "no_ready_engine")
        assert got.head["retry-after"] == "1"


async def test_retry_time_is_bounded() -> None:
    settings = ProxySettings(first_byte_timeout_s=0.2, retry_time_s_max=0.1)
    async with served(writes(then="hang"), GOOD, settings=settings) as (_, good, rig):
        got = await ask(rig)
        assert (got.status, got.json()["error"]["code"]) == (504, "engine_timeout")
        assert not good.calls


@pytest.mark.parametrize("method", ["DELETE", "PUT", "PATCH"])
async def test_methods_that_change_things_are_sent_once(method: str) -> None:
    async with Engine(writes(then="reset")) as bad, Engine(GOOD) as good, routing(bad.url, good.url) as rig:
        got = await ask(rig, request(b"{}", method=method, target="/v1/files/x"))
        assert got.status == 502
        assert not good.calls


async def test_methods_that_change_things_may_go_elsewhere_while_unsent() -> None:
    async with Engine(GOOD) as good, routing(f"http://127.0.0.1:{free_port()}", good.url) as rig:
        got = await ask(rig, request(b"", method="DELETE", target="/v1/files/x"))
        assert got.status == 200


def _dies_when_reused(engine: Engine) -> Script:
    async def script(_: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if len(engine.calls) == 2:
            reset(writer)
        else:
            writer.write(answer(200, b"ok"))

    return script


async def test_stale_connection_is_replaced_for_free() -> None:
    async with Engine(GOOD) as engine, routing(engine.url) as rig:
        engine.script = _dies_when_reused(engine)
        assert (await ask(rig)).status == 200
        assert (await ask(rig)).status == 200
        assert len(engine.calls) == 3
        assert engine.connections == 2
        assert rig.stats.stale_reconnects == 1
        assert rig.stats.retries == 0
        assert [p.told for p in rig.planner.placements] == [["first_byte", "finished"]] * 2


async def test_stale_connection_is_replaced_once_only() -> None:
    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if len(engine.calls) == 1:
            writer.write(answer(200, b"ok"))
        else:
            reset(writer)

    async with Engine(script) as engine, routing(engine.url) as rig:
        await ask(rig)
        assert (await ask(rig)).status == 502
        assert len(engine.calls) == 3
        assert rig.planner.placements[1].told == ["reset"]


async def test_connection_closed_while_idle_is_not_used() -> None:
    async with Engine(writes(answer(200, b"ok"), then="close")) as engine, routing(engine.url) as rig:
        origin = rig.app.client.origin(engine.url)
        for _ in range(3):
            assert (await ask(rig)).status == 200
            await until(lambda: not origin.idle, "the idle connection is dropped")
        assert rig.stats.stale_reconnects == 0
        assert origin.open == 0


async def test_connections_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.http.upstream_pool.IDLE_CONNECTIONS_MAX", 2)

    settings = ProxySettings(engine_connections_max=4)

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await engine.go.wait()
        writer.write(answer(200, b"ok"))

    async with Engine(script) as engine, routing(engine.url, settings=settings) as rig:
        asked = [asyncio.ensure_future(ask(rig)) for _ in range(6)]
        await until(lambda: rig.stats.engine_pool_overflows == 2, "overflow")
        await until(lambda: len(engine.calls) == 4, "four are asked")
        engine.go.set()
        got = [await one for one in asked]
        assert sorted(one.status for one in got) == [200] * 4 + [503] * 2
        await until(lambda: rig.app.client.origin(engine.url).open == 2, "two are kept")
        assert rig.planner.available(engine.url)
