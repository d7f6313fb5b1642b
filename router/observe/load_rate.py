"""Seconds per token that loads from a store take, learned from receipts.

A sample is a first token's time beyond everything else that was predicted of it, where nothing waited ahead
and the engine reported exactly the predicted hit. Single samples carry all errors of those predictions, so
the median of the latest counts, from ``SAMPLES_MIN`` on. Pure.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SAMPLES_MIN, _SAMPLES_MAX = 5, 33
# From 100 KB per token at 1 TB/s to 10 ms per token: slower than computing it.
_LEAST_S, _MOST_S = 1e-7, 1e-2


class LoadRate:
    """Rate of one store."""

    __slots__ = ("_latest", "s_per_token")

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_SAMPLES_MAX)
        self.s_per_token = 0.0
        """0: not known yet."""

    def add(self, seconds: float, tokens: int) -> None:
        """Learn from a load of ``tokens`` (more than 0), which took so long."""
        self._latest.append(min(_MOST_S, max(_LEAST_S, seconds / tokens)))
        if len(self._latest) >= SAMPLES_MIN:
            self.s_per_token = median(self._latest)
