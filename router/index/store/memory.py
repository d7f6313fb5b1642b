"""The embedded index: one dictionary from block hash to row number (see ``patterns.py``).

Presence is a bit of the block's row; the first copy is the bit itself and only further copies are counted
(``_Lane.extra``), so a block costs one dictionary entry whatever number of engines and groups hold it.
An engine has a slot; forgetting it clears the slot's lanes in the row table, whatever number of blocks
they hold. Blocks left on an empty row are swept a slice at a time by later writes (the list of keys to sweep
is copied at once: about 10 ms per million blocks).

Used from one thread (the event loop). Not shared between processes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import groupby, repeat

import numpy as np

from publisher.block_hash import PromptHashes
from publisher.events import BlockHash
from router.index.base import IndexStats, Plane, Rows, Runs, Slot, Words, only_gpu
from router.index.store.recall import HASHES_MIN, Numbers, Recall
from router.index.store.rows import Patterns, Steps, slot_position

_SWEEP_SLICE = 512
"""Blocks looked at per write while leftovers are being swept: about 50 us."""

_ROWS_MAX = 1 << 16
"""Rows kept before unused ones are dropped (one pass over the blocks, about 0.1 s per million)."""

_STEPS_MAX = 1 << 20
"""Steps remembered by all lanes together (about 100 MB) before they are dropped with the unused rows."""


_RUNS_MAX = 32
"""Stretches of equal rows that are told of; beyond it arrays are faster."""


class _Lane:
    """One engine in one plane."""

    __slots__ = ("clear", "count", "extra", "set")

    def __init__(self, steps: tuple[Steps, Steps]) -> None:
        self.set, self.clear = steps
        self.count = 0
        self.extra: dict[BlockHash, int] = {}


class MemoryIndex:
    """See ``router.index.base.Index`` for the contract."""

    def __init__(self) -> None:
        self._row_of: dict[BlockHash, int] = {}
        self._patterns = Patterns()
        self._recall = Recall()
        self._columns: dict[tuple[Plane, int], int] = {}
        self._only_gpu = True
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._lanes: dict[str, dict[Plane, _Lane]] = {}
        self._unknown_removals = 0
        self._rows_max = _ROWS_MAX
        self._steps_seen = 0
        self._sweep: list[BlockHash] = []
        self._empty_rows: frozenset[int] = frozenset()

    def store(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> None:
        lane = self._lane(engine_id, plane)
        row_of, steps = self._row_of, lane.set
        stamps, mask, now = self._recall.stamps, self._recall.mask, self._recall.now
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
        lane = self._lanes.get(engine_id, {}).get(plane)
        if lane is None:
            self._unknown_removals += len(hashes)
            return ()
        left: list[BlockHash] = []
        row_of, steps, extra = self._row_of, lane.clear, lane.extra
        stamps, mask, now = self._recall.stamps, self._recall.mask, self._recall.now
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
            if step:
                row_of[block] = step
            else:
                del row_of[block]
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
            # So few are gone through faster than an array is made of them.
            numbers = list(map(self._row_of.get, hashes, repeat(0)))
            starts = _starts(numbers)
            firsts = [numbers[at] for at in starts]
        else:
            if isinstance(hashes, PromptHashes):
                found_rows = self._recall.rows(hashes, self._numbers)
            else:
                found_rows = self._numbers(hashes)
            starts = [0, *((found_rows[1:] != found_rows[:-1]).nonzero()[0] + 1).tolist()]
            numbers, firsts = found_rows, found_rows[starts].tolist()
        if len(starts) <= _RUNS_MAX:
            words = self._patterns.words
            rows = [words[row] for row in firsts]
            return Rows(len(hashes), None, Runs(starts, rows, self._columns, self._only_gpu))
        found = self._patterns.matrix.take(numbers, axis=0)
        return Rows(len(hashes), {key: found[:, at] for key, at in self._columns.items()})

    def _numbers(self, hashes: Sequence[BlockHash]) -> Numbers:
        """The row of each hash, 0 for none. Packing costs a third of ``np.fromiter``."""
        packed = struct.pack(f"{len(hashes)}i", *map(self._row_of.get, hashes, repeat(0)))
        return np.frombuffer(packed, np.int32)

    def copies(self, engine_id: str, plane: Plane) -> int:
        lane = self._lanes.get(engine_id, {}).get(plane)
        return 0 if lane is None else lane.count

    def planes(self, engine_id: str) -> tuple[Plane, ...]:
        """The planes this engine ever stored anything in since it was forgotten."""
        return tuple(self._lanes.get(engine_id, ()))

    def held_in(self, engine_id: str, planes: Sequence[Plane], hashes: Sequence[BlockHash]) -> Words:
        """Per hash one word: bit i is set if this engine holds it in ``planes[i]`` (at most 64)."""
        held: Words = self._held_by_row(engine_id, planes)[self._numbers(hashes)]
        return held

    def blocks_of(self, engine_id: str, medium: str | None = None) -> Words:
        """Every hash this engine holds in any plane (of one medium), in no order; a pass over all blocks."""
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
        """Per row number, the engine's presence in ``planes`` as bits."""
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
        lanes = [lane for planes in self._lanes.values() for lane in planes.values()]
        return IndexStats(
            blocks=len(self._row_of),
            residencies=sum(lane.count for lane in lanes),
            extra_copies=sum(sum(lane.extra.values()) for lane in lanes),
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
            self._columns = {**self._columns, (plane, word): column}  # answers given keep the ones they have
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
        self._sweep = list(self._row_of)
        self._empty_rows = self._patterns.empty_rows()

    def _housekeep(self) -> None:
        if self._sweep:
            self._sweep_slice()
        elif self._patterns.count > self._rows_max or self._patterns.steps_made > _STEPS_MAX:
            self._drop_unused_rows()
        self._steps_seen = self._patterns.steps_made

    def _sweep_slice(self) -> None:
        row_of, empty = (
            self._row_of,
            self._empty_rows,
        )  # no row changes, but to empty, until the sweep is over
        for block in self._sweep[-_SWEEP_SLICE:]:
            if row_of.get(block) in empty:
                del row_of[block]
        del self._sweep[-_SWEEP_SLICE:]

    def _drop_unused_rows(self) -> None:
        self._recall.begin()
        renumbered = self._patterns.keep_only(sorted(set(self._row_of.values())))
        self._row_of = {block: new for block, row in self._row_of.items() if (new := renumbered[row])}
        for lanes in self._lanes.values():
            for lane in lanes.values():
                lane.set.clear()
                lane.clear.clear()
        self._rows_max = max(_ROWS_MAX, 2 * self._patterns.count)


def _starts(numbers: list[int]) -> list[int]:
    """Where each stretch of equal numbers starts."""
    starts: list[int] = []
    at = 0
    for number, _ in groupby(numbers):
        at = numbers.index(number, at)
        starts.append(at)
    return starts
