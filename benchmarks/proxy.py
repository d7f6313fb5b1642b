"""CPU per request and per streamed chunk of the whole router, beside another router and Python's floor.

    python -m benchmarks.proxy [--routers kvatlas no-events no-tokenizer floor direct]
        [--sglang-router PYTHON] [--loads 1KB 32KB stream] [--rate 500] [--streams 128] [--seconds 2]
        [--rounds 9]

All routers run together before the same four cheap engines, which hold every session's prompt but its end
(``fake_engine_events``), and are loaded in turn, round after round: figures are compared within a round, as
the machine changes. Routers run on the first core, load and engines on the last one. Requests arrive evenly
at ``--rate`` per second (500 of 1 KB, 150 of 32 KB), whether or not earlier ones are answered: a load that
waits for its answers queues in a slow router, which then does the same thing many times in a row, with warm
caches, and looks cheaper than it is. ``stream``: streams of 100 chunks, one chunk every 10 ms.

``kvatlas`` follows events and tokenizes; ``no-events`` has engines without events, ``no-tokenizer`` none to
read prompts. ``floor`` is a proxy of two ``asyncio.Protocol`` classes with httptools that reads only the
length of a request: what Python costs before a router does anything. ``direct`` is the first engine.
``--sglang-router`` takes the Python of an environment with sglang-router (policy ``cache_aware``). Per load
and router: median CPU over the rounds, as a multiple of sglang-router's in the same round (quartiles), and
the times within which half and 99 % of the requests were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import NamedTuple

import httptools
import uvloop

from benchmarks.fake_engine_events import SESSIONS
from benchmarks.legs import engines, read_answer, requests, router_words
from benchmarks.picker import cpu_s

EVENTS_PORT, ROUTER_PORT = 19501, 19521
SIZES = {"1KB": 1024, "32KB": 32768, "stream": 1024}
RATES = {"1KB": 500.0, "32KB": 150.0, "stream": 0.0}
OPEN_MAX = 128
"""Requests under way at which a router does not keep up, so that its figures would be of a queue."""
WARM_ROUNDS = 3
"""Times each session is read before anything counts."""
START_S = 60


class Running(NamedTuple):
    """A router: its name, its processes and its port."""

    name: str
    pids: list[int]
    port: int

    def cpu_s(self) -> float:
        """CPU of its processes."""
        return sum(map(cpu_s, self.pids))


class _Floor(asyncio.Protocol):
    """A client's connection of the floor; each has one connection to an engine."""

    def __init__(self, engine: tuple[str, int]) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()
        self._upstream: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = bytes(self._body), bytearray()
        self._task = asyncio.get_running_loop().create_task(self._forward(body))

    async def _forward(self, body: bytes) -> None:
        if self._upstream is None:
            loop = asyncio.get_running_loop()
            self._upstream, _ = await loop.create_connection(lambda: _Answer(self._transport), *self._engine)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: e\r\ncontent-type: application/json\r\n"
        self._upstream.writelines([head + b"content-length: %d\r\n\r\n" % len(body), body])

    def connection_lost(self, exc: Exception | None) -> None:
        if self._upstream is not None:
            self._upstream.close()


class _Answer(asyncio.Protocol):
    """An engine's connection of the floor: parses what comes, and passes it on."""

    def __init__(self, client: asyncio.BaseTransport) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        self._client.write(data)  # type: ignore[attr-defined]


async def serve_floor(port: int, engine_ports: list[int]) -> None:
    """The floor before these engines, until it is ended."""
    turns = cycle(engine_ports)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Floor(("127.0.0.1", next(turns))), "127.0.0.1", port)
    await server.serve_forever()


def command(name: str, told: list[str], port: int, sglang_python: str) -> list[str]:
    """How a router of this name is started."""
    urls = [one.split(",")[0] for one in told]
    if name == "sglang-router":
        words = [sglang_python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--policy"]
        words += ["cache_aware", "--log-level", "warn", "--prometheus-port", str(port + 1)]
        return [*words, "--port", str(port), "--worker-urls", *urls]
    if name == "floor":
        ports = [url.rpartition(":")[2] for url in urls]
        return [sys.executable, "-m", "benchmarks.proxy", "--serve-floor", str(port), *ports]
    words = router_words(urls if name == "no-events" else told, port, port + 1)
    if name == "no-tokenizer":
        at = words.index("--tokenizer")
        words[at : at + 2] = []
    return words


@contextmanager
def running(name: str, told: list[str], port: int, sglang_python: str) -> Iterator[Running]:
    """A router on the first core, once it accepts connections. Raises ``RuntimeError`` where it does not."""
    if name == "direct":
        yield Running(name, [], int(told[0].split(",")[0].rpartition(":")[2]))
        return
    quiet = subprocess.DEVNULL if name == "sglang-router" else None
    process = subprocess.Popen(command(name, told, port, sglang_python), stdout=quiet, stderr=quiet)
    try:
        os.sched_setaffinity(process.pid, {0})
        until_s = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < until_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"{name} did not start, or not within {START_S} s")
        yield Running(name, [process.pid], port)
    finally:
        process.terminate()
        process.wait()


