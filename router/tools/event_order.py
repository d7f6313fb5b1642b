"""Ordering of the frames of one stream for a capture, without sockets or clock.

The live stream is in order, so what is missing in it lies exactly before the next live frame. While the
missing frames are requested from the replay socket, live frames are held back; the response is used only up
to the first held frame, even if it contains more. A seq that goes back is a restarted engine unless the frame
is known. Invariant: frames leave in rising seqs between restarts, none twice, and frames missing between two
of them are counted as lost.
"""

from __future__ import annotations

from collections import deque

import msgspec
import xxhash

from kvatlas.router.feeds.position import RecentBatches
from kvatlas.router.tools.capture import CaptureLine

# Digests kept, to distinguish a frame received both live and by replay from one of a restarted engine.
_RECENT_MAX = 16_384
HOLD_BYTES_MAX = 64 << 20


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


class ReplayRequest(msgspec.Struct, frozen=True, eq=False):
    """A request to the replay socket for frames from ``from_seq`` on."""

    from_seq: int
    for_gap: bool
    """True: a live frame has shown that they exist. False: any available history."""


class CaptureOrder:
    """Ordering state of one source.

    ``request`` is the fetch to perform now; a new value cancels the previous one.
    """

    def __init__(self, stats: RecordStats, *, has_replay: bool, hold_bytes_max: int = HOLD_BYTES_MAX) -> None:
        self.request = ReplayRequest(0, for_gap=False) if has_replay else None
        self._stats = stats
        self._has_replay = has_replay
        self._hold_bytes_max = hold_bytes_max
        self._next = 0 if has_replay else None
        self._begun = False
        # The response to ``request`` has begun.
        self._response_started = False
        # Seq known to be unavailable from the replay socket.
        self._unavailable: int | None = None
        self._recent = RecentBatches(_RECENT_MAX)
        self._held: deque[CaptureLine] = deque()
        self._held_bytes = 0
        self._out: list[CaptureLine] = []

    @property
    def holds(self) -> bool:
        """Whether a live frame is held back: a response is useful only up to that frame."""
        # Read live frames before the first frame of a response; otherwise the response may overtake live
        # frames that are waiting to be read.
        return bool(self._held)

    @property
    def settled(self) -> bool:
        """Whether nothing is requested or held back."""
        return self.request is None and not self._held

    def take(self) -> list[CaptureLine]:
        """Return the frames to write since the last call, in order."""
        out, self._out = self._out, []
        return out

    def live(self, frame: CaptureLine) -> None:
        """Process the next frame of the live stream."""
        if self.request is None:
            self._accept(frame)
            return
        if self._held and frame.seq <= self._held[-1].seq:
            # Restarted meanwhile: the response may be from the new process, while the held frames are from
            # the old one.
            self.abandon()
            if self.request is None:
                self._accept(frame)
                return
        if self._held_bytes + len(frame.payload) <= self._hold_bytes_max:
            self._hold(frame)
        # A frame that cannot be held appears as a gap after the held frames, and is then requested again.

    def replayed(self, request: ReplayRequest, frame: CaptureLine) -> bool:
        """Process a frame of the response to ``request``; False once the rest of the response is useless."""
        if request is not self.request or self._next is None:
            return False
        if self._held and frame.seq >= self._held[0].seq:
            return False
        if frame.seq < self._next:
            return True
        if frame.seq > self._next:
            if self._response_started:
                # A hole: it is requested again, as long as there is progress.
                return False
            self._skip_to(frame.seq)
        self._response_started = True
        self._stats.history_frames += 1
        self._write(frame)
        return True

    def response_ended(self, request: ReplayRequest) -> None:
        """Handle the end or failure of the response to ``request``."""
        if request is self.request:
            if request.for_gap and self._next == request.from_seq:
                self._unavailable = request.from_seq
            self._release()

    def abandon(self) -> None:
        """Stop waiting for the frames missing before the held ones."""
        self._unavailable = self._next
        self._release()

    def _accept(self, frame: CaptureLine) -> None:
        """Write one live frame, or begin to request the frames missing before it."""
        if self._next is None:
            self._next = frame.seq
        if frame.seq < self._next:
            if self._recent.digest(frame.seq) == xxhash.xxh3_64_intdigest(frame.payload):
                self._stats.duplicates += 1
                return
            self._stats.restarts += 1
            self._recent.clear()
            self._next, self._unavailable = 0, None
        if frame.seq > self._next:
            if self._has_replay and self._unavailable != self._next:
                self._stats.gaps += self._begun
                self._hold(frame)
                self.request, self._response_started = ReplayRequest(self._next, for_gap=True), False
                return
            self._skip_to(frame.seq)
        self._write(frame)

    def _hold(self, frame: CaptureLine) -> None:
        self._held.append(frame)
        self._held_bytes += len(frame.payload)

    def _skip_to(self, seq: int) -> None:
        """Continue at ``seq``; frames missing before the first one are unavailable history, not losses."""
        if self._begun and self._next is not None:
            self._stats.gaps += not self._has_replay
            self._stats.lost_frames += seq - self._next
        self._next = seq

    def _write(self, frame: CaptureLine) -> None:
        self._begun = True
        self._next = frame.seq + 1
        self._recent.put(frame.seq, xxhash.xxh3_64_intdigest(frame.payload))
        self._out.append(frame)

    def _release(self) -> None:
        """Write the held frames; stops where a new gap is requested."""
        self.request = None
        held, self._held, self._held_bytes = self._held, deque(), 0
        while held and self.request is None:
            self._accept(held.popleft())
        for frame in held:
            self._hold(frame)
