"""The contract of all engines on a real GPU, by every way of copying."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.transfer.calibrate import Calibration
from kvatlas.connectors.transfer.cuda import CudaTransferEngine, open_cuda
from kvatlas.connectors.transfer.cuda_driver import CudaDriver, TorchDevice
from kvatlas.connectors.transfer.host import PinnedHostPool
from tests.connectors.transfer.contract import PoolPart, TransferEngineContract
from tests.connectors.transfer.handmade import UNIFORM, Bytes, HandmadeCache

with warnings.catch_warnings(action="ignore"):  # of torch's own modules, in some versions
    torch = pytest.importorskip("torch", reason="needs torch; make test-connectors runs it")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),  # the same of triton's, which is imported later
]


class GpuMemory:
    def __init__(self, size_bytes: int) -> None:
        self._tensor = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
        self.address = int(self._tensor.data_ptr())
        self.size_bytes = size_bytes

    def read(self) -> Bytes:
        content: Bytes = self._tensor.cpu().numpy()
        return content

    def write(self, content: Bytes) -> None:
        self._tensor.copy_(torch.from_numpy(content))
        torch.cuda.synchronize()


class PinnedMemory:
    def __init__(self, pool: PinnedHostPool) -> None:
        self._pool = pool
        self.address = pool.address
        self.size_bytes = pool.size_bytes

    def read(self) -> Bytes:
        return np.frombuffer(self._pool.row(0), np.uint8).copy()

    def write(self, content: Bytes) -> None:
        np.frombuffer(self._pool.row(0), np.uint8)[:] = content


class GpuContract(TransferEngineContract):
    calibration = Calibration()
    batched = True

    @pytest.fixture(autouse=True)
    def gpu(self) -> Iterator[None]:
        self.device, self.driver = TorchDevice(), CudaDriver(allow_batched=self.batched)
        self.pools: list[PinnedHostPool] = []
        yield
        for pool in self.pools:
            pool.close()

    def make_device(self, size_bytes: int) -> GpuMemory:
        return GpuMemory(size_bytes)

    def make_pool(self, size_bytes: int) -> PinnedMemory:
        self.pools.append(PinnedHostPool(size_bytes, size_bytes, driver=self.driver))
        return PinnedMemory(self.pools[-1])

    def make_engine(self, view: CacheView, pool: PoolPart) -> CudaTransferEngine:
        return CudaTransferEngine(
            view, pool, device=self.device, driver=self.driver, calibration=self.calibration
        )


class TestByCopyEngine(GpuContract):
    pass


class TestByKernel(GpuContract):
    calibration = Calibration(kernel_max_piece_bytes=1 << 20, kernel_min_pieces=1, note="")


class TestOneCallPerPiece(GpuContract):
    batched = False


def test_the_engine_as_connectors_open_it() -> None:
    cache = HandmadeCache("BLHNC", UNIFORM["one full group"], 24)
    memory: Any = GpuMemory(cache.size_bytes)
    engine, pool = open_cuda(cache.view(memory.address), 1 << 20)
    assert pool.pinned
    assert engine.calibration.seconds < 2.0
    engine.close()
    pool.close()
