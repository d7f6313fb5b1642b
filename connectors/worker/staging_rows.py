"""Staging rows that cache their values, and the threads that copy values to and from a shared store.

A row is empty, in use by a transfer, or keeps a value under its store key. When rows are needed, the least
recently used values are dropped. Store keys name content, so a kept value is never stale. Invariant: a row in
use is not given to another transfer, except that several loads may read one kept value.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class RowCache:
    """``rows`` rows, by number. Not thread-safe: one owner."""

    def __init__(self, rows: int) -> None:
        self._empty = list(range(rows))
        # Kept values without readers; the least recently used first.
        self._idle: OrderedDict[bytes, int] = OrderedDict()
        # Kept values that loads are reading.
        self._read: dict[bytes, int] = {}
        self._readers: Counter[bytes] = Counter()
        # Values being read that must not be read again.
        self._dropped: set[bytes] = set()

    @property
    def available(self) -> int:
        return len(self._empty) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Take ``count`` rows to write to, at most ``available``; drops kept values if needed."""
        return [self._empty.pop() if self._empty else self._idle.popitem(last=False)[1] for _ in range(count)]

    def give_back(self, rows: Sequence[int], keys: Sequence[bytes | None]) -> None:
        """Return rows from ``take``. With a key the row keeps its value; None: it is empty."""
        for row, key in zip(rows, keys, strict=True):
            if key is None or key in self._idle or key in self._read:
                self._empty.append(row)
            else:
                self._idle[key] = row

    def read(self, key: bytes) -> int | None:
        """The row that keeps this value, valid until ``end_read``; None if no row does."""
        if key in self._dropped:
            return None
        row = self._read.get(key)
        if row is None:
            row = self._idle.pop(key, None)
            if row is None:
                return None
            self._read[key] = row
        self._readers[key] += 1
        return row

    def end_read(self, key: bytes, *, keep: bool = True) -> None:
        """End a read. ``keep=False``: drop the value."""
        if not keep:
            self._dropped.add(key)
        self._readers[key] -= 1
        if self._readers[key]:
            return
        del self._readers[key]
        row = self._read.pop(key)
        if key in self._dropped:
            self._dropped.discard(key)
            self._empty.append(row)
        else:
            self._idle[key] = row
