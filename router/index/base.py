"""The residency index: which engine holds which block of which group, and in which medium.

An index answers one question fast: for the block hashes of a prompt, which engines hold each of them in
each *plane* (medium, group). It is written by one writer per engine, which hands it counted operations in
the order the engine published them; readers see presence only (count > 0), never counts.

Always true for every backend (one contract suite checks them all):
- a block is present in a plane iff it was stored there more often than it was removed since the engine's
  last ``forget`` (and, for GPU planes, its last ``clear``);
- ``lookup`` never shows a block of an engine that was forgotten, and never invents one;
- ``forget`` and ``clear`` take no step per block the engine held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from publisher.events import MEDIA, BlockHash

# Where blocks of an engine can lie, by name.
#
# A place is ``GPU``, or a medium outside it: ``CPU`` or ``STORAGE``, with the owner that an event names
# behind it (``CPU@kvatlas-host``). Several connectors of one engine may hold the same block in one medium,
# each for itself; as places they are apart, so that what one of them drops the others still hold. A store
# that several engines share (``STORAGE``, locality ``REMOTE``, with an owner) has two places,
# ``STORAGE*0@owner`` and ``STORAGE*1@owner``, filled in turns: nobody tells what such a store evicts, so
# what was told long ago goes, a place at a time. Places are what ``Plane.medium`` holds; an index does not
# look into them.


GPU, CPU, STORAGE = MEDIA

# How events name the engine's own pool.
ON_GPU = frozenset({None, "", GPU, "gpu"})

OWNER_CHARS_MAX = 64
TURNS = (0, 1)

_NAMED = {
    CPU: CPU,
    STORAGE: STORAGE,
    "cpu": CPU,  # LMCache's connector inside vLLM
    "CPU_PINNED": CPU,  # these three: StorageMedium of SGLang 0.5.23, srt/disaggregation/kv_events.py
    "DISK": STORAGE,
    "EXTERNAL": STORAGE,
}
# SGLang's host cache is one tree with the GPU's: when that is reset, both are empty.
_CLEARED_WITH_GPU = frozenset({"CPU_PINNED"})

_REMOTE = "REMOTE"
# Secondary tiers that vLLM's own offloading looks up together with its host memory.
_JOINED_OWNERS = frozenset({"kvcr"})


def medium_named(name: str | None) -> str | None:
    """``CPU`` or ``STORAGE`` for the name that an event has for it; None for any other name."""
    return _NAMED.get(name) if name is not None else None


def is_cleared_with_gpu(name: str | None) -> bool:
    """Whether the medium of this name is emptied too when an engine clears its cache."""
    return name in _CLEARED_WITH_GPU


def is_remote(medium: str, locality: str | None, ownership: str | None) -> bool:
    """Whether an event tells of a store that other engines may read."""
    return medium == STORAGE and locality == _REMOTE and bool(ownership)


def place(medium: str, ownership: str | None = None, *, turn: int | None = None) -> str:
    """The place's name; ``turn`` is 0 or 1 for a shared store."""
    name = medium if turn is None else f"{medium}*{turn}"
    return f"{name}@{ownership}" if ownership else name


def medium_of(name: str) -> str:
    """``GPU``, ``CPU`` or ``STORAGE``."""
    return name.partition("@")[0].partition("*")[0]


def owner_of(name: str) -> str:
    """Whose connector holds it; empty where the events do not say."""
    return name.partition("@")[2]


def connector_of(name: str) -> str:
    """What stands for the connector that looks this place up: its owner, or nothing for vLLM's own."""
    owner = owner_of(name)
    return "" if owner in _JOINED_OWNERS else owner


def is_shared(name: str) -> bool:
    """Whether it is a store that several engines share."""
    return "*" in name.partition("@")[0]


Words = npt.NDArray[np.uint64]
"""Bit sets of engines, 64 to a word."""

WORD_BITS = 64


