"""Time that the endpoint picker adds behind a real Envoy, to one client that sends one request after another.

    KVATLAS_ENVOY=.../envoy python -m benchmarks.picker_envoy

Five Envoys before the same four engines, which answer immediately: *none* has no picker and goes round,
*wire* asks a picker with a stub in the router's place, *whole* asks a whole router (as in
``benchmarks.picker``), *sampled* one that watches every tenth answer, *unseen* one that watches none. They
are asked in turns, so that what else the machine does is shared; the CPU is the picker's process's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import AsyncExitStack, ExitStack
from typing import cast

import uvloop

from benchmarks.picker import ANSWER, bodies, cpu_s, picker
from kvatlas.router.simulation.demo.gateway import find_envoy, gateway_process

_KINDS = {
    "none": ("", 1.0),
    "wire": ("stub", 1.0),
    "whole": ("router", 1.0),
    "sampled": ("router", 0.1),
    "unseen": ("router", 0.0),
}
"""The picker that is asked, and the share of answers that it watches."""
_SIZES = (1024, 32 * 1024)
_CHUNKS_END = b"0\r\n\r\n"
_REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(ANSWER),
    ANSWER,
)


def _whole(message: bytes) -> bool:
    """A request or an answer has come to its end."""
    head, blank, body = message.partition(b"\r\n\r\n")
    if not blank:
        return False
    head = head.lower()
    if b"transfer-encoding: chunked" in head:
        return body.endswith(_CHUNKS_END)
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(body) >= int(length or 0)


class Peer(asyncio.Protocol):
    """One connection; an engine answers every request immediately, a client waits in ``ask``."""

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers
        self._came = b""
        self._future: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._came += data
        if not _whole(self._came):
            return
        came, self._came = self._came, b""
        if self._answers:
            self._transport.write(_REPLY)
        elif self._future is not None:
            self._future.set_result(came)

    async def ask(self, request: bytes) -> float:
        """Seconds until the answer is whole. Raises ``RuntimeError`` for an error."""
        self._future = asyncio.get_running_loop().create_future()
        begun = time.perf_counter()
        self._transport.write(request)
        answer = await self._future
        took_s = time.perf_counter() - begun
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:300].decode("latin-1"))
        return took_s


def _requests(kind: str, size: int) -> list[bytes]:
    head = (
        b"POST %b HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    chat = kind == "router"
    path = b"/v1/chat/completions" if chat else b"/v1/embeddings"
    return [head % (path, len(body)) + body for body in bodies(size, chat=chat)]


async def _main(requests: int, turns: int) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(4):
            server = await loop.create_server(lambda: Peer(answers=True), "127.0.0.1", 0)
            stack.callback(server.close)
            engines.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        processes = stack.enter_context(ExitStack())
        clients, pids = {}, {}
        for name, (kind, share) in _KINDS.items():
            ports = []
            if kind:
                pids[name], port = processes.enter_context(picker(kind, engines, share=share))
                ports = [port]
            url = processes.enter_context(gateway_process(find_envoy(), engines, ports))
            port = int(url.rpartition(":")[2])
            _, clients[name] = await loop.create_connection(lambda: Peer(answers=False), "127.0.0.1", port)
        for size in _SIZES:
            took_s: dict[str, list[float]] = {name: [] for name in clients}
            used_s = dict.fromkeys(pids, 0.0)
            for turn in range(turns + 1):  # the first one warms up
                for name, client in clients.items():
                    asked = _requests(_KINDS[name][0], size)
                    before = cpu_s(pids[name]) if name in pids else 0.0
                    times_s = [await client.ask(asked[at % len(asked)]) for at in range(requests)]
                    if turn:
                        took_s[name] += times_s
                        if name in pids:
                            used_s[name] += cpu_s(pids[name]) - before
            base_s = statistics.median(took_s["none"])
            for name, times_s in took_s.items():
                median_s = statistics.median(times_s)
                cpu = f"{used_s[name] / (requests * turns) * 1e6:.0f}" if name in pids else ""
                added = f"{(median_s - base_s) * 1e3:.2f}" if name in pids else ""
                tenth_s = statistics.quantiles(times_s, n=10)[0]
                row = (
                    name,
                    f"{size // 1024} KB",
                    f"{median_s * 1e3:.2f}",
                    added,
                    f"{tenth_s * 1e3:.2f}",
                    cpu,
                )
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of each Envoy, in each turn")
    parser.add_argument("--turns", type=int, default=10)
    arguments = parser.parse_args()
    print("| picker | body | median ms | added ms | first tenth ms | picker's CPU us |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    uvloop.run(_main(arguments.requests, arguments.turns))
