"""Contract tests of transfer engines: inherit ``TransferEngineContract`` and define how to make an engine.

    class TestMyEngine(TransferEngineContract):
        def make_engine(self, view, pool): return MyEngine(view, pool)

Where device or host memory is not plain host memory, override ``make_device`` / ``make_pool`` as well: they
return a ``Memory``. Every engine made is closed at the end of its test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import pytest

from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.transfer.base import (
    Direction,
    GroupMoves,
    TransferEngine,
    TransferJob,
    TransferResult,
)
from tests.connectors.transfer.handmade import CASES, SHAPES, UNIFORM, Bytes, HandmadeCache
from tests.support.waiting import HANG_S

NUM_BLOCKS = 24
NUM_SLOTS = 20
MARGIN_BYTES = 4096
"""Canary bytes after the last row."""


class Memory(Protocol):
    """Memory that a test can look into. ``read`` returns a copy, ``write`` replaces everything."""

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def read(self) -> Bytes: ...

    def write(self, content: Bytes) -> None: ...


class ArrayMemory:
    """Plain host memory."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = np.zeros(size_bytes, np.uint8)

    @property
    def address(self) -> int:
        return int(self._bytes.ctypes.data)

    @property
    def size_bytes(self) -> int:
        return int(self._bytes.nbytes)

    def read(self) -> Bytes:
        return self._bytes.copy()

    def write(self, content: Bytes) -> None:
        self._bytes[:] = content


class PoolPart:
    """A pool that ends before its memory does, so that writes past the end show."""

    def __init__(self, memory: Memory, size_bytes: int) -> None:
        self.memory = memory
        self.address = memory.address
        self.size_bytes = size_bytes


class Rig:
    """One cache, one pool and one engine, all filled with random bytes."""

    def __init__(self, contract: TransferEngineContract, layout: str, shape: str, seed: int = 7) -> None:
        rng = np.random.default_rng(seed)
        self.cache = HandmadeCache(layout, SHAPES[shape], NUM_BLOCKS)
        self.device = contract.make_device(self.cache.size_bytes)
        self.view = self.cache.view(self.device.address)
        self.row_bytes = self.view.row_bytes
        self.host = contract.make_pool(self.row_bytes * NUM_SLOTS + MARGIN_BYTES)
        self.device.write(rng.integers(0, 256, self.device.size_bytes, np.uint8))
        self.host.write(rng.integers(0, 256, self.host.size_bytes, np.uint8))
        self.engine = contract.make_engine(self.view, PoolPart(self.host, self.row_bytes * NUM_SLOTS))
        self._last_job_id = 0

    def moves(self, seed: int = 3) -> tuple[GroupMoves, ...]:
        """Some blocks of every group, each block and slot used once, in no particular order."""
        rng = np.random.default_rng(seed)
        blocks = rng.permutation(np.arange(1, NUM_BLOCKS))[:15].astype(np.int64)
        slots = rng.permutation(NUM_SLOTS)[:15].astype(np.int64)
        shares = np.array_split(np.arange(15), len(self.view.groups))
        return tuple(
            GroupMoves(group.group_idx, blocks[share], slots[share])
            for group, share in zip(self.view.groups, shares, strict=True)
        )

    def submit(self, direction: Direction, *groups: GroupMoves) -> int:
        self._last_job_id += 1
        self.engine.submit(TransferJob(self._last_job_id, direction, groups))
        return self._last_job_id

    def run(self, direction: Direction, *groups: GroupMoves) -> TransferResult:
        """Submit one job and return how it ended."""
        job_id = self.submit(direction, *groups)
        assert self.engine.wait([job_id], HANG_S)
        [result] = self.engine.poll()
        assert (result.job_id, result.direction) == (job_id, direction)
        return result


def move(group_idx: int, blocks: list[int], slots: list[int], keys: tuple[bytes, ...] = ()) -> GroupMoves:
    return GroupMoves(group_idx, np.array(blocks, np.int64), np.array(slots, np.int64), keys)


