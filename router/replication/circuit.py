"""Whether the shared index is worth asking: after failures in a row it is left alone for a while.

Pure; times are the caller's clock in seconds. Always true: while the circuit is open nobody waits for the
index, and once its time is over exactly one question tries again.
"""

from __future__ import annotations


class Circuit:
    """Opens after ``failures_max`` failures in a row, for ``open_s`` and twice as long each time."""

    def __init__(self, *, failures_max: int = 3, open_s: float = 0.5, open_s_max: float = 5.0) -> None:
        self.opened = 0
        self._failures_max = failures_max
        self._open_s = open_s
        self._open_s_max = open_s_max
        self._failures = 0
        self._next_open_s = open_s
        self._until_s: float | None = None
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether the last answer was a failure that opened it; also while one question tries again."""
        return self._until_s is not None

    def allows(self, now: float) -> bool:
        """Whether to ask now. Where it was open and its time is over, the asker is the one who tries."""
        if self._until_s is None:
            return True
        if now < self._until_s:
            return False
        self._until_s, self._trying = now + self._next_open_s, True
        return True

    def succeeded(self) -> None:
        """An answer came in time."""
        self._failures, self._next_open_s, self._until_s, self._trying = 0, self._open_s, None, False

    def failed(self, now: float) -> None:
        """No answer, or one too late."""
        self._failures += 1
        if self._failures < self._failures_max or (self._until_s is not None and not self._trying):
            return  # those asked before it opened say nothing new
        self.opened += 1
        self._trying = False
        self._until_s = now + self._next_open_s
        self._next_open_s = min(2 * self._next_open_s, self._open_s_max)
