"""The last moment at which answers that have come since surely were not there yet, for whoever must know how
old one may be at most."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

_EVERY_S = 1.0
_LOOKED_S = 0.05


class Quiet:
    """For all requests of one loop: each says when it begins and ends, and once its answer has come, the
    later of its beginning and ``at_s`` is that moment. A moment counts only if the loop has looked at its
    sockets since, and whoever waits has been woken: a loop that stood still finds answers that have lain
    there for long. Nothing is noted while nobody waits."""

    __slots__ = ("_clock", "_noting", "_waiting", "at_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting = 0
        self._noting = False
        self.at_s = -math.inf

    def begin(self) -> float:
        """A request is sent from now on: the time."""
        self._waiting += 1
        if not self._noting:
            self._noting = True
            asyncio.get_running_loop().call_later(_EVERY_S, self._note)
        return self._clock()

    def end(self) -> None:
        """Its answer has been read, or there will be none."""
        self._waiting -= 1

    def _note(self) -> None:
        if self._waiting:
            asyncio.get_running_loop().call_later(_LOOKED_S, self._looked, self._clock())
        else:
            self._noting = False

    def _looked(self, then_s: float) -> None:
        asyncio.get_running_loop().call_soon(self._settle, then_s)

    def _settle(self, then_s: float) -> None:
        self.at_s = then_s
        asyncio.get_running_loop().call_later(_EVERY_S, self._note)
