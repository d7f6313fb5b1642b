"""SIGTERM to a real process: stop accepting immediately, finish running requests, end in time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from kvatlas.router.http.settings import ListenSettings
from tests.support.paths import ROOT
from tests.support.proxy_rig import (
    DONE,
    END,
    SSE_HEAD,
    STREAM,
    Call,
    Engine,
    Rig,
    chunk,
    event,
    read_answer,
    request,
    routing,
    says,
)
from tests.support.waiting import HANG_S, until


class Process:
    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


async def refused(port: int) -> None:
    """Wait until new connections are refused."""

    async def it_is() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    # A reset connection was still waiting to be accepted when the listener closed.
    await until(it_is, "refused", ignoring=(ConnectionResetError,))


@contextlib.asynccontextmanager
async def router(engine: Engine) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.router.http.drained_router",
        engine.url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield Process(process, int(await process.stdout.readline()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        process._transport.close()  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def serving(
    engine: Engine, drain_s: float, delay_s: float = 0.0
) -> AsyncIterator[tuple[Rig, Callable[[int], None]]]:
    """Here, as in a process of kvatlas: until a signal, and to the end of its drain. Signals come by the
    function that is given too."""
    listen = ListenSettings(drain_s_max=drain_s, drain_delay_s=delay_s)
    async with routing(engine.url, listen=listen) as rig:

        async def serve() -> None:
            await rig.server.main_loop()
            await rig.server.shutdown()

        running = asyncio.create_task(serve())
        yield rig, lambda number: rig.server.handle_exit(number, None)
        await running


async def _slow(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
    writer.write(SSE_HEAD + chunk(event("a")))
    await engine.go.wait()
    writer.write(chunk(event("b") + DONE) + END)


@pytest.mark.real  # a process of kvatlas
async def test_running_stream_finishes_and_nothing_new_is_taken() -> None:
    async with Engine(_slow) as engine, router(engine) as process:
        reader, writer = await process.connect()
        idle, idle_writer = await process.connect()
        writer.write(request(STREAM))
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(chunk(event("a"))))
        for _ in range(3):  # repeating it changes nothing
            process.process.send_signal(signal.SIGTERM)
        await refused(process.port)
        assert await idle.read() == b""
        engine.go.set()
        assert await reader.read() == chunk(event("b") + DONE) + END
        assert await process.process.wait() == 0
        writer.close()
        idle_writer.close()


async def test_answers_begun_while_draining_close_their_connection() -> None:
    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await engine.go.wait()
        await says(200, b"{}")(engine, call, writer)

    async with Engine(script) as engine, serving(engine, 30) as (rig, signalled):
        reader, writer = await rig.connect()
        writer.write(request())
        await until(lambda: engine.calls, "the engine is asked")
        signalled(signal.SIGTERM)
        await refused(rig.port)
        engine.go.set()
        got = await read_answer(reader)
        assert (got.status, got.head["connection"]) == (200, "close")


@pytest.mark.parametrize("how", ["time", "second SIGINT"])
async def test_drain_does_not_last_for_ever(how: str) -> None:
    clock = asyncio.get_running_loop().time
    async with Engine(_slow) as engine:
        async with serving(engine, 60) as (rig, signalled):
            reader, writer = await rig.connect()
            writer.write(request(STREAM))
            await reader.readuntil(b"\r\n\r\n")
            signalled(signal.SIGINT)
            began = clock()
            await refused(rig.port)
            if how != "time":
                signalled(signal.SIGINT)
            with contextlib.suppress(ConnectionError):
                rest = await reader.read()
                assert not rest.endswith(END)  # cut, not ended
            assert (clock() - began > 59) == (how == "time")
        await engine.calls[0].closed.wait()


async def test_during_the_delay_requests_are_answered_and_connections_closed_with_them() -> None:
    """Load balancers that have not noticed yet lose nothing, and clients with idle connections move on."""
    async with Engine(says(200, b"{}")) as engine, serving(engine, 30, delay_s=60) as (rig, signalled):
        idle, idle_writer = await rig.connect()
        idle_writer.write(request())
        assert "connection" not in (await read_answer(idle)).head
        signalled(signal.SIGTERM)
        await until(lambda: rig.server.draining, "draining")
        late, late_writer = await rig.connect()
        for reader, writer in ((idle, idle_writer), (late, late_writer)):
            writer.write(request())
            got = await read_answer(reader)
            assert (got.status, got.head["connection"]) == (200, "close")
            assert await reader.read() == b""
        signalled(signal.SIGTERM)  # repeating it changes nothing
        await rig.connect()
        signalled(signal.SIGINT)  # a person who will not wait
        await refused(rig.port)


async def test_an_answer_that_began_before_the_delay_and_said_nothing_leaves_its_connection_open() -> None:
    """Its client may be sending the next request, which would stay unanswered."""
    async with Engine(_slow) as engine, serving(engine, 30, delay_s=60) as (rig, signalled):
        reader, writer = await rig.connect()
        writer.write(request(STREAM))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection" not in head
        signalled(signal.SIGTERM)
        await until(lambda: rig.server.draining, "draining")
        engine.go.set()
        await reader.readuntil(END)
        writer.write(request(STREAM))
        assert b"connection: close" in await reader.readuntil(b"\r\n\r\n")
        assert (await reader.read()).endswith(END)


async def test_after_the_delay_nothing_new_is_taken_and_what_runs_is_finished() -> None:
    async with Engine(_slow) as engine, serving(engine, 30, delay_s=5) as (rig, signalled):
        reader, writer = await rig.connect()
        idle, _ = await rig.connect()
        writer.write(request(STREAM))
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(chunk(event("a"))))
        signalled(signal.SIGTERM)
        await refused(rig.port)
        assert await idle.read() == b""
        engine.go.set()
        assert await reader.read() == chunk(event("b") + DONE) + END


async def test_a_head_that_does_not_end_is_cut_at_the_end_of_the_drain() -> None:
    listen = ListenSettings(drain_s_max=5, header_timeout_s=HANG_S)
    async with Engine(says(200, b"{}")) as engine, routing(engine.url, listen=listen) as rig:
        reader, writer = await rig.connect()
        writer.write(request() + b"POST /v1/")
        assert (await read_answer(reader)).status == 200
        await rig.server.shutdown()
        assert rig.listen_stats.drain_closed == 1
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


@pytest.mark.real  # a process of kvatlas
async def test_idle_router_ends_immediately() -> None:
    async with Engine(_slow) as engine, router(engine) as process:
        process.process.send_signal(signal.SIGTERM)
        assert await process.process.wait() == 0
        assert (await process.process.stdout.read()).splitlines()[-1] == b"True"


@pytest.mark.real  # sockets of the kernel
async def test_connections_accepted_as_it_ends_are_closed_too() -> None:
    async with routing(listen=ListenSettings(drain_s_max=5, header_timeout_s=HANG_S)) as rig:
        # More than one turn of the loop accepts: some are made known to the server after the drain began.
        address = ("127.0.0.1", rig.port)
        clients = [socket.create_connection(address, timeout=HANG_S) for _ in range(64)]
        await asyncio.sleep(0)
        await rig.server.shutdown()
        assert rig.listen_stats.drain_closed == 0
        for client in clients:
            with client, contextlib.suppress(ConnectionError):
                assert await asyncio.to_thread(client.recv, 1) == b""
