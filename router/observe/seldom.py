"""Log lines that anybody can cause, at most one per key and interval. Pure; the caller has the clock."""

from __future__ import annotations

from collections import OrderedDict

_KEYS_MAX = 1024


class Seldom:
    """``every_s``: at least so long between two lines of a key."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._said: OrderedDict[str, tuple[float, int]] = OrderedDict()  # key -> said at, unsaid since

    def due(self, key: str, now: float) -> int | None:
        """None: say nothing. Else say it; the number of times it was not said since the last line."""
        at, unsaid = self._said.get(key, (float("-inf"), 0))
        if now - at < self._every_s:
            self._said[key] = at, unsaid + 1
            return None
        self._said[key] = now, 0
        self._said.move_to_end(key)
        if len(self._said) > _KEYS_MAX:
            self._said.popitem(last=False)
        return unsaid
