"""A feed's position in its engine's stream: applied, held and missing batches.

``next_seq`` is the next seq to apply. A batch is applied only at that position, so batches are applied in
order and never twice; passing a gap is an explicit ``skip_to``, which counts the missing batches.
"""

from __future__ import annotations

from kvatlas.publisher.events import AllBlocksCleared, DecodedBatch
from kvatlas.router.feeds.actions import Action, Adopt, Apply, Forget
from kvatlas.router.feeds.base import Cut, FeedSettings, FeedState, FeedStats
from kvatlas.router.feeds.frames import Frame


class HeldBatches:
    """Batches waiting for earlier ones, by seq. Bounded in number and payload bytes."""

    def __init__(self, *, batches_max: int, bytes_max: int) -> None:
        self._frames: dict[int, Frame] = {}
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: Frame) -> bool:
        """Keep a batch; the first of a seq wins. False if there is no room; then nothing has changed."""
        if frame.seq in self._frames:
            return True
        if len(self._frames) >= self._batches_max or self._bytes + frame.size_bytes > self._bytes_max:
            return False
        self._frames[frame.seq] = frame
        self._bytes += frame.size_bytes
        return True

    def pop(self, seq: int) -> Frame | None:
        """Remove and return a batch; None if it is not held."""
        frame = self._frames.pop(seq, None)
        if frame is not None:
            self._bytes -= frame.size_bytes
        return frame

    def frames(self) -> list[Frame]:
        return [self._frames[seq] for seq in sorted(self._frames)]

    def lowest(self) -> int | None:
        return min(self._frames, default=None)

    def clear(self) -> None:
        self._frames.clear()
        self._bytes = 0


class RecentBatches:
    """Digests of the last applied batches, to tell a repeated batch from one of a restarted engine."""

    def __init__(self, batches_max: int) -> None:
        self._seqs = [-1] * batches_max
        self._digests = [0] * batches_max

    def __len__(self) -> int:
        return len(self._seqs)

    def put(self, seq: int, digest: int) -> None:
        slot = seq % len(self._seqs)
        self._seqs[slot] = seq
        self._digests[slot] = digest

    def digest(self, seq: int) -> int | None:
        """Return the digest of the batch applied under that seq; None if none was, or too long ago."""
        slot = seq % len(self._seqs)
        return self._digests[slot] if self._seqs[slot] == seq else None

    def clear(self) -> None:
        self._seqs = [-1] * len(self._seqs)


# ``next_seq`` while nothing of the stream is known.
NOWHERE = -1


