"""How often somebody may ask: one token bucket per name. Pure; the caller has the clock."""

from __future__ import annotations

import math
from collections import OrderedDict

_ROUNDING = 1e-6
_NAMES_MAX = 256
"""Names remembered; the one not heard of for longest is forgotten, and begins with a full bucket again."""


class RateLimit:
    """``per_minute`` requests on average, bursts of a quarter of it (one at least)."""

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._burst = max(1.0, per_minute / 4)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> left, when

    def take(self, name: str, now: float) -> int:
        """0: go on. Else so many seconds until the next request may succeed."""
        left, at = self._buckets.get(name, (self._burst, now))
        left = min(self._burst, left + max(0.0, now - at) * self._per_s)
        allowed = left >= 1 - _ROUNDING
        self._buckets[name] = (max(0.0, left - 1) if allowed else left, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > _NAMES_MAX:
            self._buckets.popitem(last=False)
        return 0 if allowed else max(1, math.ceil((1 - left) / self._per_s))
