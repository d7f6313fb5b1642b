"""Transfer engine between a GPU's KV cache and pinned host memory, asynchronous to the model.

``mark`` records an event on the compute stream; ``submit`` queues a job behind such an event. A thread makes
the pieces of jobs and enqueues them behind the event, on one stream per direction. So a store reads data
computed before it, and a load overwrites nothing that earlier work still has to zero. Both streams have the
lowest priority, which is also that of vLLM's streams: copies yield to the model only if its stream has a
higher one. Loads precede stores, because requests wait for loads. ``poll`` queries the events behind each
part.

Invariants: a job is reported once, as successful only after its last byte arrived. ``submit`` and ``poll``
never wait for the device. After a CUDA error, all running jobs fail once the streams are idle, and so do all
later ones.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.transfer.base import (
    QUEUED_STORES_MAX,
    Direction,
    HostMemory,
    Pieces,
    StreamMark,
    ThreadedEngine,
    TransferJob,
    TransferPlan,
    TransferResult,
    joined,
    merge_adjacent,
)
from kvatlas.connectors.transfer.calibrate import Calibration, calibrate, without_kernel
from kvatlas.connectors.transfer.cuda_driver import CudaDriver, EventHandle, StreamHandle, TorchDevice
from kvatlas.connectors.transfer.cuda_moves import MoveCounts, Mover, cut_at_chunks
from kvatlas.connectors.transfer.host import PinnedHostPool, SharedMapping

PART_PIECES_MAX = 16_384
# Most bytes in a part, unless it is a single piece.
PART_BYTES_MAX = 32 << 20


class EventPool:
    """Pool of reusable events: creating one costs more than recording it. Thread-safe."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device
        self._free: deque[EventHandle] = deque()
        self.created = 0

    def take(self) -> EventHandle:
        """Take an event without waiters."""
        try:
            return self._free.pop()
        except IndexError:
            self.created += 1
            return self._device.new_event()

    def give(self, event: EventHandle) -> None:
        """Return an event whose last record was reached, or whose waits are all enqueued."""
        self._free.append(event)


class Mark:
    """An event recorded on the compute stream; returns to its pool with its last reference."""

    def __init__(self, events: EventPool, device: TorchDevice) -> None:
        self._events = events
        self.event = events.take()
        device.record(self.event, device.current_stream())

    def __del__(self) -> None:
        if hasattr(self, "event"):
            self._events.give(self.event)


@dataclass(slots=True)
class QueuedJob:
    """A job to be enqueued. ``ready``: the mark it waits for; None after the wait was enqueued."""

    job: TransferJob
    ready: Mark | None
    submitted_at: float
    bytes_by_group: dict[int, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.bytes_by_group.values())


@dataclass(slots=True)
class Part:
    """Pieces in flight. ``ends``: jobs that end with them; ``kept``: objects that the copy needs."""

    done: EventHandle
    size_bytes: int
    ends: list[QueuedJob]
    kept: object


class PreparedJobs:
    """Pieces of jobs that are enqueued together, part by part; the jobs end with the last part."""

    def __init__(self, queued: list[QueuedJob], pieces: Pieces) -> None:
        self.queued = queued
        self._pieces = pieces
        self._ends = np.cumsum(pieces[2])
        self._next = 0

    @property
    def exhausted(self) -> bool:
        return self._next >= len(self._ends)

    def take_part(self) -> tuple[Pieces, int]:
        """The next pieces and their bytes; empty only for jobs without any."""
        first = self._next
        before = int(self._ends[first - 1]) if first else 0
        within = int(np.searchsorted(self._ends, before + PART_BYTES_MAX, side="right"))
        self._next = last = min(max(within, first + 1), first + PART_PIECES_MAX, len(self._ends))
        size = int(self._ends[last - 1]) - before if last > first else 0
        src, dst, sizes = (array[first:last] for array in self._pieces)
        return (src, dst, sizes), size


