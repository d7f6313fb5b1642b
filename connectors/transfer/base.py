"""What a transfer engine is asked to move, and how it answers.

A *row* is one slot of the host pool: all pieces of one (group, device block), packed one after another in the
group's canonical order. A job copies whole rows in one direction; it succeeds or fails as a whole, and is
reported exactly once. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class Direction(enum.Enum):
    """Seen from the device: ``LOAD`` fills device blocks, ``STORE`` fills host rows."""

    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class GroupMoves:
    """``block_ids[i]`` (device, never 0: that is the null block) <-> ``slots[i]`` (host row), of one group.

    ``keys[i]`` is the block key (hash bytes + group index, see ``messages.keys``); transfer engines that
    only copy ignore it, those that go on to a shared store use it. Empty, or as long as the arrays.
    """

    group_idx: int
    block_ids: Indices
    slots: Indices
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One unit of work. ``job_id`` is unique among the jobs of one engine process."""

    job_id: int
    direction: Direction
    groups: tuple[GroupMoves, ...]


def joined(jobs: Sequence[TransferJob]) -> TransferJob:
    """All moves of jobs of one direction as one job, under the first one's id, one entry per group."""
    if len(jobs) == 1:
        return jobs[0]
    by_group: dict[int, list[GroupMoves]] = {}
    for job in jobs:
        for moves in job.groups:
            by_group.setdefault(moves.group_idx, []).append(moves)
    return TransferJob(
        jobs[0].job_id,
        jobs[0].direction,
        tuple(
            GroupMoves(
                group_idx,
                np.concatenate([moves.block_ids for moves in parts]),
                np.concatenate([moves.slots for moves in parts]),
                tuple(key for moves in parts for key in moves.keys),
            )
            for group_idx, parts in by_group.items()
        ),
    )


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a job ended. ``failed_keys`` names the blocks to blame where known; none named: all of them."""

    job_id: int
    direction: Direction
    ok: bool
    seconds: float
    bytes_by_group: dict[int, int]
    error: str = ""
    failed_keys: tuple[bytes, ...] = ()


CLOSE_S = 10.0
"""How long a shutdown waits for copies: they take milliseconds, or hang."""

StreamMark = object
"""A point in the work of a device's computing stream; only the engine that made it looks inside."""


class TransferEngine(Protocol):
    """Copies rows asynchronously. ``submit`` never blocks and never raises for a job's own fault."""

    def mark(self) -> StreamMark | None:
        """The end of what is enqueued on the current device stream now. Never blocks, never raises.

        Any number of jobs may be submitted after it. None: the engine needs no marks, or can take none.
        """

    def submit(self, job: TransferJob, after: StreamMark | None = None) -> None:
        """Take a job. It sees the work enqueued on the device stream before ``after``, and need not wait for
        what came later; None: before this call. Jobs of one direction that are under way together name no
        destination twice: whoever gives blocks or rows away again does it after their job ended."""

    def poll(self) -> list[TransferResult]:
        """The jobs that ended since the last call, each exactly once; never blocks."""

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        """Block until these jobs have ended (they still come out of ``poll``). False: not within the time."""

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Let what runs end and free every resource; may be called again. Later jobs fail.

        False: something still runs after ``timeout_s``. Its memory must stay; its jobs are never answered.
        """
