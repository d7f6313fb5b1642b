"""How fast a transfer engine copies, beside what else could be used, and what it costs computing.

A cell is a piece size and a number of pieces per job, scattered over the cache and the pool so that hardly
anything can be joined. Small jobs are submitted many at a time, and so are the copies they are compared with.
Rates are the best of several rounds: other work on the machine only ever takes away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.transfer_machine import Machine, Memory
from connectors.layout.blocks import CacheView, GroupPages, Region
from connectors.transfer.base import Direction, GroupMoves, TransferEngine, TransferJob
from connectors.transfer.host_pool import PinnedHostPool

KIB, MIB = 1 << 10, 1 << 20
WAIT_S = 120.0


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    piece_bytes: tuple[int, ...]
    pieces: tuple[int, ...]
    job_bytes_max: int
    round_bytes: int
    """Jobs are repeated until a round moves this much (or 64 jobs)."""
    indexed_bytes_max: int
    each_pieces_max: int
    rounds: int
    products: int
    budget_s: float


FULL = Scale(
    piece_bytes=tuple(size * KIB for size in (4, 8, 16, 32, 64, 256, 1024, 4096)),
    pieces=(16, 256, 4096, 65536),
    job_bytes_max=1024 * MIB,
    round_bytes=256 * MIB,
    indexed_bytes_max=64 * MIB,
    each_pieces_max=4096,
    rounds=5,
    products=60,
    budget_s=270.0,
)
QUICK = Scale(
    piece_bytes=tuple(size * KIB for size in (4, 16, 64, 1024)),
    pieces=(16, 1024),
    job_bytes_max=256 * MIB,
    round_bytes=64 * MIB,
    indexed_bytes_max=32 * MIB,
    each_pieces_max=1024,
    rounds=3,
    products=40,
    budget_s=90.0,
)


@dataclass
class Cell:
    """Rates in bytes per second by column; None: not measured."""

    direction: Direction | None
    """None: both at once."""
    piece_bytes: int
    pieces: int
    rates: dict[str, float | None] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the rate of one big copy of the same bytes."""
        whole = self.rates.get("one copy")
        return (self.rates.get("engine") or 0.0) / whole if whole else 0.0


@dataclass(frozen=True)
class Slowdown:
    """How much longer matrix products take while this is copied, in percent; ``covered``: until their end."""

    direction: Direction
    piece_bytes: int
    percent: float
    rate: float
    covered: bool


class Field:
    """A cache of blocks of one piece, a pool of rows a little larger, and an engine over both."""

    def __init__(self, machine: Machine, piece_bytes: int, size_bytes: int) -> None:
        self.machine = machine
        self.piece_bytes = piece_bytes
        self.blocks = size_bytes // piece_bytes + 1
        self.memory: Memory = machine.memory(self.blocks * piece_bytes)
        # No gaps: the same memory can be copied whole. Shuffled ids keep pieces from being joined.
        region = Region(self.memory.address, piece_bytes, (0,), piece_bytes)
        self.view = CacheView((GroupPages(0, (region,), piece_bytes),), self.blocks, piece_bytes)
        self.pool: PinnedHostPool = machine.pool(self.blocks * piece_bytes, piece_bytes)
        self.engine: TransferEngine = machine.engine(self.view, self.pool)
        self._rng = np.random.default_rng(3)
        self._last_job = 0

    def moves(self, pieces: int) -> GroupMoves:
        """Scattered blocks and rows."""
        blocks = self._rng.permutation(self.blocks - 1)[:pieces].astype(np.int64) + 1
        return GroupMoves(0, blocks, self._rng.permutation(self.blocks)[:pieces].astype(np.int64))

    def submit(self, direction: Direction, moves: GroupMoves) -> int:
        self._last_job += 1
        self.engine.submit(TransferJob(self._last_job, direction, (moves,)))
        return self._last_job

    def finish(self, job_ids: list[int]) -> None:
        """Raises RuntimeError if any of them failed."""
        if not self.engine.wait(job_ids, WAIT_S):
            raise RuntimeError(f"jobs of {self.piece_bytes} byte pieces did not end within {WAIT_S:.0f} s")
        failed = [result.error for result in self.engine.poll() if not result.ok]
        if failed:
            raise RuntimeError(f"jobs failed: {failed[0]}")

    def close(self) -> None:
        self.engine.close()
        self.pool.close()


def measure(machine: Machine, scale: Scale, say: Callable[[str], None]) -> Iterator[Cell]:
    """Every cell; stops early, and says so, when the time is over."""
    until = time.monotonic() + scale.budget_s
    for piece_bytes in scale.piece_bytes:
        counts = [n for n in scale.pieces if n * piece_bytes <= scale.job_bytes_max]
        # Twice the largest job, so that scattered pieces are far apart.
        place = Field(machine, piece_bytes, max(2 * counts[-1] * piece_bytes, scale.round_bytes))
        try:
            for pieces in counts:
                if time.monotonic() > until:
                    say(f"time is over: {pieces} pieces of {piece_bytes} bytes and more are not measured")
                    return
                for direction in (Direction.LOAD, Direction.STORE, None):
                    yield _cell(place, direction, pieces, scale)
        finally:
            place.close()


