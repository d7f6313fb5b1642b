"""The worker half of a connector: submits the jobs of each step to a transfer engine and reports their
results.

One object per rank. Methods have vLLM's names. Invariants: a request is reported as received once, when its
load job has ended here, failed or not, together with the job's result. Loads begin before stores of the same
step.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvatlas.connectors.layout import CacheView, LayoutError, row_bytes_from_config
from kvatlas.connectors.registered_tensors import view_of_tensors
from kvatlas.connectors.settings import ConfigError
from kvatlas.connectors.transfer.base import (
    CLOSE_S,
    Counts,
    Direction,
    GroupMoves,
    StepJobs,
    StepResults,
    StreamMark,
    TransferEngine,
    TransferJob,
    TransferResult,
)
from kvatlas.connectors.transfer.host import HostMemoryError, PinnedHostPool, SharedMapping
from kvatlas.connectors.worker.joined_stores import JoinedStores

log = logging.getLogger(__name__)


EngineFactory = Callable[[CacheView, str], TransferEngine]
"""Makes the transfer engine for a registered cache; the text is its device, ``cpu`` or ``cuda:0``."""


class OffloadWorker:
    """Moves one rank's blocks. Call ``register_kv_caches`` first."""

    def __init__(
        self, kv_cache_config: Any, make_engine: EngineFactory, *, join_stores: bool = False
    ) -> None:
        """``join_stores``: submit all stores of a step as one job; possible if one deadline fits all."""
        self.counters = Counts()
        self._joined = JoinedStores() if join_stores else None
        self._kv_cache_config = kv_cache_config
        self._make_engine = make_engine
        self._engine: TransferEngine | None = None
        # Running load jobs and the requests that wait for them.
        self._waiting: dict[int, str] = {}
        self._ended: list[TransferResult] = []
        # Mark from before the launch of the step's forward pass, if the step has loads.
        self._before_forward: StreamMark | None = None

    @property
    def engine(self) -> TransferEngine:
        if self._engine is None:
            raise RuntimeError("register_kv_caches comes before any transfer")
        return self._engine

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Register the rank's KV cache: layer name -> tensor, or list of state tensors.

        Raises ``LayoutError`` for a cache that cannot be copied safely.
        """
        view = view_of_tensors(self._kv_cache_config, kv_caches)
        device = device_of(kv_caches)
        self.use_engine(self._make_engine(view, device))
        pieces = sum(len(region.piece_offsets) for group in view.groups for region in group.regions)
        log.info(
            "offloading %d groups of %d blocks on %s: rows of %d bytes, %d pieces per block of all groups",
            len(view.groups), view.num_blocks, device, view.row_bytes, pieces,
        )  # fmt: skip

    def use_engine(self, engine: TransferEngine) -> None:
        """Use this engine, for caches that are not registered as tensors."""
        self._engine = engine

    def bind(self, step: StepJobs) -> None:
        """Receive a step before its forward pass is launched.

        vLLM starts loads only after the launch, to launch the pass early.
        """
        # Earlier work on the loads' blocks (zeroing, or copying from them) is enqueued already, and no
        # request of this pass uses them. So loads wait for this point of the compute stream and run beside
        # the pass, not after it.
        self._before_forward = self.engine.mark() if step.loads else None

    def start_load_kv(self, step: StepJobs) -> None:
        # A job without blocks is one that the scheduler wants to fail.
        after, self._before_forward = self._before_forward, None
        for job in step.loads:
            self._waiting[job.job_id] = step.load_requests[job.job_id]
            if job.groups:
                self.engine.submit(job, after)
            else:
                self._ended.append(_impossible(job))

    def wait_for_save(self, step: StepJobs) -> None:
        """Begin the step's stores after the launch of its forward pass, without waiting."""
        if not step.stores:
            return
        after = self.engine.mark()
        for job in [self._joined.join(step.stores)] if self._joined is not None else step.stores:
            self.engine.submit(job, after)

    def poll(self) -> tuple[set[str], set[str]]:
        """(Requests whose load ended since the last call, the failed ones among them)."""
        if self._engine is not None:
            results = self._engine.poll()
            self._ended += results if self._joined is None else self._joined.split(results)
        finished: set[str] = set()
        failed: set[str] = set()
        for result in self._ended:
            request_id = self._waiting.pop(result.job_id, None)
            if request_id is not None:
                finished.add(request_id)
                if not result.ok:
                    failed.add(request_id)
        return finished, failed

    def take_results(self) -> StepResults | None:
        """Results of the jobs that ended by the last ``poll``; None if there are none."""
        if not self._ended:
            return None
        results, self._ended = self._ended, []
        for result in results:
            self.counters.transfer(result)
        return StepResults(results)

    def shutdown(self) -> None:
        """Wait for running jobs and free all resources; may be called again."""
        if self._engine is not None:
            self._engine.close()


