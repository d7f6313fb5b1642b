"""A transfer engine to a shared store: device <-> staging row <-> store.

A job is cut into chunks, and each takes free staging rows. A store copies blocks into its rows and passes
them to the store's threads. A load fetches values into its rows, checks them and copies them to the device.
Rows keep their values until the rows are needed, so the next load of a value comes from host memory. Another
``TransferEngine`` makes the copies; it is called only from the thread that calls this one, which preserves
its order with the device's work.

Invariants: only values that passed their frame's check are copied to the device. A job ends once, by its
deadline (plus a running copy), and its blocks are not written to afterwards. Rows are reused only after their
last use.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.store.base import BlockStore, Deadline, Namespace, close_within
from kvatlas.connectors.store.frame import DIGEST_BYTES, FRAME_BYTES
from kvatlas.connectors.transfer.base import (
    CLOSE_S,
    Direction,
    GroupMoves,
    StreamMark,
    TransferEngine,
    TransferJob,
    TransferResult,
)
from kvatlas.connectors.worker.staging_rows import RowCache
from kvatlas.connectors.worker.store_threads import StagedValue, StoreTask, StoreThreads


@dataclass(frozen=True)
class StagingSettings:
    """``rows``: staging rows of this rank. Deadlines in seconds, for a whole job from its submission."""

    rows: int = 0
    threads: int = 4
    """Threads that get values; half as many others put them, so that neither direction blocks the other."""
    keep: bool = True
    """Whether rows keep their values until the rows are needed."""
    load_deadline_s: float = 10.0
    store_deadline_s: float = 10.0

    def limit_s(self, direction: Direction) -> float:
        return self.load_deadline_s if direction is Direction.LOAD else self.store_deadline_s


@dataclass(frozen=True, slots=True)
class Block:
    group_idx: int
    block_id: int
    key: bytes


@dataclass(slots=True, eq=False)
class StagedJob:
    """``running``: chunks that have rows and may still touch the job's blocks or its answer."""

    job_id: int
    direction: Direction
    epoch: int
    started: float
    deadline: Deadline
    waiting: deque[list[Block]]
    """Chunks without rows."""
    after: StreamMark | None = None
    """Mark of the device's work at submission; every chunk is copied after it."""
    running: int = 0
    overdue: bool = False
    failed: set[bytes] = field(default_factory=set)
    error: str = ""
    bytes_by_group: dict[int, int] = field(default_factory=dict)

    @classmethod
    def from_job(
        cls,
        job: TransferJob,
        epoch: int,
        chunk_blocks: int,
        limit_s: float,
        after: StreamMark | None = None,
    ) -> StagedJob:
        blocks = [
            Block(moves.group_idx, int(block_id), key)
            for moves in job.groups
            for block_id, key in zip(moves.block_ids, moves.keys, strict=True)
        ]
        chunks = deque(blocks[at : at + chunk_blocks] for at in range(0, len(blocks), chunk_blocks))
        return cls(job.job_id, job.direction, epoch, time.monotonic(), Deadline(limit_s), chunks, after)

    def result(self) -> TransferResult:
        """Result of a job without waiting or running chunks."""
        seconds, ok = time.monotonic() - self.started, not self.failed
        if ok:
            return TransferResult(self.job_id, self.direction, True, seconds, self.bytes_by_group)
        failed = tuple(sorted(self.failed))
        return TransferResult(self.job_id, self.direction, False, seconds, {}, self.error, failed)


@dataclass(slots=True, eq=False)
class Chunk:
    job: StagedJob
    blocks: list[Block]
    rows: list[int]
    kept: bool = False
    """A load of kept values, which needs no store access."""
    abandoned: bool = False
    """Its job was answered without it; only its rows are still in use."""


