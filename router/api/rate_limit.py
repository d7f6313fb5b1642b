"""Rate limits: one token bucket per name, and turns of ``TURN_S`` once it is empty.

Pure and bounded; the caller has the clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict

_ROUNDING = 1e-6
TURN_S = 0.25
WAITING_MAX = 8
# Names remembered; the least recently used is evicted, and starts with a full bucket the next time.
_NAMES_MAX = 256


class RateLimit:
    """``per_minute`` requests on average, bursts of a quarter of it (at least one)."""

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._burst = max(1.0, per_minute / 4)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (tokens left, time)

    def used_up(self, name: str, now: float) -> bool:
        """Whether ``take`` would refuse."""
        return self._left(name, now) < 1 - _ROUNDING

    def take(self, name: str, now: float) -> int:
        """Return 0 to continue, otherwise the seconds until the next request may succeed."""
        left = self._left(name, now)
        allowed = left >= 1 - _ROUNDING
        self._buckets[name] = (max(0.0, left - 1) if allowed else left, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > _NAMES_MAX:
            self._buckets.popitem(last=False)
        return 0 if allowed else max(1, math.ceil((1 - left) / self._per_s))

    def _left(self, name: str, now: float) -> float:
        left, at = self._buckets.get(name, (self._burst, now))
        return min(self._burst, left + max(0.0, now - at) * self._per_s)


class Turns:
    """One turn per ``TURN_S`` for each name; at most ``WAITING_MAX`` wait for theirs."""

    def __init__(self) -> None:
        self._free_at: OrderedDict[str, float] = OrderedDict()

    def take(self, name: str, now: float) -> float | None:
        """Take the next turn. Returns the seconds to wait for it; None if too many wait already."""
        at = max(now, self._free_at.get(name, now))
        if at - now > WAITING_MAX * TURN_S - _ROUNDING:
            return None
        self._free_at[name] = at + TURN_S
        self._free_at.move_to_end(name)
        if len(self._free_at) > _NAMES_MAX:
            self._free_at.popitem(last=False)
        return at - now
