"""Rows on their way to a shared store: the contract of all engines, and what staging adds to it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.store.base import Namespace
from kvatlas.connectors.store.frame import FRAME_BYTES
from kvatlas.connectors.transfer.base import Direction, GroupMoves, TransferJob, TransferResult
from kvatlas.connectors.transfer.host_engine import HostTransferEngine
from kvatlas.connectors.worker.staged import StagedTransfers, StagingSettings, staging_row_bytes
from tests.connectors.store.store_kit import MemoryStore
from tests.connectors.transfer.contract import NUM_BLOCKS, PoolPart, TransferEngineContract
from tests.connectors.transfer.handmade import UNIFORM, Bytes, HandmadeCache
from tests.support.waiting import HANG_S

NAMESPACE = Namespace({"model": "m"}, ((0, 0, 0), (1, 0, 0)), "engine-1")
TICKET = NAMESPACE.ticket(0)
ROWS = 12


class Rows:
    """Staging rows in plain memory."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.buffer = bytearray(rows * row_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.size_bytes = len(self.buffer)
        self.closed = False

    def row(self, slot: int) -> memoryview:
        return memoryview(self.buffer)[slot * self.row_bytes : (slot + 1) * self.row_bytes]

    def close(self) -> None:
        self.closed = True


def closed(engine: StagedTransfers) -> bool:
    """Whether it released its rows."""
    pool = engine._pool
    assert isinstance(pool, Rows)
    return pool.closed


def staged(
    view: CacheView,
    store: Any,
    *,
    rows: int = ROWS,
    fault: Any = None,
    rank: int = 0,
    namespace: Namespace = NAMESPACE,
    **settings: Any,
) -> StagedTransfers:
    settings.setdefault("keep", False)  # most of these tests are about the way to the store
    row_bytes = staging_row_bytes(view.row_bytes)
    pool = Rows(rows, row_bytes)
    copies = HostTransferEngine(view, pool, row_bytes=row_bytes, fault=fault)
    return StagedTransfers(view, copies, pool, store, namespace, rank, StagingSettings(rows, **settings))


class KeyedBySlot:
    """Lets the contract's jobs name rows: a row is the store's value of that name."""

    def __init__(self, engine: StagedTransfers) -> None:
        self._engine = engine
        self.poll, self.wait, self.close = engine.poll, engine.wait, engine.close

    def submit(self, job: TransferJob, after: Any = None) -> None:
        groups = tuple(
            GroupMoves(
                moves.group_idx,
                moves.block_ids,
                np.full_like(moves.slots, TICKET if min(moves.slots, default=0) >= 0 else -1),
                moves.keys or tuple(b"%d of %d" % (slot, moves.group_idx) for slot in moves.slots.tolist()),
            )
            for moves in job.groups
        )
        self._engine.submit(TransferJob(job.job_id, job.direction, groups), after)


class TestStagedTransfers(TransferEngineContract):
    def make_engine(self, view: CacheView, pool: PoolPart) -> Any:
        return KeyedBySlot(staged(view, MemoryStore(), keep=True))

    @staticmethod
    def _only_rows_changed(rig: Any, host_before: Bytes, moves: Any) -> None:
        """The rows are elsewhere."""
        assert np.array_equal(rig.host.read(), host_before)

    @pytest.mark.skip(reason="slots are not rows here: see the tests of tickets")
    def test_a_wrong_job_fails_and_touches_nothing(self) -> None:  # type: ignore[override]
        """Below, by its own list."""

    @pytest.mark.skip(reason="stores of one value by two blocks are no clash of rows here")
    def test_a_destination_named_twice_is_refused(self) -> None:  # type: ignore[override]
        """Below, for loads."""

    @pytest.mark.parametrize("shape", ["one full group"])
    def test_close_finishes_what_runs_and_refuses_the_rest(self, rigs: Any, shape: str) -> None:
        rig = rigs("LBHNC", shape)
        super().test_close_finishes_what_runs_and_refuses_the_rest(lambda: rig)