class StagedView:
    """Value sizes and key prefixes of a cache, and checks of jobs against it."""

    def __init__(self, view: CacheView, namespace: Namespace, rank: int) -> None:
        self._namespace = namespace
        self._rank = rank
        self._num_blocks = view.num_blocks
        self._format = repr([(g.group_idx, g.row_bytes, g.row_format) for g in view.groups]).encode()
        self._digests: dict[int, tuple[bytes, bytes]] = {}
        # By group: size of a row and its frame.
        self.value_bytes = {group.group_idx: group.row_bytes + FRAME_BYTES for group in view.groups}

    def digests(self, epoch: int) -> tuple[bytes, bytes]:
        """(prefix of store keys, digest for sealing frames, which also covers the row format)."""
        if epoch not in self._digests:
            digest = self._namespace.digest(self._rank, epoch)
            seal = hashlib.blake2b(self._format, key=digest, digest_size=DIGEST_BYTES).digest()
            self._digests = {epoch: (digest, seal)}
        return self._digests[epoch]

    def check(self, job: TransferJob) -> int:
        """The epoch of a valid job. ValueError for an invalid one."""
        tickets: set[int] = set()
        for moves in job.groups:
            count, where = len(moves.block_ids), f"group {moves.group_idx}"
            if moves.group_idx not in self.value_bytes:
                raise ValueError(f"{where}: no such group is registered for transfer")
            if len(moves.slots) != count or len(moves.keys) != count:
                raise ValueError(f"{where}: {count} blocks, {len(moves.slots)} slots, {len(moves.keys)} keys")
            if count and not (moves.block_ids.min() >= 1 and moves.block_ids.max() < self._num_blocks):
                raise ValueError(f"{where}: a block is not in [1, {self._num_blocks})")
            tickets.update(moves.slots.tolist())
        if job.direction is Direction.LOAD:
            named = [block for moves in job.groups for block in moves.block_ids.tolist()]
            if len(set(named)) != len(named):
                raise ValueError("block_ids names a destination more than once")
        if len(tickets) > 1:
            raise ValueError("one job over two epochs")
        return self._namespace.read_ticket(tickets.pop()) if tickets else 0


