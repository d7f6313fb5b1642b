"""The GPU's transfer engine over a device whose streams run in any order that events allow."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.connectors.layout import CacheView, GroupPages, Region
from kvatlas.connectors.transfer import cuda
from kvatlas.connectors.transfer.base import Direction, GroupMoves, TransferJob
from kvatlas.connectors.transfer.calibrate import Calibration
from kvatlas.connectors.transfer.cuda import CudaTransferEngine
from kvatlas.connectors.transfer.host_engine import HostTransferEngine
from tests.connectors.transfer.contract import ArrayMemory, PoolPart, Rig, TransferEngineContract
from tests.connectors.transfer.cuda.bench import DMA_ONLY, KERNEL, PAGE, Bench, SlowDriver, engine_on
from tests.connectors.transfer.cuda.fakes import FakeDevice, FakeDriver
from tests.support.examples import examples
from tests.support.waiting import HANG_S


class TestByCopyEngine(TransferEngineContract):
    def make_engine(self, view: CacheView, pool: PoolPart) -> CudaTransferEngine:
        return engine_on(FakeDevice(), view, pool)


class TestByKernel(TransferEngineContract):
    def make_engine(self, view: CacheView, pool: PoolPart) -> CudaTransferEngine:
        return engine_on(FakeDevice(1), view, pool, KERNEL)


class TestInManyParts(TransferEngineContract):
    """Parts of a few pieces, hardly any bytes on their way, chunks that cut rows' runs."""

    @pytest.fixture(autouse=True)
    def small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda, "PART_PIECES_MAX", 3)
        monkeypatch.setattr(cuda, "PART_BYTES_MAX", 500)

    def make_engine(self, view: CacheView, pool: PoolPart) -> CudaTransferEngine:
        chunk = view.row_bytes * 2
        return engine_on(FakeDevice(2), view, pool, inflight_bytes_max=700, host_chunk_bytes=chunk)


class TestOneCallPerPiece(TransferEngineContract):
    def make_engine(self, view: CacheView, pool: PoolPart) -> CudaTransferEngine:
        device = FakeDevice(3)
        driver = FakeDriver(device)
        driver.batched = False
        return engine_on(device, view, pool, driver=driver)


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.booleans())
def test_a_store_reads_what_was_computed_before_and_a_load_overwrites_it(seed: int, kernel: bool) -> None:
    """The canary: work on the computing stream that has not run yet when the job is submitted."""
    bench = Bench(seed=seed, calibration=KERNEL if kernel else DMA_ONLY)
    bench.rows.write(np.repeat(np.arange(8, dtype=np.uint8), PAGE))
    compute, device = bench.device.compute, bench.device
    device.enqueue(compute, lambda: bench.write_block(1, 41), "compute")
    bench.submit(1, Direction.STORE, [1], [7])
    for block in (2, 3, 4):
        device.enqueue(compute, lambda block=block: bench.write_block(block, 0), "zero")  # type: ignore[misc]
    bench.submit(2, Direction.LOAD, [2, 3, 4], [2, 3, 4])
    assert bench.engine.wait([1, 2], HANG_S)
    assert [result.ok for result in bench.engine.poll()] == [True, True]
    assert bench.row(7) == {41}
    assert [bench.block(block) for block in (2, 3, 4)] == [{2}, {3}, {4}]
    bench.engine.close()
    assert device.violations == []


def test_each_direction_waits_for_the_computing_stream_on_a_stream_of_its_own(benches: Any) -> None:
    bench = benches()
    bench.submit(1, Direction.STORE, [1], [1])
    assert bench.engine.wait([1], HANG_S)
    bench.submit(2, Direction.LOAD, [2], [2])
    assert bench.engine.wait([2], HANG_S)
    assert bench.device.log == [
        ("record", "compute"), ("wait", "low2"), ("copy store", "low2"), ("record", "low2"),
        ("record", "compute"), ("wait", "low1"), ("copy load", "low1"), ("record", "low1"),
    ]  # fmt: skip


def test_a_job_is_not_reported_before_its_last_part_has_arrived(
    benches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "PART_PIECES_MAX", 1)
    bench = benches()
    bench.device.held = True
    bench.submit(1, Direction.STORE, [1, 3, 5], [1, 4, 6])
    bench.until_sent("copy store", 3)
    assert bench.engine.poll() == []
    assert not bench.engine.wait([1], 0.0)
    bench.device.held = False
    assert bench.engine.wait([1], HANG_S)
    [result] = bench.engine.poll()
    assert (result.ok, result.bytes_by_group) == (True, {0: 3 * PAGE})


