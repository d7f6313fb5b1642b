"""Host memory for rows.

Anonymous memory aligned to huge pages is bound to the GPU's NUMA node, populated, and registered with
the driver in chunks, so that no page is allocated, moved or pinned during a transfer. Without a driver (CPU
platforms) the memory is not pinned. Invariants: a row lies within one registered chunk, and no page is shared
by two chunks.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvatlas.connectors.transfer.memory_limits import available_bytes
from kvatlas.connectors.transfer.system_memory import (
    advise_huge_pages,
    cpus_of_node,
    keep_from_children,
    numa_node_of,
    populate,
    prefer_node,
)

if TYPE_CHECKING:
    from kvatlas.connectors.transfer.cuda_driver import CudaDriver


log = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
# Most bytes registered in one call: drivers on some machines refuse much larger ranges.
REGISTER_CHUNK_BYTES = 64 << 30


@dataclass(frozen=True)
class SharedMapping:
    """Memory shared by several processes through a file in a memory file system, removed once all have mapped
    it.

    ``first``: this process populates the pages.
    """

    path: Path
    first: bool


class HostMemoryError(Exception):
    """The requested host memory is unavailable; the message names the setting and the available amount."""


class PinnedHostPool:
    """``size_bytes // row_bytes`` rows, packed from ``address`` on. Close it after all engines that use it.

    ``numa_node`` overrides the node of the driver's device. ``notes`` has the memory's properties and the
    system's refusals, for the log.
    """

    def __init__(
        self,
        size_bytes: int,
        row_bytes: int,
        *,
        driver: CudaDriver | None = None,
        numa_node: int | None = None,
        register_chunk_bytes: int = REGISTER_CHUNK_BYTES,
        shared: SharedMapping | None = None,
    ) -> None:
        """``shared``: memory that pools of other processes map too.

        HostMemoryError if there is not enough memory or it cannot be pinned.
        """
        if row_bytes <= 0 or size_bytes < row_bytes:
            raise HostMemoryError(
                f"host_bytes leaves this rank {size_bytes} bytes, less than one row of {row_bytes}: raise it"
            )
        self.row_bytes = row_bytes
        self.num_rows = size_bytes // row_bytes
        self.size_bytes = self.num_rows * row_bytes
        self.chunk_bytes = _chunk_bytes(row_bytes, register_chunk_bytes)
        self.notes: list[str] = []
        self._driver = driver
        self._registered: list[int] = []
        self._closed = False
        self._map = self._reserve() if shared is None else self._map_shared(shared)
        whole = np.frombuffer(self._map, np.uint8)
        # In shared memory, row 0 must be the same bytes in every process, so no alignment by address.
        skip = -whole.ctypes.data % HUGE_PAGE_BYTES if shared is None else 0
        self._bytes = whole[skip : skip + self.size_bytes]
        self.address = int(self._bytes.ctypes.data)
        try:
            if shared is None or shared.first:
                self._settle(numa_node)
            self._register()
        except BaseException:
            self.close()
            raise

    @property
    def pinned(self) -> bool:
        """Whether a device can reach every row by DMA."""
        return self._driver is not None and not self._closed

    def row(self, slot: int) -> memoryview:
        """The writable bytes of one row, valid while the pool is open. IndexError if there is no such row."""
        if not 0 <= slot < self.num_rows:
            raise IndexError(f"row {slot} is not in [0, {self.num_rows})")
        if self._closed:
            raise ValueError("the host pool is closed")
        return self._bytes[slot * self.row_bytes : (slot + 1) * self.row_bytes].data

    def close(self) -> None:
        """Unpin and free the memory (after the last row view is released); may be called again."""
        self._closed = True
        while self._registered and self._driver is not None:
            address = self._registered.pop()
            try:
                self._driver.unregister_host(address)
            except Exception:
                # The device may be gone; the memory must still be freed.
                log.warning("unpinning host memory failed", exc_info=True)
        self._bytes = np.empty(0, np.uint8)

    def _reserve(self) -> mmap.mmap:
        available = available_bytes()
        if self.size_bytes > available:
            # The kernel kills a process that exceeds its container's limit, without an error message.
            raise self._short(available)
        try:
            return mmap.mmap(-1, self.size_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise self._short(available) from error

    def _map_shared(self, shared: SharedMapping) -> mmap.mmap:
        size = -(-self.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if shared.first:
            available = available_bytes()
            if size > available:
                raise self._short(available)
        try:
            file = os.open(shared.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(file, size)
                if shared.first:
                    # Touching a page that cannot be allocated later would kill the process (SIGBUS).
                    os.posix_fallocate(file, 0, size)
                self.notes.append(f"shared as {shared.path}")
                return mmap.mmap(file, size, mmap.MAP_SHARED)
            finally:
                os.close(file)
        except OSError as error:
            shared.path.unlink(missing_ok=True)
            raise HostMemoryError(
                f"host_bytes: {_gib(size)} of shared memory at {shared.path} cannot be had ({error}): give "
                "the container more (docker --shm-size, or an emptyDir of medium Memory at /dev/shm), or set "
                "share_replicas to false, with which every rank keeps its own copy"
            ) from error

    def _settle(self, numa_node: int | None) -> None:
        span = -(-self.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if not advise_huge_pages(self.address, span):
            self.notes.append("no huge pages on this system")
        keep_from_children(self.address, span)
        if numa_node is None and self._driver is not None:
            numa_node = numa_node_of(self._driver.pci_bus_id())
        cpus = self._bind(span, numa_node)
        try:
            populate(self.address, span, cpus)
        except MemoryError as error:
            raise self._short(available_bytes()) from error

    def _bind(self, span: int, numa_node: int | None) -> frozenset[int]:
        """Place the pages near the device; returns the processors that must touch them first, if any."""
        if numa_node is None:
            self.notes.append("not bound to a memory node: the system names none near the device")
            return frozenset()
        where = f"memory node {numa_node}"
        refused = prefer_node(self.address, span, numa_node)
        if not refused:
            self.notes.append(f"on {where}")
            return frozenset()
        cpus = cpus_of_node(numa_node)
        if cpus:
            self.notes.append(f"on {where} by the processors that touch it first ({refused})")
            remedy = (
                "pages that must move later will not stay there; allow mbind (CAP_SYS_NICE in a container)"
            )
        else:
            self.notes.append(f"not bound to {where}: {refused}, and no processor of it may be used")
            remedy = (
                "copies may cross the machine; allow mbind (CAP_SYS_NICE in a container), or its processors"
            )
        log.warning("host memory is %s: %s", self.notes[-1], remedy)
        return cpus

    def _register(self) -> None:
        if self._driver is None:
            self.notes.append("not pinned")
            return
        for start in range(0, self.size_bytes, self.chunk_bytes):
            length = min(self.chunk_bytes, self.size_bytes - start)
            try:
                self._driver.register_host(self.address + start, length)
            except Exception as error:
                raise HostMemoryError(
                    f"host_bytes: pinning {_gib(self.size_bytes)} of host memory failed after {_gib(start)} "
                    f"({error}); lower host_bytes, or raise what this machine or container may lock"
                ) from error
            self._registered.append(self.address + start)
        self.notes.append(f"pinned in {len(self._registered)} chunks")

    def _short(self, available: int) -> HostMemoryError:
        return HostMemoryError(
            f"host_bytes asks for {_gib(self.size_bytes)} of host memory for this rank, "
            f"{_gib(available)} are available: lower host_bytes, or give the machine or container more memory"
        )


def _chunk_bytes(row_bytes: int, most: int) -> int:
    """The longest chunk of whole rows and whole pages within ``most`` bytes; at least one such unit."""
    unit = math.lcm(row_bytes, mmap.PAGESIZE)
    return max(most // unit, 1) * unit


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"