def _cell(place: Field, direction: Direction | None, pieces: int, scale: Scale) -> Cell:
    size = pieces * place.piece_bytes
    repeats = max(1, min(64, scale.round_bytes // size))
    cell = Cell(direction, place.piece_bytes, pieces)
    directions = list(Direction) if direction is None else [direction]
    moves = {way: [place.moves(pieces) for _ in range(min(repeats, 4))] for way in directions}
    total = size * repeats * len(directions)

    def by_engine() -> None:
        jobs = [
            place.submit(way, moves[way][turn % len(moves[way])])
            for turn in range(repeats)
            for way in directions
        ]
        place.finish(jobs)

    def whole() -> None:
        base, rows = place.memory.address, place.pool.address
        copies = [(way, base, rows, size) for _ in range(repeats) for way in directions]
        if direction is None:  # apart, as the engine's are
            half = place.blocks // 2 * place.piece_bytes
            copies = [
                (
                    way,
                    base + (half if way is Direction.STORE else 0),
                    rows + (0 if way is Direction.STORE else half),
                    s,
                )
                for way, _, _, s in copies
            ]
        place.machine.copy_whole(copies)

    cell.rates["engine"] = _rate(by_engine, total, scale.rounds)
    cell.rates["one copy"] = _rate(whole, total, scale.rounds)
    if direction is not None:
        first = moves[direction][0]
        cell.rates["call per piece"] = _each(place, direction, first, scale)
        cell.rates["torch index"] = _indexed(place, direction, first, scale)
    return cell


def _each(place: Field, direction: Direction, moves: GroupMoves, scale: Scale) -> float | None:
    if len(moves.slots) > scale.each_pieces_max:
        return None
    device = place.memory.address + moves.block_ids * place.piece_bytes
    host = place.pool.address + moves.slots * place.piece_bytes
    src, dst = (device, host) if direction is Direction.STORE else (host, device)
    sizes = np.full(len(src), place.piece_bytes, np.int64)
    total = int(sizes.sum())
    repeats = max(1, min(16, 16 * MIB // total))

    def run() -> None:
        for _ in range(repeats):
            place.machine.copy_each(direction, src, dst, sizes)

    return _rate(run, total * repeats, min(scale.rounds, 3))


def _indexed(place: Field, direction: Direction, moves: GroupMoves, scale: Scale) -> float | None:
    total = len(moves.slots) * place.piece_bytes
    if total > scale.indexed_bytes_max:
        return None

    def run() -> None:
        place.machine.copy_indexed(direction, place.memory, place.pool, moves.block_ids, moves.slots)

    return _rate(run, total, min(scale.rounds, 3))


def _rate(run: Callable[[], None], size: int, rounds: int) -> float:
    run()
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return size / best


def slowdowns(machine: Machine, scale: Scale) -> Iterator[Slowdown]:
    """Matrix products alone and beside transfers, in turns; medians."""
    alone_s = min(machine.compute_seconds(scale.products) for _ in range(3))
    for direction, sizes in ((Direction.STORE, (16, 64, 1024)), (Direction.LOAD, (4, 16, 64, 1024))):
        for piece_bytes in (size * KIB for size in sizes):
            place = Field(machine, piece_bytes, 128 * MIB)
            try:
                yield _slowdown(place, direction, alone_s, scale)
            finally:
                place.close()


def _slowdown(place: Field, direction: Direction, alone_s: float, scale: Scale) -> Slowdown:
    machine = place.machine
    moves = place.moves(max(32 * MIB // place.piece_bytes, 1))
    job_bytes = len(moves.slots) * place.piece_bytes
    pilot = [place.submit(direction, moves) for _ in range(8)]
    started = time.perf_counter()
    place.finish(pilot)
    rate = len(pilot) * job_bytes / max(time.perf_counter() - started, 1e-6)
    # Enough to last longer than submitting them and the products together.
    jobs_needed = min(max(int(4 * alone_s * rate / job_bytes) + 2, 4), 2000)
    ratios, covered = [], True
    for _ in range(scale.rounds):
        alone = machine.compute_seconds(scale.products)
        jobs = [place.submit(direction, moves) for _ in range(jobs_needed)]
        beside = machine.compute_seconds(scale.products)
        covered = covered and not place.engine.wait(jobs, 0.0)
        place.finish(jobs)
        again = machine.compute_seconds(scale.products)
        ratios.append(beside / ((alone + again) / 2))
    return Slowdown(direction, place.piece_bytes, 100 * (float(np.median(ratios)) - 1), rate, covered)


def beside(machine: Any, scale: Scale) -> list[Slowdown]:
    """Slowdowns where the machine computes beside copying; none elsewhere."""
    return list(slowdowns(machine, scale)) if machine.computes else []