class Rig:
    """One cache, and as many engines on one store as a test wants."""

    def __init__(self) -> None:
        self.cache = HandmadeCache("LBHNC", UNIFORM["sliding windows and one full group"], NUM_BLOCKS)
        self.device = np.random.default_rng(5).integers(0, 256, self.cache.size_bytes, np.uint8)
        self.view = self.cache.view(int(self.device.ctypes.data))
        self.store = MemoryStore()
        self.engines: list[StagedTransfers] = []
        self._last_job_id = 0

    def open(self, **others: Any) -> StagedTransfers:
        self.engines.append(staged(self.view, self.store, **others))
        return self.engines[-1]

    def job(
        self, direction: Direction, blocks: Sequence[int], keys: Sequence[bytes] | None = None, epoch: int = 0
    ) -> TransferJob:
        self._last_job_id += 1
        named = tuple(keys or (b"key-%d" % block for block in blocks))
        slots = np.full(len(blocks), NAMESPACE.ticket(epoch), np.int64)
        moves = GroupMoves(0, np.array(blocks, np.int64), slots, named)
        return TransferJob(self._last_job_id, direction, (moves,))

    def run(self, engine: StagedTransfers, direction: Direction, *args: Any, **others: Any) -> TransferResult:
        job, began_s = self.job(direction, *args, **others), time.monotonic()
        engine.submit(job)
        assert engine.wait([job.job_id], HANG_S)
        [result] = engine.poll()
        assert result.job_id == job.job_id
        assert 0 <= result.seconds <= time.monotonic() - began_s
        return result

    def wipe(self, blocks: Sequence[int]) -> Bytes:
        """Overwrite blocks of group 0; returns the device as it was."""
        before = self.device.copy()
        self.cache.fill(self.device, 0, np.array(blocks), 0xEE)
        return before

    def value_of(self, key: bytes, rank: int = 0) -> bytes:
        return NAMESPACE.digest(rank) + key


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    if made.store.gate is not None:
        made.store.gate.set()
    for engine in made.engines:
        engine.close()


BLOCKS = [3, 1, 7, 20, 9]


def test_another_engine_loads_what_one_stored(rig: Rig) -> None:
    writer, reader = rig.open(), rig.open()
    stored = rig.run(writer, Direction.STORE, BLOCKS)
    row_bytes = rig.view.groups[0].row_bytes
    assert (stored.ok, stored.bytes_by_group) == (True, {0: 5 * row_bytes})
    assert {len(value) for value in rig.store.values.values()} == {row_bytes + FRAME_BYTES}
    before = rig.wipe(BLOCKS)
    loaded = rig.run(reader, Direction.LOAD, BLOCKS)
    assert loaded.ok, loaded.error
    assert np.array_equal(rig.device, before)


def test_a_job_of_more_blocks_than_rows_goes_through_in_chunks(rig: Rig) -> None:
    engine = rig.open(rows=3)
    blocks = list(range(1, NUM_BLOCKS))
    assert rig.run(engine, Direction.STORE, blocks).ok
    before = rig.wipe(blocks)
    assert rig.run(engine, Direction.LOAD, blocks).ok
    assert np.array_equal(rig.device, before)
    assert sorted(engine._rows.take(3)) == [0, 1, 2]


