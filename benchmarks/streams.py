"""Many open streams on one router, and one long stream to a client that reads slowly.

    python -m benchmarks.streams open [--streams 5000] [--seconds 10] [--chunks-per-s 10000]
    python -m benchmarks.streams slow [--mebibytes 1024] [--read-mb-per-s 100]

The engine, the router (one worker) and the client are processes of their own on loopback. ``open``: this many
streamed chats are opened, stay silent, and then get their chunks spread evenly. Per stream: the router's
resident memory beyond what it had with none. Per chunk: its CPU beyond that of the silent streams. Stalls:
the longest time its loop was away from a task that wants a turn every 5 ms, by the clock and in CPU of its
thread (what it would be on a core of its own), while streams open and while chunks come. ``slow``: one stream
of this many MiB that the engine sends as fast as it can and the client reads at the given rate; the most the
router was resident, beyond what it was before. One JSON line each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.index import resident_bytes
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config, ModelConfig, ServerConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.observe.log_lines import configure_logging
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.serve import share_the_interpreter, tame_garbage_collection
from kvatlas.router.server_lifecycle import make_server

MODEL = "streams"
TURN_S, TICK_S, SETTLE_S = 0.005, 0.01, 2.0
PIECE_BYTES = 64 * 1024
OPENING = 200
"""Streams on their way to the engine at one time while they are opened."""


def chunk(data: bytes) -> bytes:
    """One piece of a chunked answer."""
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = chunk(
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"streams","choices":'
    b'[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
CARDS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()


def request(*, long: bool) -> bytes:
    """A streamed chat; the engine sends a long answer to those that ask for tokens without end."""
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    encoded = json.dumps({**body, "max_tokens": 1_000_000} if long else body).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(encoded), encoded)
    )


class FakeEngine:
    """Answers chats with streams; its process reports what is written on them."""

    def __init__(self) -> None:
        self.streams: list[asyncio.StreamWriter] = []
        self.long_bytes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the router, request after request."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().split(b"\r\n")
                length = next((int(one[15:]) for one in lines if one.startswith(b"content-length:")), 0)
                body = await reader.readexactly(length)
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(CARDS), CARDS))
                    continue
                writer.write(HEAD + TOKEN)
                if b"max_tokens" in body:
                    await self._pour(writer)
                else:
                    self.streams.append(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            if writer in self.streams:
                self.streams.remove(writer)
            writer.close()

    async def _pour(self, writer: asyncio.StreamWriter) -> None:
        piece = chunk(b"data: " + b"x" * (PIECE_BYTES - 8) + b"\n\n")
        for _ in range(self.long_bytes // PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write(LAST)

    async def speak(self, per_s: float, seconds: float) -> int:
        """This many chunks a second, on one stream after the other."""
        began, sent = time.monotonic(), 0
        while (passed := time.monotonic() - began) < seconds:
            while sent < passed * per_s:
                self.streams[sent % len(self.streams)].write(TOKEN)
                sent += 1
            await asyncio.sleep(TICK_S)
        return sent


def engine_process(pipe: Connection, long_bytes: int) -> None:
    """Told ``(chunks per second, seconds)``, says how many it sent; ends when the pipe does."""

    async def main() -> None:
        engine = FakeEngine()
        engine.long_bytes = long_bytes
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await engine.speak(*order))
        os._exit(0)

    uvloop.run(main())


class Turns:
    """The longest absences of a loop since ``take``, in milliseconds."""

    def __init__(self) -> None:
        self._wall = self._cpu = 0.0

    async def watch(self) -> None:
        """Want a turn again and again."""
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(TURN_S)
            self._wall = max(self._wall, time.monotonic() - wall - TURN_S)
            self._cpu = max(self._cpu, time.thread_time() - cpu)

    def take(self) -> tuple[float, float]:
        """By the clock, and in CPU of the thread."""
        found = round(self._wall * 1e3, 1), round(self._cpu * 1e3, 1)
        self._wall = self._cpu = 0.0
        return found


def router_process(pipe: Connection, engine_port: int) -> None:
    """Told anything, says what its CPU, memory and stalls are; ends when told None."""

    async def main() -> None:
        configure_logging("error", "console")
        config = Config(
            server=ServerConfig(port=0, ops_port=0),
            engines=(EngineAddress(f"http://127.0.0.1:{engine_port}"),),
            models={ANY_MODEL: ModelConfig(tokenizer=str(DEMO_TOKENIZER_DIR))},
            listen=ListenSettings(client_share_max=1.0),
            proxy=ProxySettings(engine_connections_max=8192),
        )
        router = Router(config)
        server = make_server(router)
        tame_garbage_collection()
        share_the_interpreter()
        serving, turns = asyncio.create_task(server.serve()), Turns()
        while not (server.started and router.readiness().ready):  # noqa: ASYNC110  # no event says so
            await asyncio.sleep(0.01)
        watching = asyncio.create_task(turns.watch())
        pipe.send(server.base_url)
        while await asyncio.to_thread(pipe.recv) is not None:
            wall, cpu = turns.take()
            pipe.send(
                {
                    "cpu_s": time.process_time(),
                    "resident": resident_bytes(),
                    "stall_ms": wall,
                    "stall_cpu_ms": cpu,
                    "read_pauses": router.proxy.stats.read_pauses,
                }
            )
        watching.cancel()
        serving.cancel()
        os._exit(0)

    uvloop.run(main())


class Reader(asyncio.Protocol):
    """One client connection; counts what comes."""

    def __init__(self, first: Callable[[], None]) -> None:
        self.chunks = 0
        self._first: Callable[[], None] | None = first

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(request(long=False))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.chunks += data.count(b"data: ")
        if self._first is not None and self.chunks:
            self._first()
            self._first = None


class Processes:
    """Engine and router, each with a pipe."""

    def __init__(self, long_bytes: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self.engine, theirs = multiprocessing.Pipe()
        context.Process(target=engine_process, args=(theirs, long_bytes), daemon=True).start()
        self.router, routers = multiprocessing.Pipe()
        context.Process(target=router_process, args=(routers, self.engine.recv()), daemon=True).start()
        self.port = int(self.router.recv().rsplit(":", 1)[1])

    def seen(self) -> dict[str, Any]:
        """The router's figures; its stalls are those since the last time."""
        self.router.send("seen")
        found: dict[str, Any] = self.router.recv()
        return found

    def close(self) -> None:
        """End both."""
        self.router.send(None)
        self.engine.send(None)


