"""Transfer engine that copies on the CPU, for CPU platforms and as the reference for other engines.

One worker thread runs jobs in order and copies their pieces with ``memmove``; the interpreter lock is
released during each copy. ``poll`` returns the results. Invariants: a job is reported exactly once. A job
with a wrong block or row is refused before any byte is copied. ``submit`` never waits. Stores are best
effort: beyond ``queued_stores_max`` waiting ones, further stores fail immediately and are counted. Loads are
always accepted; waiting requests bound their number.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.transfer.base import (
    QUEUED_STORES_MAX,
    Direction,
    HostMemory,
    StreamMark,
    ThreadedEngine,
    TransferJob,
    TransferPlan,
    TransferResult,
    merge_adjacent,
)

log = logging.getLogger(__name__)


class CopyFault(Protocol):
    """Test hook around a job's copy, on the worker thread: may wait, raise, or change bytes after
    ``copy()``."""

    def __call__(self, job: TransferJob, copy: Callable[[], None]) -> None: ...


class HostTransferEngine(ThreadedEngine):
    """The ``TransferEngine`` for caches in host memory."""

    def __init__(
        self,
        view: CacheView,
        pool: HostMemory,
        *,
        row_bytes: int | None = None,
        queued_stores_max: int = QUEUED_STORES_MAX,
        fault: CopyFault | None = None,
    ) -> None:
        """``pool`` must outlive the engine. LayoutError if a row cannot hold a block."""
        super().__init__(TransferPlan(view, pool, row_bytes), queued_stores_max, "kvatlas-host-copy")
        self._pool = pool
        self._fault = fault
        self._queue: deque[TransferJob] = deque()
        self._queued_stores = 0
        self._thread.start()

    def mark(self) -> StreamMark | None:
        """None: computation in host memory has ended when a job is submitted."""
        return None

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        """Block until these jobs have ended; unknown ids count as ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished.keys().isdisjoint(job_ids), timeout_s)

    def stores_waiting(self) -> int:
        return self._queued_stores

    def accept(self, job: TransferJob, after: StreamMark | None) -> str:
        self._queued_stores += job.direction is Direction.STORE
        self._queue.append(job)
        return ""

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                job = self._queue.popleft()
                if job.direction is Direction.STORE:
                    self._queued_stores -= 1
            result = self._execute(job)
            with self._changed:
                del self._unfinished[job.job_id]
                self._results.append(result)
                self._changed.notify_all()

    def _execute(self, job: TransferJob) -> TransferResult:
        started = time.monotonic()
        try:
            if self._fault is None:
                self._copy(job)
            else:
                self._fault(job, lambda: self._copy(job))
        except Exception as error:
            # The job must be answered after any error.
            log.warning("transfer job %d failed", job.job_id, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
            seconds = time.monotonic() - started
            return TransferResult(job.job_id, job.direction, False, seconds, {}, reason)
        moved = self._plan.bytes_by_group(job)
        return TransferResult(job.job_id, job.direction, True, time.monotonic() - started, moved)

    def _copy(self, job: TransferJob) -> None:
        sources, destinations, sizes = merge_adjacent(self._plan.pieces(job))
        for source, destination, size in zip(
            sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(destination, source, size)