class Position:
    """Position in the stream. Actions are appended to ``out``, counts go to ``stats``."""

    def __init__(self, settings: FeedSettings, stats: FeedStats, out: list[Action]) -> None:
        self.next_seq = NOWHERE
        # Highest seq seen from this process, applied or not.
        self.top_seq = -1
        # Batches whose content is unknown now.
        self.missing = 0
        # Number of batches that the known state is based on.
        self.known = 0
        # Why the residency is not completely known; empty if it is.
        self.unknown = ""
        self.held = HeldBatches(batches_max=settings.hold_batches_max, bytes_max=settings.hold_bytes_max)
        self.recent = RecentBatches(settings.recent_batches_max)
        self.publisher_id: bytes | None = None
        # Batches applied since the feed was made; shows whether a repair makes progress.
        self.applied = 0
        self._stats = stats
        self._out = out
        self._last_ts = float("-inf")
        self._offload_seen = False
        # Highest seq seen when a snapshot moved the position past it.
        self._heard_seq = -1
        # The snapshot's cut: batches between the two are part of it, and may still arrive.
        self._covered_seq = -1

    @property
    def is_whole(self) -> bool:
        """Whether every batch seen has been applied or skipped."""
        return not self.held and self.next_seq > self.top_seq

    def is_foreign(self, frame: Frame) -> bool:
        """Whether the frame names a publisher other than the one followed."""
        theirs, ours = frame.publisher_id, self.publisher_id
        return theirs is not None and ours is not None and theirs != ours

    def is_same(self, frame: Frame) -> bool:
        """Whether the frame names the publisher followed."""
        return frame.publisher_id is not None and frame.publisher_id == self.publisher_id

    def is_repetition(self, frame: Frame) -> bool:
        """Whether a frame from before the position is known to be a repetition by the same process."""
        if self.is_same(frame) or self.recent.digest(frame.seq) == frame.digest:
            return True
        if self._heard_seq < frame.seq <= self._covered_seq:
            self._heard_seq = frame.seq
            self.recent.put(frame.seq, frame.digest)
            return True
        return False

    def is_late(self, frame: Frame, *, in_step: bool) -> bool:
        """Whether a frame of the followed process is late: given up a short while ago or, if live batches
        come ``in_step``, still unread when a replay passed it. A new process has a later timestamp.
        """
        if frame.batch is None or self.recent.digest(frame.seq) is not None:
            return False
        near = self.next_seq - frame.seq <= len(self.recent)
        return (near or in_step) and frame.batch.ts <= self._last_ts

    def hold(self, frame: Frame) -> bool:
        """Hold a frame from behind the position; False if there is no room (``top_seq`` records that it
        exists)."""
        self.top_seq = max(self.top_seq, frame.seq)
        if self.held.put(frame):
            return True
        self._stats.buffer_overflows += 1
        return False

    def apply(self, frame: Frame) -> None:
        """Apply the frame at ``next_seq``. One without a batch only consumes its seq."""
        self.next_seq = frame.seq + 1
        self.top_seq = max(self.top_seq, frame.seq)
        self.applied += 1
        self.held.pop(frame.seq)
        self.recent.put(frame.seq, frame.digest)
        self.publisher_id = frame.publisher_id or self.publisher_id
        self._stats.last_seq = frame.seq
        if frame.batch is None:
            self.lose(1, frame.fault or "undecodable")
            return
        self._last_ts = frame.batch.ts
        self.known += 1
        self._out.append(Apply(frame.batch))
        self._note(frame.batch)

    def drain(self) -> None:
        """Apply held batches up to the next gap."""
        while (frame := self.held.pop(self.next_seq)) is not None:
            self.apply(frame)

    def adopt(self, cut: Cut, tail: list[Frame]) -> None:
        """Move the position just after a snapshot; ``tail``: live frames received since it was requested."""
        self._out.append(Adopt())
        self._heard_seq = max(self.top_seq, self.next_seq - 1)
        self._covered_seq = cut.seq
        self.next_seq = cut.seq + 1
        self.publisher_id = cut.publisher_id or self.publisher_id
        self.found_whole()
        self._offload_seen = cut.offload
        self.known = cut.seq + 1
        self.applied += 1
        self._stats.last_seq = cut.seq if cut.seq >= 0 else None
        self.held.clear()
        self.top_seq = cut.seq
        for frame in tail:
            if frame.seq > cut.seq and not self.is_foreign(frame):
                self.hold(frame)
        self.drain()

    def begin_at(self, frame: Frame) -> None:
        """Take the first frame ever received as the position; earlier batches are unknown."""
        self.next_seq = frame.seq
        self.lose(frame.seq, "history_unknown", counted=False)
        self.apply(frame)

    def skip_to(self, seq: int, reason: str) -> None:
        """Give up the batches before ``seq``."""
        gone = seq - self.next_seq
        if gone > 0:
            self.lose(gone, reason, counted=self.next_seq > 0)
            self.next_seq = seq

    def skip_all(self, reason: str) -> None:
        """Apply all held batches in order, and give up the ones missing between."""
        while (lowest := self.held.lowest()) is not None:
            self.skip_to(lowest, reason)
            self.drain()
        if self.next_seq <= self.top_seq:
            self.skip_to(self.top_seq + 1, reason)

    def lose(self, batches: int, reason: str, *, counted: bool = True) -> None:
        """Record batches whose content is lost; history from before the feed's start is not ``counted``."""
        if batches > 0:
            self.missing += batches
            self.unknown = reason
            self._stats.lost_batches += batches if counted else 0

    def doubt(self, reason: str) -> None:
        """Record that the known state may be of another process, though no batch is known to be missing."""
        self.unknown = self.unknown or reason

    def found_whole(self) -> None:
        """Record that nothing is missing or in doubt any more."""
        self.missing = 0
        self.unknown = ""

    def forget(self) -> None:
        """Drop all known state of the engine, in the sink too; held batches stay."""
        self._out.append(Forget())
        self.recent.clear()
        self.known = 0
        self._stats.last_seq = None
        self.found_whole()
        self.next_seq = NOWHERE
        self.publisher_id = None
        self._last_ts = float("-inf")
        self._offload_seen = False
        self._covered_seq = -1

    def drop_held(self) -> None:
        # Their existence is remembered if they are known to follow the applied ones.
        self.held.clear()
        self._covered_seq = -1
        if self.next_seq <= 0:
            self.top_seq = -1

    def _note(self, batch: DecodedBatch) -> None:
        stats = self._stats
        stats.batches += 1
        stats.events += len(batch.events)
        if batch.rejected:
            stats.rejected_events += len(batch.rejected)
            stats.last_rejection = batch.rejected[-1]
        stats.unknown_events += len(batch.unknown)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                # It empties the GPU only: if offload tiers were seen, losses remain.
                if not self._offload_seen:
                    self.known = 1
                    self.found_whole()
            elif event.medium != "GPU" and event.medium is not None:
                self._offload_seen = True


# Reasons without a number of batches.
DOUBTS = frozenset({"phantom", "unverified"})


def expected_share(stats: FeedStats) -> float:
    """Return the expected share of a predicted hit while a feed is incomplete, 0 to 1.

    READY: all of it. Otherwise the known state is evidence, and of a hit

        the share is applied / (applied + missing + waiting)

    ``applied``: batches that the known state is based on (since the engine's start, its last cache clear, or
    up to a snapshot's cut); ``missing``: batches known to be lost; ``waiting``: batches that exist but have
    not been applied yet. For a problem without a number (a phantom alarm, a process that may be another one),
    half of that. A feed that is only silent keeps its share, as nothing indicates a change. A feed that lost
    its connection has none until the process is confirmed: an engine that restarts loses its cache, and its
    next event may come late.
    """
    if stats.state is FeedState.READY:
        return 1.0
    if stats.unconfirmed:
        return 0.0
    unknown = stats.missing_batches + stats.waiting_batches
    known = stats.known_batches
    share = known / (known + unknown) if known else 0.0
    return share / 2 if stats.reason in DOUBTS else share


def expected_hit(hit_tokens: int, alignment: int, stats: FeedStats | None) -> int:
    """Return the expected hit in tokens: its share, rounded down to where a hit may end."""
    if stats is None or stats.state is FeedState.READY:
        return hit_tokens
    expected = int(hit_tokens * expected_share(stats))
    return expected - expected % max(alignment, 1)
