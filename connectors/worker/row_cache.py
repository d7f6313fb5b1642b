"""Staging rows that remember what they hold: a value fetched once is loaded from host memory the next time.

A row is empty, in use by a transfer, or keeps a value under its store key; values go, the least recently used
first, when rows are needed. Store keys name content, so what is kept can never be out of date. What always
holds: a row in use is given to nobody else, except that several loads may read one kept value at once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class RowCache:
    """``rows`` rows, by number. Not thread-safe: one owner."""

    def __init__(self, rows: int) -> None:
        self._empty = list(range(rows))
        self._idle: OrderedDict[bytes, int] = OrderedDict()
        """Kept values that nobody reads; the least recently used first."""
        self._read: dict[bytes, int] = {}
        """Kept values that loads read."""
        self._readers: Counter[bytes] = Counter()
        self._spoilt: set[bytes] = set()
        """Of those being read, the ones that nobody else shall read."""

    @property
    def available(self) -> int:
        """Rows that ``take`` could give."""
        return len(self._empty) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Rows to write to, at most ``available``; ends what some of them keep."""
        return [self._empty.pop() if self._empty else self._idle.popitem(last=False)[1] for _ in range(count)]

    def give_back(self, rows: Sequence[int], keys: Sequence[bytes | None]) -> None:
        """Rows that ``take`` gave. With a key: the row holds its value; None: it holds nothing of use."""
        for row, key in zip(rows, keys, strict=True):
            if key is None or key in self._idle or key in self._read:
                self._empty.append(row)
            else:
                self._idle[key] = row

    def read(self, key: bytes) -> int | None:
        """The row that keeps this value, until ``end_read``; None: no row does."""
        if key in self._spoilt:
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
        """``keep=False``: nobody shall read it again."""
        if not keep:
            self._spoilt.add(key)
        self._readers[key] -= 1
        if self._readers[key]:
            return
        del self._readers[key]
        row = self._read.pop(key)
        if key in self._spoilt:
            self._spoilt.discard(key)
            self._empty.append(row)
        else:
            self._idle[key] = row
