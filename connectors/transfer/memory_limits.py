"""Memory that this process can still allocate, by the machine and its control groups."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED_BYTES = 1 << 60
# Files of a control group, version 2 and 1: limit, usage, and the line of memory.stat for cached file pages.
_GROUP_FILES = ("memory.max", "memory.current", "inactive_file ")
_GROUP_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still allocate: the minimum of the machine and its control groups."""
    available = _UNLIMITED_BYTES
    for line in lines_of(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for line in lines_of(proc / "self" / "cgroup"):
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
        limit, used = lines_of(group / names[0]), lines_of(group / names[1])
        if limit and used and limit[0] != "max":
            # Cached file pages count as used but are reclaimable.
            stat = lines_of(group / "memory.stat")
            cached = sum(int(line.split()[1]) for line in stat if line.startswith(names[2]))
            available = min(available, int(limit[0]) - int(used[0]) + cached)
        group = group.parent
    return available


def lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
