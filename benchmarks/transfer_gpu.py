"""The machine that transfers are measured on where it is a GPU: torch's current one."""

from __future__ import annotations

import importlib
import subprocess
from typing import Any

import numpy as np

from benchmarks.transfer_machine import QUEUED_STORES_MAX, STEP_BYTES, STEP_KERNELS, Bytes, Memory, pool_rows
from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.transfer.base import Direction, Indices, TransferEngine
from kvatlas.connectors.transfer.calibrate import Calibration, calibrate
from kvatlas.connectors.transfer.cuda import CudaTransferEngine
from kvatlas.connectors.transfer.cuda_driver import CudaDriver, TorchDevice
from kvatlas.connectors.transfer.host import PinnedHostPool


class CudaMemory:
    """``Memory`` of a GPU, as torch allocates it."""

    def __init__(self, torch: Any, size_bytes: int) -> None:
        self._torch = torch
        self.tensor = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
        self.address = int(self.tensor.data_ptr())
        torch.cuda.synchronize()

    def read(self) -> Bytes:
        self._torch.cuda.synchronize()
        content: Bytes = self.tensor.cpu().numpy()
        return content

    def write(self, content: Bytes) -> None:
        self.tensor.copy_(self._torch.from_numpy(content))
        self._torch.cuda.synchronize()


class CudaMachine:
    """torch's current GPU, its driver, and the engine that connectors use."""

    ways: tuple[str, ...] = ("batched copy engine", "one call per piece", "kernel")
    computes = True
    step_ways: tuple[str, ...] = ("launches", "graph")

    def __init__(self) -> None:
        torch: Any = importlib.import_module("torch")  # this module must load where there is none
        self.torch = torch
        self.device = TorchDevice()
        self.driver = CudaDriver(self.device.index)
        self.single = CudaDriver(self.device.index, allow_batched=False)
        self.calibration = calibrate(self.device, self.driver)
        self.title = self.device.name
        self.streams = {direction: self.device.low_priority_stream() for direction in Direction}
        self._operands: Any = None
        self._small: Any = None
        self._graph: Any = None
        self.facts = [
            ("driver", _driver_version()),
            ("link", _link()),
            ("torch", f"{torch.__version__} (CUDA {torch.version.cuda})"),
            ("triton", str(importlib.import_module("triton").__version__)),
            ("numpy", np.__version__),
            ("batched copies", "yes" if self.driver.batched else "no (driver before CUDA 12.8)"),
            ("calibration", self.calibration.describe()),
            *(
                (
                    f"{point.pieces} x {point.piece_bytes} B",
                    f"copy engine {point.dma_rate / 1e9:.1f}, kernel {point.kernel_rate / 1e9:.1f} GB/s",
                )
                for point in self.calibration.points
            ),
        ]

    def memory(self, size_bytes: int) -> Memory:
        return CudaMemory(self.torch, size_bytes)

    def pool(self, size_bytes: int, row_bytes: int) -> PinnedHostPool:
        return PinnedHostPool(size_bytes, row_bytes, driver=self.driver)

    def engine(self, view: CacheView, pool: PinnedHostPool, way: str = "") -> TransferEngine:
        forced = {
            "batched copy engine": Calibration(note="copy engine asked for"),
            "one call per piece": Calibration(note="copy engine asked for"),
            "kernel": Calibration(kernel_max_piece_bytes=1 << 40, kernel_min_pieces=1, note=""),
        }
        return CudaTransferEngine(
            view,
            pool,
            device=self.device,
            driver=self.single if way == "one call per piece" else self.driver,
            host_chunk_bytes=pool.chunk_bytes,
            calibration=forced.get(way, self.calibration),
            queued_stores_max=QUEUED_STORES_MAX,
        )

    def copy_whole(self, copies: list[tuple[Direction, int, int, int]]) -> None:
        for direction, device, host, size in copies:
            src, dst = (host, device) if direction is Direction.LOAD else (device, host)
            self._enqueue(self.single, direction, src, dst, size)
        self._at_rest()

    def _enqueue(self, driver: CudaDriver, direction: Direction, src: int, dst: int, size: int) -> None:
        one_src, one_dst, one_size = (np.array([value], np.int64) for value in (src, dst, size))
        driver.copy(direction, one_src, one_dst, one_size, self.device.raw(self.streams[direction]))

    def copy_each(self, direction: Direction, src: Indices, dst: Indices, sizes: Indices) -> None:
        self.single.copy(direction, src, dst, sizes, self.device.raw(self.streams[direction]))
        self._at_rest()

    def copy_indexed(self, direction: Direction, device: Any, pool: Any, blocks: Any, slots: Any) -> None:
        torch = self.torch
        rows = torch.from_numpy(pool_rows(pool))
        pages = device.tensor.view(-1, pool.row_bytes)
        on_device, on_host = torch.from_numpy(blocks).cuda(), torch.from_numpy(slots)
        if direction is Direction.STORE:
            rows.index_copy_(0, on_host, pages.index_select(0, on_device).cpu())
        else:
            pages.index_copy_(0, on_device, rows.index_select(0, on_host).cuda())
        torch.cuda.synchronize()

    def fill_later(self, device: Any, start: int, size_bytes: int, value: int) -> None:
        self.torch.cuda._sleep(20_000_000)  # noqa: SLF001  # the only wait torch offers; ~10 ms
        device.tensor[start : start + size_bytes] = value

    def read_now(self, device: Memory, start: int, host_address: int, size_bytes: int) -> None:
        self._enqueue(self.driver, Direction.STORE, device.address + start, host_address, size_bytes)
        self._at_rest()

    def compute_seconds(self, products: int) -> float:
        torch = self.torch
        if self._operands is None:
            self._operands = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        left, right, result = self._operands
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(products):
            torch.matmul(left, right, out=result)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def step(self, way: str) -> None:
        torch = self.torch
        if self._small is None:
            self._small = torch.zeros(STEP_BYTES, dtype=torch.uint8, device="cuda")
            self._launch_step()
            torch.cuda.synchronize()
        if way != "graph":
            self._launch_step()
        elif self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._launch_step()
        else:
            self._graph.replay()
        done = torch.cuda.Event()
        done.record()
        done.synchronize()

    def _launch_step(self) -> None:
        for _ in range(STEP_KERNELS):
            self._small.add_(1)

    def close(self) -> None:
        self._at_rest()

    def _at_rest(self) -> None:
        for stream in self.streams.values():
            self.device.synchronize(stream)


def _driver_version() -> str:
    return _ask_nvidia_smi("driver_version") or "unknown"


def _link() -> str:
    found = _ask_nvidia_smi("pcie.link.gen.max,pcie.link.width.max")
    return "PCIe generation {}, {} lanes".format(*found.split(", ")) if ", " in found else "unknown"


def _ask_nvidia_smi(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
