"""Replay of a capture through the serving code, event by event, without a clock: equal captures give equal
results.

A capture holds each engine's frames in the order they were published. A seq that goes back is a restarted
engine, unless the batch is older than the one before it: then it was late and is skipped. Missing seqs are
counted and skipped, as by a feed without a replay socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import xxhash
import zmq

from publisher.event_decoder import decode_batch
from publisher.events import (
    AllBlocksCleared,
    BlockHash,
    BlockStored,
    DecodedBatch,
    EventDecodeError,
    to_block_hash,
)
from publisher.zmq_publisher import ZmqPublisher
from router.index.base import Plane
from router.index.learn.layout import ModelFacts
from router.index.memory import MemoryIndex
from router.index.model import FleetResidency
from router.tools.capture import CapturedFrame

# A journaling index: for every block of every plane it records the last change and its position. It is the
# serving index with a journal, so what a replay counts is what the router would have held. ``at`` is the
# position of the event being applied, set by the player. Memory grows with the distinct blocks of the capture
# and is never freed: for tools, not for serving.


Gone = Literal["", "evicted", "cleared", "restarted"]


class EventPosition(NamedTuple):
    """Position of one event of one engine: seq of its batch, and its index in the batch."""

    seq: int
    event: int


class BlockLog(msgspec.Struct):
    """Journal of one block in one plane: physical copies now, and the last change in either direction."""

    copies: int = 0
    stored: EventPosition | None = None
    gone: EventPosition | None = None
    how: Gone = ""


class PlaneCounts(msgspec.Struct):
    """Counts of one plane of one engine.

    ``stored`` to ``cleared`` count copies since the start of the capture.
    """

    blocks: int = 0
    """Number of distinct blocks held now."""
    copies: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    """Copies dropped by a cache reset or a restart."""
    unknown_removals: int = 0
    """Removals of blocks that were not present: history is missing."""


class JournaledIndex(MemoryIndex):
    """Memory index that journals the last change of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.at = EventPosition(0, 0)
        self.logs: dict[tuple[str, Plane], dict[BlockHash, BlockLog]] = {}
        self.counts: dict[tuple[str, Plane], PlaneCounts] = {}

    def seen_planes(self, engine_id: str) -> list[Plane]:
        """Every plane in which the engine ever stored or removed a block."""
        return sorted(plane for engine, plane in self.counts if engine == engine_id)

    def log(self, engine_id: str, plane: Plane, block: BlockHash) -> BlockLog | None:
        """Return the journal of a block; None if it was never present."""
        return self.logs.get((engine_id, plane), {}).get(block)

    def held(self, engine_id: str, plane: Plane) -> dict[BlockHash, int]:
        """Blocks held now, with their number of copies."""
        logs = self.logs.get((engine_id, plane), {})
        return {block: log.copies for block, log in logs.items() if log.copies}

    def restart_journal(self) -> None:
        """Clear the journal but not the index."""
        self.logs.clear()
        self.counts.clear()

    def store(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> None:
        super().store(engine_id, plane, hashes)
        logs, counts = self._of(engine_id, plane)
        for block in hashes:
            log = logs.get(block)
            if log is None:
                log = logs[block] = BlockLog()
            counts.blocks += not log.copies
            log.copies += 1
            log.stored = self.at
        counts.copies += len(hashes)
        counts.stored += len(hashes)

    def remove(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        left = super().remove(engine_id, plane, hashes)
        logs, counts = self._of(engine_id, plane)
        for block in hashes:
            log = logs.get(block)
            if log is None or not log.copies:
                counts.unknown_removals += 1
                continue
            self._take(log, counts, 1, "evicted")
            counts.removed += 1
        return left

    def set_copies(self, engine_id: str, plane: Plane, block: BlockHash, copies: int) -> None:
        log = self.log(engine_id, plane, block)
        held = log.copies if log is not None else 0
        if copies > held:
            self.store(engine_id, plane, [block] * (copies - held))
        elif copies < held:
            self.remove(engine_id, plane, [block] * (held - copies))

    def clear(self, engine_id: str, medium: str) -> None:
        super().clear(engine_id, medium)
        self._drop(
            engine_id, "cleared", [plane for plane in self.seen_planes(engine_id) if plane.medium == medium]
        )

    def forget(self, engine_id: str) -> None:
        super().forget(engine_id)
        self._drop(engine_id, "restarted", self.seen_planes(engine_id))

    def _of(self, engine_id: str, plane: Plane) -> tuple[dict[BlockHash, BlockLog], PlaneCounts]:
        key = engine_id, plane
        if key not in self.counts:
            self.logs[key], self.counts[key] = {}, PlaneCounts()
        return self.logs[key], self.counts[key]

    def _drop(self, engine_id: str, how: Gone, planes: list[Plane]) -> None:
        for plane in planes:
            logs, counts = self._of(engine_id, plane)
            counts.cleared += counts.copies
            for log in logs.values():
                if log.copies:
                    self._take(log, counts, log.copies, how)

    def _take(self, log: BlockLog, counts: PlaneCounts, copies: int, how: Gone) -> None:
        log.copies -= copies
        counts.copies -= copies
        if not log.copies:
            counts.blocks -= 1
            log.gone, log.how = self.at, how


_RECENT_MAX = 1024


class SourceRun(msgspec.Struct):
    """Counters of one engine's stream."""

    source: str
    frames: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
    events: int = 0
    gaps: int = 0
    missing_batches: int = 0
    duplicates: int = 0
    late: int = 0
    restarts: int = 0
    clears: int = 0
    undecodable: int = 0
    rejected_events: int = 0
    unknown_events: int = 0
    redacted: bool = False
    """Whether no token id other than 0 was seen, and some were 0."""


class MaskedSpan(msgspec.Struct, frozen=True):
    """A stored event that covers more blocks than it lists."""

    at: EventPosition
    event: BlockStored
    listed: frozenset[BlockHash]


class _Cursor:
    """State of one engine's stream."""

    def __init__(self, source: str) -> None:
        self.run = SourceRun(source)
        self.last_ts = float("-inf")
        self.recent: dict[int, int] = {}
        self.saw_tokens = False


class Player:
    """Residency of all engines of a capture."""

    def __init__(self, facts: ModelFacts) -> None:
        self.ledger = JournaledIndex()
        self.fleet = FleetResidency(facts, self.ledger)
        # By engine and group, then by the parent of the span.
        self.masked: dict[tuple[str, int], dict[BlockHash | None, list[MaskedSpan]]] = {}
        self._cursors: dict[str, _Cursor] = {}

    @property
    def runs(self) -> list[SourceRun]:
        """One entry per engine, in the order of their first frames."""
        return [cursor.run for cursor in self._cursors.values()]

    def run_of(self, source: str) -> SourceRun:
        """Return the entry of one engine that occurs in the capture."""
        return self._cursors[source].run

    def play(self, frame: CapturedFrame) -> bool:
        """Apply one frame; False if it is ignored: late, or a duplicate."""
        cursor = self._cursors.get(frame.source)
        if cursor is None:
            cursor = self._cursors[frame.source] = _Cursor(frame.source)
        try:
            batch = decode_batch(frame.payload)
        except EventDecodeError:
            batch = None
        if not self._in_order(cursor, frame, batch):
            return False
        cursor.run.frames += 1
        cursor.run.last_seq = frame.seq
        if batch is None:
            cursor.run.undecodable += 1
        else:
            cursor.last_ts = batch.ts
            self._apply(cursor, frame, batch)
        return True

    def play_all(self, frames: Iterable[CapturedFrame]) -> None:
        """Apply every frame."""
        for frame in frames:
            self.play(frame)

    def learn(self, frames: Iterable[CapturedFrame]) -> None:
        """Play frames only to learn each engine's groups and hash scheme, then reset."""
        # Equivalent to engines that ran before the capture and restarted when it began.
        for frame in frames:
            if self.play(frame) and not self.run_of(frame.source).redacted:
                self.fleet.engine(frame.source).finish_detection()
        for source in self._cursors:
            self.fleet.forget(source)
        self.ledger.restart_journal()
        self.masked.clear()
        self._cursors.clear()

    def _in_order(self, cursor: _Cursor, frame: CapturedFrame, batch: DecodedBatch | None) -> bool:
        """Count gaps and restarts; False for a frame that must not be applied."""
        run, digest = cursor.run, xxhash.xxh3_64_intdigest(frame.payload)
        if run.last_seq is None:
            run.first_seq = frame.seq
        elif frame.seq <= run.last_seq:
            if cursor.recent.get(frame.seq) == digest:
                run.duplicates += 1
                return False
            if batch is None or batch.ts < cursor.last_ts:
                run.late += 1
                return False
            run.restarts += 1
            self.ledger.at = EventPosition(frame.seq, 0)
            self.fleet.forget(frame.source)
            self._forget_masked(frame.source)
            cursor.recent.clear()
            run.last_seq = -1
        if run.last_seq is not None and frame.seq > run.last_seq + 1:
            run.gaps += 1
            run.missing_batches += frame.seq - run.last_seq - 1
        cursor.recent[frame.seq] = digest
        if len(cursor.recent) > _RECENT_MAX:
            del cursor.recent[next(iter(cursor.recent))]
        return True

    def _apply(self, cursor: _Cursor, frame: CapturedFrame, batch: DecodedBatch) -> None:
        """Apply a batch; the journal attributes changes to its events."""
        run = cursor.run
        run.rejected_events += len(batch.rejected)
        run.unknown_events += len(batch.unknown)
        run.events += len(batch.events)

        def before(number: int) -> None:
            event = batch.events[number]
            self.ledger.at = EventPosition(frame.seq, number)
            if isinstance(event, BlockStored):
                self._look_at(cursor, event)
            run.clears += isinstance(event, AllBlocksCleared)

        self.fleet.engine(frame.source).apply(batch, before)

    def _look_at(self, cursor: _Cursor, event: BlockStored) -> None:
        """Record the span of a masked event, and detect token ids."""
        if not cursor.saw_tokens and event.num_tokens():
            try:
                cursor.saw_tokens = any(event.tokens())
            except EventDecodeError:
                return
            cursor.run.redacted = not cursor.saw_tokens
        if event.num_tokens() <= len(event.block_hashes) * event.block_size or not event.block_size:
            return
        parent = None if event.parent_block_hash is None else to_block_hash(event.parent_block_hash)
        listed = frozenset(to_block_hash(wire) for wire in event.block_hashes)
        spans = self.masked.setdefault((cursor.run.source, event.group_idx or 0), {})
        spans.setdefault(parent, []).append(MaskedSpan(self.ledger.at, event, listed))

    def _forget_masked(self, source: str) -> None:
        for key in [key for key in self.masked if key[0] == source]:
            del self.masked[key]


def up_to(frames: Iterable[CapturedFrame], to_seq: int | None) -> Iterator[CapturedFrame]:
    """Yield the frames of each engine before its first one beyond ``to_seq``."""
    ended: set[str] = set()
    for frame in frames:
        if to_seq is not None and frame.seq > to_seq:
            ended.add(frame.source)
        if frame.source not in ended:
            yield frame


class PlaneSample(msgspec.Struct, frozen=True):
    """One plane of one engine at one point in time; counts are totals since the start."""

    source: str
    seq: int | None
    medium: str
    group: int
    blocks: int
    copies: int
    stored: int
    removed: int
    cleared: int
    unknown_removals: int
    gaps: int


class Sample(msgspec.Struct, frozen=True):
    """All planes after ``frames`` frames; ``elapsed_s`` by the recorder's clock since the first frame."""

    frames: int
    elapsed_s: float
    planes: list[PlaneSample]


def sample(player: Player, frames: int, elapsed_s: float) -> Sample:
    """Sample the current state of a player."""
    planes = []
    for run in player.runs:
        for plane in player.ledger.seen_planes(run.source):
            counts = player.ledger.counts[run.source, plane]
            numbers = msgspec.structs.asdict(counts)
            planes.append(
                PlaneSample(run.source, run.last_seq, plane.medium, plane.group_idx, gaps=run.gaps, **numbers)
            )
    return Sample(frames, round(elapsed_s, 3), planes)


class Sampler:
    """Plays ``total`` frames and takes ``samples`` samples at equal distances, the last one at the end."""

    def __init__(self, player: Player, *, total: int, samples: int) -> None:
        self.taken: list[Sample] = []
        self.frames = 0
        self.total = total
        self._player = player
        self._marks = {max(1, total * number // samples) for number in range(1, samples + 1)}
        self._first_ts: float | None = None

    def play(self, frame: CapturedFrame) -> None:
        """Apply one frame, and take a sample if one is due."""
        self._player.play(frame)
        self.frames += 1
        if self._first_ts is None:
            self._first_ts = frame.recv_ts
        if self.frames in self._marks:
            self.taken.append(sample(self._player, self.frames, frame.recv_ts - self._first_ts))


# Publishes a capture again as the recorded engines did: PUB sockets and replay ROUTERs. Seqs, topics and
# payloads are the recorded ones; an engine that restarted in the capture restarts here. The pace is that of
# the recorder's clock times ``speed`` (0: no waiting).


_BREATHE_FRAMES = 64


class PublishEndpoint(msgspec.Struct, frozen=True):
    """Addresses at which one engine of a capture is published."""

    events: str
    replay: str | None = None


def parse_endpoint(text: str) -> PublishEndpoint:
    """Parse ``tcp://..[,replay=tcp://..]``. Raises ``ValueError``."""
    events, *options = text.split(",")
    replay = None
    for option in options:
        name, separator, replay = option.partition("=")
        if name != "replay" or not separator:
            raise ValueError(f"--publish {text!r}: {option!r} is not replay=tcp://..")
    for address in (events, replay):
        if address is not None and not address.startswith(("tcp://", "ipc://")):
            raise ValueError(f"--publish {text!r}: {address!r} is not a tcp:// or ipc:// address")
    return PublishEndpoint(events, replay)


@contextlib.contextmanager
def publishers(
    endpoints: Mapping[str, PublishEndpoint],
    topics: Mapping[str, str],
    *,
    buffer_steps: int,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
) -> Iterator[dict[str, ZmqPublisher]]:
    """Open one publisher per engine, inside a running loop. Raises ``zmq.ZMQError`` for a used address."""
    opened: dict[str, ZmqPublisher] = {}
    try:
        for source, endpoint in endpoints.items():
            opened[source] = ZmqPublisher(
                endpoint.events,
                replay_endpoint=endpoint.replay,
                topic=topics[source],
                buffer_steps=max(1, buffer_steps),
                context=context,
            )
            opened[source].start()
        yield opened
    finally:
        for publisher in opened.values():
            publisher.close()


async def paced(frames: Iterator[CapturedFrame], speed: float) -> AsyncIterator[CapturedFrame]:
    """Yield frames at their recorded times, ``speed`` times as fast; 0: without waiting."""
    loop = asyncio.get_running_loop()
    began: float | None = None
    first_ts = 0.0
    for number, frame in enumerate(frames):
        if began is None:
            began, first_ts = loop.time(), frame.recv_ts
        wait_s = (frame.recv_ts - first_ts) / speed - (loop.time() - began) if speed else 0.0
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        elif number % _BREATHE_FRAMES == 0:
            await asyncio.sleep(0)
        yield frame


def publish_frame(publisher: ZmqPublisher, frame: CapturedFrame) -> None:
    """Send one frame under its recorded seq."""
    publisher.renumber(frame.seq)
    publisher.publish_payload(frame.payload)


def topics_of(frames: Iterable[CapturedFrame]) -> dict[str, str]:
    """Return the topic of each engine's first frame."""
    topics: dict[str, str] = {}
    for frame in frames:
        topics.setdefault(frame.source, frame.topic)
    return topics
