"""Bodies above the limit are refused without being read, and every wait on an engine ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import openai
import pytest

from kvatlas.router.http.deadlines import NEVER, Sweeper
from kvatlas.router.proxy.settings import ProxySettings
from tests.support.clients import openai_client
from tests.support.proxy_rig import (
    CHAT,
    SSE_HEAD,
    STREAM,
    Call,
    Engine,
    answer,
    ask,
    chunk,
    read_answer,
    request,
    routing,
    says,
    served,
    writes,
)
from tests.support.waiting import until
from tests.world.machines import MACHINE
from tests.world.seams import virtual_loop

USUAL = ProxySettings(body_bytes_max=8 * 1024 * 1024)
SMALL = ProxySettings(body_bytes_max=1000)


def _padded(size: int) -> bytes:
    return b'{"model": "m", "pad": "%b"}' % (b"x" * (size - 25))


async def test_exactly_the_limit_passes() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url, settings=SMALL) as rig:
        body = _padded(1000)
        assert len(body) == 1000
        assert (await ask(rig, request(body))).status == 200
        assert (await ask(rig, request(_padded(1001)))).status == 413
        assert len(engine.calls) == 1


async def test_declared_length_is_enough_to_refuse() -> None:
    async with routing(settings=SMALL) as rig:
        reader, writer = await rig.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999\r\n\r\n{")
        got = await read_answer(reader)
        assert (got.status, got.json()["error"]["code"]) == (413, "body_too_large")
        assert got.head["connection"] == "close"
        assert len([name for name, _ in got.head.fields if name == "connection"]) == 1
        assert rig.stats.bodies_too_large == 1
        assert await reader.read() == b""


async def test_chunked_body_is_counted_as_it_comes() -> None:
    async with routing(settings=SMALL) as rig:
        reader, writer = await rig.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            writer.write(chunk(b"x" * 500))
        assert (await read_answer(reader)).status == 413


async def test_client_that_is_still_sending_sees_the_answer() -> None:
    """Closing immediately would reset the connection under it."""
    async with routing(settings=USUAL) as rig:
        reader, writer = await rig.connect()
        writer.write(request(b"x" * 20_000_000))
        got = await read_answer(reader)
        assert got.status == 413
        await writer.drain()
        writer.close()
        await until(lambda: not rig.server.server_state.connections, "closed")


async def test_openai_client_sees_it_and_does_not_repeat() -> None:
    async with routing(settings=USUAL) as rig:
        async with openai_client(rig.url, max_retries=2) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x" * 10_000_000}]
                )
        assert caught.value.code == "body_too_large"
        assert caught.value.request_id
        assert rig.stats.requests == 1


async def test_expect_continue_is_answered_when_the_body_is_wanted() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url, settings=USUAL) as rig:
        reader, writer = await rig.connect()
        head, _, body = request(CHAT, "Expect: 100-Continue").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await read_answer(reader)).status == 200
        assert engine.calls[0].body == CHAT


async def test_expect_continue_is_refused_before_the_body() -> None:
    async with routing(settings=SMALL) as rig:
        reader, writer = await rig.connect()
        writer.write(request(_padded(2000), "expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        assert (await read_answer(reader)).status == 413


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
            await hung.calls[0].closed.wait()
        async with routing(hung.url, settings=settings) as rig:
            got = await ask(rig, request(body))
            assert (got.status, got.json()["error"]["code"]) == (504, "engine_timeout")


async def test_head_in_time_but_no_first_byte() -> None:
    settings = ProxySettings(first_byte_timeout_s=0.3)
    async with served(writes(SSE_HEAD, then="hang"), GOOD, settings=settings) as (_, _, rig):
        assert (await ask(rig, request(STREAM))).status == 200
        assert rig.planner.placements[0].told == ["timeout"]


@contextlib.contextmanager
def full_listener() -> Iterator[tuple[socket.socket, str]]:
    """A listener whose backlog is full takes no further connection and answers nothing."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        yield full, f"http://127.0.0.1:{port}"


@pytest.mark.real  # a full backlog
async def test_connect_time_out_tries_another_engine() -> None:
    settings = ProxySettings(connect_timeout_s=1.0)
    with full_listener() as (_, url):
        async with Engine(GOOD) as good, routing(url, good.url, settings=settings) as rig:
            assert (await ask(rig)).status == 200
            assert rig.planner.placements[0].told == ["timeout"]


async def test_an_engine_that_took_no_connection_is_asked_again_where_there_is_no_other() -> None:
    """On the virtual network: what the kernel does with a backlog that was full depends on the moment."""

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(200, b'{"late": 1}'))
        writer.close()

    loop = virtual_loop()
    assert loop is not None
    here, there, port = MACHINE.get(), "127.0.0.9", 8000
    loop.net.cut(here, there)
    settings = ProxySettings(connect_timeout_s=1.0)
    async with (
        await asyncio.start_server(engine, there, port),
        routing(f"http://{there}:{port}", settings=settings) as rig,
    ):
        asked = asyncio.create_task(ask(rig))
        await until(lambda: rig.stats.engine_failures.get("timeout"), "timed out")
        loop.net.cut(here, there, up=True)
        got = await asked
        assert (got.status, got.body) == (200, b'{"late": 1}')
        told = [one.told for one in rig.planner.placements]
        assert told[0] == ["timeout"]
        assert told[-1] == ["first_byte", "finished"]


@pytest.mark.real  # a full backlog
async def test_an_engine_that_gives_no_connection_is_not_asked_for_ever() -> None:
    settings = ProxySettings(connect_timeout_s=0.2, attempts_max=2)
    with full_listener() as (_, url):
        async with routing(url, settings=settings) as rig:
            got = await ask(rig)
            assert (got.status, got.json()["error"]["code"]) == (504, "engine_timeout")
            assert [one.told for one in rig.planner.placements] == [["timeout"], ["timeout"]]
            assert rig.app.client.origin(url).open == 0


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


class _Waiting:
    """Has a deadline."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.expired = False

    def expire(self) -> None:
        self.deadline = NEVER
        self.expired = True


async def test_time_in_which_the_loop_was_busy_does_not_count() -> None:
    """A deadline still passes, however busy the loop is."""
    sweeper = Sweeper(time.monotonic, 0.02)
    item = _Waiting(time.monotonic() + 0.2)
    sweeper.add(item)
    turns = 0
    while not item.expired and turns < 100:
        time.sleep(0.1)  # the fault under test
        await asyncio.sleep(0)
        turns += 1
    sweeper.discard(item)
    assert 5 < turns < 100
