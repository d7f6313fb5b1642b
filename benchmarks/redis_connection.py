"""A look-up's round trip by three clients: own protocol, redis-py's connection pipelined, redis-py's client.

    python -m benchmarks.redis_connection [--server redis-server]

Each asks for 64, 1000 and 6250 blocks (MGET, with the three small reads of a look-up) from an own server
on loopback, in turn, five times; medians of CPU and wall time of the asking process, in microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import hiredis
import uvloop
from redis.asyncio import Redis

from kvatlas.router.replication.index_url import parse_url
from kvatlas.router.replication.redis_client import connection_arguments
from kvatlas.router.replication.redis_connection import PipelinedConnection, pack

PORT = 7431
ROUNDS = {64: 1000, 1000: 200, 6250: 50}


class OwnProtocol(asyncio.Protocol):
    """Least cost of an own client: bytes into hiredis, replies to one future."""

    def __init__(self) -> None:
        self._parser = hiredis.Reader(notEnoughData=Ellipsis)
        self._replies: list[Any] = []
        self._done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        while (reply := self._parser.gets()) is not Ellipsis:
            self._replies.append(reply)
        if len(self._replies) == 4:
            self._done.set_result(self._replies)

    async def ask(self, payload: bytes) -> list[Any]:
        self._replies, self._done = [], asyncio.get_running_loop().create_future()
        self.transport.write(payload)
        return await asyncio.wait_for(self._done, 5)


async def compare() -> None:
    target = connection_arguments(parse_url(f"redis://127.0.0.1:{PORT}"), 5.0)
    kind = target.pop("connection_class")
    client = Redis(port=PORT, **target)
    keys = [b"kva" + os.urandom(14) for _ in range(6250)]
    await client.mset(dict.fromkeys(keys, b"\x01\x02" * 64))
    await client.hset("scope", mapping={"epoch": "abcdef", "v": "12345678"})
    await client.hset("load", "replica", b"x" * 30)
    _, own = await asyncio.get_running_loop().create_connection(OwnProtocol, "127.0.0.1", PORT)
    pipelined = PipelinedConnection(kind(host="127.0.0.1", port=PORT, **target))
    async with asyncio.TaskGroup() as tasks:
        await pipelined.open(tasks)
        for blocks, rounds in ROUNDS.items():
            few = keys[:blocks]
            small = [
                ("HMGET", "scope", "epoch", "v"),
                ("HGETALL", "load"),
                ("XREAD", "STREAMS", "flights", "0-0"),
            ]
            payload = b"".join(pack(*command) for command in [("MGET", *few), *small])

            async def by_client(few: list[bytes] = few, small: list[Any] = small) -> None:
                pipeline = client.pipeline(transaction=False)
                for command in [("MGET", *few), *small]:
                    pipeline.execute_command(*command)
                await pipeline.execute()

            ways: dict[str, Callable[[], Awaitable[Any]]] = {
                "own protocol": partial(own.ask, payload),
                "redis-py connection": partial(pipelined.ask, payload, 4, 5.0),
                "redis-py client": by_client,
            }
            cpu: dict[str, list[float]] = {name: [] for name in ways}
            wall: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(5):
                for name, ask in ways.items():
                    began_cpu, began = time.process_time(), time.perf_counter()
                    for _ in range(rounds):
                        await ask()
                    cpu[name].append((time.process_time() - began_cpu) / rounds * 1e6)
                    wall[name].append((time.perf_counter() - began) / rounds * 1e6)
            for name in ways:
                shown = (
                    f"cpu {statistics.median(cpu[name]):.0f} us, wall {statistics.median(wall[name]):.0f} us"
                )
                print(f"{blocks} blocks, {name}: {shown}")
        pipelined.abort()
    own.transport.abort()
    await client.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="redis-server", help="the server program to start")
    options = parser.parse_args()
    server = subprocess.Popen([options.server, "--port", str(PORT), "--save", ""], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        uvloop.run(compare())
    finally:
        server.kill()


if __name__ == "__main__":
    main()
