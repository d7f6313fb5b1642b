"""Every wait on an engine ends."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.proxy.settings import ProxySettings
from tests.support.proxy_rig import SSE_HEAD, STREAM, Call, Engine, ask, request, routing, says, writes
from tests.support.waiting import WAIT_S, until

GOOD = says(200, b"{}")


@pytest.mark.parametrize(
    ("settings", "body"),
    [
        (ProxySettings(first_byte_timeout_s=0.3), b'{"model": "m"}'),
        (ProxySettings(stream_head_timeout_s=0.3), STREAM),
    ],
)
async def test_engine_that_hangs_is_replaced_then_given_up(settings: ProxySettings, body: bytes) -> None:
    async with Engine(writes(then="hang")) as hung, Engine(GOOD) as good:
        async with routing(hung.url, good.url, settings=settings) as rig:
            assert (await ask(rig, request(body))).status == 200
            assert rig.planner.placements[0].told == ["timeout"]
            await asyncio.wait_for(hung.calls[0].closed.wait(), WAIT_S)
        async with routing(hung.url, settings=settings) as rig:
            got = await ask(rig, request(body))
            assert (got.status, got.json()["error"]["code"]) == (504, "engine_timeout")


async def test_head_in_time_but_no_first_byte() -> None:
    settings = ProxySettings(first_byte_timeout_s=0.3)
    async with (
        Engine(writes(SSE_HEAD, then="hang")) as hung,
        Engine(GOOD) as good,
        routing(hung.url, good.url, settings=settings) as rig,
    ):
        assert (await ask(rig, request(STREAM))).status == 200
        assert rig.planner.placements[0].told == ["timeout"]


async def test_connect_time_out_tries_another_engine() -> None:
    """A listener whose backlog is full takes no further connection and answers nothing."""

    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        held = []
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
            held.append(sock)
        settings = ProxySettings(connect_timeout_s=0.3)
        async with (
            Engine(GOOD) as good,
            routing(f"http://127.0.0.1:{port}", good.url, settings=settings) as rig,
        ):
            assert (await ask(rig)).status == 200
            assert rig.planner.placements[0].told == ["timeout"]
        for sock in held:
            sock.close()


async def test_idle_connections_are_closed_before_the_engine_would() -> None:
    settings = ProxySettings(keepalive_s=0.2)
    async with Engine(GOOD) as engine, routing(engine.url, settings=settings) as rig:
        await ask(rig)
        origin = rig.app.client.origin(engine.url)
        assert len(origin.idle) == 1
        await until(lambda: origin.open == 0, "closed")
        assert not origin.idle


async def test_slow_but_steady_stream_is_not_timed_out() -> None:
    """The whole takes longer than the time-out, no pause in it does."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + b"6\r\ndata: \r\n")
        for _ in range(30):
            await asyncio.sleep(0.05)
            writer.write(b"1\r\nx\r\n")
        writer.write(b"2\r\n\n\n\r\n0\r\n\r\n")

    settings = ProxySettings(idle_timeout_s=1.0)
    async with Engine(script) as engine, routing(engine.url, settings=settings) as rig:
        got = await ask(rig, request(STREAM))
        assert got.body == b"data: " + b"x" * 30 + b"\n\n"
