"""Host memory for rows, and the transfer engine that copies on the CPU.

Memory: anonymous memory aligned to huge pages is bound to the GPU's NUMA node, populated, and registered with
the driver in chunks, so that no page is allocated, moved or pinned during a transfer. Without a driver (CPU
platforms) the memory is not pinned. Invariants: a row lies within one registered chunk, and no page is shared
by two chunks.

Engine, for CPU platforms and as the reference for other engines: one worker thread runs jobs in order and
copies their pieces with ``memmove``; the interpreter lock is released during each copy. ``poll`` returns the
results. Invariants: a job is reported exactly once. A job with a wrong block or row is refused before any
byte is copied. ``submit`` never waits. Stores are best effort: beyond ``queued_stores_max`` waiting ones,
further stores fail immediately and are counted. Loads are always accepted; waiting requests bound their
number.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.transfer.base import (
    QUEUED_STORES_MAX,
    Direction,
    HostMemory,
    StreamMark,
    ThreadedEngine,
    TransferJob,
    TransferPlan,
    TransferResult,
    merge_adjacent,
)

if TYPE_CHECKING:
    from kvatlas.connectors.transfer.cuda_driver import CudaDriver


# Memory interfaces of the operating system.
#
# Reads /proc and /sys; calls madvise and mbind through ctypes, which releases the interpreter lock during the
# call. All calls except populating are advice: if the system refuses, the caller gets the reason and
# continues.


_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MPOL_PREFERRED = 1
_MBIND_CALLS = {"x86_64": 237, "aarch64": 235}
_NODE_BITS = 1024
_POPULATE_STEP_BYTES = 256 << 20
_POPULATE_THREADS_MAX = 8
_UNLIMITED_BYTES = 1 << 60
_GROUP_FILES = ("memory.max", "memory.current", "inactive_file ")
# Files of a control group, version 2 and 1: limit, usage, and the line of memory.stat for cached file pages.
_GROUP_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.restype = ctypes.c_long


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still allocate: the minimum of the machine and its control groups."""
    available = _UNLIMITED_BYTES
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for line in _lines(proc / "self" / "cgroup"):
        _number, controllers, place = line.split(":", 2)
        if not controllers:
            available = min(available, _group_available(cgroup, place, _GROUP_FILES))
        elif "memory" in controllers.split(","):  # control groups of version 1
            available = min(available, _group_available(cgroup / "memory", place, _GROUP_FILES_V1))
    return max(available, 0)


def _group_available(root: Path, place: str, names: tuple[str, str, str]) -> int:
    """Bytes left by a group and its ancestors."""
    # In a container the group itself may be outside the visible tree.
    available = _UNLIMITED_BYTES
    group = root / place.strip("/")
    while group.is_relative_to(root):
        limit, used = _lines(group / names[0]), _lines(group / names[1])
        if limit and used and limit[0] != "max":
            # Cached file pages count as used but are reclaimable.
            stat = _lines(group / "memory.stat")
            cached = sum(int(line.split()[1]) for line in stat if line.startswith(names[2]))
            available = min(available, int(limit[0]) - int(used[0]) + cached)
        group = group.parent
    return available


def numa_node_of(pci_bus_id: str, sys: Path = Path("/sys")) -> int | None:
    """NUMA node of a device; None if the machine has one node or does not report it."""
    found = _lines(sys / "bus/pci/devices" / pci_bus_id.lower() / "numa_node")
    node = int(found[0]) if found else -1
    return node if node >= 0 and (sys / f"devices/system/node/node{node}").exists() else None


def cpus_of_node(node: int, sys: Path = Path("/sys")) -> frozenset[int]:
    """CPUs of a NUMA node that this process may use; empty if there are none or it is unknown."""
    found = _lines(sys / f"devices/system/node/node{node}/cpulist")
    cpus: set[int] = set()
    for stretch in found[0].split(",") if found else ():
        if stretch.strip():
            first, _, last = stretch.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus & os.sched_getaffinity(0))


