"""Clients that hold connections without using them."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc

import pytest

from kvatlas.router.http.settings import ListenSettings
from tests.support.proxy_rig import (
    END,
    SSE_HEAD,
    STREAM,
    Call,
    Engine,
    ask,
    chunk,
    event,
    read_answer,
    request,
    routing,
    says,
    writes,
)
from tests.support.waiting import until

QUICK = ListenSettings(header_timeout_s=0.3, body_timeout_s=0.3, keepalive_timeout_s=0.3, drain_s_max=0.5)
PATIENT = ListenSettings(header_timeout_s=1.0, body_timeout_s=1.0, keepalive_timeout_s=1.0, drain_s_max=0.5)
"""For tests in which somebody else must be in time."""
GOOD = says(200, b"{}")


async def test_half_open_heads_are_timed_out_and_others_are_served() -> None:
    async with Engine(GOOD) as engine, routing(engine.url, listen=PATIENT) as rig:
        held = [await rig.connect() for _ in range(200)]
        for _, writer in held:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-")
        assert (await ask(rig)).status == 200
        for reader, writer in held:
            got = await read_answer(reader)
            assert (got.status, got.json()["error"]["code"]) == (408, "request_timeout")
            assert await reader.read() == b""
            writer.close()
        assert rig.listen_stats.header_timeouts == 200
        await until(lambda: not rig.server.server_state.connections, "all gone")


async def test_a_byte_now_and_then_does_not_help() -> None:
    async with routing(listen=QUICK) as rig:
        reader, writer = await rig.connect()
        writer.write(b"GET /v1/x HTTP/1.1\r\n")
        while not reader.at_eof() and rig.listen_stats.header_timeouts == 0:
            writer.write(b"a: b\r\n")
            await asyncio.sleep(0.02)
        assert (await read_answer(reader)).status == 408


async def test_silent_and_idle_connections_are_closed() -> None:
    async with Engine(GOOD) as engine, routing(engine.url, listen=PATIENT) as rig:
        silent, _ = await rig.connect()
        used, used_writer = await rig.connect()
        used_writer.write(request())
        assert (await read_answer(used)).status == 200
        assert await silent.read() == b""
        assert await used.read() == b""


async def test_slow_head_on_a_kept_connection() -> None:
    async with Engine(GOOD) as engine, routing(engine.url, listen=PATIENT) as rig:
        reader, writer = await rig.connect()
        writer.write(request() + b"POST /v1/")
        assert (await read_answer(reader)).status == 200
        assert (await read_answer(reader)).status == 408


async def test_the_first_byte_of_a_head_ends_the_time_to_be_idle() -> None:
    clock = asyncio.get_running_loop().time
    listen = ListenSettings(header_timeout_s=1.0, keepalive_timeout_s=60.0, drain_s_max=0.5)
    async with Engine(GOOD) as engine, routing(engine.url, listen=listen) as rig:
        reader, writer = await rig.connect()
        writer.write(request())
        assert (await read_answer(reader)).status == 200
        began = clock()
        writer.write(b"P")
        assert (await read_answer(reader)).status == 408
        assert clock() - began < 30


async def test_body_that_stops() -> None:
    async with Engine(GOOD) as engine, routing(engine.url, listen=QUICK) as rig:
        reader, writer = await rig.connect()
        writer.write(request()[:-3])
        got = await read_answer(reader)
        assert (got.status, got.json()["error"]["code"]) == (408, "request_timeout")
        assert rig.listen_stats.body_timeouts == 1
        await until(lambda: rig.stats.requests_active == 0, "given up")
        assert not engine.calls


async def test_slow_but_steady_body_passes() -> None:
    async with Engine(GOOD) as engine, routing(engine.url, listen=PATIENT) as rig:
        reader, writer = await rig.connect()
        data = request()
        for i in range(0, len(data), 8):
            writer.write(data[i : i + 8])
            await asyncio.sleep(0.15 if i > len(data) - 80 else 0)
        assert (await read_answer(reader)).status == 200


async def test_waiting_for_the_engine_is_not_the_clients_fault() -> None:
    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2.0)  # beyond every time-out of the listener
        await GOOD(engine, call, writer)

    async with Engine(script) as engine, routing(engine.url, listen=PATIENT) as rig:
        assert (await ask(rig)).status == 200


@pytest.mark.real  # buffers of the kernel
async def test_client_that_does_not_read_is_cut_off() -> None:
    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        while True:
            writer.write(chunk(event("x" * 100_000)))
            await writer.drain()

    listen = ListenSettings(stall_timeout_s=0.5, drain_s_max=0.5)
    async with Engine(script) as engine, routing(engine.url, listen=listen) as rig:
        sock = socket.create_connection(("127.0.0.1", rig.port))
        sock.sendall(request(STREAM))
        await until(lambda: rig.listen_stats.stalled_clients == 1, "cut off")
        await engine.calls[0].closed.wait()
        assert rig.planner.placements[0].told == ["first_byte", "finished"]
        sock.close()


@pytest.mark.real  # buffers of the kernel
async def test_a_client_that_reads_slowly_costs_little_memory() -> None:
    """Of an answer of 64 MB no more is held than what is read ahead."""
    piece, count = chunk(event("x" * 60_000)), 1000

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for _ in range(count):
            writer.write(piece)
            await writer.drain()
        writer.write(END)

    async with Engine(script) as engine, routing(engine.url) as rig:
        with socket.create_connection(("127.0.0.1", rig.port)) as client:
            client.setblocking(False)
            tracemalloc.start()
            try:
                client.sendall(request(STREAM))
                await until(lambda: rig.stats.read_pauses > 0, "reading pauses")
                received = 0
                while received < count * 60_000:
                    received += len(await asyncio.get_running_loop().sock_recv(client, 1 << 16))
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert most < 8 << 20, most


async def test_head_bytes_are_bounded() -> None:
    async with routing(listen=ListenSettings(header_bytes_max=4096, drain_s_max=0.5)) as rig:
        for start in (b"GET /v1/" + b"x" * 9000, b"GET /v1/x HTTP/1.1\r\n" + b"a: bcdefgh\r\n" * 900):
            reader, writer = await rig.connect()
            writer.write(start)
            got = await read_answer(reader)
            assert (got.status, got.json()["error"]["code"]) == (431, "headers_too_large")
            writer.close()
        assert rig.listen_stats.header_overflows == 2


async def test_connections_are_bounded() -> None:
    listen = ListenSettings(connections_max=2, drain_s_max=0.5)
    async with Engine(GOOD) as engine, routing(engine.url, listen=listen) as rig:
        held = [await rig.connect() for _ in range(2)]
        await until(lambda: len(rig.server.server_state.connections) == 2, "held")
        got = await ask(rig)
        assert (got.status, got.json()["error"]["code"]) == (503, "too_many_connections")
        assert rig.listen_stats.connections_refused == 1
        held[0][1].close()
        await until(lambda: len(rig.server.server_state.connections) == 1, "one less")
        assert (await ask(rig)).status == 200
        held[1][1].close()


async def test_stream_to_a_reading_client_is_not_cut() -> None:
    script = writes(SSE_HEAD, *[chunk(event(str(i))) for i in range(100)], b"0\r\n\r\n")
    async with Engine(script) as engine, routing(engine.url, listen=PATIENT) as rig:
        got = await ask(rig, request(STREAM))
        assert got.whole
        assert got.body.count(b"data:") == 100
