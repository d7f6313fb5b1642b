"""Replay of a capture through the serving code, event by event, without a clock: equal captures give equal
results.

A capture holds each engine's frames in the order they were published. They are applied as by the router's own
feed of an engine without a replay socket: missing seqs are counted and skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import xxhash

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import AllBlocksCleared, BlockHash, EventDecodeError
from kvatlas.router.feeds.actions import Apply, Forget
from kvatlas.router.feeds.frames import Frame
from kvatlas.router.index.base import Plane
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.tools.capture import CapturedFrame
from kvatlas.router.tools.event_order import StreamOrder


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


class CountingIndex(MemoryIndex):
    """Memory index that counts what every plane stored and removed: what the router would have held.

    Memory grows with the distinct blocks of the capture and is never freed: for tools, not for serving.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[tuple[str, Plane], PlaneCounts] = {}
        self._copies: dict[tuple[str, Plane], dict[BlockHash, int]] = {}

    def seen_planes(self, engine_id: str) -> list[Plane]:
        """Every plane in which the engine ever stored or removed a block."""
        return sorted(plane for engine, plane in self.counts if engine == engine_id)

    def held(self, engine_id: str, plane: Plane) -> dict[BlockHash, int]:
        """Blocks held now, with their number of copies."""
        return dict(self._copies.get((engine_id, plane), ()))

    def store(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> None:
        super().store(engine_id, plane, hashes)
        copies, counts = self._of(engine_id, plane)
        for block in hashes:
            copies[block] = copies.get(block, 0) + 1
        counts.blocks = len(copies)
        counts.copies += len(hashes)
        counts.stored += len(hashes)

    def remove(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        left = super().remove(engine_id, plane, hashes)
        copies, counts = self._of(engine_id, plane)
        for block in hashes:
            held = copies.pop(block, 0)
            if not held:
                counts.unknown_removals += 1
                continue
            if held > 1:
                copies[block] = held - 1
            counts.copies -= 1
            counts.removed += 1
        counts.blocks = len(copies)
        return left

    def set_copies(self, engine_id: str, plane: Plane, block: BlockHash, copies: int) -> None:
        held = self._copies.get((engine_id, plane), {}).get(block, 0)
        if copies > held:
            self.store(engine_id, plane, [block] * (copies - held))
        elif copies < held:
            self.remove(engine_id, plane, [block] * (held - copies))

    def clear(self, engine_id: str, medium: str) -> None:
        super().clear(engine_id, medium)
        self._drop(engine_id, [plane for plane in self.seen_planes(engine_id) if plane.medium == medium])

    def forget(self, engine_id: str) -> None:
        super().forget(engine_id)
        self._drop(engine_id, self.seen_planes(engine_id))

    def _of(self, engine_id: str, plane: Plane) -> tuple[dict[BlockHash, int], PlaneCounts]:
        key = engine_id, plane
        if key not in self.counts:
            self._copies[key], self.counts[key] = {}, PlaneCounts()
        return self._copies[key], self.counts[key]

    def _drop(self, engine_id: str, planes: list[Plane]) -> None:
        for plane in planes:
            copies, counts = self._of(engine_id, plane)
            copies.clear()
            counts.cleared += counts.copies
            counts.blocks = counts.copies = 0


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


class Player:
    """Residency of all engines of a capture."""

    def __init__(self, facts: ModelFacts) -> None:
        self.index = CountingIndex()
        self.fleet = FleetResidency(facts, self.index)
        self._streams: dict[str, tuple[SourceRun, StreamOrder]] = {}

    @property
    def runs(self) -> list[SourceRun]:
        """One entry per engine, in the order of their first frames."""
        return [run for run, _ in self._streams.values()]

    def play(self, frame: CapturedFrame) -> None:
        """Apply one frame, unless it is late or a duplicate."""
        if frame.source not in self._streams:
            run = SourceRun(frame.source, first_seq=frame.seq)
            self._streams[frame.source] = run, StreamOrder()
        run, order = self._streams[frame.source]
        digest, size = xxhash.xxh3_64_intdigest(frame.payload), len(frame.payload)
        try:
            batch = decode_batch(frame.payload)
        except EventDecodeError:
            batch = None
            run.undecodable += 1
        publisher_id = None if batch is None else batch.publisher_id
        for action in order.live(frame.recv_ts, Frame(frame.seq, batch, digest, size, publisher_id)):
            if isinstance(action, Forget):
                self.fleet.forget(frame.source)
            elif isinstance(action, Apply):
                run.clears += sum(isinstance(event, AllBlocksCleared) for event in action.batch.events)
                self.fleet.engine(frame.source).apply(action.batch)
        feed = order.stats
        run.last_seq = feed.last_seq
        run.frames, run.events = feed.batches + run.undecodable, feed.events
        run.gaps, run.missing_batches, run.restarts = feed.gaps, order.lost.count, feed.restarts
        run.duplicates, run.late = feed.duplicate_batches, feed.late_batches
        run.rejected_events, run.unknown_events = feed.rejected_events, feed.unknown_events


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
        for plane in player.index.seen_planes(run.source):
            counts = player.index.counts[run.source, plane]
            numbers = msgspec.structs.asdict(counts)
            planes.append(
                PlaneSample(run.source, run.last_seq, plane.medium, plane.group_idx, gaps=run.gaps, **numbers)
            )
    return Sample(frames, round(elapsed_s, 3), planes)


def samples_of(player: Player, frames: Iterable[CapturedFrame], *, total: int, samples: int) -> list[Sample]:
    """Play ``total`` frames; ``samples`` samples at equal distances, the last one at the end."""
    marks = {max(1, total * number // samples) for number in range(1, samples + 1)}
    taken: list[Sample] = []
    first_ts: float | None = None
    for number, frame in enumerate(frames, start=1):
        player.play(frame)
        if first_ts is None:
            first_ts = frame.recv_ts
        if number in marks:
            taken.append(sample(player, number, frame.recv_ts - first_ts))
    return taken
