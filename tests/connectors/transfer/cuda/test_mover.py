"""Cutting pieces and jobs into parts, and the point of the compute stream at which a job starts."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.connectors.transfer import cuda
from kvatlas.connectors.transfer.base import Direction, Pieces, StepJobs, TransferJob, merge_adjacent
from kvatlas.connectors.transfer.cuda import PreparedJobs, QueuedJob
from kvatlas.connectors.transfer.cuda_moves import cut_at_chunks
from kvatlas.connectors.worker.worker import OffloadWorker
from tests.connectors.transfer.cuda.bench import PAGE, LongPass
from tests.support.waiting import HANG_S

BASE = 1 << 20


@st.composite
def pieces_at(draw: st.DrawFn) -> Pieces:
    """Pieces in order with gaps on either side (a gap of 0: neighbours)."""
    sizes = np.array(draw(st.lists(st.integers(1, 300), max_size=20)), np.int64)
    gaps = st.lists(st.sampled_from([0, 0, 0, 8, 50]), min_size=len(sizes), max_size=len(sizes))
    sides = [start + np.cumsum(sizes + np.array(draw(gaps), np.int64)) - sizes for start in (BASE, 5 << 30)]
    return sides[0], sides[1], sizes


def bytes_of(pieces: Pieces) -> dict[int, int]:
    """Every byte: where it goes and where it comes from."""
    return {
        destination + i: source + i
        for source, destination, size in zip(*(array.tolist() for array in pieces), strict=True)
        for i in range(size)
    }


@given(pieces_at(), st.integers(1, 400))
def test_cut_and_merged_pieces_copy_the_same_bytes_and_none_spans_two_chunks(
    pieces: Pieces, chunk: int
) -> None:
    cut = cut_at_chunks(merge_adjacent(pieces), 0, BASE, chunk)
    assert bytes_of(cut) == bytes_of(pieces)
    assert ((cut[0] - BASE) // chunk == (cut[0] + cut[2] - 1 - BASE) // chunk).all()
    assert (cut[2] > 0).all()


@given(pieces_at())
def test_the_destination_can_be_the_host(pieces: Pieces) -> None:
    source, destination, sizes = pieces
    cut = cut_at_chunks((destination, source, sizes), 1, BASE, 100)
    assert ((cut[1] - BASE) // 100 == (cut[1] + cut[2] - 1 - BASE) // 100).all()


@given(pieces_at(), st.integers(1, 5), st.integers(1, 700))
def test_parts_hold_every_piece_once_within_their_bounds(
    pieces: Pieces, most_pieces: int, most_bytes: int
) -> None:
    before = cuda.PART_PIECES_MAX, cuda.PART_BYTES_MAX
    cuda.PART_PIECES_MAX, cuda.PART_BYTES_MAX = most_pieces, most_bytes
    try:
        job = PreparedJobs([QueuedJob(TransferJob(1, Direction.LOAD, ()), None, 0.0, {})], pieces)
        parts = []
        while not job.exhausted:
            part, size = job.take_part()
            assert size == part[2].sum()
            assert 1 <= len(part[2]) <= most_pieces
            assert size <= most_bytes or len(part[2]) == 1
            parts.append(part)
    finally:
        cuda.PART_PIECES_MAX, cuda.PART_BYTES_MAX = before
    for column in range(3):
        joined = np.concatenate([part[column] for part in parts]) if parts else np.empty(0)
        assert np.array_equal(joined, pieces[column])


def test_a_load_runs_beside_a_forward_pass_that_was_launched_after_its_mark(benches: Any) -> None:
    bench = benches()
    bench.rows.write(np.repeat(np.arange(8, dtype=np.uint8), PAGE))
    zero = lambda: bench.write_block(3, 0)  # noqa: E731
    bench.device.enqueue(bench.device.compute, zero, "zero")
    before = bench.engine.mark()
    forward = LongPass(bench.device)
    bench.submit(1, Direction.LOAD, [3], [3], after=before)
    bench.submit(2, Direction.LOAD, [4], [4], after=before)
    bench.submit(3, Direction.LOAD, [5], [5])
    assert bench.engine.wait([1, 2], HANG_S)
    assert [bench.block(block) for block in (3, 4)] == [{3}, {4}]
    assert not bench.engine.wait([3], 0.05), "a job without a mark waits for what was launched before it"
    forward.end()
    assert bench.engine.wait([3], HANG_S)


def test_the_connectors_worker_has_its_loads_run_beside_the_forward_pass(benches: Any) -> None:
    """vLLM binds a step's metadata, launches the pass, and asks for the loads only then."""
    bench = benches()
    bench.rows.write(np.repeat(np.arange(8, dtype=np.uint8), PAGE))
    worker = OffloadWorker(None, lambda view, device: bench.engine)
    worker.use_engine(bench.engine)
    step = StepJobs(loads=[bench.job(1, Direction.LOAD, [3], [3])], load_requests={1: "a"})
    step.stores = [bench.job(2, Direction.STORE, [4], [4])]
    worker.bind(step)
    forward = LongPass(bench.device)
    bench.device.enqueue(bench.device.compute, lambda: bench.write_block(4, 9), "compute")
    worker.start_load_kv(step)
    worker.wait_for_save(step)
    assert bench.engine.wait([1], HANG_S)
    assert worker.poll() == ({"a"}, set())
    assert not bench.engine.wait([2], 0.05), "a store reads what the pass computes"
    forward.end()
    assert bench.engine.wait([2], HANG_S)
    assert bench.row(4) == {9}


def test_marks_give_their_events_back(benches: Any) -> None:
    bench = benches()
    for turn in range(1, 41):
        mark = bench.engine.mark()
        bench.submit(turn, Direction.LOAD, [1], [1], after=mark)
        assert bench.engine.wait([turn], HANG_S)
    assert bench.device.events_made <= 5
