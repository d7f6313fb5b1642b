"""Which streams of a drained engine go on from another one, and when.

Before the deadline those leave that are not predicted to end by then, so that short answers end where they
are and few wait at the end. What is left in the last seconds leaves too. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

AT_ONCE_MAX: Final = 8
"""Streams of one engine that leave in one second."""
LAST_S: Final = 2.0
"""A stream is predicted to end in time if it does so this long before the deadline; what the last one to
leave needs."""


def leaving(rests_s: Sequence[float], left_s: float) -> list[int]:
    """Which streams leave now, or as soon as it is their turn: positions in ``rests_s``, the seconds until
    the predicted end of each. ``left_s``: until the deadline."""
    if is_last(len(rests_s), left_s):
        return list(range(len(rests_s)))
    return [at for at, rest_s in enumerate(rests_s) if rest_s > left_s - LAST_S]


def is_last(streams: int, left_s: float) -> bool:
    """Whether this many streams must leave now to have left by the deadline."""
    return left_s <= LAST_S + streams / AT_ONCE_MAX
