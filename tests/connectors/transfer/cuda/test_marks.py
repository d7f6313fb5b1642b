"""Jobs wait for the point of the compute stream at their submission, and for nothing later."""

from __future__ import annotations

from typing import Any

import numpy as np

from connectors.transfer.base import Direction, StepJobs
from connectors.worker.worker import OffloadWorker
from tests.connectors.transfer.cuda.bench import PAGE, WAIT_S, LongPass


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
    assert bench.engine.wait([1, 2], WAIT_S)
    assert [bench.block(block) for block in (3, 4)] == [{3}, {4}]
    assert not bench.engine.wait([3], 0.05), "a job without a mark waits for what was launched before it"
    forward.end()
    assert bench.engine.wait([3], WAIT_S)


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
    assert bench.engine.wait([1], WAIT_S)
    assert worker.poll() == ({"a"}, set())
    assert not bench.engine.wait([2], 0.05), "a store reads what the pass computes"
    forward.end()
    assert bench.engine.wait([2], WAIT_S)
    assert bench.row(4) == {9}


def test_marks_give_their_events_back(benches: Any) -> None:
    bench = benches()
    for turn in range(1, 41):
        mark = bench.engine.mark()
        bench.submit(turn, Direction.LOAD, [1], [1], after=mark)
        assert bench.engine.wait([turn], WAIT_S)
    assert bench.device.events_made <= 5
