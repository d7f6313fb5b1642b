"""A circuit breaker per engine: pure, on a clock of its caller, with quick recovery.

Opens after ``failures_max`` connection-level failures in a row, or when at least ``share_max`` of no fewer
than ``window_min`` recent outcomes failed (error statuses count only here: one poisonous request that every
engine answers with 500 must not close the fleet). Open for ``open_s_first``, then one probe at a time; each
failed probe doubles the wait up to ``open_s_max``; the first success closes and forgets. ``block_until``
is the engine's own wish (Retry-After) and independent of its health.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class BreakerSettings(msgspec.Struct, frozen=True):
    """Numbers of the rule above."""

    failures_max: int = 3
    open_s_first: float = 0.5
    open_s_max: float = 10.0
    probe_s: float = 1.0
    """A probe without outcome for this long (a long generation) allows the next one."""
    share_max: float = 0.5
    window_s: float = 10.0
    window_min: int = 20


class Breaker:
    """State of one engine. Times are seconds on one monotonic clock and must not decrease."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._in_a_row = 0
        self._open_s = 0.0  # 0: closed
        self._open_until = 0.0
        self._blocked_until = 0.0
        self._probing = False
        self._window_end = 0.0
        self._recent = [0, 0]  # ok, failed in this half of the window
        self._before = [0, 0]  # and in the half before it

    @property
    def closed(self) -> bool:
        """No failure is being waited out (a ``block_until`` may still hold)."""
        return self._open_s == 0.0

    def allows(self, now: float) -> bool:
        """May this engine be chosen now? No side effect."""
        return now >= self._blocked_until and (self.closed or now >= self._open_until)

    def waits_s(self, now: float) -> float:
        """Seconds for which the engine itself asked (``block_until``) to be left alone."""
        return max(0.0, self._blocked_until - now)

    def begin(self, now: float) -> None:
        """A request goes there: in the half-open state it is the only probe for ``probe_s``."""
        if not self.closed:
            self._probing = True
            self._open_until = max(self._open_until, now + self._settings.probe_s)

    def record(self, ok: bool, now: float, *, connection: bool = True) -> None:
        """An outcome. ``connection``: a failure of the connection, not an error status."""
        self._roll(now)
        self._recent[0 if ok else 1] += 1
        if ok:
            self._in_a_row = 0
            if not self.closed:
                self._close()
            return
        if connection:
            self._in_a_row += 1
        if not self.closed:
            # Requests from before it opened may all fail together and say nothing new; a probe does.
            if self._probing:
                self._open(now, min(self._open_s * 2, self._settings.open_s_max))
        elif self._in_a_row >= self._settings.failures_max or self._share_too_high():
            self._open(now, self._settings.open_s_first)

    def block_until(self, time: float) -> None:
        """Keep the engine out until ``time``; the later of two wishes counts."""
        self._blocked_until = max(self._blocked_until, time)

    def _open(self, now: float, seconds: float) -> None:
        self._probing = False
        self._open_s = seconds
        self._open_until = now + seconds

    def _close(self) -> None:
        self._probing = False
        self._open_s = 0.0
        self._recent = [0, 0]
        self._before = [0, 0]

    def _roll(self, now: float) -> None:
        if now < self._window_end:
            return
        half = self._settings.window_s / 2
        self._before = self._recent if now < self._window_end + half else [0, 0]
        self._recent = [0, 0]
        self._window_end = now + half

    def _share_too_high(self) -> bool:
        failed = self._recent[1] + self._before[1]
        total = failed + self._recent[0] + self._before[0]
        return total >= self._settings.window_min and failed >= self._settings.share_max * total


class BreakerBoard:
    """The breakers of a fleet, by engine id. One that never failed has none and costs a dict look-up."""

    def __init__(self, clock: Callable[[], float], settings: BreakerSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or BreakerSettings()
        self._breakers: dict[str, Breaker] = {}

    def available(self, engine_id: str) -> bool:
        """May the planner choose this engine now?"""
        breaker = self._breakers.get(engine_id)
        return breaker is None or breaker.allows(self._clock())

    def waits_s(self, engine_id: str) -> float:
        """Seconds for which this engine asked (Retry-After) to be left alone; 0 if it did not."""
        breaker = self._breakers.get(engine_id)
        return 0.0 if breaker is None else breaker.waits_s(self._clock())

    def begin(self, engine_id: str) -> None:
        """A request is about to be sent there."""
        breaker = self._breakers.get(engine_id)
        if breaker is not None:
            breaker.begin(self._clock())

    def record(self, engine_id: str, ok: bool, *, connection: bool = True) -> None:
        """The outcome of a request (see ``Breaker.record``)."""
        breaker = self._breakers.get(engine_id)
        if breaker is None:
            if ok:
                return
            breaker = self._breaker(engine_id)
        breaker.record(ok, self._clock(), connection=connection)

    def block_for(self, engine_id: str, seconds: float) -> None:
        """The engine asked (Retry-After) to be left alone for ``seconds``."""
        self._breaker(engine_id).block_until(self._clock() + seconds)

    def forget(self, engine_id: str) -> None:
        """The engine left the fleet."""
        self._breakers.pop(engine_id, None)

    def open_engines(self) -> list[str]:
        """Engines that ``available`` refuses now, for metrics."""
        now = self._clock()
        return sorted(name for name, breaker in self._breakers.items() if not breaker.allows(now))

    def _breaker(self, engine_id: str) -> Breaker:
        breaker = self._breakers.get(engine_id)
        if breaker is None:
            breaker = self._breakers[engine_id] = Breaker(self._settings)
        return breaker
