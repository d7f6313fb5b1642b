"""Small jobs that wait are enqueued together: fewer calls, the same bytes, each answered once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import virtual_link
from kvatlas.connectors.transfer import cuda
from kvatlas.connectors.transfer.base import Direction, GroupMoves, TransferJob, TransferResult, joined
from kvatlas.connectors.worker.joined_stores import JoinedStores
from tests.connectors.transfer.cuda.bench import PAGE, LongPass, SlowDriver
from tests.connectors.transfer.cuda.fakes import FakeDevice
from tests.support.waiting import HANG_S


def busy(benches: Any) -> tuple[Any, SlowDriver]:
    """A bench whose first store is being enqueued, until the test releases the driver."""
    device = FakeDevice()
    driver = SlowDriver(device)
    bench = benches(device=device, driver=driver)
    bench.submit(1, Direction.STORE, [1], [1])
    assert driver.called.wait(HANG_S)
    return bench, driver


def test_jobs_that_wait_behind_one_on_its_way_are_one_call(benches: Any) -> None:
    bench, driver = busy(benches)
    mark = bench.engine.mark()
    for block in (2, 4, 6):
        bench.write_block(block, 10 + block)
        bench.submit(block, Direction.STORE, [block], [block], after=mark)
    bench.device.held = True  # what was enqueued is on its way while the next is chosen
    driver.go_on.set()
    bench.until_sent("copy store", 2)
    bench.device.held = False
    assert bench.engine.wait([1, 2, 4, 6], HANG_S)
    assert [result.job_id for result in bench.engine.poll()] == [1, 2, 4, 6]
    assert [len(sizes) for _, sizes in driver.copies] == [1, 3]
    assert [bench.row(row) for row in (2, 4, 6)] == [{12}, {14}, {16}]


def test_no_more_are_joined_than_fit_into_one_part(benches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "PART_BYTES_MAX", 2 * PAGE)
    bench, driver = busy(benches)
    mark = bench.engine.mark()
    for block in (2, 4, 6):
        bench.submit(block, Direction.STORE, [block], [block], after=mark)
    bench.device.held = True
    driver.go_on.set()
    bench.until_sent("copy store", 3)
    bench.device.held = False
    assert bench.engine.wait([1, 2, 4, 6], HANG_S)
    assert [len(sizes) for _, sizes in driver.copies] == [1, 2, 1]


def test_a_job_is_not_made_to_wait_for_a_later_ones_forward_pass(benches: Any) -> None:
    bench, driver = busy(benches)
    early = bench.engine.mark()
    bench.submit(2, Direction.STORE, [2], [2], after=early)
    forward = LongPass(bench.device)
    bench.submit(3, Direction.STORE, [3], [3])
    driver.go_on.set()
    assert bench.engine.wait([1, 2], HANG_S)
    assert not bench.engine.wait([3], 0.05)
    forward.end()
    assert bench.engine.wait([3], HANG_S)


def moves(group: int, *blocks: int) -> GroupMoves:
    ids = np.array(blocks, np.int64)
    return GroupMoves(group, ids, ids + 100, tuple(b"%d" % block for block in blocks))


def test_joined_jobs_have_every_move_once_and_one_entry_for_each_group() -> None:
    jobs = [
        TransferJob(5, Direction.STORE, (moves(0, 1, 2), moves(1, 3))),
        TransferJob(6, Direction.STORE, (moves(1, 4),)),
    ]
    whole = joined(jobs)
    assert whole.job_id == 5
    assert [(g.group_idx, g.block_ids.tolist(), g.slots.tolist()) for g in whole.groups] == [
        (0, [1, 2], [101, 102]),
        (1, [3, 4], [103, 104]),
    ]
    assert whole.groups[1].keys == (b"3", b"4")


class TestJoinedStores:
    STORES = (
        TransferJob(5, Direction.STORE, (moves(0, 1, 2), moves(1, 3))),
        TransferJob(6, Direction.STORE, (moves(1, 4),)),
    )

    def answered(self, ok: bool, failed: tuple[bytes, ...] = ()) -> list[TransferResult]:
        stores = JoinedStores()
        job = stores.join(list(self.STORES))
        moved = {0: 200, 1: 100} if ok else {}
        other = TransferResult(9, Direction.LOAD, True, 1.0, {})
        result = TransferResult(job.job_id, Direction.STORE, ok, 3.0, moved, "" if ok else "lost", failed)
        first, *rest = stores.split([other, result])
        assert first is other
        assert stores.split([other]) == [other]
        return rest

    def test_each_store_is_answered_with_its_share(self) -> None:
        first, second = self.answered(ok=True)
        assert (first.job_id, first.bytes_by_group) == (5, {0: 200, 1: 50})
        assert (second.job_id, second.bytes_by_group) == (6, {1: 50})
        assert first.seconds + second.seconds == pytest.approx(3.0)

    def test_a_failure_without_names_is_everybodys(self) -> None:
        assert [(result.ok, result.error) for result in self.answered(ok=False)] == [(False, "lost")] * 2

    def test_named_blocks_are_blamed_on_the_store_that_has_them(self) -> None:
        first, second = self.answered(ok=False, failed=(b"4",))
        assert (first.ok, first.failed_keys) == (True, ())
        assert (second.ok, second.failed_keys) == (False, (b"4",))

    def test_one_store_is_left_as_it_is(self) -> None:
        stores = JoinedStores()
        assert stores.join([self.STORES[0]]) is self.STORES[0]


def test_the_virtual_link_is_never_faster_than_one_big_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_link, "JOBS", 16)
    cell = virtual_link.measure((Direction.LOAD, "kernel", 64, 16 << 10, 0.65), rounds=1)
    assert 0 < cell.share <= 1
    assert cell.met == (cell.share >= 0.65)
