"""The CPU engine: the contract of all engines, and what is its own (faults, bounds)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.transfer.base import Direction, TransferJob
from kvatlas.connectors.transfer.host_engine import CopyFault, HostTransferEngine
from tests.connectors.transfer.contract import (
    ArrayMemory,
    PoolPart,
    TransferEngineContract,
    job,
    move,
)
from tests.connectors.transfer.handmade import UNIFORM, HandmadeCache
from tests.support.waiting import HANG_S


class TestHostTransferEngine(TransferEngineContract):
    def make_engine(self, view: CacheView, pool: PoolPart) -> HostTransferEngine:
        return HostTransferEngine(view, pool)


class Gate:
    """Holds every copy until it is opened; ``reached`` tells that one arrived."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, job: TransferJob, copy: Callable[[], None]) -> None:
        self.reached.set()
        assert self.open.wait(HANG_S)
        copy()


class FailJob:
    """One job fails before it copies anything."""

    def __init__(self, job_id: int) -> None:
        self.job_id = job_id

    def __call__(self, job: TransferJob, copy: Callable[[], None]) -> None:
        if job.job_id == self.job_id:
            raise OSError("the device fell off the bus")
        copy()


class Setup:
    """A small cache with an engine that has a fault."""

    def __init__(self) -> None:
        self.cache = HandmadeCache("LBHNC", UNIFORM["sliding windows and one full group"], 40)
        self.device = ArrayMemory(self.cache.size_bytes)
        self.view = self.cache.view(self.device.address)
        self.pool = ArrayMemory(self.view.row_bytes * 40)
        self.engines: list[HostTransferEngine] = []

    def engine(self, fault: CopyFault, queued_stores_max: int = 4) -> HostTransferEngine:
        engine = HostTransferEngine(self.view, self.pool, queued_stores_max=queued_stores_max, fault=fault)
        self.engines.append(engine)
        return engine


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    for engine in made.engines:
        engine.close()


def test_a_failed_copy_fails_only_its_job(setup: Setup) -> None:
    engine = setup.engine(FailJob(2))
    for i in (1, 2, 3):
        engine.submit(job(i, Direction.STORE, move(0, [i], [i])))
    assert engine.wait([1, 2, 3], HANG_S)
    results = {result.job_id: result for result in engine.poll()}
    assert [results[i].ok for i in (1, 2, 3)] == [True, False, True]
    assert "fell off the bus" in results[2].error
    assert results[2].bytes_by_group == {}


def test_a_fault_may_alter_bytes_after_the_copy(setup: Setup) -> None:
    def corrupt(job: TransferJob, copy: Callable[[], None]) -> None:
        copy()
        memory = setup.device.read()
        setup.cache.fill(memory, 1, job.groups[0].block_ids, 0xAB)
        setup.device.write(memory)

    engine = setup.engine(corrupt)
    engine.submit(job(1, Direction.LOAD, move(1, [6], [0])))
    assert engine.wait([1], HANG_S)
    assert engine.poll()[0].ok
    for layer in setup.cache.blocks(setup.device.read(), 1, np.array([6])):
        assert (layer == 0xAB).all()


def test_submit_and_poll_return_while_a_copy_hangs(setup: Setup) -> None:
    gate = Gate()
    engine = setup.engine(gate)
    engine.submit(job(1, Direction.LOAD, move(0, [1], [1])))
    assert gate.reached.wait(HANG_S)
    engine.submit(job(2, Direction.LOAD, move(0, [2], [2])))
    assert engine.poll() == []
    assert not engine.wait([2], 0.0)
    gate.open.set()
    assert engine.wait([1, 2], HANG_S)
    assert [result.job_id for result in engine.poll()] == [1, 2]


def test_stores_beyond_the_bound_fail_immediately_and_loads_do_not(setup: Setup) -> None:
    gate = Gate()
    engine = setup.engine(gate, queued_stores_max=3)
    engine.submit(job(1, Direction.LOAD, move(0, [1], [1])))
    assert gate.reached.wait(HANG_S)
    for i in range(2, 8):
        engine.submit(job(i, Direction.STORE, move(0, [i], [i])))
    for i in range(8, 20):
        engine.submit(job(i, Direction.LOAD, move(0, [i], [i])))
    dropped = engine.poll()
    assert [(result.job_id, result.ok) for result in dropped] == [(5, False), (6, False), (7, False)]
    assert engine.stores_dropped == 3
    gate.open.set()
    engine.close()
    ended = {result.job_id: result.ok for result in engine.poll()}
    assert ended == dict.fromkeys([1, 2, 3, 4, *range(8, 20)], True)
    engine.submit(job(30, Direction.STORE, move(0, [1], [1])))
    assert engine.stores_dropped == 3


def test_stores_are_taken_again_once_others_are_done(setup: Setup) -> None:
    engine = setup.engine(FailJob(0), queued_stores_max=1)
    for i in range(1, 6):
        engine.submit(job(i, Direction.STORE, move(0, [i], [i])))
        assert engine.wait([i], HANG_S)
    assert [result.ok for result in engine.poll()] == [True] * 5
    assert engine.stores_dropped == 0


def test_a_job_submitted_twice_is_answered_once(setup: Setup) -> None:
    gate = Gate()
    engine = setup.engine(gate)
    for _ in range(2):
        engine.submit(job(1, Direction.STORE, move(0, [1], [1])))
    gate.open.set()
    engine.close()
    assert [result.job_id for result in engine.poll()] == [1]


def test_room_for_no_store_is_refused(setup: Setup) -> None:
    with pytest.raises(ValueError, match="queued_stores_max=0"):
        HostTransferEngine(setup.view, setup.pool, queued_stores_max=0)