def device_of(kv_caches: Mapping[str, Any]) -> str:
    """Device of the first registered tensor: ``cpu``, ``cuda:0``, ..."""
    for cache in kv_caches.values():
        tensor = cache[0] if isinstance(cache, list | tuple) else cache
        return str(tensor.device)
    raise ValueError("vLLM registered no KV caches")


def _impossible(job: TransferJob) -> TransferResult:
    reason = "its blocks were gone before the load could begin"
    return TransferResult(job.job_id, job.direction, ok=False, seconds=0.0, bytes_by_group={}, error=reason)


Share = Callable[[GroupMoves], npt.NDArray[np.bool_]]
"""Mask of the moves that this rank stores."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """This rank is number ``index`` of ``count`` ranks with the same KV, in replica group ``group``.

    Ranks that hold the same KV share one copy outside the GPU.

    With MLA, or with fewer KV heads than tensor-parallel ranks, vLLM keeps equal blocks on several ranks
    (``kv_tp_replicas``). Each rank then stores its share of every job and loads all of it. Invariants:
    exactly one replica stores each block of a job; every replica answers the job.
    """

    count: int = 1
    index: int = 0
    group: int = 0

    @classmethod
    def from_config(cls, kv_cache_config: Any, parallel: Any) -> Replicas:
        """The replicas in vLLM's configuration. On several machines nothing is shared."""
        count = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
        if count < 2 or int(getattr(parallel, "nnodes_within_dp", 1)) > 1:
            return cls()
        rank = int(parallel.rank)
        return cls(count, rank % parallel.tensor_parallel_size % count, rank // count)

    def by_slot(self, moves: GroupMoves) -> npt.NDArray[np.bool_]:
        """Mask of this rank's share by host row."""
        mine: npt.NDArray[np.bool_] = moves.slots % self.count == self.index
        return mine

    def by_key(self, moves: GroupMoves) -> npt.NDArray[np.bool_]:
        """Mask of this rank's share by block key, for blocks without a row that is common to all ranks."""
        return np.array([zlib.crc32(key) % self.count == self.index for key in moves.keys], np.bool_)


class ForwardingEngine:
    """A ``TransferEngine`` in front of another."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def mark(self) -> StreamMark | None:
        return self._engine.mark()

    def submit(self, job: TransferJob, after: StreamMark | None = None) -> None:
        self._engine.submit(job, after)

    def poll(self) -> list[TransferResult]:
        return self._engine.poll()

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        return self._engine.wait(job_ids, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        return self._engine.close(timeout_s)


class ShareOfStores(ForwardingEngine):
    """It stores only this rank's share."""

    def __init__(self, engine: TransferEngine, share: Share) -> None:
        super().__init__(engine)
        self._share = share
        self._empty: list[TransferResult] = []

    def submit(self, job: TransferJob, after: StreamMark | None = None) -> None:
        if job.direction is Direction.STORE:
            mine = [_selected(moves, self._share(moves)) for moves in job.groups]
            job = replace(job, groups=tuple(moves for moves in mine if len(moves.slots)))
            if not job.groups:
                self._empty.append(TransferResult(job.job_id, job.direction, True, 0.0, {}))
                return
        super().submit(job, after)

    def poll(self) -> list[TransferResult]:
        ended, self._empty = self._empty, []
        return ended + super().poll()


def _selected(moves: GroupMoves, mine: npt.NDArray[np.bool_]) -> GroupMoves:
    keys = (
        tuple(key for key, kept in zip(moves.keys, mine.tolist(), strict=True) if kept) if moves.keys else ()
    )
    return GroupMoves(moves.group_idx, moves.block_ids[mine], moves.slots[mine], keys)


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a memory file system, not for files that stay


class EngineWithPool(ForwardingEngine):
    """A ``TransferEngine`` that owns its host memory and closes both."""

    def __init__(self, engine: TransferEngine, pool: PinnedHostPool) -> None:
        super().__init__(engine)
        self._pool = pool
        self._closed = False

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        if not self._closed and self._engine.close(timeout_s):
            self._closed = True
            self._pool.close()
        return self._closed


def slots_of(kv_cache_config: Any, host_bytes: int, shares: int, where: str) -> int:
    """Rows in each of ``shares`` shares of ``host_bytes``: the same number in scheduler and worker.

    ``ConfigError`` (``where`` names the setting) if there is no room for two rows.
    """
    row_bytes = row_bytes_from_config(kv_cache_config)
    slots = host_bytes // shares // row_bytes
    if slots < 2:
        need = 2 * shares * row_bytes
        raise ConfigError(where, host_bytes, f"a block takes {row_bytes} bytes of it; give {need} or more")
    return slots


def make_engine(
    view: CacheView,
    device: str,
    *,
    slots: int,
    row_bytes: int,
    replicas: Replicas | None = None,
    name: str = "",
    meet: Callable[[], bool] | None = None,
) -> TransferEngine:
    """Make an engine over at least ``slots`` new rows, for a ``cpu`` or ``cuda`` cache.

    ``row_bytes``: size of a row by the configuration. ``LayoutError`` if a block of the cache is larger,
    ``ConfigError`` for other devices, ``HostMemoryError`` if the memory is unavailable. ``replicas``: these
    ranks use the same rows, in shared memory named after ``name``, the engine's id. ``meet`` waits for all of
    them; it returns False if there is no process group.
    """
    if view.row_bytes > row_bytes:
        raise LayoutError(f"a block takes {view.row_bytes} bytes; its configuration says at most {row_bytes}")
    if replicas is None or replicas.count < 2 or meet is None:
        return EngineWithPool(*open_rows(view, device, slots, view.row_bytes))
    path = _SHARED_MEMORY / f"kvatlas-{name}-{replicas.group}"
    shared = SharedMapping(path, first=replicas.index == 0)
    try:
        engine = EngineWithPool(*open_rows(view, device, slots, view.row_bytes, shared))
        if not meet():
            engine.close()
            raise HostMemoryError(
                f"share_replicas: ranks that share {path} must meet, and cannot; set it to false"
            )
    finally:
        # Existing mappings stay valid; a crash leaves no file behind.
        path.unlink(missing_ok=True)
    return ShareOfStores(engine, replicas.by_slot)


def open_rows(
    view: CacheView, device: str, rows: int, row_bytes: int, shared: SharedMapping | None = None
) -> tuple[TransferEngine, PinnedHostPool]:
    """Make ``rows`` rows of ``row_bytes`` for a ``cpu`` or ``cuda`` cache, and an engine that copies to them.

    Close the engine, then the pool.
    ConfigError for other devices, HostMemoryError if there is not enough memory.
    """
    # As many stores may wait as there are rows, which bounds them already.
    kind, _, index = device.partition(":")
    if kind == "cpu":
        # only where it is used
        from kvatlas.connectors.transfer.host_engine import HostTransferEngine  # noqa: PLC0415

        pool = PinnedHostPool(rows * row_bytes, row_bytes, shared=shared)
        return HostTransferEngine(view, pool, row_bytes=row_bytes, queued_stores_max=rows), pool
    if kind == "cuda":
        from kvatlas.connectors.transfer.cuda import open_cuda  # noqa: PLC0415 - only where it is used

        view = replace(view, row_bytes=row_bytes)
        gpu = int(index) if index else None
        return open_cuda(view, rows * row_bytes, device_index=gpu, queued_stores_max=rows, shared=shared)
    raise ConfigError("device", device, "there are transfer engines for cpu and cuda")
