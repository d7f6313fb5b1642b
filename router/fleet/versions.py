"""Release numbers that engines state."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

Version = tuple[int, int, int]
"""Major, minor and patch, 0 where a version has no patch."""

# Four digits at most: what follows more is another kind of number, such as a date.
_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?!\d)", re.ASCII)


@lru_cache(maxsize=64)
def parse_version(text: str) -> Version | None:
    """Parse the beginning of a version such as ``0.32.0+cpu`` or ``0.11.0rc2``; None if it is none."""
    found = _VERSION.match(text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))
