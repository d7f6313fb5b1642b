"""Cache of lookup results for the conversation's next turn: only blocks changed since are looked up again. A
lookup of a thousand blocks costs a thousand CPU cache misses, and most results are unchanged since the last
turn. So every change of a block's row writes the current generation (number of lookups) into a table at a
position given by the block's hash; a prompt's hashes carry the rows that were found and their generation. A
row whose table entry is older is still valid. Collisions only cause an additional lookup. Results equal
those of an uncached lookup (tests/router/index/store/test_lookup_cache.py).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvatlas.publisher.block_hash import PromptHashes

# Table entries, 4 bytes each. After a million changes a returning conversation looks up two thirds of its
# blocks again.
_PLACES = 1 << 20
_LOOKUPS_MAX = (1 << 32) - 1
# Below this number of hashes, an uncached lookup is cheaper (measured).
HASHES_MIN = 128

Numbers = npt.NDArray[np.int32]
Find = Callable[[Sequence[Any]], Numbers]


class NumberRuns(NamedTuple):
    """Row numbers in run-length form: where each run starts, and its number."""

    starts: list[int]
    numbers: list[int]


def runs_of(numbers: Numbers) -> NumberRuns:
    starts = [0, *((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist()]
    return NumberRuns(starts, numbers[starts].tolist())


class CachedRows(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Cached rows of a prompt's first hashes; opaque to its holder."""

    numbers: Numbers
    runs: NumberRuns
    cache: LookupCache
    generation: int
    stamp: int

    def first(self, num_hashes: int) -> CachedRows:
        """Return the rows of at most the first ``num_hashes`` hashes."""
        if num_hashes >= len(self.numbers):
            return self
        starts, numbers = self.runs
        count = bisect_left(starts, num_hashes)
        runs = NumberRuns(starts[:count], numbers[:count])
        return CachedRows(self.numbers[:num_hashes], runs, self.cache, self.generation, self.stamp)


class LookupCache:
    """The change stamps of one index. Nothing is allocated before the first lookup that could use it."""

    __slots__ = ("_generation", "_view", "mask", "now", "stamps")

    def __init__(self) -> None:
        self._generation = 0
        self.mask = 0
        # A writer that changes the row of a block stores ``now`` at ``hash & mask``.
        self.stamps = array("I", (0,))
        # Number of lookups so far, plus one.
        self.now = 1
        self._view = np.zeros(0, np.uint32)

    def begin(self) -> None:
        """Invalidate all cached rows: row numbers have a different meaning from now on."""
        self._generation += 1
        self.now = 1
        if self.mask:
            self._view[:] = 0

    def rows(self, hashes: PromptHashes, find: Find) -> tuple[Numbers, NumberRuns]:
        """Return the row of each hash, and their runs; ``find`` looks up the ones that are not cached."""
        if not self.mask:
            self.mask, self.stamps = _PLACES - 1, array("I", bytes(4 * _PLACES))
            self._view = np.frombuffer(self.stamps, np.uint32)
        if self.now == _LOOKUPS_MAX:
            self.begin()
        found = hashes.found
        if (
            not isinstance(found, CachedRows)
            or found.cache is not self
            or found.generation != self._generation
        ):
            numbers = find(hashes)
            runs = runs_of(numbers)
        else:
            numbers, runs = self._again(found, hashes, find)
        hashes.found = CachedRows(numbers, runs, self, self._generation, self.now)
        self.now += 1
        return numbers, runs

    def _again(self, found: CachedRows, hashes: PromptHashes, find: Find) -> tuple[Numbers, NumberRuns]:
        numbers, runs = found.numbers, found.runs
        known = len(numbers)
        places = np.frombuffer(hashes, np.int64, known) & self.mask
        changed = (self._view.take(places) > found.stamp).nonzero()[0]
        if len(changed):
            numbers = numbers.copy()
            numbers[changed] = find([hashes[at] for at in changed.tolist()])
            runs = runs_of(numbers)
        if known < len(hashes):
            more = find(hashes[known:])
            numbers = np.concatenate((numbers, more))
            starts, firsts = runs_of(more)
            same = runs.numbers[-1:] == firsts[:1]  # the last run goes on
            runs = NumberRuns(
                runs.starts + [known + at for at in starts[same:]], runs.numbers + firsts[same:]
            )
        return numbers, runs
