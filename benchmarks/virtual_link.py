"""Cost of the transfer engine's own work beside a link of a GPU's speed, on a machine without a GPU.

    python -m benchmarks.virtual_link

The engine is the real one, its thread too; behind its device and driver lies a link that copies nothing and
takes time on a clock of its own. That clock is this process's CPU time plus what driver calls and kernel
launches are assumed to take on a GPU's machine, so that other work on this machine does not count. A cell's
figure is the share of the time in which one big copy moves the same bytes.

Assumptions: 55 GB/s in each direction, 5 us a driver call and 0.05 us a piece in it, 60 us a kernel launch.
Not modelled: what a copy engine needs to start a piece (the device's own benchmark measures it:
``benchmarks.transfer``), so the copy engine's figures are a bound. Exit code 1: a goal was missed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvatlas.connectors.layout import CacheView, GroupPages, Region
from kvatlas.connectors.transfer.base import Direction, GroupMoves, Indices, TransferJob
from kvatlas.connectors.transfer.calibrate import Calibration
from kvatlas.connectors.transfer.cuda import CudaTransferEngine

KIB = 1 << 10
LINK_BYTES_PER_S = 55e9
CALL_S, PIECE_S, LAUNCH_S = 5e-6, 0.05e-6, 60e-6
JOBS, ROUNDS = 128, 7
SPREAD = 4
"""Blocks and rows there are for each one that a job names."""
BY_COPY_ENGINE = Calibration(note="asked for")
BY_KERNEL = Calibration(kernel_max_piece_bytes=1 << 20, kernel_min_pieces=1, note="")
WAIT_S = 120.0


@dataclass
class _Event:
    at_s: float = 0.0


@dataclass
class _Stream:
    handle: int
    ready_s: float = 0.0


class VirtualLink:
    """Both ``Device`` and ``Driver``. Streams and events are points in time on the link's clock."""

    name = "virtual link"
    batched = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._assumed_s = 0.0
        self._streams = [_Stream(0)]
        self._free_s = 0.0
        self.end_s = 0.0
        """When the last copy enqueued so far is done."""

    def now(self) -> float:
        return time.process_time() + self._assumed_s

    def bind_thread(self) -> None: ...

    def current_stream(self) -> _Stream:
        return self._streams[0]

    def low_priority_stream(self) -> _Stream:
        self._streams.append(_Stream(len(self._streams)))
        return self._streams[-1]

    def raw(self, stream: _Stream) -> int:
        return stream.handle

    def new_event(self) -> _Event:
        return _Event()

    def record(self, event: _Event, stream: _Stream) -> None:
        event.at_s = stream.ready_s

    def wait(self, stream: _Stream, event: _Event) -> None:
        stream.ready_s = max(stream.ready_s, event.at_s)

    def done(self, event: _Event) -> bool:
        return event.at_s <= self.now()

    def synchronize(self, stream: _Stream) -> None: ...

    def copy(self, direction: Direction, src: Indices, dst: Indices, sizes: Indices, stream: int) -> None:
        self._enqueue(int(sizes.sum()), CALL_S + PIECE_S * len(sizes), self._streams[stream])

    def kernel_copy(self, src: Indices, dst: Indices, sizes: Indices, stream: _Stream) -> object:
        self._enqueue(int(sizes.sum()), LAUNCH_S, stream)
        return None

    def _enqueue(self, size_bytes: int, call_s: float, stream: _Stream) -> None:
        with self._lock:
            self._assumed_s += call_s
            begins = max(self.now(), stream.ready_s, self._free_s)
            self._free_s = stream.ready_s = self.end_s = begins + size_bytes / LINK_BYTES_PER_S

    def scratch(self, size_bytes: int) -> tuple[int, object]:
        return 0, None

    def register_host(self, address: int, size_bytes: int) -> None: ...

    def unregister_host(self, address: int) -> None: ...

    def maps_same_address(self, address: int) -> bool:
        return True

    def pci_bus_id(self) -> str:
        return ""


