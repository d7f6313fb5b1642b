"""Worth of an engine's cache: the order of engines for scale-down."""

from __future__ import annotations

import math

import msgspec

# Equal to that of hot prefixes: the order of engines for scale-down should outlast the pauses of a session.
WORTH_HALF_LIFE_S = 600.0


class CacheWorth(msgspec.Struct):
    """Prefill work that one engine's cache alone can save, as a decaying sum.

    Every prompt adds the seconds by which its hit there is longer than on any other eligible engine,
    whichever engine was chosen: the work that the fleet would repeat if this cache were lost.
    """

    seconds: float = 0.0
    at_s: float = 0.0
    """Monotonic time of ``seconds``."""

    def add(self, seconds: float, now: float) -> None:
        """Count one prompt."""
        self.seconds = self.seconds * math.exp2((self.at_s - now) / WORTH_HALF_LIFE_S) + seconds
        self.at_s = now

    def per_minute(self, now: float) -> float:
        """Seconds of prefill per minute.

        A steady rate r per second gives a sum of r * half-life / ln 2.
        """
        decayed = self.seconds * math.exp2((self.at_s - now) / WORTH_HALF_LIFE_S)
        return decayed * 60.0 * math.log(2.0) / WORTH_HALF_LIFE_S