def test_chunks_leave_each_direction_and_thread_two_and_are_no_larger_than_a_bound(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.open(rows=32, threads=4)._chunk_blocks == 4
    assert rig.open(rows=1, threads=4)._chunk_blocks == 1
    monkeypatch.setattr("kvatlas.connectors.worker.staged._CHUNK_BYTES", 1)
    assert rig.open(rows=32, threads=4)._chunk_blocks == 1


def test_each_direction_has_its_deadline() -> None:
    settings = StagingSettings(load_deadline_s=1.0, store_deadline_s=2.0)
    assert [settings.limit_s(way) for way in (Direction.LOAD, Direction.STORE)] == [1.0, 2.0]


def test_blocks_in_the_store_are_not_put_again(rig: Rig) -> None:
    engine = rig.open()
    assert rig.run(engine, Direction.STORE, BLOCKS[:3]).ok
    assert rig.run(engine, Direction.STORE, BLOCKS).ok
    assert sum(count for call, count in rig.store.calls if call == "put") == 5
    assert engine.counters()["store_there_already"] == 3


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda value: bytes([value[0] ^ 1]) + value[1:], "load_fault_checksum"),
        (lambda value: value[:-1] , "load_missing"),
        (lambda value: b"", "load_missing"),
        (lambda value: None, "load_missing"),
        (lambda value: bytes(len(value)), "load_fault_magic"),
    ],
    ids=["bit", "short", "empty", "gone", "zeros"],
)  # fmt: skip
def test_a_bad_value_fails_its_load_by_name_and_nothing_is_copied(
    rig: Rig, spoil: Callable[[bytes], bytes | None], reason: str
) -> None:
    engine = rig.open()
    rig.run(engine, Direction.STORE, BLOCKS)
    name = rig.value_of(b"key-7")
    spoilt = spoil(rig.store.values[name])
    if spoilt is None:
        del rig.store.values[name]
    else:
        rig.store.values[name] = spoilt
    rig.wipe(BLOCKS)
    before = rig.device.copy()
    result = rig.run(engine, Direction.LOAD, [7])
    assert (result.ok, result.failed_keys, result.bytes_by_group) == (False, (b"key-7",), {})
    assert np.array_equal(rig.device, before)
    assert engine.counters()[reason] == 1
    if "fault" in reason:
        assert name not in rig.store.values
    others = [block for block in BLOCKS if block != 7]
    assert rig.run(engine, Direction.LOAD, others).ok


def test_one_bad_value_blames_no_other(rig: Rig) -> None:
    engine = rig.open()
    rig.run(engine, Direction.STORE, BLOCKS)
    rig.store.values[rig.value_of(b"key-20")] = b"short"
    assert rig.run(engine, Direction.LOAD, BLOCKS).failed_keys == (b"key-20",)


def test_a_value_under_the_wrong_name_does_not_pass(rig: Rig) -> None:
    engine = rig.open()
    rig.run(engine, Direction.STORE, BLOCKS)
    rig.store.values[rig.value_of(b"key-1")] = rig.store.values[rig.value_of(b"key-3")]
    assert rig.run(engine, Direction.LOAD, [1]).failed_keys == (b"key-1",)
    assert engine.counters()["load_fault_key"] == 1


def test_other_ranks_epochs_and_namespaces_have_values_of_their_own(rig: Rig) -> None:
    rig.run(rig.open(), Direction.STORE, BLOCKS)
    assert rig.run(rig.open(rank=1), Direction.LOAD, [3]).failed_keys == (b"key-3",)
    assert rig.run(rig.open(), Direction.LOAD, [3], epoch=1).failed_keys == (b"key-3",)
    # Even a value moved under the other's name is not taken for its own.
    rig.store.values[rig.value_of(b"key-3", rank=1)] = rig.store.values[rig.value_of(b"key-3")]
    other = rig.open(rank=1)
    assert rig.run(other, Direction.LOAD, [3]).failed_keys == (b"key-3",)
    assert other.counters()["load_fault_namespace"] == 1


def test_rows_that_mean_something_else_are_foreign(rig: Rig) -> None:
    """The same namespace and length, but another order of bytes within a row."""
    rig.run(rig.open(), Direction.STORE, BLOCKS)
    rig.view = replace(rig.view, groups=tuple(replace(g, row_format=("other",)) for g in rig.view.groups))
    other = rig.open()
    assert not rig.run(other, Direction.LOAD, [3]).ok
    assert other.counters()["load_fault_namespace"] == 1


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    "wrong",
    [
        GroupMoves(0, np.array([0]), np.array([TICKET]), (b"k",)),
        GroupMoves(0, np.array([-1]), np.array([TICKET]), (b"k",)),
        GroupMoves(0, np.array([NUM_BLOCKS]), np.array([TICKET]), (b"k",)),
        GroupMoves(0, np.array([1, 2]), np.array([TICKET]), (b"k", b"l")),
        GroupMoves(0, np.array([1]), np.array([TICKET])),
        GroupMoves(9, np.array([1]), np.array([TICKET]), (b"k",)),
        GroupMoves(0, np.array([1]), np.array([TICKET ^ 1 << 30]), (b"k",)),
        GroupMoves(0, np.array([1, 2]), np.array([TICKET, TICKET + 1]), (b"k", b"l")),
    ],
    ids=["null block", "negative", "past the end", "lengths", "no keys", "unknown group", "other namespace",
         "two epochs"],
)  # fmt: skip
def test_a_wrong_job_fails_and_touches_nothing(rig: Rig, direction: Direction, wrong: GroupMoves) -> None:
    engine, before = rig.open(), rig.device.copy()
    engine.submit(TransferJob(1, direction, (wrong,)))
    [result] = engine.poll()
    assert not result.ok
    assert result.error
    assert np.array_equal(rig.device, before)
    assert rig.store.calls == []