class Lane:
    """One direction of transfers: waiting jobs, the job being enqueued, the parts in flight. ``throttled``
    counts how often the bytes in flight reached their limit.

    A large job is enqueued in parts, each followed by an event, so that it neither fills the device's queues
    nor delays the other direction. Small waiting jobs are enqueued as one part, because calls and launches
    cost as much as their bytes. All parts of a lane go to one stream in order: the event of a job's last part
    follows the whole job.

    Not locked: the engine's lock guards every method except ``prepare``, which only its submit thread calls.
    """

    def __init__(self, direction: Direction, stream: StreamHandle, inflight_bytes_max: int) -> None:
        self.direction = direction
        self.stream = stream
        self.waiting: deque[QueuedJob] = deque()
        self.current: PreparedJobs | None = None
        self.inflight: deque[Part] = deque()
        self.inflight_bytes = 0
        self.throttled = 0
        self._inflight_bytes_max = inflight_bytes_max

    @property
    def wanting(self) -> bool:
        """Whether there is something to enqueue."""
        return self.current is not None or bool(self.waiting)

    @property
    def idle(self) -> bool:
        return not self.wanting and not self.inflight

    @property
    def throttling(self) -> bool:
        """Whether parts wait for the limit of bytes in flight; one part is always allowed."""
        return self.wanting and bool(self.inflight) and self.inflight_bytes >= self._inflight_bytes_max

    def may_enqueue(self) -> bool:
        return self.wanting and not self.throttling

    def take_queued(self, device: TorchDevice) -> list[QueuedJob]:
        """Jobs to begin enqueueing now; empty while earlier ones continue."""
        # Several are taken only while parts are in flight, so that joining them delays nothing, and only as
        # many as fit one part, so that the first is delayed by at most one part. A job whose mark would delay
        # the others is not joined.
        if self.current is not None:
            return []
        taken = [self.waiting.popleft()]
        size_bytes, first = taken[0].size_bytes, taken[0].ready
        while self.waiting and self.inflight:
            candidate = self.waiting[0]
            size_bytes += candidate.size_bytes
            ready = candidate.ready
            reached = ready is None or ready is first or device.done(ready.event)
            if size_bytes > PART_BYTES_MAX or not reached:
                break
            taken.append(self.waiting.popleft())
        return taken

    @staticmethod
    def prepare(queued: list[QueuedJob], plan: TransferPlan, chunk_bytes: int) -> PreparedJobs:
        """Make the pieces of jobs; the expensive step, done without the lock."""
        job = joined([entry.job for entry in queued])
        pieces = merge_adjacent(plan.pieces(job))
        if chunk_bytes:
            host_side = 0 if job.direction is Direction.LOAD else 1
            pieces = cut_at_chunks(pieces, host_side, plan.host_base, chunk_bytes)
        return PreparedJobs(queued, pieces)

    def sent(self, part: Part) -> None:
        self.inflight.append(part)
        self.inflight_bytes += part.size_bytes
        if part.ends:
            self.current = None
        if self.throttling:
            self.throttled += 1

    def retire(self, device: TorchDevice, events: EventPool) -> list[QueuedJob]:
        """Jobs whose parts have all arrived, in the order of enqueueing."""
        ended = []
        while self.inflight and device.done(self.inflight[0].done):
            part = self.inflight.popleft()
            self.inflight_bytes -= part.size_bytes
            events.give(part.done)
            ended += part.ends
        return ended

    def abandon(self) -> None:
        """Drop all jobs; call it only when the stream is idle."""
        self.waiting.clear()
        self.inflight.clear()
        self.current = None
        self.inflight_bytes = 0


log = logging.getLogger(__name__)

# Most bytes in flight per direction: about ten milliseconds of a PCIe link, to keep the device busy.
INFLIGHT_BYTES_MAX = 512 << 20
POLL_INTERVAL_S = 0.0002


