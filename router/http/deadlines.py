"""One timer for all connections: closes what is past its deadline.

Arming and cancelling a timer per request and per chunk costs more than the chunk. Connections only write
their ``deadline``; the sweeper looks at all of them once per tick and calls ``expire`` where it has passed.
A time-out so comes at most one tick late. The timer runs only while there is something to watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

NEVER = float("inf")


class Watched(Protocol):
    """Something with a deadline on the sweeper's clock."""

    deadline: float

    def expire(self) -> None:
        """The deadline has passed. Must move it, or discard itself from the sweeper."""


class Sweeper:
    """Watches a set of connections; used from the event loop only."""

    def __init__(self, clock: Callable[[], float], tick_s: float) -> None:
        self._clock = clock
        self.tick_s = tick_s
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Watched) -> None:
        """Watch until ``discard``."""
        self._watched.add(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.tick_s, self._sweep)

    def discard(self, item: Watched) -> None:
        """Watch no more; unknown items are fine."""
        self._watched.discard(item)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.tick_s, self._sweep)
        now = self._clock()
        for item in [item for item in self._watched if item.deadline <= now]:
            item.expire()


def tick_for(*timeouts_s: float) -> float:
    """A tick that keeps the shortest time-out within a tenth, between 10 ms and 0.5 s."""
    return min(0.5, max(0.01, min(timeouts_s) / 10))
