"""How long an event loop is held: the CPU time that its thread takes between two turns.

CPU time and not the clock, and in proportion to what the same processor takes for a fixed piece of work at
that moment, so that a busy machine changes nothing. Code that is not the router's own must run in other
threads: ``elsewhere`` gives engines a loop of their own, and clients are blocking sockets. The garbage
collector rests meanwhile: its passes depend on what all tests before have left.
"""

from __future__ import annotations

import asyncio
import gc
import re
import statistics
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
PAUSE_S_MAX = 0.05
"""The longest time for which the loop may be held, on a processor whose ``slowness`` is 1."""
TRIES = 5
"""A host that takes the processor away adds to a guest's CPU time (84 and 107 ms seen once where 6 ms are
usual). A pause of the code's own is there each time."""
_WORK = b'"a":1,"b":[true,"\\u0061"],' * 20_000
_STRINGS = re.compile(rb'[^"\\]*["\\]')
_WORK_S = 0.004
"""CPU time of ``_work`` on the machine on which the limits were set, while nothing else ran there."""


def slowness() -> float:
    """How many times longer the processor takes now, at least 1."""
    return max(1.0, statistics.median(_work() for _ in range(5)) / _WORK_S)


def _work() -> float:
    began = time.thread_time()
    count = sum(found.end() & 1 for found in _STRINGS.finditer(_WORK, 0, 60_000))
    for number in range(5_000):
        count += number & 3
    return time.thread_time() - began


class Pauses:
    """Of the loop it was made in. ``too_long``: those above ``PAUSE_S_MAX``, in seconds, by what was sent."""

    def __init__(self) -> None:
        self.too_long: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()
        self._ends = False
        self._longest_s, self._at_s = 0.0, time.thread_time()
        self._loop.call_soon(self._turn)

    async def during(self, name: str, send: Callable[[], Awaitable[object]]) -> None:
        """Send it, again where the loop was held too long; the shortest of the longest pauses counts."""
        longest: list[float] = []
        for _ in range(TRIES):
            self._longest_s = 0.0
            await send()
            if self._longest_s <= PAUSE_S_MAX:
                return
            longest.append(self._longest_s / await asyncio.to_thread(slowness))
            if longest[-1] <= PAUSE_S_MAX:
                return
        self.too_long[name] = round(min(longest), 3)

    def end(self) -> None:
        self._ends = True

    def _turn(self) -> None:
        now = time.thread_time()
        self._longest_s, self._at_s = max(self._longest_s, now - self._at_s), now
        if not self._ends:
            self._loop.call_soon(self._turn)


@asynccontextmanager
async def pauses() -> AsyncIterator[Pauses]:
    """Of the running loop."""
    gc.collect()
    gc.disable()
    found = Pauses()
    try:
        yield found
    finally:
        found.end()
        gc.enable()


@asynccontextmanager
async def elsewhere(make: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
    """Result of this coroutine, in a thread and a loop of its own."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[T] = loop.create_future()
    over = threading.Event()

    async def main() -> None:
        async with make() as value:
            loop.call_soon_threadsafe(made.set_result, value)
            while not over.is_set():  # it is set in another thread
                await asyncio.sleep(0.01)

    running = asyncio.ensure_future(asyncio.to_thread(asyncio.run, main()))
    try:
        either: list[asyncio.Future[Any]] = [made, running]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield made.result()
    finally:
        over.set()
        await running
