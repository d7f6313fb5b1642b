"""Liveness of a replica that keeps writing a number, without comparing two machines' clocks.

Every replica increases the number in its record; a reader notes, by its own clock, when the number last
changed. Invariant: a writer that stopped counts as dead ``limit_s`` after the reader first saw its last
number; a record seen for the first time counts as alive for that long.
"""

from __future__ import annotations

from collections.abc import Collection


class HeartbeatMonitor:
    """Last number and the time of its last change, by replica."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: dict[str, tuple[int, float]] = {}

    def beat(self, name: str, number: int, now: float) -> bool:
        """Record the number that ``name`` shows at ``now``; returns whether it is alive."""
        seen = self._seen.get(name)
        if seen is None or seen[0] != number:
            self._seen[name] = number, now
            return True
        return now - seen[1] <= self._limit_s

    def silent_s(self, name: str, now: float) -> float:
        """Return the seconds since its number last changed; 0 for an unknown name."""
        seen = self._seen.get(name)
        return 0.0 if seen is None else now - seen[1]

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all other names."""
        for name in self._seen.keys() - set(names):
            del self._seen[name]
