"""Rounds of ``benchmarks.transfer --quick`` are long enough: a device without any cost meets every goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import transfer_rates
from benchmarks.transfer_machine import HostMachine
from benchmarks.transfer_rates import MIB, QUICK, Scale
from benchmarks.transfer_report import goals
from kvatlas.connectors.transfer.base import CLOSE_S, Direction, StreamMark, TransferJob, TransferResult
from kvatlas.connectors.transfer.cuda import POLL_INTERVAL_S

LINK_BYTES_PER_S = 55e9


class PerfectLink:
    """Time passes only by copying, each direction at the link's full rate."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._free_s = dict.fromkeys(Direction, 0.0)

    def clock(self) -> float:
        return self.now_s

    def enqueue(self, direction: Direction, size_bytes: int) -> float:
        """When these bytes have arrived."""
        begins = max(self.now_s, self._free_s[direction])
        self._free_s[direction] = begins + size_bytes / LINK_BYTES_PER_S
        return self._free_s[direction]

    def come_to_rest(self) -> None:
        self.now_s = max(self.now_s, *self._free_s.values())


class PerfectEngine:
    """Enqueues for nothing. ``wait`` looks as seldom as the engine for GPUs does."""

    def __init__(self, link: PerfectLink, row_bytes: int) -> None:
        self._link = link
        self._row_bytes = row_bytes
        self._ends: dict[int, tuple[float, TransferJob]] = {}

    def mark(self) -> StreamMark | None:
        return None

    def submit(self, job: TransferJob, after: StreamMark | None = None) -> None:
        size = sum(len(moves.slots) for moves in job.groups) * self._row_bytes
        self._ends[job.job_id] = self._link.enqueue(job.direction, size), job

    def poll(self) -> list[TransferResult]:
        ended = [job for end, job in self._ends.values() if end <= self._link.now_s]
        for job in ended:
            del self._ends[job.job_id]
        return [TransferResult(job.job_id, job.direction, True, 0.0, {}) for job in ended]

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        last = max(self._ends[job_id][0] for job_id in job_ids)
        looks = math.ceil((last - self._link.now_s) / POLL_INTERVAL_S)
        self._link.now_s += max(looks, 0) * POLL_INTERVAL_S
        return True

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        return True


class NoMemory:
    """Addresses that are never read."""

    address = 1 << 40

    def close(self) -> None: ...


class PerfectMachine(HostMachine):
    def __init__(self) -> None:
        super().__init__()
        self.link = PerfectLink()

    def memory(self, size_bytes: int) -> Any:
        return NoMemory()

    def pool(self, size_bytes: int, row_bytes: int) -> Any:
        return NoMemory()

    def engine(self, view: Any, pool: Any, way: str = "") -> Any:
        return PerfectEngine(self.link, view.row_bytes)

    def copy_whole(self, copies: list[tuple[Direction, int, int, int]]) -> None:
        for direction, _, _, size in copies:
            self.link.enqueue(direction, size)
        self.link.come_to_rest()

    def copy_each(self, direction: Direction, src: Any, dst: Any, sizes: Any) -> None:
        self.copy_whole([(direction, 0, 0, int(sizes.sum()))])

    def copy_indexed(self, direction: Direction, device: Any, pool: Any, blocks: Any, slots: Any) -> None:
        self.copy_whole([(direction, 0, 0, len(slots))])


def verdicts(scale: Scale) -> list[str]:
    machine = PerfectMachine()
    cells = list(transfer_rates.measure(machine, scale, print, machine.link.clock))
    assert all(cell.measured for cell in cells)
    return [row[2] for row in goals(cells, [])[:4]]


def test_a_perfect_device_meets_the_goals_of_a_quick_run() -> None:
    assert verdicts(QUICK) == ["met"] * 4


def test_rounds_as_short_as_they_were_would_miss_them() -> None:
    assert "MISSED" in verdicts(replace(QUICK, round_bytes=64 * MIB))
