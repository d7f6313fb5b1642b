"""Interned bit rows: a block's residency is the number of its row.

A row has one bit for every (plane, engine): one 64-bit word per *column*, where a column is (plane, group of
64 engines). Blocks of one prefix share their row, so a million blocks need only a few hundred rows, and a
block costs one dictionary entry with a small shared integer. A *lane* is one bit of the row: one engine in
one plane. Setting or clearing a lane maps a row number to another, cached per lane, so that the usual update
of a block is two dictionary lookups. Row 0 has no bit set. Two row numbers may name equal rows after
``drop``: rows are compared by content wherever it matters.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvatlas.router.index.base import WORD_BITS, Words

# Maximum number of rows cached as lists; the prompts of some minutes use a few hundred.
_WORDS_MAX: Final = 4096


class Steps(dict[int, int]):
    """Row number -> row number with one lane set (or cleared), computed on first use."""

    __slots__ = ("_bit", "_column", "_patterns", "_set")

    def __init__(self, patterns: Patterns, column: int, bit: int, *, to: bool) -> None:
        super().__init__()
        self._patterns = patterns
        self._column = column
        self._bit = np.uint64(1 << bit)
        self._set = to

    def __missing__(self, row: int) -> int:
        words = self._patterns.row(row).copy()
        if self._set:
            words[self._column] |= self._bit
        else:
            words[self._column] &= ~self._bit
        same = np.array_equal(words, self._patterns.row(row))
        step = row if same else self._patterns.number_of(words)
        self[row] = step
        self._patterns.steps_made += 1
        return step


class RowWords(dict[int, list[int]]):
    """Row number -> its words, for rows that are looked up; read-only."""

    __slots__ = ("_patterns",)

    def __init__(self, patterns: Patterns) -> None:
        super().__init__()
        self._patterns = patterns

    def __missing__(self, row: int) -> list[int]:
        if len(self) >= _WORDS_MAX:
            self.clear()
        words: list[int] = self._patterns.row(row).tolist()
        self[row] = words
        return words


class Patterns:
    """The table of rows and the transitions between them."""

    def __init__(self) -> None:
        self._matrix: Words = np.zeros((64, 1), np.uint64)
        # Number of rows, row 0 included.
        self.count = 1
        # Transitions computed since ``keep_only``: an upper bound of what all lanes cache.
        self.steps_made = 0
        self._numbers: dict[bytes, int] = {self._matrix[0].tobytes(): 0}
        self._columns = 0
        # Column -> lanes to clear in every row before one is read again: of all engines that are forgotten
        # together.
        self._dropped: dict[int, int] = {}
        self.words = RowWords(self)

    @property
    def matrix(self) -> Words:
        """All rows, shape (rows, columns); a view that the next change may replace."""
        if self._dropped:
            self._clear_dropped()
        return self._matrix[: self.count]

    def row(self, number: int) -> Words:
        """Return one row's words."""
        if self._dropped:
            self._clear_dropped()
        row: Words = self._matrix[number]
        return row

    def add_column(self) -> int:
        """Add a column of zeros; returns its number."""
        if self._dropped:
            self._clear_dropped()
        self.words.clear()
        if self._columns == self._matrix.shape[1]:
            wider = np.zeros((self._matrix.shape[0], 2 * self._columns), np.uint64)
            wider[:, : self._columns] = self._matrix
            self._matrix = wider
            self._rebuild_numbers()
        self._columns += 1
        return self._columns - 1

    def steps(self, column: int, bit: int) -> tuple[Steps, Steps]:
        """Return the (set, clear) transitions of one lane."""
        return Steps(self, column, bit, to=True), Steps(self, column, bit, to=False)

    def number_of(self, words: Words) -> int:
        """Return the number of the row with these words, created if it does not exist."""
        if self._dropped:
            self._clear_dropped()
        key = words.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._append(words)
            self._numbers[key] = number
        return number

    def drop(self, column: int, bit: int) -> None:
        """Clear one lane in every row at once, without touching any block."""
        self._dropped[column] = self._dropped.get(column, 0) | 1 << bit
        self.words.clear()

    def _clear_dropped(self) -> None:
        for column, bits in self._dropped.items():
            self._matrix[: self.count, column] &= ~np.uint64(bits)
        self._dropped.clear()
        self._numbers = {self._matrix[0].tobytes(): 0}

    def empty_rows(self) -> frozenset[int]:
        """Return the numbers of the rows without any bit; blocks on them are held nowhere."""
        return frozenset(np.flatnonzero(~self.matrix.any(axis=1)).tolist())

    def keep_only(self, used: list[int]) -> dict[int, int]:
        """Drop all rows but ``used`` and row 0; returns old number -> new number (equal rows merge).

        The caller must then clear all transitions, which refer to old numbers.
        """
        old = self.matrix
        self._matrix = np.zeros((max(64, 2 * len(used)), old.shape[1]), np.uint64)
        self.count, self.steps_made = 1, 0
        self.words.clear()
        self._numbers = {self._matrix[0].tobytes(): 0}
        return {number: self.number_of(old[number]) for number in used} | {0: 0}

    def _append(self, words: Words) -> int:
        if self.count == self._matrix.shape[0]:
            taller = np.zeros((2 * self.count, self._matrix.shape[1]), np.uint64)
            taller[: self.count] = self._matrix
            self._matrix = taller
        self._matrix[self.count] = words
        self.count += 1
        return self.count - 1

    def _rebuild_numbers(self) -> None:
        self._numbers = {self._matrix[n].tobytes(): n for n in range(self.count - 1, -1, -1)}


def slot_position(slot: int) -> tuple[int, int]:
    """Return (word, bit) of an engine slot."""
    return divmod(slot, WORD_BITS)
