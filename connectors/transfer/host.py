"""Transfer engine on the CPU, for CPU platforms and as the reference for other engines.

One worker thread runs jobs in order and copies their pieces with ``memmove``; the interpreter lock is
released during each copy. ``poll`` returns the results.

Invariants: a job is reported exactly once. A job with a wrong block or row is refused before any byte is
copied. ``submit`` never waits. Stores are best effort: beyond ``queued_stores_max`` waiting ones, further
stores fail immediately and are counted. Loads are always accepted; waiting requests bound their number.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from connectors.layout import CacheView
from connectors.transfer.base import (
    CLOSE_S,
    Direction,
    HostMemory,
    StreamMark,
    TransferJob,
    TransferPlan,
    TransferResult,
    merge_adjacent,
)

log = logging.getLogger(__name__)

QUEUED_STORES_MAX = 64


class CopyFault(Protocol):
    """Test hook around a job's copy, on the worker thread: may wait, raise, or change bytes after
    ``copy()``."""

    def __call__(self, job: TransferJob, copy: Callable[[], None]) -> None: ...


class BufferMemory:
    """Rows in any writable buffer (bytearray, mmap, numpy array), which it keeps alive."""

    def __init__(self, buffer: memoryview) -> None:
        """ValueError if the buffer is read-only or not contiguous."""
        if buffer.readonly or not buffer.c_contiguous:
            raise ValueError("rows need a writable, contiguous buffer")
        self._bytes = np.frombuffer(buffer.cast("B"), np.uint8)

    @property
    def address(self) -> int:
        return int(self._bytes.ctypes.data)

    @property
    def size_bytes(self) -> int:
        return int(self._bytes.nbytes)


class HostTransferEngine:
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
        if queued_stores_max < 1:
            raise ValueError(f"queued_stores_max={queued_stores_max}: at least one store must fit")
        self._plan = TransferPlan(view, pool, row_bytes)
        self._pool = pool
        self._fault = fault
        self._queued_stores_max = queued_stores_max
        self._changed = threading.Condition()
        self._queue: deque[TransferJob] = deque()
        self._queued_stores = 0
        self._unfinished: set[int] = set()
        self._results: list[TransferResult] = []
        self._closing = False
        # Stores that failed because too many were waiting.
        self.stores_dropped = 0
        self._thread = threading.Thread(target=self._run, name="kvatlas-host-copy", daemon=True)
        self._thread.start()

    def mark(self) -> StreamMark | None:
        """None: computation in host memory has ended when a job is submitted."""
        return None

    def submit(self, job: TransferJob, after: StreamMark | None = None) -> None:
        """Submit a job; its result has any error."""
        del after
        refusal = self._plan.refusal(job)
        with self._changed:
            if job.job_id in self._unfinished:
                # An answer to the second would end the first one early.
                log.error("transfer job %d was submitted twice; the second is ignored", job.job_id)
                return
            if self._closing:
                refusal = "the transfer engine is closed"
            elif not refusal and job.direction is Direction.STORE:
                if self._queued_stores >= self._queued_stores_max:
                    self.stores_dropped += 1
                    refusal = f"{self._queued_stores} stores are waiting, no more are taken"
                else:
                    self._queued_stores += 1
            if refusal:
                self._results.append(TransferResult(job.job_id, job.direction, False, 0.0, {}, refusal))
            else:
                self._unfinished.add(job.job_id)
                self._queue.append(job)
            self._changed.notify_all()

    def poll(self) -> list[TransferResult]:
        """The jobs that ended since the last call, in the order they ended."""
        with self._changed:
            results, self._results = self._results, []
        return results

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        """Block until these jobs have ended; unknown ids count as ended."""
        wanted = set(job_ids)
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished.isdisjoint(wanted), timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Finish every submitted job, then stop; may be called again. False if a copy hangs."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("copies did not end within %g s; their host memory is left to the process", timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
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
                self._unfinished.discard(job.job_id)
                self._results.append(result)
                self._changed.notify_all()

    def _execute(self, job: TransferJob) -> TransferResult:
        started = time.monotonic()
        try:
            if self._fault is None:
                self._copy(job)
            else:
                self._fault(job, lambda: self._copy(job))
        except Exception as error:  # the job must be answered after any error
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