def open_cuda(
    view: CacheView,
    host_bytes: int,
    device_index: int | None = None,
    *,
    queued_stores_max: int = QUEUED_STORES_MAX,
    shared: SharedMapping | None = None,
) -> tuple[CudaTransferEngine, PinnedHostPool]:
    """Make the engine and the pinned pool for the GPU of this index (default: torch's current one).

    Close the engine, then the pool. Raises HostMemoryError, DriverError, LayoutError, or RuntimeError without
    a CUDA device.
    """
    device = TorchDevice(device_index)
    driver = CudaDriver(device.index)
    pool = PinnedHostPool(host_bytes, view.row_bytes, driver=driver, shared=shared)
    try:
        engine = CudaTransferEngine(
            view,
            pool,
            device=device,
            driver=driver,
            host_chunk_bytes=pool.chunk_bytes,
            queued_stores_max=queued_stores_max,
        )
    except BaseException:
        pool.close()
        raise
    log.info("host memory of %s: %s; %s", device.name, "; ".join(pool.notes), engine.calibration.describe())
    return engine, pool


class CudaTransferEngine(ThreadedEngine):
    """The ``TransferEngine`` for caches in a GPU's memory."""

    def __init__(
        self,
        view: CacheView,
        pool: HostMemory,
        *,
        device: TorchDevice,
        driver: CudaDriver,
        row_bytes: int | None = None,
        host_chunk_bytes: int = 0,
        calibration: Calibration | None = None,
        queued_stores_max: int = QUEUED_STORES_MAX,
        inflight_bytes_max: int = INFLIGHT_BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pool`` is pinned and must outlive the engine; ``host_chunk_bytes`` is the length of its
        registered chunks, 0 for a single one. ``calibration`` is measured now by default. LayoutError if a
        row cannot hold a block."""
        if inflight_bytes_max < 1 or host_chunk_bytes < 0:
            raise ValueError(
                f"inflight_bytes_max={inflight_bytes_max} and host_chunk_bytes={host_chunk_bytes}: the first "
                "must be positive, the second not negative"
            )
        super().__init__(TransferPlan(view, pool, row_bytes), queued_stores_max, "kvatlas-cuda-copy")
        self._pool = pool
        self._device = device
        self._driver = driver
        self._host_chunk_bytes = host_chunk_bytes
        self._clock = clock
        self.calibration = calibration if calibration is not None else calibrate(device, driver)
        if self.calibration.kernel_max_piece_bytes and not driver.maps_same_address(pool.address):
            self.calibration = without_kernel(
                self.calibration, "the host pool is not mapped at its own address"
            )
        self._mover = Mover(device, driver, self.calibration)
        self._events = EventPool(device)
        # In order of priority: requests wait for loads, nothing waits for stores.
        self._lanes = {
            direction: Lane(direction, device.low_priority_stream(), inflight_bytes_max)
            for direction in (Direction.LOAD, Direction.STORE)
        }
        self._thread.start()

    @property
    def counts(self) -> MoveCounts:
        """Number of pieces by copy method."""
        return self._mover.counts

    @property
    def throttled(self) -> int:
        """How often enqueueing stopped at ``inflight_bytes_max``."""
        return sum(lane.throttled for lane in self._lanes.values())

    def mark(self) -> StreamMark | None:
        """Record an event on the compute stream; None if the device has failed, which fails the engine."""
        return self._mark()

    def _mark(self) -> Mark | None:
        if self.failure:
            return None
        try:
            return Mark(self._events, self._device)
        except Exception as error:
            log.exception("recording an event on the computing stream failed")
            with self._changed:
                self._fail(error)
            return None

    def poll(self) -> list[TransferResult]:
        with self._changed:
            self._retire()
            return super().poll()

    def stores_waiting(self) -> int:
        return len(self._lanes[Direction.STORE].waiting)

    def accept(self, job: TransferJob, after: StreamMark | None) -> str:
        ready = after if isinstance(after, Mark) else self._mark()
        if not self.failure:
            queued = QueuedJob(job, ready, self._clock(), self._plan.bytes_by_group(job))
            self._lanes[job.direction].waiting.append(queued)
        return self.failure

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        """Block until these jobs have ended; unknown ids count as ended."""
        deadline = self._clock() + timeout_s
        with self._changed:
            while True:
                self._retire()
                if self._unfinished.keys().isdisjoint(job_ids):
                    return True
                left = deadline - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(min(left, POLL_INTERVAL_S))

    def _retire(self) -> None:
        """Report completed parts. The lock is held."""
        if self.failure:
            # The submit thread answers the remaining jobs when the streams are idle.
            return
        try:
            ended = [
                queued for lane in self._lanes.values() for queued in lane.retire(self._device, self._events)
            ]
        except Exception as error:
            log.exception("asking whether copies have arrived failed")
            self._fail(error)
            return
        now = self._clock()
        for queued in ended:
            job = self._unfinished.pop(queued.job.job_id)
            self._results.append(
                TransferResult(
                    job.job_id, job.direction, True, now - queued.submitted_at, queued.bytes_by_group
                )
            )
        if ended:
            self._changed.notify_all()

    def _fail(self, error: Exception) -> str:
        """Fail the engine; the first reason is kept. The lock is held."""
        if not self.failure:
            self.failure = f"the transfer engine is dead after {type(error).__name__}: {error}"
            log.error("%s; blocks are neither saved nor loaded any more", self.failure)
        self._changed.notify_all()
        return self.failure

    def run(self) -> None:
        try:
            self._device.bind_thread()
            self._driver.bind_thread()
            while (lane := self._next_lane()) is not None:
                self._send_part(lane)
        except Exception as error:
            log.exception("enqueueing copies failed")
            with self._changed:
                self._fail(error)
        if self.failure:
            self._answer_all()

    def _next_lane(self) -> Lane | None:
        """Wait for work to enqueue; None at the end."""
        with self._changed:
            while not self.failure:
                if any(lane.throttling for lane in self._lanes.values()) or self._closing:
                    self._retire()
                for lane in self._lanes.values():
                    if lane.may_enqueue():
                        return lane
                if self._closing and all(lane.idle for lane in self._lanes.values()):
                    return None
                # Completions are processed by ``poll``, unless this thread waits for room or for the end.
                watching = self._closing or any(lane.throttling for lane in self._lanes.values())
                self._changed.wait(POLL_INTERVAL_S if watching else None)
            return None

    def _send_part(self, lane: Lane) -> None:
        with self._changed:
            queued = lane.take_queued(self._device)
        prepared = lane.current
        if queued:
            prepared = Lane.prepare(queued, self._plan, self._host_chunk_bytes)
            for mark in {id(entry.ready): entry.ready for entry in queued}.values():
                if mark is not None:
                    self._device.wait(lane.stream, mark.event)
            for entry in queued:
                entry.ready = None
            with self._changed:
                lane.current = prepared
        if prepared is not None:
            self._send(lane, prepared)

    def _send(self, lane: Lane, prepared: PreparedJobs) -> None:
        pieces, size_bytes = prepared.take_part()
        kept = self._mover.move(lane.direction, pieces, lane.stream) if size_bytes else None
        with self._changed:
            done = self._events.take()
        self._device.record(done, lane.stream)
        with self._changed:
            lane.sent(Part(done, size_bytes, prepared.queued if prepared.exhausted else [], kept))

    def _answer_all(self) -> None:
        """Fail the running jobs after the streams are idle; before that, their memory must not be reused."""
        for lane in self._lanes.values():
            try:
                self._device.synchronize(lane.stream)
            except Exception:
                log.debug("a stream did not come to rest", exc_info=True)
        with self._changed:
            for lane in self._lanes.values():
                lane.abandon()
            for job in self._unfinished.values():
                self._results.append(TransferResult(job.job_id, job.direction, False, 0.0, {}, self.failure))
            self._unfinished.clear()
            self._changed.notify_all()
