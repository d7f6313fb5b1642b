"""How fast a transfer engine copies, beside what else could be used.

A cell is a piece size and a number of pieces per job, scattered over the cache and the pool so that hardly
anything can be joined. Small jobs are submitted many at a time, and so are the copies they are compared with.
Rates are the best of several rounds: other work on the machine only ever takes away. A round is long against
the 0.2 ms between two looks of an engine's ``wait``, which would otherwise count as time of the copies.

A cell that fails is a line of the report, not the end: its error is kept, and the next one gets an engine and
memory of its own. Only jobs that never end are the end (``StuckError``): what comes after would hang too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.transfer_machine import Machine, Memory
from kvatlas.connectors.layout import CacheView, GroupPages, Region
from kvatlas.connectors.transfer.base import Direction, GroupMoves, TransferEngine, TransferJob
from kvatlas.connectors.transfer.host import PinnedHostPool

KIB, MIB = 1 << 10, 1 << 20
WAIT_S = 60.0
JOBS_MAX = 256
"""Of one round."""


class StuckError(Exception):
    """Jobs that did not end: the device, or the engine over it, hangs."""


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    piece_bytes: tuple[int, ...]
    pieces: tuple[int, ...]
    job_bytes_max: int
    round_bytes: int
    """Jobs are repeated until a round moves this much (or JOBS_MAX jobs)."""
    indexed_bytes_max: int
    each_pieces_max: int
    rounds: int
    products: int
    steps: int
    """Decode-like steps of one measurement."""
    budget_s: float
    """For all rates together; what comes after it has bounds of its own."""


FULL = Scale(
    # What the goals look at comes first, in case the time is over before the end.
    piece_bytes=tuple(size * KIB for size in (16, 64, 4, 32, 256, 8, 1024, 4096)),
    pieces=(16, 256, 4096, 65536),
    job_bytes_max=1024 * MIB,
    round_bytes=1024 * MIB,
    indexed_bytes_max=64 * MIB,
    each_pieces_max=4096,
    rounds=5,
    products=60,
    steps=1000,
    budget_s=240.0,
)
QUICK = Scale(
    piece_bytes=tuple(size * KIB for size in (16, 64, 4, 1024)),
    pieces=(16, 1024),
    job_bytes_max=256 * MIB,
    round_bytes=1024 * MIB,
    indexed_bytes_max=32 * MIB,
    each_pieces_max=1024,
    rounds=3,
    products=40,
    steps=300,
    budget_s=75.0,
)


@dataclass
class Cell:
    """Rates in bytes per second by column; None: not measured."""

    direction: Direction | None
    """None: both together."""
    piece_bytes: int
    pieces: int
    rates: dict[str, float | None] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """By column: why it could not be measured."""

    @property
    def measured(self) -> bool:
        """Whether engine and limit of the link are both known."""
        return bool(self.rates.get("engine") and self.rates.get("one copy"))

    @property
    def share(self) -> float:
        """Of the rate of one big copy of the same bytes."""
        whole = self.rates.get("one copy")
        return (self.rates.get("engine") or 0.0) / whole if whole else 0.0


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
        try:
            self.engine: TransferEngine = machine.engine(self.view, self.pool)
        except BaseException:
            self.pool.close()
            raise
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
        """Raises RuntimeError if any of them failed, StuckError if any did not end."""
        if not self.engine.wait(job_ids, WAIT_S):
            raise StuckError(f"jobs of {self.piece_bytes} byte pieces did not end within {WAIT_S:.0f} s")
        self.ended()

    def ended(self) -> set[int]:
        """Ids of the jobs that ended since the last call. Raises RuntimeError if any of them failed."""
        results = self.engine.poll()
        failed = [result.error for result in results if not result.ok]
        if failed:
            raise RuntimeError(f"jobs failed: {failed[0]}")
        return {result.job_id for result in results}

    def close(self) -> None:
        if self.engine.close():
            self.pool.close()

    def __enter__(self) -> Field:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Nothing of a stuck engine can be closed: it would be waited for.
        if kind is None or not issubclass(kind, StuckError):
            self.close()


Clock = Callable[[], float]
"""Seconds since any moment."""


def measure(
    machine: Machine, scale: Scale, say: Callable[[str], None], clock: Clock = time.perf_counter
) -> Iterator[Cell]:
    """Every cell, also those that failed; stops early, and says so, when the time is over.

    ``clock``: what rounds are timed by. Raises StuckError.
    """
    until = time.monotonic() + scale.budget_s
    for piece_bytes in scale.piece_bytes:
        counts = [n for n in scale.pieces if n * piece_bytes <= scale.job_bytes_max]
        # Twice the largest job, so that scattered pieces are far apart.
        size_bytes = max(2 * counts[-1] * piece_bytes, min(scale.round_bytes, 256 * MIB))
        place: Field | None = None
        try:
            for pieces, direction in itertools.product(counts, (Direction.LOAD, Direction.STORE, None)):
                if time.monotonic() > until:
                    say(f"time is over: {pieces} pieces of {piece_bytes} bytes and more are not measured")
                    return
                cell = Cell(direction, piece_bytes, pieces)
                try:
                    place = place or Field(machine, piece_bytes, size_bytes)
                except Exception as error:  # noqa: BLE001  # any failure is a line of the report
                    cell.errors = dict.fromkeys(("engine", "one copy"), _text(error))
                else:
                    _fill(cell, place, scale, clock)
                yield cell
                if cell.errors and place is not None:  # what failed may have left it useless
                    place.close()
                    place = None
        except StuckError:
            place = None
            raise
        finally:
            if place is not None:
                place.close()


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _fill(cell: Cell, place: Field, scale: Scale, clock: Clock) -> None:
    """Measure each column; one that fails leaves its error. Raises StuckError."""
    direction, pieces = cell.direction, cell.pieces
    size = pieces * place.piece_bytes
    repeats = max(1, min(JOBS_MAX, scale.round_bytes // size))
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

    first = moves[directions[0]][0]
    columns: dict[str, Callable[[], float | None]] = {
        "one copy": lambda: _rate(whole, total, scale.rounds, clock),
        "engine": lambda: _rate(by_engine, total, scale.rounds, clock),
    }
    if direction is not None:
        columns["call per piece"] = lambda: _each(place, direction, first, scale, clock)
        columns["torch index"] = lambda: _indexed(place, direction, first, scale, clock)
    for column, measure_column in columns.items():
        try:
            cell.rates[column] = measure_column()
        except StuckError:
            raise
        except Exception as error:  # noqa: BLE001  # any failure is a line of the report
            cell.errors[column] = _text(error)


def _each(place: Field, direction: Direction, moves: GroupMoves, scale: Scale, clock: Clock) -> float | None:
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

    return _rate(run, total * repeats, min(scale.rounds, 3), clock)


def _indexed(
    place: Field, direction: Direction, moves: GroupMoves, scale: Scale, clock: Clock
) -> float | None:
    total = len(moves.slots) * place.piece_bytes
    if total > scale.indexed_bytes_max:
        return None

    def run() -> None:
        place.machine.copy_indexed(direction, place.memory, place.pool, moves.block_ids, moves.slots)

    return _rate(run, total, min(scale.rounds, 3), clock)


def _rate(run: Callable[[], None], size: int, rounds: int, clock: Clock) -> float:
    run()
    best = float("inf")
    for _ in range(rounds):
        started = clock()
        run()
        best = min(best, clock() - started)
    return size / best
