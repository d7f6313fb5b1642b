"""The jobs of ``worker.staged``, cut into chunks that fit the staging rows, and what a sound job is."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from dataclasses import dataclass, field

from connectors.layout.blocks import CacheView
from connectors.store.base import Deadline
from connectors.store.frame import DIGEST_BYTES, FRAME_BYTES
from connectors.store.namespace import Namespace
from connectors.transfer.base import Direction, StreamMark, TransferJob, TransferResult


@dataclass(frozen=True)
class StagingSettings:
    """``rows``: staging rows of this rank. Deadlines in seconds, for a whole job from its submission."""

    rows: int
    threads: int = 4
    """That get values; half as many put them, so that neither waits for the other."""
    keep: bool = True
    """Whether rows keep what passed through them, until they are needed."""
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
    """Chunks that have no rows yet."""
    after: StreamMark | None = None
    """What the device computed before it was submitted; every chunk is copied after that."""
    running: int = 0
    overdue: bool = False
    failed: set[bytes] = field(default_factory=set)
    error: str = ""
    bytes_by_group: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        job: TransferJob,
        epoch: int,
        chunk_blocks: int,
        limit_s: float,
        after: StreamMark | None = None,
    ) -> StagedJob:
        """Cut a sound job into chunks."""
        blocks = [
            Block(moves.group_idx, int(block_id), key)
            for moves in job.groups
            for block_id, key in zip(moves.block_ids, moves.keys, strict=True)
        ]
        chunks = deque(blocks[at : at + chunk_blocks] for at in range(0, len(blocks), chunk_blocks))
        return cls(job.job_id, job.direction, epoch, time.monotonic(), Deadline(limit_s), chunks, after)

    def result(self) -> TransferResult:
        """How it ended; it did when nothing waits or runs."""
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
    """A load of values that their rows kept: it does not visit the store."""
    abandoned: bool = False
    """Its job was answered without it; only its rows are still to come back."""


class StagedView:
    """What staging must know of a cache: how long each group's values are, and what they are called."""

    def __init__(self, view: CacheView, namespace: Namespace, rank: int) -> None:
        self._namespace = namespace
        self._rank = rank
        self._num_blocks = view.num_blocks
        self._format = repr([(g.group_idx, g.row_bytes, g.row_format) for g in view.groups]).encode()
        self._digests: dict[int, tuple[bytes, bytes]] = {}
        self.value_bytes = {group.group_idx: group.row_bytes + FRAME_BYTES for group in view.groups}
        """By group: a row and its frame."""

    def digests(self, epoch: int) -> tuple[bytes, bytes]:
        """(what store keys begin with, what frames are sealed with: also the meaning of a row's bytes)."""
        if epoch not in self._digests:
            digest = self._namespace.digest(self._rank, epoch)
            seal = hashlib.blake2b(self._format, key=digest, digest_size=DIGEST_BYTES).digest()
            self._digests = {epoch: (digest, seal)}
        return self._digests[epoch]

    def check(self, job: TransferJob) -> int:
        """The epoch of a job that can be done. ValueError: it cannot."""
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
    """Size of a staging row for rows of ``row_bytes``: with its frame, a multiple of 64."""
    return -(-(row_bytes + FRAME_BYTES) // 64) * 64
