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
from collections.abc import Sequence
from itertools import groupby, repeat
from typing import Final

import numpy as np

from kvatlas.publisher.block_hash import PromptHashes
from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import WORD_BITS, IndexStats, Plane, Rows, Runs, Slot, Words, only_gpu
from kvatlas.router.index.bit_rows import Patterns, Steps, slot_position
from kvatlas.router.index.lookup_cache import HASHES_MIN, LookupCache, Numbers, runs_of

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
            starts, firsts = runs_of(numbers)
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
