"""The residency index: which engine holds which block of which group, and in which medium.

For the block hashes of a prompt it returns the engines that hold each of them in each *plane* (medium,
group). It has one writer per engine, which applies counted operations in the order the engine published them;
readers see presence only (count > 0), never counts.

Invariants of every backend (one contract suite checks them all):
- a block is present in a plane iff it was stored there more often than it was removed since the engine's
  last ``forget`` (and, for GPU planes, its last ``clear``);
- ``lookup`` never returns a block of a forgotten engine, and never one that was not stored;
- ``forget`` and ``clear`` take no step per block the engine held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.places import GPU

# Bit sets of engines, 64 to a word.
Words = npt.NDArray[np.uint64]

WORD_BITS = 64


class Plane(NamedTuple):
    """A place and KV cache group in which blocks of an engine can lie."""

    medium: str
    group_idx: int


class Slot(NamedTuple):
    """Position of an engine's bit in the rows of a lookup: word number, and bit in the word."""

    word: int
    bit: int


class Runs(msgspec.Struct, gc=False):
    """Rows of a lookup in run-length form: the start of each run, its row (read-only), and the index of a
    (plane, word) in a row.
    """

    starts: list[int]
    rows: list[list[int]]
    columns: Mapping[tuple[Plane, int], int]
    only_gpu: bool
    """Whether all columns are of GPUs."""


class Rows(msgspec.Struct, gc=False):
    """Result of a lookup over N hashes: for each (plane, word) N bit sets of 64 engines each.

    Given either as ``columns`` (``known``) or as ``runs``; columns are computed from the runs on first use.
    """

    num_hashes: int
    known: dict[tuple[Plane, int], Words] | None = None
    runs: Runs | None = None

    @property
    def columns(self) -> dict[tuple[Plane, int], Words]:
        if self.known is None:
            self.known = {} if self.runs is None else _columns(self.runs, self.num_hashes)
        return self.known

    @property
    def places(self) -> Iterable[tuple[Plane, int]]:
        """The (plane, word) keys of the columns."""
        return self.columns if self.runs is None else self.runs.columns

    @property
    def only_gpu(self) -> bool:
        """Whether nothing was ever stored outside GPUs."""
        return self.runs.only_gpu if self.runs is not None else only_gpu(self.columns)

    def plane(self, plane: Plane, word: int) -> Words:
        """Return the N bit sets of one plane; zeros if nothing was ever stored in it."""
        column = self.columns.get((plane, word))
        return np.zeros(self.num_hashes, np.uint64) if column is None else column

    def holds(self, medium: str, slot: Slot) -> bool:
        """Whether the engine of this slot holds any of the hashes in this medium."""
        if self.runs is not None:
            at = [
                n
                for (plane, word), n in self.runs.columns.items()
                if (plane.medium, word) == (medium, slot.word)
            ]
            return any(row[n] >> slot.bit & 1 for row in self.runs.rows for n in at)
        mine = (
            column
            for (plane, word), column in self.columns.items()
            if (plane.medium, word) == (medium, slot.word)
        )
        return any(int(np.bitwise_or.reduce(column)) >> slot.bit & 1 for column in mine)


def only_gpu(places: Iterable[tuple[Plane, int]]) -> bool:
    """Whether all of these are columns of GPUs."""
    return all(plane.medium == GPU for plane, _ in places)


def _columns(runs: Runs, num_hashes: int) -> dict[tuple[Plane, int], Words]:
    ends = [*runs.starts[1:], num_hashes]
    lengths = [end - start for start, end in zip(runs.starts, ends, strict=False)]
    rows = np.array(runs.rows, np.uint64).repeat(lengths, axis=0)
    if not len(rows):
        return {key: np.zeros(0, np.uint64) for key in runs.columns}
    return {key: rows[:, at] for key, at in runs.columns.items()}


class IndexStats(NamedTuple):
    """Sizes and counters of an index, for metrics and ``check_integrity``."""

    blocks: int
    """Distinct block hashes held by any engine; may include those of a forgotten engine until they are
    swept.
    """
    residencies: int
    """(engine, plane, block hash) triples present."""
    extra_copies: int
    """Physical copies beyond the first."""
    unknown_removals: int
    """Removals of blocks that were not present: history is missing, or the publisher counts differently."""
    patterns: int
    """Number of distinct bit rows."""


class PoolListener(NamedTuple):
    """Callbacks for the blocks of one engine's GPU pool, in the order of its events."""

    stored: Callable[[Sequence[BlockHash], BlockHash | None], None]
    """Stored blocks, and the block before them."""
    removed: Callable[[Sequence[BlockHash]], None]
    """Evicted blocks."""
    clear: Callable[[], None]
    """All blocks were removed."""


class Index(Protocol):
    """Residency of all engines of one scope (one model: equal hashes mean equal prefixes)."""

    def store(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> None:
        """Add one copy of each block; a hash may occur twice."""

    def remove(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Remove one copy of each block; a block that is not present is counted and otherwise ignored.

        Returns the blocks with remaining copies, as far as the backend knows immediately.
        """

    def set_copies(self, engine_id: str, plane: Plane, block: BlockHash, copies: int) -> None:
        """Set the exact number of copies, from a publisher that reports it (``remaining_copy_counts``)."""

    def clear(self, engine_id: str, medium: str) -> None:
        """Remove everything of this engine in one medium."""

    def forget(self, engine_id: str) -> None:
        """Remove everything of this engine, in O(1) of the blocks it held."""

    def adopt(self, staged_id: str, engine_id: str) -> None:
        """Atomically replace the content of ``engine_id`` by what was stored under ``staged_id``.

        The staged id is then free. Readers see the old or the new content, never a mixture.
        """

    def slot(self, engine_id: str) -> Slot | None:
        """Return the position of this engine's bit in ``Rows``; None for an engine that never stored
        anything.
        """

    def lookup(self, hashes: Sequence[BlockHash]) -> Rows:
        """Return the presence of each hash in every plane; a negative number is a placeholder and held
        nowhere.
        """

    def holds(self, engine_id: str, medium: str, block: BlockHash) -> bool:
        """Return whether this engine holds the block in any group of a medium."""

    def copies(self, engine_id: str, plane: Plane) -> int:
        """Return the number of distinct hashes this engine holds in a plane."""

    def physical(self, engine_id: str, medium: str) -> int:
        """Return the number of copies this engine holds in a medium, over all groups (may take a step per
        duplicated block).
        """

    def stats(self) -> IndexStats:
        """Return sizes and counters."""

    def check_integrity(self) -> list[str]:
        """Recount everything; returns one sentence per contradiction."""
