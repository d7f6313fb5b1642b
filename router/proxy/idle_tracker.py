"""Lower bound on when a response arrived: the last time the event loop was seen idle."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

_EVERY_S = 1.0
_LOOKED_S = 0.05


class IdleTracker:
    """Tracks idle times for all requests of one loop. A response arrived after the later of its request's
    start and ``at_s``."""

    __slots__ = ("_clock", "_noting", "_waiting", "at_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting = 0
        self._noting = False
        self.at_s = -math.inf

    def begin(self) -> float:
        """Note a request sent from now on; returns the time."""
        self._waiting += 1
        if not self._noting:
            self._noting = True
            asyncio.get_running_loop().call_later(_EVERY_S, self._note)
        return self._clock()

    def end(self) -> None:
        """Note that its answer has been read, or that there will be none."""
        self._waiting -= 1

    def _note(self) -> None:
        if self._waiting:
            asyncio.get_running_loop().call_later(_LOOKED_S, self._looked, self._clock())
        else:
            self._noting = False

    def _looked(self, then_s: float) -> None:
        # The loop has polled its sockets since ``then_s``; one turn later all waiters have been woken. A loop
        # that was blocked finds responses that arrived long before.
        asyncio.get_running_loop().call_soon(self._settle, then_s)

    def _settle(self, then_s: float) -> None:
        self.at_s = then_s
        asyncio.get_running_loop().call_later(_EVERY_S, self._note)