def staging_row_bytes(row_bytes: int) -> int:
    """Size of a staging row for rows of ``row_bytes``, with its frame, rounded up to a multiple of 64."""
    return -(-(row_bytes + FRAME_BYTES) // 64) * 64


log = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20
# Time after a deadline in which the store may still report its own error.
_GRACE_S = 0.5
_STORE_CLOSE_S = 5.0
_POLL_S = 0.005


class RowPool(Protocol):
    """The staging rows."""

    def row(self, slot: int) -> memoryview: ...

    def close(self) -> None: ...


class StagedTransfers:
    """``kvatlas.connectors.transfer.base.TransferEngine`` to a store. Every method is called from one thread.

    ``copies`` moves rows of ``pool``; this object closes ``copies``, ``pool`` and ``store``. ``rank`` owns
    the blocks. Slots of jobs are tickets of the namespace (``kvatlas.connectors.tier.store``).
    """

    def __init__(
        self,
        view: CacheView,
        copies: TransferEngine,
        pool: RowPool,
        store: BlockStore,
        namespace: Namespace,
        rank: int,
        settings: StagingSettings,
    ) -> None:
        if settings.rows < 1 or settings.threads < 1:
            raise ValueError(f"{settings}: at least one row and one thread are needed")
        self._view = StagedView(view, namespace, rank)
        self._copies = copies
        self._pool = pool
        self._store = store
        self._settings = settings
        # At least two chunks per direction and thread, so that copies and calls overlap.
        most = max(1, settings.rows // (2 * settings.threads))
        self._chunk_blocks = min(most, max(1, _CHUNK_BYTES // staging_row_bytes(view.row_bytes)))
        self._tasks = StoreThreads(store, settings.threads)
        self._rows = RowCache(settings.rows)
        self._jobs: dict[int, StagedJob] = {}
        # Jobs with chunks that wait for rows: (loads, stores).
        self._queues: tuple[deque[StagedJob], deque[StagedJob]] = (deque(), deque())
        self._copying: dict[int, Chunk] = {}
        # Chunks in a store task, by the task's ``id()``.
        self._in_store: dict[int, tuple[StoreTask, Chunk]] = {}
        self._copy_ids = itertools.count(1)
        self._results: list[TransferResult] = []
        self._closed = False
        self._at_rest = False

    # -- the transfer engine's interface -----------------------------------------------------------------

    def mark(self) -> StreamMark | None:
        return self._copies.mark()

    def submit(self, job: TransferJob, after: StreamMark | None = None) -> None:
        if job.job_id in self._jobs:
            log.error("transfer job %d was submitted twice; the second is ignored", job.job_id)
            return
        try:
            if self._closed:
                raise ValueError("the transfer engine is closed")
            epoch = self._view.check(job)
        except ValueError as error:
            self._results.append(TransferResult(job.job_id, job.direction, False, 0.0, {}, str(error)))
            return
        # No one else uses the job's blocks from here on, so one mark serves all its chunks, even late ones:
        # none waits for a forward pass that was launched in the meantime.
        after = self._copies.mark() if after is None else after
        taken = StagedJob.from_job(
            job, epoch, self._chunk_blocks, self._settings.limit_s(job.direction), after
        )
        self._jobs[job.job_id] = taken
        self._queues[0 if job.direction is Direction.LOAD else 1].append(taken)
        self._advance()

    def poll(self) -> list[TransferResult]:
        self._advance()
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        deadline = Deadline(timeout_s)
        while True:
            self._advance()
            if not any(job_id in self._jobs for job_id in job_ids):
                return True
            if deadline.passed():
                return False
            poll_s = min(_POLL_S, deadline.left_s())
            if self._copying:
                self._copies.wait(list(self._copying), poll_s)
            else:
                self._tasks.wait_done(poll_s)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Finish the submitted jobs, within ``timeout_s`` if the store or copies hang."""
        if self._closed:
            return self._at_rest
        self._closed = True
        if not self.wait(list(self._jobs), timeout_s):
            for job in list(self._jobs.values()):
                self._abandon(job, "the store did not answer before the engine was closed")
        idle = self._tasks.close(timeout_s=1.0)
        copied = self._copies.close(timeout_s)
        self._advance()
        closed = close_within(self._store, _STORE_CLOSE_S)
        self._at_rest = idle and copied and closed
        if self._at_rest:
            self._pool.close()
        return self._at_rest

    def counters(self) -> dict[str, int]:
        """Counts of store errors and other events by reason; they only grow."""
        return self._store.counters() | self._tasks.counters.snapshot()

    # -- progress ----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        for result in self._copies.poll():
            chunk = self._copying.pop(result.job_id)
            if chunk.job.direction is Direction.STORE and result.ok and not chunk.abandoned:
                self._run_store_task(chunk)
            else:
                self._end_chunk(chunk, result.ok, result.error)
        for task in self._tasks.take_done():
            _, chunk = self._in_store.pop(id(task))
            if chunk.job.direction is Direction.LOAD and not task.failed and not chunk.abandoned:
                self._copy(chunk)
            else:
                self._end_chunk(chunk, not task.failed, task.error, task.failed)
        for job in list(self._jobs.values()):
            limit_s = self._settings.limit_s(job.direction)
            if not job.overdue and time.monotonic() - job.started > limit_s + _GRACE_S:
                self._abandon(job, f"no end after {limit_s:g} s")
        for queued in self._queues:
            while queued and self._start(queued[0]):
                queued.popleft()
        for job in list(self._jobs.values()):
            if not job.waiting and not job.running:
                del self._jobs[job.job_id]
                self._results.append(job.result())

    def _start(self, job: StagedJob) -> bool:
        """Begin as many chunks as there are rows for. True if none of them waits any longer."""
        if job.failed and job.direction is Direction.LOAD:
            job.waiting.clear()
        # Stores leave half of the rows to loads, because requests wait for loads.
        spared = 0 if job.direction is Direction.LOAD else self._settings.rows // 2
        while job.waiting:
            if job.direction is Direction.LOAD and self._settings.keep and not self._copy_kept(job):
                continue
            if len(job.waiting[0]) > self._rows.available - spared:
                return False
            blocks = job.waiting.popleft()
            chunk = Chunk(job, blocks, self._rows.take(len(blocks)))
            job.running += 1
            if job.direction is Direction.STORE:
                self._copy(chunk)
            else:
                self._run_store_task(chunk)
        return True

    def _copy_kept(self, job: StagedJob) -> bool:
        """Begin to load the kept values of the next chunk. False if those were all of it."""
        prefix, _ = self._view.digests(job.epoch)
        blocks = job.waiting.popleft()
        found = [(block, self._rows.read(prefix + block.key)) for block in blocks]
        kept = [(block, row) for block, row in found if row is not None]
        missing = [block for block, row in found if row is None]
        if kept:
            self._tasks.counters.add("load_kept_in_host_memory", len(kept))
            job.running += 1
            self._copy(Chunk(job, [block for block, _ in kept], [row for _, row in kept], kept=True))
        if missing:
            job.waiting.appendleft(missing)
        return bool(missing)

    def _copy(self, chunk: Chunk) -> None:
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        for block, row in zip(chunk.blocks, chunk.rows, strict=True):
            ids, rows = by_group.setdefault(block.group_idx, ([], []))
            ids.append(block.block_id)
            rows.append(row)
        copy_id = next(self._copy_ids)
        self._copying[copy_id] = chunk
        self._copies.submit(
            TransferJob(
                copy_id,
                chunk.job.direction,
                tuple(
                    GroupMoves(group, np.array(ids, np.int64), np.array(rows, np.int64))
                    for group, (ids, rows) in by_group.items()
                ),
            ),
            chunk.job.after,
        )

    def _run_store_task(self, chunk: Chunk) -> None:
        prefix, seal = self._view.digests(chunk.job.epoch)
        values = [
            StagedValue(
                block.key, prefix + block.key, self._pool.row(row)[: self._view.value_bytes[block.group_idx]]
            )
            for block, row in zip(chunk.blocks, chunk.rows, strict=True)
        ]
        task = StoreTask(chunk.job.direction, values, seal, chunk.job.deadline)
        self._in_store[id(task)] = task, chunk
        self._tasks.begin(task)

    # -- endings -----------------------------------------------------------------------------------------

    def _end_chunk(self, chunk: Chunk, ok: bool, error: str, failed: set[bytes] | None = None) -> None:
        self._release_rows(chunk, ok, failed or set())
        if chunk.abandoned:
            return
        job = chunk.job
        job.running -= 1
        blamed = failed if failed or ok else {block.key for block in chunk.blocks}
        job.failed |= blamed or set()
        job.error = job.error or error
        for block in chunk.blocks:
            if block.key not in (blamed or ()):
                size = self._view.value_bytes[block.group_idx] - FRAME_BYTES
                job.bytes_by_group[block.group_idx] = job.bytes_by_group.get(block.group_idx, 0) + size

    def _release_rows(self, chunk: Chunk, ok: bool, failed: set[bytes]) -> None:
        """Release the rows of an ended chunk; complete values stay in them until the rows are needed."""
        prefix, _ = self._view.digests(chunk.job.epoch)
        if chunk.kept:
            for block in chunk.blocks:
                self._rows.end_read(prefix + block.key, keep=ok)
            return
        # A failure that names no block leaves the state of all of them unknown.
        whole = self._settings.keep and not chunk.abandoned and (ok or bool(failed))
        keys = [prefix + block.key if whole and block.key not in failed else None for block in chunk.blocks]
        self._rows.give_back(chunk.rows, keys)

    def _abandon(self, job: StagedJob, reason: str) -> None:
        """Answer a job without its chunks in the store; their rows return when the store calls end."""
        job.overdue = True
        for blocks in job.waiting:
            job.failed.update(block.key for block in blocks)
        job.waiting.clear()
        for _, chunk in self._in_store.values():
            if chunk.job is job and not chunk.abandoned:
                chunk.abandoned = True
                job.running -= 1
                job.failed.update(block.key for block in chunk.blocks)
        if job.failed:
            job.error = job.error or reason
            self._tasks.counters.add(f"{job.direction.value}_overdue")