@dataclass
class _Rows:
    """Rows that are an address only: nothing is copied."""

    size_bytes: int
    address: int = 1 << 40


@dataclass(frozen=True)
class LinkCell:
    """Measured values. ``goal``: the least share; None: there is none."""

    direction: Direction
    way: str
    pieces: int
    piece_bytes: int
    goal: float | None
    share: float
    """Of one big copy's rate."""
    job_us: float
    """From one job to the next, the link's own time included."""

    @property
    def met(self) -> bool:
        return self.goal is None or self.share >= self.goal


CELLS = (
    (Direction.LOAD, "kernel", 256, 4 * KIB, None),
    (Direction.LOAD, "kernel", 256, 16 * KIB, 0.65),
    (Direction.LOAD, "kernel", 4096, 16 * KIB, 0.65),
    (Direction.LOAD, "kernel", 256, 64 * KIB, 0.92),
    (Direction.LOAD, "copy engine", 256, 16 * KIB, 0.60),
    (Direction.LOAD, "copy engine", 256, 64 * KIB, 0.92),
    (Direction.STORE, "copy engine", 256, 16 * KIB, 0.60),
    (Direction.STORE, "copy engine", 256, 64 * KIB, 0.92),
)


def measure(cell: tuple[Direction, str, int, int, float | None], rounds: int = ROUNDS) -> LinkCell:
    """The best of several rounds: other work on the machine only ever takes away."""
    direction, way, pieces, piece_bytes, goal = cell
    link = VirtualLink()
    blocks = SPREAD * pieces + 1
    view = CacheView(
        (GroupPages(0, (Region(1 << 44, piece_bytes, (0,), piece_bytes),), piece_bytes),), blocks, piece_bytes
    )
    calibration = BY_KERNEL if way == "kernel" else BY_COPY_ENGINE
    device: Any = link
    engine = CudaTransferEngine(
        view,
        _Rows(blocks * piece_bytes),
        device=device,
        driver=device,
        calibration=calibration,
        queued_stores_max=JOBS,
    )
    rng = np.random.default_rng(1)
    order: Callable[[], Indices] = lambda: rng.permutation(blocks - 1)[:pieces].astype(np.int64) + 1  # noqa: E731
    moves = [GroupMoves(0, order(), order()) for _ in range(4)]
    best_s = float("inf")
    next_id = 1
    for _ in range(rounds):
        jobs = range(next_id, next_id + JOBS)
        next_id += JOBS
        started = link.now()
        for job_id in jobs:
            engine.submit(TransferJob(job_id, direction, (moves[job_id % len(moves)],)))
        if not engine.wait(list(jobs), WAIT_S) or not all(result.ok for result in engine.poll()):
            raise RuntimeError("jobs over the virtual link failed or did not end")
        best_s = min(best_s, link.end_s - started)
    engine.close()
    alone_s = JOBS * pieces * piece_bytes / LINK_BYTES_PER_S
    return LinkCell(direction, way, pieces, piece_bytes, goal, alone_s / best_s, 1e6 * best_s / JOBS)


def main() -> int:
    """Run by ``python -m benchmarks.virtual_link``; 1 if a goal was missed."""
    missed = False
    print("| direction | way | job | share of one copy | goal | us per job |\n|---|---|---|---|---|---|")
    for wanted in CELLS:
        cell = measure(wanted)
        missed = missed or not cell.met
        goal = "" if cell.goal is None else f"{cell.goal:.0%} {'met' if cell.met else 'MISSED'}"
        job = f"{cell.pieces} x {cell.piece_bytes // KIB} KiB"
        figures = f"{cell.share:.0%} | {goal} | {cell.job_us:.0f}"
        print(f"| {cell.direction.value} | {cell.way} | {job} | {figures} |", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
