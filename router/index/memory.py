"""The in-process index: one dictionary from block hash to row number.

Presence is a bit of the block's row; the first copy is the bit itself and only further copies are counted
(``_Lane.extra``), so a block costs one dictionary entry, independent of the number of engines and groups that
hold it. An engine has a slot; forgetting it clears the slot's lanes in the row table, independent of the
number of blocks they hold. Blocks left on an empty row are swept in slices by later writes (the list of keys
to sweep is copied at once: about 10 ms per million blocks, measured).

Used from one thread (the event loop). Not shared between processes.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby, repeat
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvatlas.publisher.block_hash import PromptHashes
from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import WORD_BITS, IndexStats, Plane, Rows, Runs, Slot, Words, only_gpu
from kvatlas.router.index.bit_rows import Patterns, Steps, slot_position

# Cache of lookup results for the conversation's next turn: only blocks changed since are looked up again. A
# lookup of a thousand blocks costs a thousand CPU cache misses, and most results are unchanged since the last
# turn. So every change of a block's row writes the current generation (number of lookups) into a table at a
# position given by the block's hash; a prompt's hashes carry the rows that were found and their generation. A
# row whose table entry is older is still valid. Collisions only cause an additional lookup. Results equal
# those of an uncached lookup (tests/router/index/store/test_lookup_cache.py).


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


def _runs(numbers: Numbers) -> NumberRuns:
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
            runs = _runs(numbers)
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
            runs = _runs(numbers)
        if known < len(hashes):
            more = find(hashes[known:])
            numbers = np.concatenate((numbers, more))
            starts, firsts = _runs(more)
            same = runs.numbers[-1:] == firsts[:1]  # the last run goes on
            runs = NumberRuns(
                runs.starts + [known + at for at in starts[same:]], runs.numbers + firsts[same:]
            )
        return numbers, runs


# Blocks checked per write while leftovers are being swept: about 50 us (measured).
_SWEEP_SLICE = 512

# Rows kept before unused ones are dropped (one pass over the blocks, about 0.1 s per million, measured).
_ROWS_MAX = 1 << 16

# Transitions cached by all lanes together (about 100 MB) before they are dropped with the unused rows.
_STEPS_MAX = 1 << 20


_ROW_0: Final = frozenset((0,))

# Maximum number of runs returned; beyond it arrays are faster (measured).
_RUNS_MAX = 32


class _Lane:
    """One engine in one plane."""

    __slots__ = ("clear", "count", "extra", "set")

    def __init__(self, steps: tuple[Steps, Steps]) -> None:
        self.set, self.clear = steps
        self.count = 0
        self.extra: dict[BlockHash, int] = {}


class MemoryIndex:
    """In-process implementation of ``Index``."""

    def __init__(self) -> None:
        self._row_of: dict[BlockHash, int] = {}
        self._patterns = Patterns()
        self._lookup_cache = LookupCache()
        self._columns: dict[tuple[Plane, int], int] = {}
        self._only_gpu = True
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._lanes: dict[str, dict[Plane, _Lane]] = {}
        self._unknown_removals = 0
        self._rows_max = _ROWS_MAX
        self._steps_seen = 0
        self._sweep: list[BlockHash] = []
        self._sweep_again = False
        # Lanes were dropped since ``_empty_rows`` was found.
        self._dropped = False
        # Rows without any bit. A transition made before a lane was dropped may lead to one that is not row 0.
        self._empty_rows = _ROW_0

    def store(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> None:
        if self._dropped:
            self._begin_sweep()
        lane = self._lane(engine_id, plane)
        row_of, steps = self._row_of, lane.set
        stamps, mask, now = self._lookup_cache.stamps, self._lookup_cache.mask, self._lookup_cache.now
        get, new = row_of.get, 0
        for block in hashes:
            row = get(block, 0)
            step = steps[row]
            if step != row:
                row_of[block] = step
                stamps[block & mask] = now
                new += 1
            else:
                lane.extra[block] = lane.extra.get(block, 0) + 1
        lane.count += new
        if self._sweep or self._steps_seen != self._patterns.steps_made:
            self._housekeep()

    def remove(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        if self._dropped:
            self._begin_sweep()
        lane = self._lanes.get(engine_id, {}).get(plane)
        if lane is None:
            self._unknown_removals += len(hashes)
            return ()
        left: list[BlockHash] = []
        row_of, steps, extra, empty = self._row_of, lane.clear, lane.extra, self._empty_rows
        stamps, mask, now = self._lookup_cache.stamps, self._lookup_cache.mask, self._lookup_cache.now
        for block in hashes:
            if extra and block in extra:
                self._drop_copy(extra, block)
                left.append(block)
                continue
            row = row_of.get(block, 0)
            step = steps[row]
            if step == row:
                self._unknown_removals += 1
                continue
            lane.count -= 1
            stamps[block & mask] = now
            if step in empty:
                del row_of[block]
            else:
                row_of[block] = step
        if self._sweep or self._steps_seen != self._patterns.steps_made:
            self._housekeep()
        return left

    @staticmethod
    def _drop_copy(extra: dict[BlockHash, int], block: BlockHash) -> None:
        if extra[block] == 1:
            del extra[block]
        else:
            extra[block] -= 1

    def set_copies(self, engine_id: str, plane: Plane, block: BlockHash, copies: int) -> None:
        lane = self._lane(engine_id, plane)
        lane.extra.pop(block, None)
        row = self._row_of.get(block, 0)
        present = lane.set[row] == row
        if copies and not present:
            self.store(engine_id, plane, (block,))
        elif present and not copies:
            self.remove(engine_id, plane, (block,))
        if copies > 1:
            lane.extra[block] = copies - 1

    def clear(self, engine_id: str, medium: str) -> None:
        lanes = self._lanes.get(engine_id, {})
        self._drop_lanes(engine_id, [plane for plane in lanes if plane.medium == medium])

    def forget(self, engine_id: str) -> None:
        self._drop_lanes(engine_id, list(self._lanes.get(engine_id, {})))
        self._lanes.pop(engine_id, None)
        slot = self._slots.pop(engine_id, None)
        if slot is not None:
            self._free_slots.append(slot)

    def adopt(self, staged_id: str, engine_id: str) -> None:
        self.forget(engine_id)
        lanes = self._lanes.pop(staged_id, None)
        if lanes is not None:
            self._lanes[engine_id] = lanes
            self._slots[engine_id] = self._slots.pop(staged_id)

    def slot(self, engine_id: str) -> Slot | None:
        slot = self._slots.get(engine_id)
        return None if slot is None else Slot(*slot_position(slot))

    def lookup(self, hashes: Sequence[BlockHash]) -> Rows:
        numbers: Numbers | list[int]
        if len(hashes) < HASHES_MIN:
            # A short list is processed faster without an array (measured).
            numbers = list(map(self._row_of.get, hashes, repeat(0)))
            starts = _starts(numbers)
            firsts = list(map(numbers.__getitem__, starts))
        elif isinstance(hashes, PromptHashes):
            numbers, (starts, firsts) = self._lookup_cache.rows(hashes, self._numbers)
        else:
            numbers = self._numbers(hashes)
            starts, firsts = _runs(numbers)
        if len(starts) <= _RUNS_MAX:
            words = self._patterns.words
            rows = list(map(words.__getitem__, firsts))
            return Rows(len(hashes), None, Runs(starts, rows, self._columns, self._only_gpu))
        found = self._patterns.matrix.take(numbers, axis=0)
        return Rows(len(hashes), {key: found[:, at] for key, at in self._columns.items()})

    def _numbers(self, hashes: Sequence[BlockHash]) -> Numbers:
        """Return the row of each hash, 0 for none.

        ``struct.pack`` takes a third of the time of ``np.fromiter``.
        """
        packed = struct.pack(f"{len(hashes)}i", *map(self._row_of.get, hashes, repeat(0)))
        return np.frombuffer(packed, np.int32)

    def holds(self, engine_id: str, medium: str, block: BlockHash) -> bool:
        row, lanes = self._row_of.get(block, 0), self._lanes.get(engine_id)
        if not row or not lanes:
            return False
        # One loop: each request asks.
        words, columns = self._patterns.words[row], self._columns
        word, bit = divmod(self._slots[engine_id], WORD_BITS)
        held = 0
        for plane in lanes:
            if plane.medium == medium:
                held |= words[columns[plane, word]]
        return bool(held >> bit & 1)

    def copies(self, engine_id: str, plane: Plane) -> int:
        lane = self._lanes.get(engine_id, {}).get(plane)
        return 0 if lane is None else lane.count

    def planes(self, engine_id: str) -> tuple[Plane, ...]:
        """Planes in which this engine stored anything since it was last forgotten."""
        return tuple(self._lanes.get(engine_id, ()))

    def held_in(self, engine_id: str, planes: Sequence[Plane], hashes: Sequence[BlockHash]) -> Words:
        """Return one word per hash: bit i is set if this engine holds it in ``planes[i]`` (at most 64)."""
        held: Words = self._held_by_row(engine_id, planes)[self._numbers(hashes)]
        return held

    def blocks_of(self, engine_id: str, medium: str | None = None) -> Words:
        """Return every hash this engine holds in any plane (of one medium), unordered; one pass over all
        blocks.
        """
        planes = tuple(plane for plane in self.planes(engine_id) if medium in {None, plane.medium})
        if not planes:
            return np.zeros(0, np.uint64)
        numbers = np.fromiter(self._row_of.values(), np.intp, len(self._row_of))
        hashes = np.fromiter(self._row_of.keys(), np.uint64, len(self._row_of))
        held = self._held_by_row(engine_id, planes[:64]) != 0
        for start in range(64, len(planes), 64):
            held |= self._held_by_row(engine_id, planes[start : start + 64]) != 0
        blocks: Words = hashes[held[numbers]]
        return blocks

    def _held_by_row(self, engine_id: str, planes: Sequence[Plane]) -> Words:
        """Return per row number the engine's presence in ``planes`` as bits."""
        matrix = self._patterns.matrix
        held = np.zeros(matrix.shape[0], np.uint64)
        lanes = self._lanes.get(engine_id, {})
        for number, plane in enumerate(planes):
            if plane in lanes:
                word, bit = slot_position(self._slots[engine_id])
                column = matrix[:, self._columns[plane, word]]
                held |= ((column >> np.uint64(bit)) & np.uint64(1)) << np.uint64(number)
        return held

    def physical(self, engine_id: str, medium: str) -> int:
        lanes = self._lanes.get(engine_id, {}).items()
        return sum(lane.count + sum(lane.extra.values()) for plane, lane in lanes if plane.medium == medium)

    def stats(self) -> IndexStats:
        # One loop: with a thousand engines this is the longest step of a page of metrics.
        residencies = extra_copies = 0
        for planes in self._lanes.values():
            for lane in planes.values():
                residencies += lane.count
                if lane.extra:
                    extra_copies += sum(lane.extra.values())
        return IndexStats(
            blocks=len(self._row_of),
            residencies=residencies,
            extra_copies=extra_copies,
            unknown_removals=self._unknown_removals,
            patterns=self._patterns.count,
        )

    def check_integrity(self) -> list[str]:
        problems: list[str] = []
        numbers = np.fromiter(self._row_of.values(), np.intp, len(self._row_of))
        for engine_id, planes in self._lanes.items():
            word, bit = slot_position(self._slots[engine_id])
            for plane, lane in planes.items():
                column = self._patterns.matrix[:, self._columns[plane, word]]
                present = int(((column[numbers] >> np.uint64(bit)) & np.uint64(1)).sum())
                if present != lane.count:
                    problems.append(f"{engine_id} {plane}: {present} blocks in rows, {lane.count} counted")
                for block, extra in lane.extra.items():
                    row = self._row_of.get(block, 0)
                    if extra < 1 or lane.set[row] != row:
                        problems.append(f"{engine_id} {plane}: {extra} extra copies of absent block {block}")
        left = int(np.isin(numbers, list(self._patterns.empty_rows())).sum())
        if left > len(self._sweep) and not (self._dropped or self._sweep_again):
            problems.append(f"{left} blocks that no engine holds, {len(self._sweep)} to be swept")
        if self._patterns.row(0).any():
            problems.append("row 0 is not empty")
        return problems

    def _lane(self, engine_id: str, plane: Plane) -> _Lane:
        try:
            return self._lanes[engine_id][plane]
        except KeyError:
            return self._new_lane(engine_id, plane)

    def _new_lane(self, engine_id: str, plane: Plane) -> _Lane:
        lanes = self._lanes.get(engine_id)
        if lanes is None:
            lanes = self._lanes[engine_id] = {}
            self._slots[engine_id] = self._free_slots.pop() if self._free_slots else len(self._slots)
        word, bit = slot_position(self._slots[engine_id])
        column = self._columns.get((plane, word))
        if column is None:
            column = self._patterns.add_column()
            self._columns = {
                **self._columns,
                (plane, word): column,
            }  # results already returned keep their own mapping
            self._only_gpu = only_gpu(self._columns)
        lane = lanes[plane] = _Lane(self._patterns.steps(column, bit))
        return lane

    def _drop_lanes(self, engine_id: str, planes: list[Plane]) -> None:
        if not planes:
            return
        word, bit = slot_position(self._slots[engine_id])
        for plane in planes:
            self._patterns.drop(self._columns[plane, word], bit)
            del self._lanes[engine_id][plane]
        self._dropped = True

    def _begin_sweep(self) -> None:
        """Once for all lanes that were dropped since the write before."""
        self._dropped = False
        self._empty_rows = self._patterns.empty_rows()
        if self._sweep:
            self._sweep_again = True
        else:
            self._sweep = list(self._row_of)

    def _housekeep(self) -> None:
        if self._sweep:
            self._sweep_slice()
            if not self._sweep and self._sweep_again:
                self._sweep_again, self._sweep = False, list(self._row_of)
        elif self._patterns.count > self._rows_max or self._patterns.steps_made > _STEPS_MAX:
            self._drop_unused_rows()
        self._steps_seen = self._patterns.steps_made

    def _sweep_slice(self) -> None:
        row_of, empty = (
            self._row_of,
            self._empty_rows,
        )  # rows only become empty until the sweep is over
        for block in self._sweep[-_SWEEP_SLICE:]:
            if row_of.get(block) in empty:
                del row_of[block]
        del self._sweep[-_SWEEP_SLICE:]

    def _drop_unused_rows(self) -> None:
        self._lookup_cache.begin()
        renumbered = self._patterns.keep_only(sorted(set(self._row_of.values())))
        self._row_of = {block: new for block, row in self._row_of.items() if (new := renumbered[row])}
        for lanes in self._lanes.values():
            for lane in lanes.values():
                lane.set.clear()
                lane.clear.clear()
        self._empty_rows = _ROW_0
        self._rows_max = max(_ROWS_MAX, 2 * self._patterns.count)


def _starts(numbers: list[int]) -> list[int]:
    """Return the start of each run of equal numbers."""
    starts: list[int] = []
    at = 0
    for number, _ in groupby(numbers):
        at = numbers.index(number, at)
        starts.append(at)
    return starts
