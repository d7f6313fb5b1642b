"""The sockets at which SGLang engines publish their load: latest readings, malformed ones, silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvatlas.publisher.simulator.server import LoadStat
from kvatlas.router.feeds.sglang_load import LOAD_FRESH_S, LoadReading, LoadSockets
from tests.support.waiting import until


class World:
    """A publisher and its followers; readings by engine."""

    def __init__(self, socket: zmq.Socket[bytes], tasks: asyncio.TaskGroup) -> None:
        self.now = 100.0
        self.read: list[tuple[str, LoadReading | None]] = []
        self.sockets = LoadSockets(lambda name, one: self.read.append((name, one)), clock=lambda: self.now)
        self.socket = socket
        self.tasks = tasks
        self.source = socket.getsockopt_string(zmq.LAST_ENDPOINT), "load"

    def follow(self, name: str) -> None:
        self.sockets.follow(name, self.source, self.tasks)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def tell(self, stat: Any) -> None:
        self.send(b"load", bytes(8), msgspec.msgpack.encode(stat))

    async def hears(self, stat: Any, expected: LoadReading | None) -> None:
        """Publish until it is read: a subscriber gets nothing from before its subscription."""
        self.read.clear()

        def heard() -> bool:
            self.tell(stat)
            return any(one == expected for _, one in self.read)

        await until(heard, "read")


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    socket = zmq.Context.instance().socket(zmq.PUB)
    socket.bind("tcp://127.0.0.1:*")
    async with asyncio.TaskGroup() as tasks:
        made = World(socket, tasks)
        try:
            yield made
        finally:
            made.sockets.stop_all()
            socket.close(linger=0)


STAT = LoadStat(3, 4, 50, 600)
READ = LoadReading(3, 4, 50, 600)


async def test_readings_are_fresh_for_three_heartbeats() -> None:
    async with world() as w:
        w.follow("a")
        assert not w.sockets.is_fresh("a")
        await w.hears(STAT, READ)
        assert w.sockets.is_fresh("a")
        assert not w.sockets.is_fresh("b")
        w.now += LOAD_FRESH_S
        assert w.sockets.is_fresh("a")
        w.now += 0.1
        assert not w.sockets.is_fresh("a")
        await w.hears(LoadStat(0, 0, 0, 0), LoadReading(0, 0, 0, 0))
        assert w.sockets.is_fresh("a")
        w.sockets.stop("a")
        assert not w.sockets.is_fresh("a")


@pytest.mark.parametrize(
    "stat",
    [
        ["LoadStat", 1, 2, 3],
        ["LoadStat", -1, 2, 3, 4],
        ["LoadStat", 1, 2, 3, 1 << 40],
        ["LoadStat", "1", 2, 3, 4],
        ["Load", 1, 2, 3, 4],
        {"type": "LoadStat"},
        None,
    ],
)
async def test_a_malformed_message_is_reported_and_the_next_one_is_read(stat: Any) -> None:
    async with world() as w:
        w.follow("a")
        await w.hears(stat, None)
        assert not w.sockets.is_fresh("a")
        w.send(b"load")
        await w.hears([*msgspec.to_builtins(STAT), "more", 12], READ)


async def test_a_moved_socket_is_followed_and_the_old_one_is_not() -> None:
    async with world() as w, world() as other:
        w.follow("a")
        await w.hears(STAT, READ)
        w.sockets.follow("a", other.source, w.tasks)
        assert not w.sockets.is_fresh("a")
        w.read.clear()

        def heard() -> bool:
            w.tell(STAT)
            other.tell(LoadStat(9, 9, 9, 9))
            return bool(w.read)

        await until(heard, "read")
        assert w.read[0] == ("a", LoadReading(9, 9, 9, 9))
        w.sockets.follow("a", None, w.tasks)
        assert not w.sockets.is_fresh("a")


async def test_of_a_burst_the_latest_is_read() -> None:
    async with world() as w:
        w.follow("a")
        await w.hears(STAT, READ)
        await asyncio.sleep(0)
        w.read.clear()
        for number in range(1000):
            w.tell(LoadStat(number, 0, 0, 0))
        # Messages beyond the queue are lost, and the socket is read a few times a second.
        await until(lambda: bool(w.read), "read")
        await w.hears(LoadStat(5000, 0, 0, 0), LoadReading(5000, 0, 0, 0))
        assert len(w.read) < 200


async def test_an_address_that_cannot_be_used_ends_nothing() -> None:
    async with world() as w:
        w.sockets.follow("b", ("tcp://no port", "load"), w.tasks)
        w.follow("a")
        await w.hears(STAT, READ)
        assert not w.sockets.is_fresh("b")