def test_a_load_into_one_block_twice_is_refused(rig: Rig) -> None:
    assert not rig.run(rig.open(), Direction.LOAD, [4, 4], [b"a", b"b"]).ok


def test_submit_and_poll_never_wait_for_a_store_that_hangs(rig: Rig) -> None:
    rig.run(rig.open(), Direction.STORE, BLOCKS)
    rig.store.gate = threading.Event()
    engine = rig.open(load_deadline_s=0.2, store_deadline_s=0.2, rows=8, threads=1)
    before = rig.device.copy()
    load, store = rig.job(Direction.LOAD, BLOCKS), rig.job(Direction.STORE, [11, 12])
    engine.submit(load)
    engine.submit(store)
    assert engine.wait([load.job_id, store.job_id], HANG_S)
    results = {result.job_id: result for result in engine.poll()}
    assert set(results[load.job_id].failed_keys) == {b"key-%d" % block for block in BLOCKS}
    assert set(results[store.job_id].failed_keys) == {b"key-11", b"key-12"}
    assert engine.counters()["load_overdue"] == 1
    # The store still writes into rows: those are not given to anybody else until it lets go of them.
    assert engine._rows.available < 8
    rig.store.gate.set()
    rig.store.gate = None
    assert rig.run(engine, Direction.LOAD, BLOCKS).ok
    assert np.array_equal(rig.device, before)
    engine.poll()
    assert sorted(engine._rows.take(8)) == list(range(8))


def test_a_store_that_is_gone_fails_jobs_and_ends_nothing(rig: Rig) -> None:
    engine = rig.open()
    rig.run(engine, Direction.STORE, BLOCKS)
    rig.store.gone = True
    assert len(rig.run(engine, Direction.LOAD, BLOCKS).failed_keys) == 5
    assert len(rig.run(engine, Direction.STORE, [11]).failed_keys) == 1
    rig.store.gone = False
    assert rig.run(engine, Direction.LOAD, BLOCKS).ok


def test_a_store_that_refuses_some_values_names_them(rig: Rig) -> None:
    put = rig.store.put
    rig.store.put = lambda items, deadline_s: [  # type: ignore[method-assign]
        done and b"key-7" not in key for (key, _), done in zip(items, put(items, deadline_s), strict=True)
    ]
    result = rig.run(rig.open(), Direction.STORE, BLOCKS)
    assert (result.ok, result.failed_keys) == (False, (b"key-7",))


@pytest.mark.parametrize("direction", list(Direction))
def test_a_copy_that_fails_fails_its_blocks(rig: Rig, direction: Direction) -> None:
    rig.run(rig.open(), Direction.STORE, BLOCKS)

    def broken(job: TransferJob, copy: Callable[[], None]) -> None:
        raise RuntimeError("the device is gone")

    result = rig.run(rig.open(fault=broken), direction, BLOCKS)
    assert not result.ok
    assert "the device is gone" in result.error
    assert len(result.failed_keys) == 5


def test_loads_do_not_wait_behind_stores(rig: Rig) -> None:
    engine = rig.open(rows=4, threads=1)
    rig.run(engine, Direction.STORE, BLOCKS)
    put = rig.store.put
    hold, putting = threading.Event(), threading.Event()

    def slow(items: Any, deadline_s: float) -> list[bool]:
        putting.set()
        assert hold.wait(HANG_S)
        return put(items, deadline_s)

    rig.store.put = slow  # type: ignore[method-assign]
    stores = rig.job(Direction.STORE, list(range(10, 20)))
    engine.submit(stores)
    while not putting.wait(0.01):
        engine.poll()
    load = rig.job(Direction.LOAD, BLOCKS)
    engine.submit(load)
    assert engine.wait([load.job_id], HANG_S)
    [result] = engine.poll()
    assert (result.job_id, result.ok) == (load.job_id, True)
    hold.set()
    assert engine.wait([stores.job_id], HANG_S)


