"""In which order the frames of one stream go into a capture, without sockets or clock.

The live stream is the backbone: it comes in order, so what is missing in it is exactly what lies before the
next live frame. While that is asked for at the replay socket, live frames wait; an answer is used up to the
first of them and no further, however far ahead of a slow reader it runs. A seq that goes back is a restarted
engine unless the frame is known. Always true: frames leave in rising seqs from restart to restart, none
twice, and what is left out between two of them is counted as lost.
"""

from __future__ import annotations

from collections import deque

import msgspec
import xxhash

from router.feeds.position import RecentBatches
from router.tools.capture import CaptureLine

_RECENT_MAX = 16_384
"""Digests kept, to tell a frame that came both live and from history from one of a restarted engine."""
HOLD_BYTES_MAX = 64 << 20


class RecordStats(msgspec.Struct):
    """Plain counters of one source."""

    source: str
    connected: bool = False
    frames: int = 0
    """Handed to the writer, history included."""
    history_frames: int = 0
    """Of those, from the replay socket."""
    first_seq: int | None = None
    last_seq: int | None = None
    gaps: int = 0
    lost_frames: int = 0
    """Seqs that neither the live stream nor the replay socket gave, after the first frame."""
    duplicates: int = 0
    restarts: int = 0
    malformed: int = 0
    replay_failures: int = 0


class ReplayRequest(msgspec.Struct, frozen=True, eq=False):
    """Frames from ``from_seq`` on are wanted from the replay socket."""

    from_seq: int
    for_gap: bool
    """A live frame has shown that they exist; else it is what history there may be."""


class CaptureOrder:
    """See the module's docstring. ``request`` is what is to be fetched now; another one makes it void."""

    def __init__(self, stats: RecordStats, *, has_replay: bool, hold_bytes_max: int = HOLD_BYTES_MAX) -> None:
        self.request = ReplayRequest(0, for_gap=False) if has_replay else None
        self._stats = stats
        self._has_replay = has_replay
        self._hold_bytes_max = hold_bytes_max
        self._next = 0 if has_replay else None
        self._begun = False
        self._answered = False  # the answer to ``request`` has begun
        self._hopeless: int | None = None  # seq that the replay socket is known not to have
        self._recent = RecentBatches(_RECENT_MAX)
        self._held: deque[CaptureLine] = deque()
        self._held_bytes = 0
        self._out: list[CaptureLine] = []

    @property
    def holds(self) -> bool:
        """A live frame is held back: an answer is known to be of use up to there only. Take live frames
        before the first of an answer, or the answer may go past live frames that wait to be read."""
        return bool(self._held)

    @property
    def settled(self) -> bool:
        """Nothing is asked for or held back."""
        return self.request is None and not self._held

    def take(self) -> list[CaptureLine]:
        """The frames to be written since the last call, in order."""
        out, self._out = self._out, []
        return out

    def live(self, frame: CaptureLine) -> None:
        """The next frame of the live stream."""
        if self.request is None:
            self._accept(frame)
            return
        if self._held and frame.seq <= self._held[-1].seq:
            # Restarted meanwhile: the answer may be the new process's, and what is held is the old one's.
            self.give_up()
            if self.request is None:
                self._accept(frame)
                return
        if self._held_bytes + len(frame.payload) <= self._hold_bytes_max:
            self._hold(frame)
        # One that cannot be held shows as a gap after what is held, and is asked for again then.

    def replayed(self, request: ReplayRequest, frame: CaptureLine) -> bool:
        """A frame of the answer to ``request``; False once no more of this answer is of use."""
        if request is not self.request or self._next is None:
            return False
        if self._held and frame.seq >= self._held[0].seq:
            return False
        if frame.seq < self._next:
            return True
        if frame.seq > self._next:
            if self._answered:
                return False  # a hole: it is asked for again, as long as there is progress
            self._lose(frame.seq)
        self._answered = True
        self._stats.history_frames += 1
        self._write(frame)
        return True

    def answered(self, request: ReplayRequest) -> None:
        """The answer to ``request`` has ended, or failed."""
        if request is self.request:
            if request.for_gap and self._next == request.from_seq:
                self._hopeless = request.from_seq
            self._release()

    def give_up(self) -> None:
        """What is missing before the held frames will not be had."""
        self._hopeless = self._next
        self._release()

    def _accept(self, frame: CaptureLine) -> None:
        """Write one live frame, or begin to ask for what is missing before it."""
        if self._next is None:
            self._next = frame.seq
        if frame.seq < self._next:
            if self._recent.digest(frame.seq) == xxhash.xxh3_64_intdigest(frame.payload):
                self._stats.duplicates += 1
                return
            self._stats.restarts += 1
            self._recent.clear()
            self._next, self._hopeless = 0, None
        if frame.seq > self._next:
            if self._has_replay and self._hopeless != self._next:
                self._stats.gaps += self._begun
                self._hold(frame)
                self.request, self._answered = ReplayRequest(self._next, for_gap=True), False
                return
            self._lose(frame.seq)
        self._write(frame)

    def _hold(self, frame: CaptureLine) -> None:
        self._held.append(frame)
        self._held_bytes += len(frame.payload)

    def _lose(self, seq: int) -> None:
        """Go on at ``seq``; what was missing before the very first frame is history that nobody has."""
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
        """Write what was held; stops where a new gap is being asked for."""
        self.request = None
        held, self._held, self._held_bytes = self._held, deque(), 0
        while held and self.request is None:
            self._accept(held.popleft())
        for frame in held:
            self._hold(frame)
