"""Run-length evaluation. Prompts share long prefixes, so a lookup of hundreds of blocks returns only a few
different rows. If every class has the block size of the hashes, hits can only end where a run ends: inside
a run, a boundary is valid if the one before it is. So one integer step per run gives the same result as the
array evaluation of ``hit_rules``, which handles the rest: EAGLE, several block sizes, chunks, states, many
runs (compared in tests/router/index/rules/test_runs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvatlas.router.index.base import WORD_BITS, Plane, Runs

# Tokens, and the engines (bits of a word) whose prefix ends there, longest first; engines without a prefix
# are left out.
Ends = list[tuple[int, int]]
ALL = (1 << WORD_BITS) - 1


class RunClass(NamedTuple):
    """A spec class whose blocks have the hash block size: its planes, and the number of blocks required
    before a boundary (0: all)."""

    planes: tuple[Plane, ...]
    needed: int


# Rows whose engines are kept.
_ROWS_READ_MAX: Final = 4096


class RunReads:
    """How some classes are read from the rows of an index: full attention, if the layout has it, then each
    window, with the number of blocks that it needs."""

    __slots__ = ("_columns", "full", "known", "needed")

    def __init__(
        self, classes: Sequence[RunClass], columns: Mapping[tuple[Plane, int], int], words: Sequence[int]
    ) -> None:
        """Find how the engines of ``words`` are read: the lowest 64 bits are those of the first word."""
        full = [plane for planes, needed in classes if not needed for plane in planes]
        windows = [(planes, needed) for planes, needed in classes if needed]
        self.full = bool(full)
        self.needed = [needed for _, needed in windows]
        shifts = [(word, WORD_BITS * at) for at, word in enumerate(words)]
        # Nothing was ever stored where a column is missing.
        self._columns = [
            [
                [(columns[one, word], shift) for word, shift in shifts if (one, word) in columns]
                for one in planes
            ]
            for planes in (full, *(planes for planes, _ in windows))
        ]
        # Rows stay the same objects for many prompts.
        self.known: dict[int, tuple[Sequence[int], tuple[int, ...]]] = {}

    def read(self, row: Sequence[int]) -> tuple[Sequence[int], tuple[int, ...]]:
        """Return the row, and per class the engines that hold a block in every plane of it."""
        # One integer of all words: Python's are as long as needed, and steps cost more than bits.
        by_class: list[int] = []
        for planes in self._columns:
            held = -1
            for places in planes:
                bits = 0
                for column, shift in places:
                    bits |= row[column] << shift
                held &= bits
            by_class.append(held)
        if len(self.known) >= _ROWS_READ_MAX:
            self.known.clear()
        found = self.known[id(row)] = row, tuple(by_class)
        return found


def run_ends(runs: Runs, its: RunReads, boundaries: int, unit: int) -> tuple[Ends, Ends]:
    """Return the ends of hits and of full-attention prefixes, longest first.

    Boundaries 1..``boundaries`` are ``unit`` tokens apart."""
    # Plain loops instead of numpy: this runs once per request over few elements.
    starts, known = runs.starts, its.known
    held = [(known.get(id(row)) or its.read(row))[1] for row in runs.rows]
    # Per run, up to the last one in which a hit can end: the engines that hold everything up to its end.
    shared_prefixes: list[int] = []
    shared_prefix = -1
    for start, by_class in zip(starts, held, strict=True):
        shared_prefix &= by_class[0]
        if not shared_prefix or start >= boundaries:
            break
        shared_prefixes.append(shared_prefix)
    hits: Ends = []
    shared_prefix_ends: Ends = []
    found = reached = 0
    end = boundaries if len(shared_prefixes) == len(starts) else starts[len(shared_prefixes)]
    end = end if end < boundaries else boundaries  # noqa: FURB136
    for number in range(len(shared_prefixes) - 1, -1, -1):
        shared_prefix = shared_prefixes[number]
        # A longer shared prefix has fewer engines.
        if shared_prefix != reached:
            shared_prefix_ends.append((end * unit, shared_prefix ^ reached))
            reached = shared_prefix
        valid = shared_prefix ^ found
        for window, needed in enumerate(its.needed, 1):
            at, first = number, end - needed
            while valid:
                valid &= held[at][window]
                if starts[at] <= first or not at:
                    break
                at -= 1
        if valid:
            hits.append((end * unit, valid))
            found |= valid
            if found == shared_prefixes[0]:
                break
        end = starts[number]
    return hits, shared_prefix_ends if its.full else hits