def prefer_node(address: int, size_bytes: int, node: int) -> str:
    """Prefer a node for pages touched from now on; returns the reason of a refusal, else an empty text."""
    # Preferred, not bound: when the node is full, pages come from another one instead of ending the process.
    call = _MBIND_CALLS.get(platform.machine())
    if call is None:
        return f"binding memory is not known for {platform.machine()}"
    mask = (ctypes.c_ulong * (_NODE_BITS // 64))()
    mask[node // 64] = 1 << (node % 64)
    result = _libc.syscall(
        ctypes.c_long(call),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(_NODE_BITS + 1),
        ctypes.c_uint(0),
    )
    return "" if result == 0 else f"mbind: {os.strerror(ctypes.get_errno())}"


def advise_huge_pages(address: int, size_bytes: int) -> bool:
    """Request pages of 2 MiB; False if this system does not support them."""
    return _madvise(address, size_bytes, _MADV_HUGEPAGE) == 0


def keep_from_children(address: int, size_bytes: int) -> bool:
    """Exclude memory from forked processes."""
    # A copy-on-write of pinned pages would separate the process from the pages that the device writes to.
    return _madvise(address, size_bytes, _MADV_DONTFORK) == 0


def populate(address: int, size_bytes: int, cpus: frozenset[int] = frozenset()) -> None:
    """Allocate every page now; ``address`` is page-aligned. MemoryError if there is not enough memory.

    ``cpus``: if not empty, only these processors touch the pages.
    """
    # By default the kernel places a page on the node of the processor that touches it first.
    steps = range(0, size_bytes, _POPULATE_STEP_BYTES)

    def settle() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # affects the calling thread only

    # Most of the time is spent on zeroing pages, which scales with the number of cores.
    workers = min(_POPULATE_THREADS_MAX, len(cpus) or os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, initializer=settle) as threads:
        list(
            threads.map(lambda at: _populate(address + at, min(_POPULATE_STEP_BYTES, size_bytes - at)), steps)
        )


def _populate(address: int, size_bytes: int) -> None:
    code = _madvise(address, size_bytes, _MADV_POPULATE_WRITE)
    if code == errno.EINVAL:  # Linux before 5.14
        touch(address, size_bytes)
    elif code:
        raise MemoryError(os.strerror(code))


def touch(address: int, size_bytes: int) -> None:
    """Write to one byte of every page without changing its content."""
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))[:: mmap.PAGESIZE]
    pages |= 0


def _madvise(address: int, size_bytes: int, advice: int) -> int:
    """Call madvise; returns 0 or the errno."""
    # A call interrupted while it populates is repeated.
    while _libc.madvise(address, size_bytes, advice):
        code = ctypes.get_errno()
        if code not in {errno.EINTR, errno.EAGAIN}:
            return code
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


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


class CopyFault(Protocol):
    """Test hook around a job's copy, on the worker thread: may wait, raise, or change bytes after
    ``copy()``."""

    def __call__(self, job: TransferJob, copy: Callable[[], None]) -> None: ...


class HostTransferEngine(ThreadedEngine):
    """The ``TransferEngine`` for caches in host memory."""

    def __init__(
        self,
        view: CacheView,
        pool: HostMemory,
        *,
        row_bytes: int | None = None,
        queued_stores_max: int = QUEUED_STORES_MAX,
        fault: CopyFault | None = None,
    ) -> None:
        """``pool`` must outlive the engine. LayoutError if a row cannot hold a block."""
        super().__init__(TransferPlan(view, pool, row_bytes), queued_stores_max, "kvatlas-host-copy")
        self._pool = pool
        self._fault = fault
        self._queue: deque[TransferJob] = deque()
        self._queued_stores = 0
        self._thread.start()

    def mark(self) -> StreamMark | None:
        """None: computation in host memory has ended when a job is submitted."""
        return None

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        """Block until these jobs have ended; unknown ids count as ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished.keys().isdisjoint(job_ids), timeout_s)

    def stores_waiting(self) -> int:
        return self._queued_stores

    def accept(self, job: TransferJob, after: StreamMark | None) -> str:
        self._queued_stores += job.direction is Direction.STORE
        self._queue.append(job)
        return ""

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                job = self._queue.popleft()
                if job.direction is Direction.STORE:
                    self._queued_stores -= 1
            result = self._execute(job)
            with self._changed:
                del self._unfinished[job.job_id]
                self._results.append(result)
                self._changed.notify_all()

    def _execute(self, job: TransferJob) -> TransferResult:
        started = time.monotonic()
        try:
            if self._fault is None:
                self._copy(job)
            else:
                self._fault(job, lambda: self._copy(job))
        except Exception as error:
            # The job must be answered after any error.
            log.warning("transfer job %d failed", job.job_id, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
            seconds = time.monotonic() - started
            return TransferResult(job.job_id, job.direction, False, seconds, {}, reason)
        moved = self._plan.bytes_by_group(job)
        return TransferResult(job.job_id, job.direction, True, time.monotonic() - started, moved)

    def _copy(self, job: TransferJob) -> None:
        sources, destinations, sizes = merge_adjacent(self._plan.pieces(job))
        for source, destination, size in zip(
            sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(destination, source, size)
