"""One direction of transfers: the jobs that wait, the one being enqueued, the parts on their way.

A large job is enqueued in parts, each with an event after it, so that it neither fills the device's queues
nor keeps the other direction waiting; small jobs that wait are enqueued as one part, because calls and
launches cost as much as their bytes. All parts of a lane go to one stream in order: the event of a job's last
part is reached after all of the job.

Not locked: the engine's lock guards every method except ``prepare``, which only its submit thread calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from connectors.transfer.base import Direction, TransferJob, joined
from connectors.transfer.cuda_device import Device, EventHandle, StreamHandle
from connectors.transfer.cuda_mover import cut_at_chunks
from connectors.transfer.plan import Pieces, TransferPlan, merge_adjacent

PART_PIECES_MAX = 16_384
PART_BYTES_MAX = 32 << 20
"""A part holds at most this much, or one piece."""


class EventPool:
    """Events that are used again: creating one costs more than recording it. Any thread may take and give."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: deque[EventHandle] = deque()
        self.created = 0

    def take(self) -> EventHandle:
        """An event nobody waits for."""
        try:
            return self._free.pop()
        except IndexError:
            self.created += 1
            return self._device.new_event()

    def give(self, event: EventHandle) -> None:
        """Back: its last record has been reached, or every wait for it has been enqueued."""
        self._free.append(event)


class Mark:
    """An event recorded on the computing stream; goes back to its pool when no job refers to it any more."""

    def __init__(self, events: EventPool, device: Device) -> None:
        """Raises what the device raises."""
        self._events = events
        self.event = events.take()
        device.record(self.event, device.current_stream())

    def __del__(self) -> None:
        if hasattr(self, "event"):
            self._events.give(self.event)


@dataclass(slots=True)
class QueuedJob:
    """A job that waits to be enqueued. ``ready``: what it has to wait for; None: the wait is enqueued."""

    job: TransferJob
    ready: Mark | None
    submitted_at: float
    bytes_by_group: dict[int, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.bytes_by_group.values())


@dataclass(slots=True)
class Part:
    """Some pieces on their way. ``ends``: the jobs whose last they are; ``kept``: what the copy needs."""

    done: EventHandle
    size_bytes: int
    ends: list[QueuedJob]
    kept: object


class PreparedJobs:
    """Jobs spelled out together as pieces, handed over part by part; they end with the last part."""

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
    """See the module. ``throttled`` counts the times that the bytes on their way were too many."""

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
        """Whether something has to wait for room; one part may always be on its way."""
        return self.wanting and bool(self.inflight) and self.inflight_bytes >= self._inflight_bytes_max

    def may_enqueue(self) -> bool:
        """Whether the next part may go now."""
        return self.wanting and not self.throttling

    def take_queued(self, device: Device) -> list[QueuedJob]:
        """The jobs whose enqueueing begins now; none: that of earlier ones goes on.

        Several only while something is on its way, so that nobody waits for their joining, and as many as fit
        into one part: the first loses no more than that part's time. None that would make the others wait
        for the computing stream longer than they must.
        """
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
        """Spell jobs out; the costly part, done without the lock."""
        job = joined([entry.job for entry in queued])
        pieces = merge_adjacent(plan.pieces(job))
        if chunk_bytes:
            host_side = 0 if job.direction is Direction.LOAD else 1
            pieces = cut_at_chunks(pieces, host_side, plan.host_base, chunk_bytes)
        return PreparedJobs(queued, pieces)

    def sent(self, part: Part) -> None:
        """A part has been enqueued."""
        self.inflight.append(part)
        self.inflight_bytes += part.size_bytes
        if part.ends:
            self.current = None
        if self.throttling:
            self.throttled += 1

    def retire(self, device: Device, events: EventPool) -> list[QueuedJob]:
        """The jobs of which everything has arrived, in the order they were enqueued."""
        ended = []
        while self.inflight and device.done(self.inflight[0].done):
            part = self.inflight.popleft()
            self.inflight_bytes -= part.size_bytes
            events.give(part.done)
            ended += part.ends
        return ended

    def abandon(self) -> None:
        """Forget everything; only after the stream has come to rest."""
        self.waiting.clear()
        self.inflight.clear()
        self.current = None
        self.inflight_bytes = 0