def test_loads_go_before_stores_that_came_earlier_and_submitting_never_waits(benches: Any) -> None:
    device = FakeDevice()
    driver = SlowDriver(device)
    bench = benches(device=device, driver=driver)
    bench.submit(1, Direction.STORE, [1], [1])
    assert driver.called.wait(HANG_S)
    bench.submit(2, Direction.STORE, [2], [2])
    bench.submit(3, Direction.LOAD, [3], [3])
    assert bench.engine.poll() == []
    driver.go_on.set()
    assert bench.engine.wait([1, 2, 3], HANG_S)
    assert [direction for direction, _ in driver.copies] == [Direction.STORE, Direction.LOAD, Direction.STORE]


def test_a_load_goes_between_the_parts_of_a_large_store(
    benches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "PART_PIECES_MAX", 1)
    device = FakeDevice()
    driver = SlowDriver(device)
    bench = benches(device=device, driver=driver)
    bench.submit(1, Direction.STORE, [1, 3, 5], [1, 3, 5])
    assert driver.called.wait(HANG_S)
    bench.submit(2, Direction.LOAD, [7], [7])
    driver.go_on.set()
    assert bench.engine.wait([1, 2], HANG_S)
    assert [direction for direction, _ in driver.copies].index(Direction.LOAD) == 1


def test_bytes_on_their_way_are_bounded(benches: Any) -> None:
    bench = benches(inflight_bytes_max=2 * PAGE)
    bench.device.held = True
    for job_id in range(1, 7):
        bench.submit(job_id, Direction.STORE, [job_id], [job_id])
    bench.until_sent("copy store", 2)
    assert not bench.engine.wait([1], 0.02)
    assert [entry[0] for entry in bench.device.log].count("copy store") == 2
    bench.device.held = False
    assert bench.engine.wait(list(range(1, 7)), HANG_S)
    assert bench.engine.throttled > 0


def test_stores_beyond_the_bound_fail_immediately_and_loads_are_taken(benches: Any) -> None:
    bench = benches(queued_stores_max=1, inflight_bytes_max=1)
    bench.device.held = True
    bench.submit(1, Direction.STORE, [1], [1])
    bench.until_sent("copy store")
    bench.submit(2, Direction.STORE, [2], [2])
    bench.submit(3, Direction.STORE, [3], [3])
    bench.submit(4, Direction.LOAD, [4], [4])
    bench.submit(5, Direction.LOAD, [5], [5])
    [refused] = bench.engine.poll()
    assert (refused.job_id, refused.ok, bench.engine.stores_dropped) == (3, False, 1)
    assert "1 stores are waiting" in refused.error
    bench.device.held = False
    assert bench.engine.wait([1, 2, 4, 5], HANG_S)
    assert all(result.ok for result in bench.engine.poll())


def test_events_are_used_again(benches: Any) -> None:
    bench = benches()
    for job_id in range(1, 60):
        bench.submit(job_id, Direction.STORE, [1], [1])
        assert bench.engine.wait([job_id], HANG_S)
    assert bench.device.events_made <= 4


