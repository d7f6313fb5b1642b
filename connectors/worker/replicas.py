"""Ranks that hold the same KV: what one of them stores, all of them load.

With MLA, and where there are fewer KV heads than tensor-parallel ranks, vLLM keeps equal blocks on several
ranks (``kv_tp_replicas``). Then one copy outside the GPU does for all: each rank stores its share of every
job, and loads all of it. What always holds: every block of a job is stored by exactly one of the replicas,
and a job is answered by each.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors.transfer.base import (
    CLOSE_S,
    Direction,
    GroupMoves,
    StreamMark,
    TransferEngine,
    TransferJob,
    TransferResult,
)

Share = Callable[[GroupMoves], npt.NDArray[np.bool_]]
"""Which of these moves are this rank's to store."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """This rank is the ``index``-th of ``count`` that hold the same; ``group``: which such group it is in."""

    count: int = 1
    index: int = 0
    group: int = 0

    @classmethod
    def of(cls, kv_cache_config: Any, parallel: Any) -> Replicas:
        """As vLLM says. On several machines nothing is shared."""
        count = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
        if count < 2 or int(getattr(parallel, "nnodes_within_dp", 1)) > 1:
            return cls()
        rank = int(parallel.rank)
        return cls(count, rank % parallel.tensor_parallel_size % count, rank // count)

    def by_slot(self, moves: GroupMoves) -> npt.NDArray[np.bool_]:
        """Shares by host row."""
        mine: npt.NDArray[np.bool_] = moves.slots % self.count == self.index
        return mine

    def by_key(self, moves: GroupMoves) -> npt.NDArray[np.bool_]:
        """Shares by block key, where blocks have no row that all ranks know."""
        return np.array([zlib.crc32(key) % self.count == self.index for key in moves.keys], np.bool_)


class ShareOfStores:
    """A ``TransferEngine`` before another, which is asked to store this rank's share only."""

    def __init__(self, engine: TransferEngine, share: Share) -> None:
        self._engine = engine
        self._share = share
        self._nothing_to_do: list[TransferResult] = []

    def mark(self) -> StreamMark | None:
        return self._engine.mark()

    def submit(self, job: TransferJob, after: StreamMark | None = None) -> None:
        if job.direction is Direction.STORE:
            mine = [_those(moves, self._share(moves)) for moves in job.groups]
            job = replace(job, groups=tuple(moves for moves in mine if len(moves.slots)))
            if not job.groups:
                self._nothing_to_do.append(TransferResult(job.job_id, job.direction, True, 0.0, {}))
                return
        self._engine.submit(job, after)

    def poll(self) -> list[TransferResult]:
        ended, self._nothing_to_do = self._nothing_to_do, []
        return ended + self._engine.poll()

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        return self._engine.wait(job_ids, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        return self._engine.close(timeout_s)


def _those(moves: GroupMoves, mine: npt.NDArray[np.bool_]) -> GroupMoves:
    keys = (
        tuple(key for key, kept in zip(moves.keys, mine.tolist(), strict=True) if kept) if moves.keys else ()
    )
    return GroupMoves(moves.group_idx, moves.block_ids[mine], moves.slots[mine], keys)
