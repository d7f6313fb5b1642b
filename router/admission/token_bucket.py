"""A token bucket: so much a minute on average, and at most one minute's worth at once.

Pure; the caller has the clock. Invariants: what is left never exceeds the capacity. It may be overdrawn,
since what a request costs is known only after it was let in; the debt is paid by waiting.
"""

from __future__ import annotations

ROUNDING = 1e-6


class TokenBucket:
    """``now`` is monotonic seconds, the same clock at every call. It begins full."""

    __slots__ = ("_at", "_left", "capacity")

    def __init__(self, per_minute: float, now: float) -> None:
        self.capacity = per_minute
        self._left = per_minute
        self._at = now

    def left(self, now: float) -> float:
        """Amount that may be taken now; negative while there is debt."""
        self._left = min(self.capacity, self._left + max(0.0, now - self._at) * self.capacity / 60)
        self._at = max(self._at, now)
        return self._left

    def take(self, amount: float, now: float) -> None:
        """Take it, overdrawing if need be; a negative amount is given back."""
        self._left = self.left(now) - amount  # ``left`` has the cap

    def take_for_other(self, charged: float, refunded: float, taken: float, now: float) -> float:
        """Count charges and refunds of another process. Takes the bucket to a debt of one period at most, and
        gives back no more than has been ``taken`` for that process; returns what then is."""
        left = self.left(now)
        more = min(charged, max(0.0, left + self.capacity))
        back = min(refunded, taken + more)
        self._left = left - more + back
        return taken + more - back

    def lower(self, left: float, now: float) -> None:
        """No more than this is left now."""
        self._left = min(self.left(now), left)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` (at most the capacity) can be taken without debt; 0: now."""
        missing = min(amount, self.capacity) - self.left(now)
        return 0.0 if missing <= ROUNDING else missing * 60 / self.capacity

    def resize(self, per_minute: float, now: float) -> None:
        """The limit changed: what was used stays used."""
        used = self.capacity - self.left(now)
        self.capacity = per_minute
        self._left = per_minute - used
