"""Bit rows, each kept once: a block's residency is the number of its row.

A row says for every (plane, engine) whether the block is there: one 64-bit word per *column*, where a
column is (plane, group of 64 engines). Blocks of one prefix share their row, so a million blocks need only
a few hundred rows and a block costs one dictionary entry with a small shared integer. A *lane* is one bit
of the row: one engine in one plane. Setting or clearing a lane is a step from row number to row number,
remembered per lane, so that the usual update of a block is two dictionary look-ups.

Always true: row 0 has no bit set. Two row numbers may name equal rows after ``drop`` (harmless: rows are
compared by content wherever it matters).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from router.index.base import WORD_BITS, Words

_WORDS_MAX: Final = 4096
"""Rows kept as lists too; prompts of minutes meet a few hundred."""


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
    """Row number -> its words, of those that are looked up; not to be changed."""

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
    """The table of rows and the steps between them."""

    def __init__(self) -> None:
        self._matrix: Words = np.zeros((64, 1), np.uint64)
        self.count = 1
        """Rows kept, row 0 included."""
        self.steps_made = 0
        """Steps computed since ``keep_only``: what the lanes together remember, at most."""
        self._numbers: dict[bytes, int] = {self._matrix[0].tobytes(): 0}
        self._columns = 0
        self.words = RowWords(self)

    @property
    def matrix(self) -> Words:
        """All rows, shape (rows, columns); a view that the next change may replace."""
        return self._matrix[: self.count]

    def row(self, number: int) -> Words:
        """One row's words."""
        row: Words = self._matrix[number]
        return row

    def add_column(self) -> int:
        """A new column of zeros; returns its number."""
        self.words.clear()
        if self._columns == self._matrix.shape[1]:
            wider = np.zeros((self._matrix.shape[0], 2 * self._columns), np.uint64)
            wider[:, : self._columns] = self._matrix
            self._matrix = wider
            self._rebuild_numbers()
        self._columns += 1
        return self._columns - 1

    def steps(self, column: int, bit: int) -> tuple[Steps, Steps]:
        """The (set, clear) steps of one lane."""
        return Steps(self, column, bit, to=True), Steps(self, column, bit, to=False)

    def number_of(self, words: Words) -> int:
        """The number of a row with these words, made if there is none."""
        key = words.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._append(words)
            self._numbers[key] = number
        return number

    def drop(self, column: int, bit: int) -> None:
        """Clear one lane in every row at once: no block is touched, whatever it held."""
        self._matrix[: self.count, column] &= ~np.uint64(1 << bit)
        self.words.clear()
        self._numbers = {self._matrix[0].tobytes(): 0}

    def empty_rows(self) -> frozenset[int]:
        """Numbers of the rows without any bit; blocks on them are nowhere."""
        return frozenset(np.flatnonzero(~self.matrix.any(axis=1)).tolist())

    def keep_only(self, used: list[int]) -> dict[int, int]:
        """Forget all rows but ``used`` and row 0; returns old number -> new number (equal rows merge).

        The caller then clears all steps: they speak of old numbers.
        """
        old = self._matrix
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
    """(word, bit) of an engine slot."""
    return divmod(slot, WORD_BITS)
