"""The machine that transfers are measured on: all that differs between a GPU and plain memory.

``benchmarks.transfer_gpu`` has the one with torch and the driver; ``HostMachine`` stands for both sides with
this machine's memory. Methods that copy return when the bytes are there.
"""

from __future__ import annotations

import ctypes
import platform
import time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.transfer.base import Direction, Indices, TransferEngine
from kvatlas.connectors.transfer.host import PinnedHostPool
from kvatlas.connectors.transfer.host_engine import HostTransferEngine

Bytes = npt.NDArray[np.uint8]
QUEUED_STORES_MAX = 1 << 16
"""Measuring queues more stores than a connector would."""
STEP_KERNELS, STEP_BYTES = 300, 64 << 10
"""A decode-like step: as many operations as a model of thirty layers launches, each a few microseconds."""


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
    step_ways: tuple[str, ...]
    """Ways to run a decode-like step."""

    def memory(self, size_bytes: int) -> Memory: ...

    def pool(self, size_bytes: int, row_bytes: int) -> PinnedHostPool: ...

    def engine(self, view: CacheView, pool: PinnedHostPool, way: str = "") -> TransferEngine: ...

    def copy_whole(self, copies: list[tuple[Direction, int, int, int]]) -> None:
        """(direction, device address, host address, bytes): each in one piece, both directions together."""

    def copy_each(self, direction: Direction, src: Indices, dst: Indices, sizes: Indices) -> None:
        """One call for each piece."""

    def copy_indexed(self, direction: Direction, device: Memory, pool: Any, blocks: Any, slots: Any) -> None:
        """By torch (or numpy) indexing of rows of one size, through a staging buffer."""

    def fill_later(self, device: Memory, start: int, size_bytes: int, value: int) -> None:
        """Enqueue, on the computing stream, a long wait and then a fill. Returns immediately."""

    def read_now(self, device: Memory, start: int, host_address: int, size_bytes: int) -> None:
        """Copy to the host without waiting for the computing stream: what an engine must not do."""

    def compute_seconds(self, products: int) -> float:
        """How long this many large matrix products take."""

    def step(self, way: str) -> None:
        """A decode-like step: STEP_KERNELS small operations, and a wait for the last of them."""

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
    step_ways: tuple[str, ...] = ("launches",)

    def __init__(self) -> None:
        self._small = np.zeros(STEP_BYTES, np.uint8)
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

    def step(self, way: str) -> None:
        for _ in range(STEP_KERNELS):
            self._small += 1

    def close(self) -> None:
        """Nothing to release."""


def pool_rows(pool: Any) -> Bytes:
    """All rows of a pool as one array [row, byte]."""
    whole = (ctypes.c_uint8 * pool.size_bytes).from_address(pool.address)
    return np.frombuffer(whole, np.uint8).reshape(-1, pool.row_bytes)
