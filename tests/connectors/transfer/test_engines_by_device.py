"""The engines that connectors are given: for each device, with room for as many stores as there are rows."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from kvatlas.connectors.layout import CacheView, Piece, group_pages
from kvatlas.connectors.transfer import cuda
from kvatlas.connectors.transfer.base import Direction, GroupMoves, TransferJob
from kvatlas.connectors.worker.worker import make_engine, open_rows
from tests.support.waiting import HANG_S

BLOCKS = 200
BLOCK_BYTES = 64


def view_of(cache: np.ndarray[Any, Any]) -> CacheView:
    piece = Piece(int(cache.ctypes.data), BLOCK_BYTES, BLOCK_BYTES)
    return CacheView((group_pages(0, [piece], BLOCKS),), BLOCKS, BLOCK_BYTES)


def store(number: int) -> TransferJob:
    moves = GroupMoves(0, np.array([number], np.int64), np.array([number], np.int64))
    return TransferJob(number, Direction.STORE, (moves,))


def test_a_step_in_which_many_requests_fill_a_block_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    gate, copy = threading.Event(), ctypes.memmove

    def held(*args: Any) -> Any:
        gate.wait(HANG_S)
        return copy(*args)

    engine = make_engine(view_of(cache), "cpu", slots=BLOCKS, row_bytes=BLOCK_BYTES)
    try:
        monkeypatch.setattr(ctypes, "memmove", held)
        jobs = [store(number) for number in range(1, BLOCKS)]
        for job in jobs:
            engine.submit(job)
        gate.set()
        assert engine.wait([job.job_id for job in jobs], HANG_S)
        assert [result.error for result in engine.poll() if not result.ok] == []
    finally:
        gate.set()
        engine.close()


def test_closing_does_not_wait_for_a_copy_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun = threading.Event(), threading.Event()
    memmove = ctypes.memmove

    def held(target: int, source: int, size: int) -> None:
        begun.set()
        gate.wait(HANG_S)
        memmove(target, source, size)

    cache = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    engine = make_engine(view_of(cache), "cpu", slots=BLOCKS, row_bytes=BLOCK_BYTES)
    monkeypatch.setattr(ctypes, "memmove", held)
    engine.submit(store(1))
    assert begun.wait(HANG_S)
    assert not engine.close(timeout_s=0.01)
    gate.set()
    assert engine.wait([1], HANG_S)
    assert [result.ok for result in engine.poll()] == [True]  # its rows were still there to be written
    assert engine.close()


def test_on_a_gpu_as_many_stores_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def open_cuda(view: CacheView, host_bytes: int, **options: Any) -> Any:
        asked.append({"row_bytes": view.row_bytes, "host_bytes": host_bytes, **options})
        raise MemoryError

    monkeypatch.setattr(cuda, "open_cuda", open_cuda)
    view = view_of(np.zeros((BLOCKS, BLOCK_BYTES), np.uint8))
    with pytest.raises(MemoryError):
        make_engine(view, "cuda:3", slots=100, row_bytes=BLOCK_BYTES)
    with pytest.raises(MemoryError):
        open_rows(view, "cuda", 100, 2 * BLOCK_BYTES)
    assert asked == [
        {
            "row_bytes": BLOCK_BYTES,
            "host_bytes": 100 * BLOCK_BYTES,
            "device_index": 3,
            "queued_stores_max": 100,
            "shared": None,
        },
        {
            "row_bytes": 2 * BLOCK_BYTES,
            "host_bytes": 200 * BLOCK_BYTES,
            "device_index": None,
            "queued_stores_max": 100,
            "shared": None,
        },
    ]
