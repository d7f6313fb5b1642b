"""Limits log lines that clients can cause: at most one per key and interval. Pure; the clock is injected."""

from __future__ import annotations

from collections import OrderedDict

_KEYS_MAX = 1024


class LogThrottle:
    """``every_s``: shortest time between two lines of a key. Keeps the latest 1024 keys."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        # key -> time of the last line, lines omitted since
        self._said: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def due(self, key: str, now: float) -> int | None:
        """Return None to omit the line, else the number of lines omitted since the last one."""
        at, unsaid = self._said.get(key, (float("-inf"), 0))
        if now - at < self._every_s:
            self._said[key] = at, unsaid + 1
            return None
        self._said[key] = now, 0
        self._said.move_to_end(key)
        if len(self._said) > _KEYS_MAX:
            self._said.popitem(last=False)
        return unsaid
