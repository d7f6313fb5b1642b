"""Deadlines: one timer for all connections.

Starting and cancelling a timer per request and per chunk costs more than the chunk. Connections only set
their ``deadline``; the sweeper checks all of them once per tick and calls ``expire`` after it. A time-out
is at most one tick late. The timer runs only while there are connections. If a tick is late by more than a
tick, the loop was busy, and all deadlines are put off by as much: a connection that is made takes several
turns of the loop, so a busy router would blame engines and clients for its own delay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

NEVER = float("inf")


class HasDeadline(Protocol):
    """An object with a deadline on the sweeper's clock."""

    deadline: float

    def expire(self) -> None:
        """Handle the passed deadline: set another one, or discard this from the sweeper."""


class Sweeper:
    """Checks the deadlines of connections, in the order they came; used from the event loop only."""

    def __init__(self, clock: Callable[[], float], tick_s: float) -> None:
        self._clock = clock
        self.tick_s = tick_s
        self._watched: dict[HasDeadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def add(self, item: HasDeadline) -> None:
        """Check its deadline until ``discard``."""
        self._watched[item] = None
        if self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + self.tick_s
        self._timer = loop.call_later(self.tick_s, self._sweep)

    def discard(self, item: HasDeadline) -> None:
        """Stop checking it; unknown items are ignored."""
        self._watched.pop(item, None)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        late_s = asyncio.get_running_loop().time() - self._due_s
        self._start_timer()
        if late_s > self.tick_s:
            for item in self._watched:
                item.deadline += late_s
        now = self._clock()
        for item in [item for item in self._watched if item.deadline <= now]:
            item.expire()


def sweep_interval_s(*timeouts_s: float) -> float:
    """Return a tenth of the shortest time-out, between 10 ms and 0.5 s."""
    return min(0.5, max(0.01, min(timeouts_s) / 10))