class Load:
    """Requests of one kind for one router."""

    def __init__(self, router: Running, kind: str) -> None:
        self.router = router
        self._stream = kind == "stream"
        self._requests = requests(SIZES[kind], stream=self._stream, max_tokens=100 if self._stream else 200)
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.us: list[float] = []
        self.took_s: list[float] = []

    async def warm(self) -> None:
        """Have every session read, one request after the other."""
        for _ in range(WARM_ROUNDS * SESSIONS if not self._stream else 1):
            await self._ask()

    async def turn(self, rate: float, seconds: float, streams: int) -> None:
        """One round: microseconds of CPU per request, or per chunk. Raises ``RuntimeError`` for an error, and
        where the router does not keep up."""
        number = streams if self._stream else int(rate * seconds)
        spacing_s = 1 / number if self._stream else 1 / rate
        began_s, cpu_before_s, tasks = time.monotonic(), self.router.cpu_s(), []
        async with asyncio.TaskGroup() as group:
            for i in range(number):
                await asyncio.sleep(max(0.0, began_s + i * spacing_s - time.monotonic()))
                if not self._stream and sum(not task.done() for task in tasks[-OPEN_MAX:]) == OPEN_MAX:
                    raise RuntimeError(
                        f"{self.router.name} does not keep up with {rate:g} requests per second"
                    )
                tasks.append(group.create_task(self._ask()))
        self.took_s += [task.result() for task in tasks]
        units = number * (100 if self._stream else 1)
        self.us.append(1e6 * (self.router.cpu_s() - cpu_before_s) / units)

    async def _ask(self) -> float:
        began_s = time.monotonic()
        reader, writer = (
            self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self.router.port)
        )
        writer.write(next(self._requests))
        try:
            await read_answer(reader)
        except RuntimeError as error:
            raise RuntimeError(f"{self.router.name} answered {error}") from None
        self._free.append((reader, writer))
        return time.monotonic() - began_s


def line(kind: str, load: Load, base: Load | None) -> str:
    """One router's figures."""
    took_ms = sorted(1e3 * s for s in load.took_s)
    what = "chunk" if kind == "stream" else "request"
    text = f"{kind:6} {load.router.name:13} {statistics.median(load.us):7.1f} us per {what}"
    if base is not None:
        ratios = sorted(ours / theirs for ours, theirs in zip(load.us, base.us, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        text += f", {statistics.median(ratios):5.2f} ({low:.2f} to {high:.2f}) times sglang-router"
    if kind != "stream":
        text += f"; {took_ms[len(took_ms) // 2]:.2f} ms, 99 %: {took_ms[int(len(took_ms) * 0.99)]:.2f} ms"
    return text


async def main() -> None:
    """Run the benchmark."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    own = ["kvatlas", "no-events", "no-tokenizer", "floor", "direct"]
    parser.add_argument("--routers", nargs="+", choices=own, default=own)
    parser.add_argument("--sglang-router", default="", metavar="PYTHON")
    parser.add_argument("--loads", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rate", type=float)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve-floor", type=int, nargs="+", metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_floor:
        await serve_floor(args.serve_floor[0], args.serve_floor[1:])
        return
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # engines inherit it
    names = [*(["sglang-router"] if args.sglang_router else []), *args.routers]
    with ExitStack() as stack:
        told = stack.enter_context(engines(("",) * 4, EVENTS_PORT))
        routers = [
            stack.enter_context(running(name, told, ROUTER_PORT + 2 * i, args.sglang_router))
            for i, name in enumerate(names)
        ]
        for kind in args.loads:
            loads = [Load(router, kind) for router in routers]
            for load in loads:
                await load.warm()
            for _ in range(args.rounds):
                for load in loads:
                    await load.turn(args.rate or RATES[kind], args.seconds, args.streams)
            base = loads[0] if args.sglang_router else None
            for load in loads:
                print(line(kind, load, base), flush=True)


if __name__ == "__main__":
    try:
        uvloop.run(main())
    except* RuntimeError as problems:
        sys.exit(str(problems.exceptions[0]))
