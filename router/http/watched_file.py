"""Detects changed or replaced files by their metadata."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_Stamp = tuple[int, int, int] | None


class WatchedFile:
    """Checks a file at most every ``every_s`` seconds; 0: at each call. ``clock`` is monotonic seconds."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = lambda: 0.0, every_s: float = 0.0) -> None:
        self.path = path
        self._clock = clock
        self._every_s = every_s
        self._checked_s = clock()
        self._stamp = _stamp(path)

    def changed(self) -> bool:
        """Return whether the file or its contents changed since the last call that returned True."""
        if self._every_s:
            now = self._clock()
            if now - self._checked_s < self._every_s:
                return False
            self._checked_s = now
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        return True


def _stamp(path: Path) -> _Stamp:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
