"""How long one exchange waits for what is next: one deadline at a time, looked at by the server's sweeper."""

from __future__ import annotations

from collections.abc import Callable

from router.http.deadlines import NEVER, Sweeper


class Timer:
    """``passed`` is called once when the time is over."""

    __slots__ = ("_clock", "_passed", "_sweeper", "deadline")

    def __init__(self, sweeper: Sweeper, clock: Callable[[], float], passed: Callable[[], None]) -> None:
        self.deadline = NEVER
        self._sweeper = sweeper
        self._clock = clock
        self._passed = passed
        sweeper.add(self)

    def wait(self, seconds: float) -> None:
        """So long from now on, in place of what was set before."""
        self.deadline = self._clock() + seconds

    def expire(self) -> None:
        """See ``Watched``."""
        self.deadline = NEVER
        self._passed()

    def stop(self) -> None:
        """Nothing is waited for any more; for good."""
        self.deadline = NEVER
        self._sweeper.discard(self)
        self._passed = _nothing


def _nothing() -> None:
    """What is left to do when the time is over, after ``stop``."""
