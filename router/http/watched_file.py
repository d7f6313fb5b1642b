"""Tells that a file was changed or replaced, by what the file system says of it, at most once a second."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_Stamp = tuple[int, int, int] | None


class WatchedFile:
    """``every_s`` 0: looks at each call. ``clock`` is monotonic seconds."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = lambda: 0.0, every_s: float = 0.0) -> None:
        self.path = path
        self._clock = clock
        self._every_s = every_s
        self._looked_s = clock()
        self._stamp = _stamp(path)

    def changed(self) -> bool:
        """Whether it is another file, or has other contents, than at the last change told."""
        if self._every_s:
            now = self._clock()
            if now - self._looked_s < self._every_s:
                return False
            self._looked_s = now
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
