"""Frames of one stream in the order of the router's own feed: ``FeedMachine``, without sockets or clock.

``StreamOrder`` is for frames without a replay socket (doctor, replay). ``CaptureOrder`` holds live frames
back while the missing ones are requested from the replay socket. Invariant: frames leave in rising seqs
between restarts, none twice, and frames missing between two of them are counted as lost.
"""

from __future__ import annotations

import msgspec
import xxhash

from kvatlas.publisher.events import DecodedBatch
from kvatlas.router.feeds.actions import Action, Apply, Forget, RequestReplay
from kvatlas.router.feeds.base import FeedSettings, FeedStats
from kvatlas.router.feeds.frames import Frame
from kvatlas.router.feeds.machine import FeedMachine
from kvatlas.router.tools.capture_writer import CaptureLine

HOLD_BYTES_MAX = 64 << 20


class LostSeqs:
    """Number of seqs between two frames, or between a restart and the next frame, that never came."""

    def __init__(self) -> None:
        self.count = 0
        self._next: int | None = None

    def restarted(self) -> None:
        self._next = 0

    def took(self, seq: int) -> None:
        """Record a frame that took its place; one that had it before changes nothing."""
        if self._next is None or seq >= self._next:
            self.count += 0 if self._next is None else seq - self._next
            self._next = seq + 1


class StreamOrder:
    """Order of one stream without a replay socket; ``stats`` are those of its feed."""

    def __init__(self) -> None:
        self.stats = FeedStats()
        self.lost = LostSeqs()
        self._machine = FeedMachine(FeedSettings(), self.stats, has_replay=False)

    def live(self, now: float, frame: Frame) -> list[Action]:
        """Process the next frame; returns the actions: ``Forget`` at a restart, ``Apply`` if it is due."""
        actions = self._machine.live(now, frame)
        if any(isinstance(action, Forget) for action in actions):
            self.lost.restarted()
        if self.stats.last_seq == frame.seq:
            self.lost.took(frame.seq)
        return actions


class RecordStats(msgspec.Struct):
    """Counters of one source."""

    source: str
    connected: bool = False
    frames: int = 0
    """Passed to the writer, history included."""
    history_frames: int = 0
    """Number of those that came from the replay socket."""
    first_seq: int | None = None
    last_seq: int | None = None
    gaps: int = 0
    lost_frames: int = 0
    """Seqs after the first frame that neither the live stream nor the replay socket provided."""
    duplicates: int = 0
    restarts: int = 0
    malformed: int = 0
    replay_failures: int = 0


class _Undecoded(DecodedBatch):
    """The batch of a frame that is only passed on."""

    line: CaptureLine | None = None
    replayed: bool = False


class CaptureOrder:
    """Ordering state of one source.

    ``request`` is the fetch to perform now; a new value cancels the previous one. A response overtakes live
    frames that wait in the socket, and the publisher's buffer may be beyond them. So it is used only up to
    the last live frame read, and live frames are read before its first one.
    """

    def __init__(self, stats: RecordStats, *, has_replay: bool, hold_bytes_max: int = HOLD_BYTES_MAX) -> None:
        self.request: RequestReplay | None = None
        self._stats = stats
        self._feed = FeedStats()
        # Nothing here is timed: the caller ends what takes too long (``abandon``).
        settings = FeedSettings(
            hold_batches_max=1 << 20,
            hold_bytes_max=hold_bytes_max,
            hold_s_max=0.0,
            recent_batches_max=16_384,
            replay_backoff_s=0.0,
            resync_backoff_s=0.0,
            resync_backoff_s_max=0.0,
            stale_after_s=float("inf"),
        )
        self._machine = FeedMachine(settings, self._feed, has_replay=has_replay)
        self._lost = LostSeqs()
        self._inputs = 0
        # Of the last live frame of this process.
        self._heard: int | None = None
        self._out: list[CaptureLine] = []
        self._do(self._machine.connected(self._now()))

    @property
    def holds(self) -> bool:
        """Whether a live frame shows up to where a response is useful."""
        return self._heard is not None

    @property
    def settled(self) -> bool:
        """Whether nothing is requested or held back."""
        return self.request is None

    def take(self) -> list[CaptureLine]:
        """Return the frames to write since the last call, in order."""
        out, self._out = self._out, []
        return out

    def live(self, line: CaptureLine) -> None:
        """Process the next frame of the live stream."""
        if self.request is not None and self._heard is not None and line.seq <= self._heard:
            # Restarted meanwhile: the response may be from the new process, while the held frames are from
            # the old one.
            self.abandon()
        self._do(self._machine.live(self._now(), self._frame(line, replayed=False)))
        self._heard = line.seq

    def replayed(self, request: RequestReplay, line: CaptureLine) -> bool:
        """Process a frame of the response to ``request``; False once the rest of the response is useless."""
        if request is not self.request or (self._heard is not None and line.seq > self._heard):
            return False
        frame = self._frame(line, replayed=True)
        self._do(self._machine.replayed(self._now(), request.request_id, frame))
        return request is self.request

    def response_ended(self, request: RequestReplay) -> None:
        """Handle the end of the response to ``request``."""
        self._do(self._machine.replay_ended(self._now(), request.request_id))

    def abandon(self) -> None:
        """Stop waiting for the frames missing before the held ones."""
        if self.request is not None:
            self._do(self._machine.tick(self._now()))

    def _now(self) -> float:
        """Number of inputs: the time of a machine in which nothing is timed."""
        self._inputs += 1
        return float(self._inputs)

    def _frame(self, line: CaptureLine, *, replayed: bool) -> Frame:
        # The time stamp rises with each frame, so that none counts as late: live frames are in order here.
        batch = _Undecoded(float(self._inputs), [], None, None, [], [], line, replayed)
        return Frame(line.seq, batch, xxhash.xxh3_64_intdigest(line.payload), len(line.payload))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Forget):
                self._lost.restarted()
                self._heard = None
            elif isinstance(action, RequestReplay):
                self.request = action
            elif isinstance(action, Apply) and isinstance(action.batch, _Undecoded) and action.batch.line:
                self._lost.took(action.batch.line.seq)
                self._stats.history_frames += action.batch.replayed
                self._out.append(action.batch.line)
        if self.request is not None and not self._machine.wants(self.request.request_id):
            self.request = None
        stats, feed = self._stats, self._feed
        stats.gaps, stats.restarts, stats.lost_frames = feed.gaps, feed.restarts, self._lost.count
        stats.duplicates = feed.duplicate_batches + feed.late_batches
