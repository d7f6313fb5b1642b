"""Whether a transfer engine copies the right bytes here, at the right time, and fails as it should.

What must come out is computed byte for byte from the meaning of a cache view, without the engines' own plan;
whole memories are compared, so gaps between pieces and rows, other blocks and block 0 are canaries.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.transfer_machine import Bytes, Machine, Memory, pool_rows
from kvatlas.connectors.layout import CacheView, GroupPages, Region
from kvatlas.connectors.transfer.base import Direction, GroupMoves, TransferEngine, TransferJob

WAIT_S = 60.0
NUM_BLOCKS = 96
RACES = 20


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class Layout:
    """Groups as lists of (offset of block 0, block stride, piece offsets, piece bytes)."""

    name: str
    groups: tuple[tuple[tuple[int, int, tuple[int, ...], int], ...], ...]
    size_bytes: int

    def view(self, base: int) -> CacheView:
        groups = []
        for index, regions in enumerate(self.groups):
            made = tuple(
                Region(base + start, stride, offsets, size) for start, stride, offsets, size in regions
            )
            groups.append(GroupPages(index, made, sum(region.row_bytes for region in made)))
        row = max(group.row_bytes for group in groups)
        return CacheView(tuple(groups), NUM_BLOCKS, -(-row // 64) * 64 + 64)


def layouts() -> list[Layout]:
    """Pages layer by layer, blocks in one piece, many small pieces, groups that share memory, odd sizes."""
    page, blocks = 16 << 10, NUM_BLOCKS
    layer = page * blocks
    small = 1 << 10
    return [
        Layout("page per layer", (tuple((i * layer, page, (0,), page) for i in range(4)),), 4 * layer),
        Layout("block in one piece", (((0, 8 * page, (0,), 8 * page),),), 8 * layer),
        Layout("small pieces with gaps", (((0, page, tuple(range(0, page, small)), 768),),), layer),
        Layout(
            "groups on shared memory",
            (
                tuple((i * layer, page, (0,), page) for i in range(2)),
                ((0, page, (0, 8192), 4096), (layer, page, (128,), 2048)),
                ((0, page, (64,), 8), (layer, page, (0, 1024), 520)),
            ),
            2 * layer,
        ),
        Layout("sizes that are no words", (((0, 1024, (0, 600), 333),),), 1024 * blocks),
    ]


def replay(view: CacheView, base: int, memory: Bytes, rows: Bytes, job: TransferJob) -> None:
    """Meaning of a job, byte for byte: changes ``rows`` or ``memory``."""
    groups = {group.group_idx: group for group in view.groups}
    for moves in job.groups:
        for block, slot in zip(moves.block_ids.tolist(), moves.slots.tolist(), strict=True):
            at = 0
            for region in groups[moves.group_idx].regions:
                for offset in region.piece_offsets:
                    start = region.base_address - base + block * region.block_stride_bytes + offset
                    piece = memory[start : start + region.piece_bytes]
                    kept = rows[slot, at : at + region.piece_bytes]
                    if job.direction is Direction.STORE:
                        kept[:] = piece
                    else:
                        piece[:] = kept
                    at += region.piece_bytes


def all_checks(machine: Machine) -> Iterator[tuple[str, Callable[[], Check]]]:
    """Every check by its name, run when called. One that raises says nothing of the copies."""
    for layout in layouts():
        for way in (*machine.ways, ""):
            yield f"{layout.name}, {way or 'as calibrated'}", partial(round_trip, machine, layout, way)
    yield "order with the computing stream", partial(ordering, machine)
    if machine.computes:
        yield "control of that order", partial(control, machine)
        yield "a device error", error_path


@contextlib.contextmanager
def rig(
    machine: Machine, layout: Layout, way: str
) -> Iterator[tuple[TransferEngine, Memory, Any, CacheView]]:
    memory = machine.memory(layout.size_bytes)
    view = layout.view(memory.address)
    pool = machine.pool(view.row_bytes * NUM_BLOCKS, view.row_bytes)
    engine = machine.engine(view, pool, way)
    try:
        yield engine, memory, pool, view
    finally:
        engine.close()
        pool.close()


def round_trip(machine: Machine, layout: Layout, way: str) -> Check:
    """Random bytes out and back into other blocks, beside an exact replay."""
    name = f"{layout.name}, {way or 'as calibrated'}"
    rng = np.random.default_rng(11)
    with rig(machine, layout, way) as (engine, memory, pool, view):
        content = rng.integers(0, 256, layout.size_bytes, np.uint8)
        rows = pool_rows(pool)
        rows[:] = rng.integers(0, 256, rows.shape, np.uint8)
        memory.write(content)
        wanted_rows, wanted = rows.copy(), content.copy()
        for job_id, direction in enumerate([Direction.STORE, Direction.LOAD] * 3, start=1):
            job = TransferJob(job_id, direction, _random_moves(view, rng))
            replay(view, memory.address, wanted, wanted_rows, job)
            engine.submit(job)
            if not engine.wait([job_id], WAIT_S):
                return Check(name, False, f"no answer within {WAIT_S:.0f} s")
            [result] = engine.poll()
            if not result.ok:
                return Check(name, False, result.error)
            if not np.array_equal(rows, wanted_rows):
                return Check(name, False, f"host rows differ after job {job_id} ({direction.value})")
            if not np.array_equal(memory.read(), wanted):
                return Check(name, False, f"device memory differs after job {job_id} ({direction.value})")
    return Check(name, True)


def _random_moves(view: CacheView, rng: np.random.Generator) -> tuple[GroupMoves, ...]:
    """Runs of neighbours and single blocks, every block and slot of one group only."""
    blocks = np.sort(rng.permutation(np.arange(1, NUM_BLOCKS))[:60]).astype(np.int64)
    slots = np.sort(rng.permutation(NUM_BLOCKS)[:60]).astype(np.int64)
    rng.shuffle(slots[30:])
    shares = np.array_split(np.arange(60), len(view.groups))
    return tuple(
        GroupMoves(group.group_idx, blocks[share], slots[share])
        for group, share in zip(view.groups, shares, strict=True)
    )


def ordering(machine: Machine) -> Check:
    """Work that is still pending on the computing stream when a job is submitted must come first."""
    name = f"{RACES} races with the computing stream"
    layout = layouts()[1]
    region = layout.groups[0][0]
    with rig(machine, layout, "") as (engine, memory, pool, _):
        rows = pool_rows(pool)
        for race in range(1, RACES + 1):
            block, other, value = race, race + 40, race
            machine.fill_later(memory, block * region[1], region[3], value)
            engine.submit(_one(2 * race, Direction.STORE, block, block))
            rows[other] = 100 + value
            machine.fill_later(memory, other * region[1], region[3], 0)
            engine.submit(_one(2 * race + 1, Direction.LOAD, other, other))
            if not engine.wait([2 * race, 2 * race + 1], WAIT_S):
                return Check(name, False, "no answer")
            if not all(result.ok for result in engine.poll()):
                return Check(name, False, "a job failed")
            if set(rows[block, : region[3]].tolist()) != {value}:
                return Check(name, False, f"race {race}: a store read what was there before the computation")
            loaded = memory.read()[other * region[1] : other * region[1] + region[3]]
            if set(loaded.tolist()) != {100 + value}:
                return Check(name, False, f"race {race}: a load was overwritten by earlier work")
    return Check(name, True)


def control(machine: Machine) -> Check:
    """The race has teeth: a copy that does not wait reads what was there before."""
    memory = machine.memory(1 << 20)
    pool = machine.pool(1 << 20, 1 << 20)
    rows = pool_rows(pool)
    machine.fill_later(memory, 0, 1 << 20, 77)
    machine.read_now(memory, 0, pool.address, 1 << 20)
    stale = set(rows[0].tolist()) != {77}
    memory.read()
    pool.close()
    return Check("control: without waiting, stale bytes are read", stale, "" if stale else "they were not")


def _one(job_id: int, direction: Direction, block: int, slot: int) -> TransferJob:
    moves = GroupMoves(0, np.array([block], np.int64), np.array([slot], np.int64))
    return TransferJob(job_id, direction, (moves,))


def error_path() -> Check:
    """In a process of its own: the error takes the device's context with it."""
    name = "a device error fails every job and every later one"
    command = [sys.executable, "-m", "benchmarks.transfer", "--error-path"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return Check(name, False, "no answer within 120 s")
    told = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return Check(name, done.returncode == 0, told[-1] if told else f"exit code {done.returncode}")


def provoke_error(machine: Any) -> str:
    """Break the device's context under a live engine; empty, or what the engine did wrong."""
    torch = machine.torch
    layout = layouts()[0]
    memory = machine.memory(layout.size_bytes)
    view = layout.view(memory.address)
    pool = machine.pool(view.row_bytes * NUM_BLOCKS, view.row_bytes)
    engine = machine.engine(view, pool)
    engine.submit(_one(1, Direction.STORE, 1, 1))
    if not engine.wait([1], WAIT_S) or not engine.poll()[0].ok:
        return "a store failed before the error"
    # Indexing past the end stops the device with an error that stays.
    torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
    for job_id, direction in ((2, Direction.STORE), (3, Direction.LOAD)):
        engine.submit(_one(job_id, direction, 2, 2))
    if not engine.wait([2, 3], WAIT_S):
        return "jobs were not answered"
    failed = {result.job_id: result for result in engine.poll()}
    if sorted(failed) != [2, 3] or any(result.ok for result in failed.values()):
        return f"jobs did not fail: {failed}"
    engine.submit(_one(4, Direction.LOAD, 3, 3))
    late = engine.poll()
    if len(late) != 1 or late[0].ok or "dead" not in late[0].error:
        return f"a later job did not fail immediately: {late}"
    engine.close()
    return ""
