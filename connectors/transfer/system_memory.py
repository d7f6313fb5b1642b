"""Memory interfaces of the operating system.

Reads /proc and /sys; calls madvise and mbind through ctypes, which releases the interpreter lock during the
call. All calls except populating are advice: if the system refuses, the caller gets the reason and
continues.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvatlas.connectors.transfer.memory_limits import lines_of

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MPOL_PREFERRED = 1
_MBIND_CALLS = {"x86_64": 237, "aarch64": 235}
_NODE_BITS = 1024
_POPULATE_STEP_BYTES = 256 << 20
_POPULATE_THREADS_MAX = 8
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.restype = ctypes.c_long


def numa_node_of(pci_bus_id: str, sys: Path = Path("/sys")) -> int | None:
    """NUMA node of a device; None if the machine has one node or does not report it."""
    found = lines_of(sys / "bus/pci/devices" / pci_bus_id.lower() / "numa_node")
    node = int(found[0]) if found else -1
    return node if node >= 0 and (sys / f"devices/system/node/node{node}").exists() else None


def cpus_of_node(node: int, sys: Path = Path("/sys")) -> frozenset[int]:
    """CPUs of a NUMA node that this process may use; empty if there are none or it is unknown."""
    found = lines_of(sys / f"devices/system/node/node{node}/cpulist")
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
