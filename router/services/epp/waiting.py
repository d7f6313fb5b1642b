"""The small parts that a picker's requests wait with: an event and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvatlas.router.http.deadlines import NEVER, Sweeper


class Wakeup:
    """Wakes one waiting task at a time; used from the event loop only."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until ``set`` is called."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        await waiter

    def set(self) -> None:
        """Wake the waiting task."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Timer:
    """Deadline of an exchange, checked by the server's sweeper; one at a time. Calls ``passed`` once when it
    has passed."""

    __slots__ = ("_clock", "_passed", "_sweeper", "deadline")

    def __init__(self, sweeper: Sweeper, clock: Callable[[], float], passed: Callable[[], None]) -> None:
        self.deadline = NEVER
        self._sweeper = sweeper
        self._clock = clock
        self._passed = passed
        sweeper.add(self)

    def wait(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now, replacing the previous one."""
        self.deadline = self._clock() + seconds

    def expire(self) -> None:
        self.deadline = NEVER
        self._passed()

    def stop(self) -> None:
        self.deadline = NEVER
        self._sweeper.discard(self)
        self._passed = lambda: None
