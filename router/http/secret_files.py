"""Files with secrets that others can read."""

from __future__ import annotations

import contextlib
import os
import stat
from functools import lru_cache
from pathlib import Path

import structlog

_log = structlog.get_logger()


@lru_cache
def warn_if_public(path: Path, setting: str) -> None:
    """Log a warning, once, for a secret that every user of this machine can read. It is used nevertheless:
    mounted secrets of containers often have such a mode, and no other user is there."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_mode & stat.S_IROTH:
            _log.warning(
                "secret can be read by every user of this machine",
                setting=setting,
                file=str(path),
                remedy=f"chmod 600 {path}",
            )