class TransferEngineContract:
    """See the module's docstring."""

    def make_engine(self, view: CacheView, pool: PoolPart) -> TransferEngine:
        raise NotImplementedError

    def make_device(self, size_bytes: int) -> Memory:
        return ArrayMemory(size_bytes)

    def make_pool(self, size_bytes: int) -> Memory:
        return ArrayMemory(size_bytes)

    @pytest.fixture
    def rigs(self) -> Iterator[Any]:
        made: list[Rig] = []

        def make(layout: str = "LBHNC", shape: str = "sliding windows and one full group") -> Rig:
            made.append(Rig(self, layout, shape))
            return made[-1]

        yield make
        for rig in made:
            rig.engine.close()

    @pytest.mark.parametrize(("layout", "shape"), CASES)
    def test_saved_blocks_come_back_and_nothing_else_changes(
        self, rigs: Any, layout: str, shape: str
    ) -> None:
        rig = rigs(layout, shape)
        before, host_before, moves = rig.device.read(), rig.host.read(), rig.moves()
        stored = rig.run(Direction.STORE, *moves)
        assert stored.ok, stored.error
        assert stored.bytes_by_group == {
            m.group_idx: len(m.slots) * rig.view.groups[m.group_idx].row_bytes for m in moves
        }
        assert np.array_equal(rig.device.read(), before)
        self._only_rows_changed(rig, host_before, moves)

        wiped = before.copy()
        for m in moves:
            rig.cache.fill(wiped, m.group_idx, m.block_ids, 0xEE)
        rig.device.write(wiped)
        host_stored = rig.host.read()
        loaded = rig.run(Direction.LOAD, *moves)
        assert loaded.ok, loaded.error
        assert np.array_equal(rig.device.read(), before)
        assert np.array_equal(rig.host.read(), host_stored)

    @staticmethod
    def _only_rows_changed(rig: Rig, host_before: Bytes, moves: tuple[GroupMoves, ...]) -> None:
        untouched = np.ones(rig.host.size_bytes, bool)
        for m in moves:
            for slot in m.slots.tolist():
                start = slot * rig.row_bytes
                untouched[start : start + rig.view.groups[m.group_idx].row_bytes] = False
        assert np.array_equal(rig.host.read()[untouched], host_before[untouched])

    @pytest.mark.parametrize(("layout", "shape"), CASES)
    def test_rows_can_be_loaded_into_other_blocks(self, rigs: Any, layout: str, shape: str) -> None:
        rig = rigs(layout, shape)
        before = rig.device.read()
        group = rig.view.groups[-1].group_idx
        assert rig.run(Direction.STORE, move(group, [5, 2, 9], [0, 1, 7])).ok
        assert rig.run(Direction.LOAD, move(group, [3, 20, 11], [1, 7, 0])).ok
        after = rig.device.read()
        targets, sources = np.array([3, 20, 11]), np.array([2, 9, 5])
        for got, wanted in zip(
            rig.cache.blocks(after, group, targets), rig.cache.blocks(before, group, sources), strict=True
        ):
            assert np.array_equal(got, wanted)
        rest = np.setdiff1d(np.arange(NUM_BLOCKS), targets)
        for got, wanted in zip(
            rig.cache.blocks(after, group, rest), rig.cache.blocks(before, group, rest), strict=True
        ):
            assert np.array_equal(got, wanted)

    @pytest.mark.parametrize("direction", list(Direction))
    @pytest.mark.parametrize(
        "wrong",
        [
            move(0, [0], [1]),
            move(0, [3, 0], [1, 2]),
            move(0, [-1], [1]),
            move(0, [NUM_BLOCKS], [1]),
            move(0, [1], [-1]),
            move(0, [1], [NUM_SLOTS]),
            move(0, [1, 2], [1]),
            move(9, [1], [1]),
            move(0, [1], [1], (b"a", b"b")),
        ],
        ids=[
            "null block", "null block among others", "negative block", "block past the end", "negative slot",
            "slot past the end", "lengths differ", "unknown group", "keys of another length",
        ],
    )  # fmt: skip
    def test_a_wrong_job_fails_and_touches_nothing(
        self, rigs: Any, direction: Direction, wrong: GroupMoves
    ) -> None:
        rig = rigs()
        before, host_before = rig.device.read(), rig.host.read()
        result = rig.run(direction, move(1, [4], [4]), wrong)
        assert not result.ok
        assert result.error
        assert result.bytes_by_group == {}
        assert np.array_equal(rig.device.read(), before)
        assert np.array_equal(rig.host.read(), host_before)

    def test_a_destination_named_twice_is_refused(self, rigs: Any) -> None:
        rig = rigs()
        assert not rig.run(Direction.LOAD, move(0, [4, 4], [1, 2])).ok
        assert not rig.run(Direction.STORE, move(0, [4], [1]), move(1, [5], [1])).ok
        assert rig.run(Direction.LOAD, move(0, [4, 5], [1, 1])).ok

    def test_a_wrong_job_does_not_harm_the_next(self, rigs: Any) -> None:
        rig = rigs()
        assert not rig.run(Direction.STORE, move(0, [0], [1])).ok
        assert rig.run(Direction.STORE, move(0, [1], [1])).ok

    def test_every_job_is_reported_once(self, rigs: Any) -> None:
        rig = rigs()
        wanted = []
        seen: list[int] = []
        for i in range(40):
            direction = Direction.STORE if i % 2 else Direction.LOAD
            wanted.append(rig.submit(direction, move(0, [1 + i % 20], [i % NUM_SLOTS])))
            seen += [result.job_id for result in rig.engine.poll()]
        assert rig.engine.wait(wanted, HANG_S)
        seen += [result.job_id for result in rig.engine.poll()]
        assert sorted(seen) == wanted
        assert rig.engine.poll() == []

    def test_a_job_that_moves_nothing_succeeds(self, rigs: Any) -> None:
        rig = rigs()
        assert rig.run(Direction.LOAD).ok
        result = rig.run(Direction.STORE, move(0, [], []))
        assert (result.ok, result.bytes_by_group) == (True, {})

    def test_waiting_for_what_is_over_or_unknown_returns_immediately(self, rigs: Any) -> None:
        rig = rigs()
        rig.run(Direction.STORE, move(0, [1], [1]))
        assert rig.engine.wait([1, 999], 0.0)
        assert rig.engine.wait([], 0.0)

    def test_close_finishes_what_runs_and_refuses_the_rest(self, rigs: Any) -> None:
        rig = rigs()
        jobs = [rig.submit(Direction.STORE, move(0, [1 + i], [i])) for i in range(8)]
        rig.engine.close()
        late = rig.submit(Direction.LOAD, move(0, [9], [1]))
        results = {result.job_id: result for result in rig.engine.poll()}
        assert sorted(results) == [*jobs, late]
        assert all(results[job].ok for job in jobs)
        assert not results[late].ok
        assert results[late].error
        rig.engine.close()

    @pytest.mark.parametrize("shape", list(UNIFORM))
    def test_neighbouring_blocks_in_neighbouring_rows(self, rigs: Any, shape: str) -> None:
        """The case that engines merge into fewer copies."""
        rig = rigs("BLHNC", shape)
        before = rig.device.read()
        moves = move(0, list(range(1, NUM_BLOCKS - 4)), list(range(NUM_BLOCKS - 5)))
        assert rig.run(Direction.STORE, moves).ok
        wiped = before.copy()
        rig.cache.fill(wiped, 0, moves.block_ids, 0)
        rig.device.write(wiped)
        assert rig.run(Direction.LOAD, moves).ok
        assert np.array_equal(rig.device.read(), before)


def job(job_id: int, direction: Direction, *groups: GroupMoves) -> TransferJob:
    return TransferJob(job_id, direction, groups)