class Plane(NamedTuple):
    """One place where blocks of an engine can lie."""

    medium: str
    group_idx: int


class Slot(NamedTuple):
    """Where an engine's bit stands in the rows of a look-up: word number and bit in it."""

    word: int
    bit: int


class Runs(msgspec.Struct, gc=False):
    """Rows of a look-up where they come in few stretches of equal ones: where each starts, its row (not to be
    changed), and which of the row's words is that of a plane and word."""

    starts: list[int]
    rows: list[list[int]]
    columns: Mapping[tuple[Plane, int], int]
    only_gpu: bool
    """Whether all columns are of GPUs."""


class Rows(msgspec.Struct, gc=False):
    """Answer of a look-up over N hashes: for each (plane, word) N bit sets of 64 engines each.

    Made of these ``columns`` (``known``), or of ``runs``, the same in short: columns are worked out of those
    where they are asked for.
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
        """What there are columns of."""
        return self.columns if self.runs is None else self.runs.columns

    @property
    def only_gpu(self) -> bool:
        """Nobody ever stored anything elsewhere."""
        return self.runs.only_gpu if self.runs is not None else only_gpu(self.columns)

    def plane(self, plane: Plane, word: int) -> Words:
        """The N bit sets of one plane; zeros where nobody ever stored anything in it."""
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
    """Sizes and odd events of an index, for metrics and ``check_integrity``."""

    blocks: int
    """Distinct block hashes held by anybody; what a forgotten engine held may count until it is swept."""
    residencies: int
    """(engine, plane, block hash) triples present."""
    extra_copies: int
    """Physical copies beyond the first."""
    unknown_removals: int
    """Removals of blocks that were not present: history is missing or the publisher's counts differ."""
    patterns: int
    """Distinct bit rows kept."""


class PoolListener(NamedTuple):
    """Follows the blocks of one engine's GPU pool, in the order of its events."""

    stored: Callable[[Sequence[BlockHash], BlockHash | None], None]
    """Stored blocks, and the block before them."""
    removed: Callable[[Sequence[BlockHash]], None]
    """Evicted blocks."""
    clear: Callable[[], None]
    """All blocks are gone."""


class Index(Protocol):
    """Residency of all engines of one scope (one model: equal hashes mean equal prefixes)."""

    def store(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> None:
        """One more copy of each block; a hash may occur twice."""

    def remove(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """One copy of each block less; a block that is not present is counted and left alone.

        Returns those of which copies are left, as far as the backend knows at once.
        """

    def set_copies(self, engine_id: str, plane: Plane, block: BlockHash, copies: int) -> None:
        """The exact number of copies, from a publisher that tells it (``remaining_copy_counts``)."""

    def clear(self, engine_id: str, medium: str) -> None:
        """Everything of this engine in one medium is gone."""

    def forget(self, engine_id: str) -> None:
        """Everything of this engine is gone, in O(1) of what it held."""

    def adopt(self, staged_id: str, engine_id: str) -> None:
        """What was stored under ``staged_id`` becomes all that ``engine_id`` holds, in one step; the
        staged name is free again. Readers see the old or the new picture, never a part of either."""

    def slot(self, engine_id: str) -> Slot | None:
        """Where this engine's bit stands in ``Rows``; None for an engine that never stored anything."""

    def lookup(self, hashes: Sequence[BlockHash]) -> Rows:
        """Presence of each hash in every plane; a negative number is no hash, and nowhere."""

    def copies(self, engine_id: str, plane: Plane) -> int:
        """How many distinct hashes this engine holds in a plane."""

    def physical(self, engine_id: str, medium: str) -> int:
        """How many copies this engine holds in a medium, all groups together (may take a step per
        duplicated block)."""

    def stats(self) -> IndexStats:
        """Sizes and counters."""

    def check_integrity(self) -> list[str]:
        """Recounts everything; an empty list, or one sentence per contradiction found."""
