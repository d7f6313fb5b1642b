"""The last moment at which an answer surely was not there yet, for whoever must know how old it may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_EVERY_S = 1.0
_LOOKED_S = 0.05


class Quiet:
    """Begins with the request; ``over`` when its answer has come. A moment counts only if the loop has
    looked at its sockets since, and whoever waits has been woken: a loop that stood still finds answers that
    have lain there for long."""

    __slots__ = ("_clock", "_handle", "_loop", "_over", "at_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._over = False
        self.at_s = clock()
        self._handle = self._loop.call_later(_EVERY_S, self._note)

    def over(self) -> None:
        """Something came, or nothing will."""
        self._over = True
        self._handle.cancel()

    def _note(self) -> None:
        self._handle = self._loop.call_later(_LOOKED_S, self._looked, self._clock())

    def _looked(self, then_s: float) -> None:
        self._loop.call_soon(self._settle, then_s)

    def _settle(self, then_s: float) -> None:
        if not self._over:
            self.at_s = then_s
            self._handle = self._loop.call_later(_EVERY_S, self._note)