def test_neighbours_go_as_one_piece_but_not_across_chunks(benches: Any) -> None:
    bench = benches(host_chunk_bytes=2 * PAGE)
    bench.submit(1, Direction.STORE, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert bench.engine.wait([1], HANG_S)
    assert bench.driver.copies == [(Direction.STORE, [PAGE, 2 * PAGE, 2 * PAGE])]


def test_only_loads_go_by_kernel_and_only_enough_small_pieces(benches: Any) -> None:
    bench = benches(calibration=Calibration(kernel_max_piece_bytes=PAGE, kernel_min_pieces=3, note=""))
    bench.submit(1, Direction.STORE, [1, 3, 5], [1, 3, 5])
    assert bench.engine.wait([1], HANG_S)
    bench.submit(2, Direction.LOAD, [1, 3], [1, 3])
    assert bench.engine.wait([2], HANG_S)
    assert (bench.engine.counts.dma_pieces, bench.engine.counts.kernel_pieces) == (5, 0)
    bench.submit(3, Direction.LOAD, [1, 2, 4, 6, 7], [1, 2, 4, 6, 0])
    assert bench.engine.wait([3], HANG_S)
    # Blocks 1 and 2 became one piece, too large for the kernel.
    assert (bench.engine.counts.dma_pieces, bench.engine.counts.kernel_pieces) == (6, 3)


def test_odd_sizes_do_not_go_by_kernel() -> None:
    memory, rows = ArrayMemory(8 * 20), ArrayMemory(8 * 64)
    view = CacheView((GroupPages(0, (Region(memory.address, 20, (0,), 20),), 20),), 8, 64)
    device = FakeDevice()
    engine = engine_on(device, view, rows, KERNEL)
    ids = np.array([1, 2, 3, 4], np.int64)
    engine.submit(TransferJob(1, Direction.LOAD, (GroupMoves(0, ids, ids),)))
    assert engine.wait([1], HANG_S)
    assert engine.poll()[0].ok
    assert engine.counts.kernel_pieces == 0
    engine.close()


def test_the_kernel_is_left_out_where_the_pool_is_not_mapped(benches: Any) -> None:
    device = FakeDevice()
    bench = benches(device=device, driver=FakeDriver(device, mapped=False), calibration=KERNEL)
    assert bench.engine.calibration.kernel_max_piece_bytes == 0
    assert "mapped" in bench.engine.calibration.describe()


class TestDeadEngine:
    """After an error of CUDA's, every job fails: those under way, and all later ones."""

    def test_a_failing_copy(self, benches: Any) -> None:
        device = FakeDevice()
        bench = benches(device=device, driver=FakeDriver(device, fail_at=1))
        device.held = True
        bench.submit(1, Direction.STORE, [1], [1])
        bench.until_sent("copy store")
        device.held = False
        bench.submit(2, Direction.STORE, [2], [2])
        bench.submit(3, Direction.LOAD, [3], [3])
        assert bench.engine.wait([1, 2, 3], HANG_S)
        results = {result.job_id: result for result in bench.engine.poll()}
        assert sorted(results) == [1, 2, 3]
        assert not results[2].ok or not results[3].ok
        assert "CUDA_ERROR_INVALID_VALUE" in bench.engine.failure
        bench.submit(4, Direction.LOAD, [4], [4])
        [late] = bench.engine.poll()
        assert (late.job_id, late.ok, late.error) == (4, False, bench.engine.failure)
        assert "dead" in late.error

    def test_failed_jobs_are_reported_only_when_nothing_runs_any_more(self, benches: Any) -> None:
        """Work enqueued before the error still writes, so its memory must not be reused."""
        device = FakeDevice()
        bench = benches(device=device, driver=FakeDriver(device, fail_at=1))
        bench.write_block(1, 9)
        device.held = True
        bench.submit(1, Direction.STORE, [1], [1])
        bench.until_sent("copy store")
        device.held = False
        bench.submit(2, Direction.STORE, [2], [2])
        assert bench.engine.wait([1, 2], HANG_S)
        assert bench.row(1) == {9}
        assert {entry for entry in device.log if entry[0] == "synchronize"} == {
            ("synchronize", "low1"), ("synchronize", "low2"),
        }  # fmt: skip

    @pytest.mark.parametrize("method", ["record", "wait", "done"])
    def test_a_failing_device(self, benches: Any, method: str) -> None:
        bench = benches()
        bench.device.failing |= {method, "synchronize"}
        bench.submit(1, Direction.STORE, [1], [1])
        assert bench.engine.wait([1], HANG_S)
        [result] = bench.engine.poll()
        assert not result.ok
        assert f"{method} hit an illegal address" in result.error
        bench.device.failing.clear()
        bench.submit(2, Direction.STORE, [1], [1])
        [late] = bench.engine.poll()
        assert not late.ok


def test_the_thread_that_copies_has_the_device(benches: Any) -> None:
    bench = benches()
    bench.submit(1, Direction.STORE, [1], [1])
    assert bench.engine.wait([1], HANG_S)
    assert bench.engine._thread.ident in bench.device.bound_threads
    assert threading.get_ident() not in bench.device.bound_threads


@pytest.mark.parametrize(
    "wrong", [{"queued_stores_max": 0}, {"inflight_bytes_max": 0}, {"host_chunk_bytes": -1}]
)
def test_wrong_bounds_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Bench(**wrong)


@pytest.mark.parametrize("shape", ["sliding windows and one full group", "latent, indexer and window packed"])
def test_every_way_of_copying_gives_the_same_bytes(shape: str) -> None:
    """The CPU's engine, the copy engine and the kernel, on the same jobs."""

    class Contract(TransferEngineContract):
        def __init__(self, way: str) -> None:
            self.way = way

        def make_engine(self, view: CacheView, pool: PoolPart) -> Any:
            if self.way == "host":
                return HostTransferEngine(view, pool)
            return engine_on(FakeDevice(5), view, pool, KERNEL if self.way == "kernel" else DMA_ONLY)

    seen = []
    for way in ("host", "dma", "kernel"):
        rig = Rig(Contract(way), "BLHNC", shape)
        moves = rig.moves()
        assert rig.run(Direction.STORE, *moves).ok
        turned = tuple(GroupMoves(m.group_idx, m.block_ids[::-1].copy(), m.slots) for m in moves)
        assert rig.run(Direction.LOAD, *turned).ok
        rig.engine.close()
        seen.append((rig.host.read(), rig.device.read()))
    for host, memory in seen[1:]:
        assert np.array_equal(host, seen[0][0])
        assert np.array_equal(memory, seen[0][1])
