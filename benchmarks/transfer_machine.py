"""The machine that transfers are measured on: all that differs between a GPU and plain memory.

``CudaMachine`` uses torch and the driver; ``HostMachine`` stands for both sides with this machine's memory.
Methods that copy return when the bytes are there.
"""

from __future__ import annotations

import ctypes
import importlib
import platform
import subprocess
import time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from connectors.layout.blocks import CacheView
from connectors.transfer.base import Direction, Indices, TransferEngine
from connectors.transfer.calibrate import Calibration, calibrate
from connectors.transfer.cuda import CudaTransferEngine
from connectors.transfer.cuda_device import TorchDevice
from connectors.transfer.driver import CudaDriver
from connectors.transfer.host import HostTransferEngine
from connectors.transfer.host_pool import PinnedHostPool

Bytes = npt.NDArray[np.uint8]
QUEUED_STORES_MAX = 1 << 16
"""Measuring queues more stores than a connector would."""


class Memory(Protocol):
    """Device memory that can be looked into."""

    address: int

    def read(self) -> Bytes: ...

    def write(self, content: Bytes) -> None: ...


class Machine(Protocol):
    """See the module. ``ways``: ways of copying that must give the same bytes; "": the engine's choice."""

    title: str
    facts: list[tuple[str, str]]
    ways: tuple[str, ...]
    computes: bool
    """Whether it computes beside copying."""

    def memory(self, size_bytes: int) -> Memory: ...

    def pool(self, size_bytes: int, row_bytes: int) -> PinnedHostPool: ...

    def engine(self, view: CacheView, pool: PinnedHostPool, way: str = "") -> TransferEngine: ...

    def copy_whole(self, copies: list[tuple[Direction, int, int, int]]) -> None:
        """(direction, device address, host address, bytes): each in one piece, the directions at once."""

    def copy_each(self, direction: Direction, src: Indices, dst: Indices, sizes: Indices) -> None:
        """One call for each piece."""

    def copy_indexed(self, direction: Direction, device: Memory, pool: Any, blocks: Any, slots: Any) -> None:
        """By torch (or numpy) indexing of rows of one size, through a staging buffer."""

    def fill_later(self, device: Memory, start: int, size_bytes: int, value: int) -> None:
        """Enqueue, on the computing stream, a long wait and then a fill. Returns at once."""

    def read_now(self, device: Memory, start: int, host_address: int, size_bytes: int) -> None:
        """Copy to the host without waiting for the computing stream: what an engine must not do."""

    def compute_seconds(self, products: int) -> float:
        """How long so many large matrix products take."""

    def close(self) -> None: ...


class HostMemory:
    """``Memory`` of this machine."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = np.zeros(size_bytes, np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def read(self) -> Bytes:
        return self.bytes.copy()

    def write(self, content: Bytes) -> None:
        self.bytes[:] = content


class HostMachine:
    """This machine's memory on either side, and the CPU's engine."""

    ways: tuple[str, ...] = ("memmove",)
    computes = False

    def __init__(self) -> None:
        self.title = f"host {platform.machine()}"
        self.facts = [("Python", platform.python_version()), ("numpy", np.__version__)]

    def memory(self, size_bytes: int) -> Memory:
        return HostMemory(size_bytes)

    def pool(self, size_bytes: int, row_bytes: int) -> PinnedHostPool:
        return PinnedHostPool(size_bytes, row_bytes)

    def engine(self, view: CacheView, pool: PinnedHostPool, way: str = "") -> TransferEngine:
        return HostTransferEngine(view, pool, queued_stores_max=QUEUED_STORES_MAX)

    def copy_whole(self, copies: list[tuple[Direction, int, int, int]]) -> None:
        for direction, device, host, size in copies:
            src, dst = (host, device) if direction is Direction.LOAD else (device, host)
            ctypes.memmove(dst, src, size)

    def copy_each(self, direction: Direction, src: Indices, dst: Indices, sizes: Indices) -> None:
        for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    def copy_indexed(self, direction: Direction, device: Any, pool: Any, blocks: Any, slots: Any) -> None:
        rows = pool_rows(pool)
        pages = device.bytes.reshape(-1, pool.row_bytes)
        if direction is Direction.STORE:
            rows[slots] = pages[blocks]
        else:
            pages[blocks] = rows[slots]

    def fill_later(self, device: Memory, start: int, size_bytes: int, value: int) -> None:
        ctypes.memset(device.address + start, value, size_bytes)

    def read_now(self, device: Memory, start: int, host_address: int, size_bytes: int) -> None:
        ctypes.memmove(host_address, device.address + start, size_bytes)

    def compute_seconds(self, products: int) -> float:
        matrix = np.ones((256, 256), np.float32)
        started = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        return time.perf_counter() - started

    def close(self) -> None:
        """Nothing to let go of."""


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
        arrays = (np.array([value], np.int64) for value in (src, dst, size))
        driver.copy(direction, *arrays, self.device.raw(self.streams[direction]))

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

    def close(self) -> None:
        self._at_rest()

    def _at_rest(self) -> None:
        for stream in self.streams.values():
            self.device.synchronize(stream)


def pool_rows(pool: Any) -> Bytes:
    """All rows of a pool as one array [row, byte]."""
    whole = (ctypes.c_uint8 * pool.size_bytes).from_address(pool.address)
    return np.frombuffer(whole, np.uint8).reshape(-1, pool.row_bytes)


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
