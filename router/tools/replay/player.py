"""Plays a capture through the serving code, event by event, without a clock: equal captures give equal
results.

A capture holds each engine's frames in the order they were published. A seq that goes back is a restarted
engine, unless the batch is older than the one before it: that came late and is left out. Missing seqs are
counted and played across, as a feed does that has no replay socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import xxhash

from publisher.event_decoder import decode_batch
from publisher.events import (
    AllBlocksCleared,
    BlockHash,
    BlockStored,
    DecodedBatch,
    EventDecodeError,
    to_block_hash,
)
from router.index.base import Index
from router.index.learn.layout import ModelFacts
from router.index.model import FleetResidency
from router.tools.capture.file import CapturedFrame
from router.tools.replay.ledger import EventPosition, Ledger

_RECENT_MAX = 1024


class SourceRun(msgspec.Struct):
    """What happened to one engine's stream so far."""

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
    """No token id other than 0 was seen, and some were 0."""


class MaskedSpan(msgspec.Struct, frozen=True):
    """A stored event that covers more blocks than it lists."""

    at: EventPosition
    event: BlockStored
    listed: frozenset[BlockHash]


class _Cursor:
    """Where one engine's stream stands."""

    def __init__(self, source: str) -> None:
        self.run = SourceRun(source)
        self.last_ts = float("-inf")
        self.recent: dict[int, int] = {}
        self.saw_tokens = False


class Player:
    """Residency of all engines of a capture. ``index``: what writes go through, if not the ledger itself."""

    def __init__(
        self, facts: ModelFacts, *, ledger: Ledger | None = None, index: Index | None = None
    ) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self.fleet = FleetResidency(facts, self.ledger if index is None else index)
        self.masked: dict[tuple[str, int], dict[BlockHash | None, list[MaskedSpan]]] = {}
        """By engine and group, then by the parent of the span."""
        self._cursors: dict[str, _Cursor] = {}

    @property
    def runs(self) -> list[SourceRun]:
        """One entry per engine, in the order of their first frames."""
        return [cursor.run for cursor in self._cursors.values()]

    def run_of(self, source: str) -> SourceRun:
        """The entry of one engine that occurs in the capture."""
        return self._cursors[source].run

    def play(self, frame: CapturedFrame) -> bool:
        """Apply one frame; False for one that counts for nothing: it came late, or was there already."""
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
        """Play frames only to learn each engine's groups and hash scheme, then start from nothing again: as
        if the engines had lived before the capture and restarted when it began."""
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
        """One event at a time, so that the journal knows which did what."""
        run, engine = cursor.run, self.fleet.engine(frame.source)
        run.rejected_events += len(batch.rejected)
        run.unknown_events += len(batch.unknown)
        run.events += len(batch.events)
        for number, event in enumerate(batch.events):
            self.ledger.at = EventPosition(frame.seq, number)
            if isinstance(event, BlockStored):
                self._look_at(cursor, event)
            run.clears += isinstance(event, AllBlocksCleared)
            engine.apply(msgspec.structs.replace(batch, events=[event], rejected=[], unknown=[]))
        if batch.rejected or batch.unknown:
            engine.apply(msgspec.structs.replace(batch, events=[]))

    def _look_at(self, cursor: _Cursor, event: BlockStored) -> None:
        """Keep what a masked event covers, and notice token ids."""
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
    """The frames of each engine before its first one beyond ``to_seq``."""
    ended: set[str] = set()
    for frame in frames:
        if to_seq is not None and frame.seq > to_seq:
            ended.add(frame.source)
        if frame.source not in ended:
            yield frame


class PlaneSample(msgspec.Struct, frozen=True):
    """One plane of one engine at one moment; counts are totals since the start."""

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
    """All planes after ``frames`` frames; ``elapsed_s`` on the recorder's clock since the first frame."""

    frames: int
    elapsed_s: float
    planes: list[PlaneSample]


def sample(player: Player, frames: int, elapsed_s: float) -> Sample:
    """The state of a player now."""
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
    """Plays ``total`` frames and looks at the state ``samples`` times, at even distances, at last at the
    end."""

    def __init__(self, player: Player, *, total: int, samples: int) -> None:
        self.taken: list[Sample] = []
        self.frames = 0
        self.total = total
        self._player = player
        self._marks = {max(1, total * number // samples) for number in range(1, samples + 1)}
        self._first_ts: float | None = None

    def play(self, frame: CapturedFrame) -> None:
        """Apply one frame, and take a sample if it is time."""
        self._player.play(frame)
        self.frames += 1
        if self._first_ts is None:
            self._first_ts = frame.recv_ts
        if self.frames in self._marks:
            self.taken.append(sample(self._player, self.frames, frame.recv_ts - self._first_ts))
