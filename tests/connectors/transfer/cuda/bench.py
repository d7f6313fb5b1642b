"""An engine over a fake device, small enough that every block and row can be looked at by number."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from kvatlas.connectors.layout import CacheView, GroupPages, Region
from kvatlas.connectors.transfer.base import Direction, GroupMoves, TransferJob
from kvatlas.connectors.transfer.calibrate import Calibration
from kvatlas.connectors.transfer.cuda import CudaTransferEngine
from tests.connectors.transfer.contract import ArrayMemory
from tests.connectors.transfer.cuda.fakes import FakeDevice, FakeDriver, FakeEvent
from tests.support.waiting import HANG_S

DMA_ONLY = Calibration()
KERNEL = Calibration(kernel_max_piece_bytes=1 << 20, kernel_min_pieces=2, note="")
PAGE = 64


def engine_on(
    device: FakeDevice, view: CacheView, pool: Any, calibration: Calibration = DMA_ONLY, **options: Any
) -> CudaTransferEngine:
    driver = options.pop("driver", None) or FakeDriver(device)
    return CudaTransferEngine(view, pool, device=device, driver=driver, calibration=calibration, **options)


class Bench:
    """One group of 8 blocks of one page; block ``b`` and row ``s`` can be looked at by number."""

    def __init__(self, **options: Any) -> None:
        self.memory = ArrayMemory(8 * PAGE)
        self.rows = ArrayMemory(8 * PAGE)
        region = Region(self.memory.address, PAGE, (0,), PAGE)
        self.view = CacheView((GroupPages(0, (region,), PAGE),), 8, PAGE)
        self.device = options.pop("device", None) or FakeDevice(options.pop("seed", 0))
        self.driver = options.pop("driver", None) or FakeDriver(self.device)
        options.setdefault("calibration", DMA_ONLY)
        self.engine = engine_on(self.device, self.view, self.rows, driver=self.driver, **options)

    def write_block(self, block: int, value: int) -> None:
        ctypes.memset(self.memory.address + block * PAGE, value, PAGE)

    def block(self, block: int) -> set[int]:
        return set(self.memory.read()[block * PAGE : (block + 1) * PAGE].tolist())

    def row(self, slot: int) -> set[int]:
        return set(self.rows.read()[slot * PAGE : (slot + 1) * PAGE].tolist())

    @staticmethod
    def job(job_id: int, direction: Direction, blocks: list[int], slots: list[int]) -> TransferJob:
        moves = GroupMoves(0, np.array(blocks, np.int64), np.array(slots, np.int64))
        return TransferJob(job_id, direction, (moves,))

    def submit(
        self, job_id: int, direction: Direction, blocks: list[int], slots: list[int], after: Any = None
    ) -> None:
        self.engine.submit(self.job(job_id, direction, blocks, slots), after)

    def until_sent(self, name: str, count: int = 1) -> None:
        """Wait until this many have been enqueued; the test's own time limit bounds it."""
        while sum(entry[0] == name for entry in self.device.log) < count:
            threading.Event().wait(0.001)


class SlowDriver(FakeDriver):
    """Its first call returns when told to, as one that finds the device's queues full."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self.called, self.go_on = threading.Event(), threading.Event()

    def copy(self, *arguments: Any) -> None:
        super().copy(*arguments)
        self.called.set()
        assert self.go_on.wait(HANG_S)


class LongPass:
    """A forward pass that runs on the compute stream until the test ends it; other streams continue."""

    def __init__(self, device: FakeDevice) -> None:
        self.over = FakeEvent(recorded=1)
        with device._lock:
            device.compute.ops.append(("wait", self.over, 1))
            device.log.append(("forward", "compute"))

    def end(self) -> None:
        self.over.reached.add(1)