async def open_streams(streams: int, seconds: float, per_s: float) -> dict[str, Any]:
    """Run the command line."""
    processes, loop = Processes(), asyncio.get_running_loop()
    await _some(20, processes.port)  # what is allocated once
    before = processes.seen()
    room, opened = asyncio.Semaphore(OPENING), asyncio.Event()
    readers: list[Reader] = []
    waiting = streams

    def first() -> None:
        nonlocal waiting
        room.release()
        waiting -= 1
        if not waiting:
            opened.set()

    began = time.monotonic()
    for _ in range(streams):
        await room.acquire()
        _, reader = await loop.create_connection(lambda: Reader(first), "127.0.0.1", processes.port)
        readers.append(reader)
    await opened.wait()
    took_s = time.monotonic() - began
    await asyncio.sleep(SETTLE_S)
    silent = processes.seen()
    await asyncio.sleep(seconds)
    idle = processes.seen()
    counted = sum(reader.chunks for reader in readers)
    processes.engine.send((per_s, seconds))
    sent = await asyncio.to_thread(processes.engine.recv)
    spoke = processes.seen()
    while sum(reader.chunks for reader in readers) < counted + sent:  # noqa: ASYNC110  # counted, not told
        await asyncio.sleep(TICK_S)
    processes.close()
    cpu_s = (spoke["cpu_s"] - idle["cpu_s"]) - (idle["cpu_s"] - silent["cpu_s"])
    return {
        "streams": streams,
        "opened_per_s": round(streams / took_s),
        "kib_per_stream": round((silent["resident"] - before["resident"]) / streams / 1024, 1),
        "chunks": sent,
        "cpu_us_per_chunk": round(1e6 * cpu_s / sent, 1),
        "silent_cpu_share": round((idle["cpu_s"] - silent["cpu_s"]) / seconds, 3),
        "stall_ms": {"opening": silent["stall_ms"], "silent": idle["stall_ms"], "chunks": spoke["stall_ms"]},
        "stall_cpu_ms": {
            "opening": silent["stall_cpu_ms"],
            "silent": idle["stall_cpu_ms"],
            "chunks": spoke["stall_cpu_ms"],
        },
    }


async def _some(count: int, port: int) -> None:
    """This many streams, opened and closed again."""
    loop, opened = asyncio.get_running_loop(), asyncio.Semaphore(0)
    made = [
        await loop.create_connection(lambda: Reader(opened.release), "127.0.0.1", port) for _ in range(count)
    ]
    for _ in made:
        await opened.acquire()
    for transport, _ in made:
        transport.abort()


async def slow_reader(mebibytes: int, mb_per_s: float) -> dict[str, Any]:
    """Run the command line."""
    processes = Processes(mebibytes << 20)
    await _some(20, processes.port)
    before, most, received = processes.seen(), 0, 0
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", processes.port)) as client:
        client.setblocking(False)
        await loop.sock_sendall(client, request(long=True))
        began, seen, asked_s = time.monotonic(), before, 0.0
        while received < mebibytes << 20:
            received += len(await loop.sock_recv(client, PIECE_BYTES))
            if received > (time.monotonic() - began) * mb_per_s * 1e6:
                await asyncio.sleep(TICK_S)
            if time.monotonic() > asked_s:
                seen, asked_s = processes.seen(), time.monotonic() + 0.1
                most = max(most, seen["resident"])
    took_s = time.monotonic() - began
    processes.close()
    return {
        "mebibytes": mebibytes,
        "mb_per_s": round((mebibytes << 20) / took_s / 1e6),
        "most_mib_beyond_before": round((most - before["resident"]) / (1 << 20), 1),
        "cpu_ms_per_mib": round(1e3 * (seen["cpu_s"] - before["cpu_s"]) / mebibytes, 2),
        "read_pauses": seen["read_pauses"],
    }


def main() -> None:
    """Print a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("open", "slow"))
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--chunks-per-s", type=float, default=10_000)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--read-mb-per-s", type=float, default=100.0)
    args = parser.parse_args()
    work: Awaitable[dict[str, Any]]
    if args.what == "open":
        work = open_streams(args.streams, args.seconds, args.chunks_per_s)
    else:
        work = slow_reader(args.mebibytes, args.read_mb_per_s)

    async def measure() -> dict[str, Any]:
        return await work

    print(json.dumps(uvloop.run(measure())), flush=True)


if __name__ == "__main__":
    main()
