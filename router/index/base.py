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

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvatlas.publisher.events import MEDIA, BlockHash

# Names of places that hold blocks. A place is ``GPU``, or a medium outside it: ``CPU`` or ``STORAGE``,
# followed by the owner if an event names one (``CPU@kvatlas-host``). Several connectors of one engine may
# each hold a copy of a block in the same medium; separate places keep the copies of the others when one
# connector drops its copy. A store shared by several engines (``STORAGE``, locality ``REMOTE``, with an
# owner) has two places, ``STORAGE*0@owner`` and ``STORAGE*1@owner``, filled alternately: such a store
# publishes no evictions, so old entries are expired one place at a time. A store with a feed of its own has
# one place, whose name says how engines find blocks there (``Reach``): ``STORAGE*alone0@owner``.
# ``Plane.medium`` holds a place name; an index does not parse it.


GPU, CPU, STORAGE = MEDIA

# Names that events use for the engine's own pool.
ON_GPU = frozenset({None, "", GPU, "gpu"})

OWNER_CHARS_MAX = 64
TURNS = (0, 1)

_NAMED = {
    CPU: CPU,
    STORAGE: STORAGE,
    "cpu": CPU,  # LMCache's connector inside vLLM
    # These three: StorageMedium of SGLang 0.5.23, srt/disaggregation/kv_events.py.
    "CPU_PINNED": CPU,
    "DISK": STORAGE,
    "EXTERNAL": STORAGE,
}
# SGLang's host cache and its GPU cache are one tree: a reset empties both.
_CLEARED_WITH_GPU = frozenset({"CPU_PINNED"})

REMOTE = "REMOTE"
# Owner of what vLLM's MooncakeStoreConnector publishes: a ``cpu`` chunk that names its group, and no removal
# (mooncake/store/worker.py, 0.32 and 0.33). LMCache's ``cpu`` names none.
MOONCAKE = "mooncake"
_REACH = re.compile(r"STORAGE\*(alone|after)([0-9]+)@")
# Secondary tiers that vLLM's own offloading looks up together with its host memory.
_JOINED_OWNERS = frozenset({"kvcr"})


def medium_named(name: str | None) -> str | None:
    """Map an event's medium name to ``CPU`` or ``STORAGE``; None for an unknown name."""
    return _NAMED.get(name) if name is not None else None


def is_cleared_with_gpu(name: str | None) -> bool:
    """Whether the medium with this name is emptied when an engine clears its cache."""
    return name in _CLEARED_WITH_GPU


def is_remote(medium: str, locality: str | None, ownership: str | None) -> bool:
    """Whether an event describes a store that other engines may read."""
    return medium == STORAGE and locality == REMOTE and bool(ownership)


def place(medium: str, ownership: str | None = None, *, turn: int | None = None) -> str:
    """Build the name of a place; ``turn`` is 0 or 1 for a shared store."""
    name = medium if turn is None else f"{medium}*{turn}"
    return f"{name}@{ownership}" if ownership else name


def medium_of(name: str) -> str:
    """Return ``GPU``, ``CPU`` or ``STORAGE``."""
    return name.partition("@")[0].partition("*")[0]


def owner_of(name: str) -> str:
    """Return the owner (connector) of a place; empty if events do not name one."""
    return name.partition("@")[2]


def connector_of(name: str) -> str:
    """Return the connector that looks this place up: its owner, or "" for vLLM's own."""
    owner = owner_of(name)
    return "" if owner in _JOINED_OWNERS else owner


class Reach(NamedTuple):
    """How a connector finds blocks in a place."""

    alone: bool
    """It must hold the whole hit by itself; else what comes before the GPU hit counts as present."""
    chunk_tokens: int
    """Tokens under one key; 0: a block."""


def store_place(owner: str, reach: Reach) -> str:
    """Build the name of the place of a store that has a feed of its own."""
    return f"{STORAGE}*{'alone' if reach.alone else 'after'}{reach.chunk_tokens}@{owner}"


def reach_of(name: str) -> Reach:
    """Return how the connector of this place finds blocks there; vLLM's own has chunks of its own."""
    found = _REACH.match(name)
    if found is None:
        return Reach(owner_of(name) == MOONCAKE, 0)
    return Reach(found[1] == "alone", int(found[2]))


def is_shared(name: str) -> bool:
    """Whether the place is a store shared by several engines."""
    return "*" in name.partition("@")[0]


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