def test_a_pool_in_use_by_a_hanging_store_is_not_freed(rig: Rig) -> None:
    engine = rig.open()
    rig.store.gate = threading.Event()
    engine.submit(rig.job(Direction.LOAD, BLOCKS))
    assert not engine.close(timeout_s=0.1)
    assert not closed(engine)
    [result] = engine.poll()
    assert not result.ok
    quick = rig.open()
    rig.store.gate.set()
    assert quick.close()
    assert closed(quick)


def test_a_store_that_never_closes_does_not_hold_up_the_shutdown(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.connectors.worker.staged._STORE_CLOSE_S", 0.05)
    engine, hold = rig.open(), threading.Event()
    monkeypatch.setattr(engine._store, "close", hold.wait)
    assert not engine.close()
    assert not closed(engine)
    hold.set()


def test_a_late_chunk_does_not_end_a_job_whose_other_chunk_is_still_copied(rig: Rig) -> None:
    """The engine would give the blocks to another request while bytes arrive in them."""
    rig.run(rig.open(), Direction.STORE, BLOCKS[:2])
    copying, go_on = threading.Event(), threading.Event()

    def slow(job: TransferJob, copy: Callable[[], None]) -> None:
        copying.set()
        assert go_on.wait(HANG_S)
        copy()

    engine = rig.open(fault=slow, rows=4, threads=2, load_deadline_s=0.2)
    get_into, hold = rig.store.get_into, threading.Event()

    def hangs_for_one(items: Any, deadline_s: float) -> list[bool]:
        if items[0][0].endswith(b"key-1"):
            assert hold.wait(HANG_S)
        return get_into(items, deadline_s)

    rig.store.get_into = hangs_for_one  # type: ignore[method-assign]
    job = rig.job(Direction.LOAD, BLOCKS[:2])
    engine.submit(job)
    while not copying.wait(0.01):
        engine.poll()
    while not engine.counters().get("load_overdue"):
        assert engine.poll() == []
    hold.set()
    while engine._rows.available < 3:
        assert engine.poll() == []
    assert not engine.wait([job.job_id], 0.0)
    go_on.set()
    assert engine.wait([job.job_id], HANG_S)
    [result] = engine.poll()
    assert result.failed_keys == (b"key-1",)


def test_fetched_blocks_are_loaded_from_host_memory_the_next_time(rig: Rig) -> None:
    """And so is what was stored: neither the GPU nor the store is asked for it again."""
    device = rig.device.copy()
    rig.run(rig.open(), Direction.STORE, BLOCKS)
    engine = rig.open(keep=True)
    for _ in range(2):
        rig.device[:] = 0
        assert rig.run(engine, Direction.LOAD, BLOCKS).ok
        rig.store.values.clear()
    assert engine.counters()["load_kept_in_host_memory"] == len(BLOCKS)
    loaded = rig.device.copy()
    rig.device[:] = device
    assert rig.run(engine, Direction.STORE, BLOCKS, [b"new-%d" % block for block in BLOCKS]).ok
    rig.store.values.clear()
    rig.device[:] = 0
    assert rig.run(engine, Direction.LOAD, BLOCKS, [b"new-%d" % block for block in BLOCKS]).ok
    assert np.array_equal(rig.device, loaded)


def test_staged_blocks_are_evicted_and_fetched_again(rig: Rig) -> None:
    engine = rig.open(keep=True, rows=4, threads=1)
    rig.run(engine, Direction.STORE, BLOCKS)
    assert rig.run(engine, Direction.LOAD, BLOCKS).ok
    assert engine.counters().get("load_kept_in_host_memory", 0) < len(BLOCKS)
    engine.close()
    assert engine._rows.available == 4


def test_another_epoch_finds_nothing_kept(rig: Rig) -> None:
    engine = rig.open(keep=True)
    rig.run(engine, Direction.STORE, BLOCKS)
    result = rig.run(engine, Direction.LOAD, BLOCKS, epoch=1)
    assert not result.ok
    assert "load_kept_in_host_memory" not in engine.counters()
