"""Cost of transfers for the computation beside them: long matrix products, and short steps like decoding's.

Matrix products show what a copy takes from the device (memory bandwidth, multiprocessors). Decode-like steps
show what it takes from the thread that launches the model: locks of the driver that the copying thread holds,
Python's interpreter lock, and the calls of submit and poll that run on the step's own thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.transfer_machine import Machine
from benchmarks.transfer_rates import KIB, MIB, Field, Scale
from kvatlas.connectors.transfer.base import Direction, GroupMoves

SUBMITTED_STORES = 16
"""One-block stores that a decode step submits: as many sequences fill a block in it."""


@dataclass(frozen=True)
class Slowdown:
    """How much longer matrix products take while this is copied, in percent; ``covered``: until their end."""

    direction: Direction
    piece_bytes: int
    percent: float
    rate: float
    covered: bool


@dataclass(frozen=True)
class StepTimes:
    """Microseconds of a step, as (p50, p99), alone and with ``transfers`` submitted in every step."""

    way: str
    transfers: str
    alone_us: tuple[float, float]
    beside_us: tuple[float, float]
    engine_calls_us: float
    """Median time a step's thread spent in the engine's submit and poll."""


def slowdowns(machine: Machine, scale: Scale) -> Iterator[tuple[str, Callable[[], Slowdown]]]:
    """Matrix products alone and beside transfers, in turns; medians. Each by name, measured when called."""
    for direction, sizes in ((Direction.STORE, (16, 64, 1024)), (Direction.LOAD, (4, 16, 64, 1024))):
        for piece_bytes in (size * KIB for size in sizes):
            name = f"products beside {direction.value}s of {piece_bytes} bytes"
            yield name, partial(_slowdown, machine, piece_bytes, direction, scale)


def _slowdown(machine: Machine, piece_bytes: int, direction: Direction, scale: Scale) -> Slowdown:
    with Field(machine, piece_bytes, 128 * MIB) as place:
        return _slowdown_on(place, direction, scale)


def _slowdown_on(place: Field, direction: Direction, scale: Scale) -> Slowdown:
    machine = place.machine
    alone_s = min(machine.compute_seconds(scale.products) for _ in range(3))
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


def step_times(machine: Machine, scale: Scale) -> Iterator[tuple[str, Callable[[], StepTimes]]]:
    """Decode-like steps alone and beside transfers, for every way the machine can run a step."""
    for way in machine.step_ways:
        for name, piece_bytes, stores, load_pieces in (
            (f"{SUBMITTED_STORES} stores of one 64 KiB block", 64 * KIB, SUBMITTED_STORES, 0),
            ("a load of 256 x 16 KiB", 16 * KIB, 0, 256),
            (f"{SUBMITTED_STORES} stores of one block, a load of 4096 x 16 KiB", 16 * KIB, 16, 4096),
        ):
            wanted = _Beside(way, name, stores, load_pieces)
            yield f"steps ({way}) beside {name}", partial(_steps, machine, piece_bytes, wanted, scale.steps)


@dataclass(frozen=True)
class _Beside:
    """Jobs of a step: ``stores`` of one block each, and a load of ``load_pieces`` (0: none)."""

    way: str
    name: str
    stores: int
    load_pieces: int


def _steps(machine: Machine, piece_bytes: int, wanted: _Beside, steps: int) -> StepTimes:
    with Field(machine, piece_bytes, 128 * MIB) as place:
        return _steps_on(place, wanted, steps)


def _steps_on(place: Field, wanted: _Beside, steps: int) -> StepTimes:
    way = wanted.way
    machine = place.machine
    each_block = [place.moves(1) for _ in range(64)]
    load = place.moves(wanted.load_pieces) if wanted.load_pieces else None
    for _ in range(max(steps // 10, 3)):  # warm up, and have every kernel compiled
        machine.step(way)
    before = [_timed_step(machine, way) for _ in range(steps)]
    beside, calls = [], []
    under_way: set[int] = set()
    load_id = 0
    for number in range(steps):
        started = time.perf_counter()
        # A request that waits for one load causes no other: the next begins when the last has ended.
        loads = [load] if load is not None and load_id not in under_way else []
        submitted = _submit_step(place, each_block, loads, wanted.stores, number)
        load_id = submitted[0] if loads else load_id
        under_way.update(submitted)
        spent = time.perf_counter() - started
        machine.step(way)
        polled = time.perf_counter()
        under_way.difference_update(place.ended())
        ended = time.perf_counter()
        beside.append(ended - started)
        calls.append(spent + ended - polled)
    place.finish(sorted(under_way))
    after = [_timed_step(machine, way) for _ in range(steps)]
    return StepTimes(
        way, wanted.name, _percentiles(before + after), _percentiles(beside), 1e6 * float(np.median(calls))
    )


def _submit_step(
    place: Field, blocks: list[GroupMoves], loads: list[GroupMoves], stores: int, number: int
) -> list[int]:
    """Ids of the step's jobs, loads first."""
    own = [blocks[(number * stores + store) % len(blocks)] for store in range(stores)]
    return [
        *(place.submit(Direction.LOAD, moves) for moves in loads),
        *(place.submit(Direction.STORE, moves) for moves in own),
    ]


def _timed_step(machine: Machine, way: str) -> float:
    started = time.perf_counter()
    machine.step(way)
    return time.perf_counter() - started


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.array(seconds) * 1e6, (50, 99))
    return float(p50), float(p99)
