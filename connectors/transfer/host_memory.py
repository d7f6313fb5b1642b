"""What the operating system says about memory, and what it does to a stretch of it on request.

Reads /proc and /sys; asks by madvise and mbind through ctypes, which leaves the interpreter lock to others
meanwhile. Everything but populating is advice: where the system refuses, the caller is told and goes on.
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
_GROUP_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
"""Of a control group, version 2 and 1: limit, what is used, and in memory.stat cached file pages of that."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.restype = ctypes.c_long


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still take: the machine's or its control groups', whichever is less."""
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
    """What a group and those around it leave. In a container its own place may be outside of what it sees."""
    available = _UNLIMITED_BYTES
    group = root / place.strip("/")
    while group.is_relative_to(root):
        limit, used = _lines(group / names[0]), _lines(group / names[1])
        if limit and used and limit[0] != "max":
            # Cached file pages count as used but make room when asked to.
            stat = _lines(group / "memory.stat")
            cached = sum(int(line.split()[1]) for line in stat if line.startswith(names[2]))
            available = min(available, int(limit[0]) - int(used[0]) + cached)
        group = group.parent
    return available


def numa_node_of(pci_bus_id: str, sys: Path = Path("/sys")) -> int | None:
    """The memory node next to a device; None: the machine has one node, or does not say."""
    found = _lines(sys / "bus/pci/devices" / pci_bus_id.lower() / "numa_node")
    node = int(found[0]) if found else -1
    return node if node >= 0 and (sys / f"devices/system/node/node{node}").exists() else None


def cpus_of_node(node: int, sys: Path = Path("/sys")) -> frozenset[int]:
    """The processors next to a memory node that this process may use; empty: none, or nobody says."""
    found = _lines(sys / f"devices/system/node/node{node}/cpulist")
    cpus: set[int] = set()
    for stretch in found[0].split(",") if found else ():
        if stretch.strip():
            first, _, last = stretch.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus & os.sched_getaffinity(0))


def prefer_node(address: int, size_bytes: int, node: int) -> str:
    """Ask that pages touched from now on come from a node; empty, or why the system refused.

    Preferred, not bound: when the node is full, pages come from another one instead of killing the process.
    """
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
    """Ask for pages of 2 MiB; False: this system has none to give."""
    return _madvise(address, size_bytes, _MADV_HUGEPAGE) == 0


def keep_from_children(address: int, size_bytes: int) -> bool:
    """Leave memory out of forked processes: a copy-on-write of pinned pages would part the process from the
    pages that the device writes to."""
    return _madvise(address, size_bytes, _MADV_DONTFORK) == 0


def populate(address: int, size_bytes: int, cpus: frozenset[int] = frozenset()) -> None:
    """Have every page in place now. MemoryError: there is not enough; ``address`` is a multiple of a page.

    ``cpus``: the only processors to do it on, unless empty: a page of which nothing else is said comes from
    the memory next to the processor that touches it first.
    """
    steps = range(0, size_bytes, _POPULATE_STEP_BYTES)

    def settle() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # of the calling thread alone

    # Zeroing pages is what takes the time, and several cores do it several times faster.
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
    """Write to one byte of every page, without changing what it holds."""
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))[:: mmap.PAGESIZE]
    pages |= 0


def _madvise(address: int, size_bytes: int, advice: int) -> int:
    """0, or the error's number. The kernel may be interrupted while it populates: then it is asked again."""
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
