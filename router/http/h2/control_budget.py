"""How many frames without content a peer may send in a second.

Always true: beyond it the connection ends; the clock is read only when a budget is used up.
"""

from __future__ import annotations

from collections.abc import Callable

from router.http.h2 import frames as h2
from router.http.h2.frames import H2Error


class ControlBudget:
    """Of one connection."""

    def __init__(self, per_s: int, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = per_s
        self._from_s = clock()

    def spend(self, cost: int) -> None:
        """A frame without content. Raises ``H2Error`` where there were too many in this second."""
        self._left -= cost
        if self._left >= 0:
            return
        now = self._clock()
        if now - self._from_s < 1.0:
            raise H2Error(h2.ENHANCE_YOUR_CALM, "too many control frames")
        self._from_s = now
        self._left = self._per_s
