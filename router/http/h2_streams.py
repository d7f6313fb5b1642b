"""One HTTP/2 stream: what waits to be sent on it, under the peer's window, and what may still be received.

Sending is by its connection, which gives each stream its turn; so one that its peer does not read holds no
other one up. Always true: after ``reset``, or the peer's reset, nothing is sent and no event is reported.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from router.http import h2_codec as h2
from router.http.h2_codec import CANCEL, H2Error


class StreamHandler(Protocol):
    """Receives the events of a stream; none after ``on_end`` and ``on_lost``, but ``on_lost``."""

    def on_data(self, data: bytes) -> None:
        """A piece of what the peer sends. Call ``Stream.taken`` once there is room for more."""

    def on_end(self) -> None:
        """The peer has sent all."""

    def on_lost(self) -> None:
        """The peer reset it, or the connection is gone: nothing can be sent any more."""


class StreamLine(Protocol):
    """Services that a stream needs of its connection."""

    loop: asyncio.AbstractEventLoop

    def ready(self, stream: Stream) -> None:
        """It has something to send."""

    def write_headers(self, stream_id: int, block: bytes, *, end: bool) -> None:
        """Send a header block now."""

    def grant(self, stream: Stream, size: int) -> None:
        """Let the peer send so much more on it."""

    def drop(self, stream: Stream, code: int | None) -> None:
        """It is over; ``code``: tell the peer so."""


class Stream:
    """See the module. ``credit``: what the peer allowed beyond the window that all streams begin with, less
    what was sent; ``receive_window``: what the peer still may send."""

    __slots__ = (
        *("_drained", "_granted", "_line", "_pieces", "begun", "closed", "credit", "handler", "peer_ended"),
        *("queued_bytes", "receive_window", "stream_id", "trailers"),
    )

    def __init__(self, line: StreamLine, stream_id: int, *, receive_window: int) -> None:
        self.stream_id = stream_id
        self.credit = 0
        self.receive_window = receive_window
        self.handler: StreamHandler | None = None
        self.peer_ended = False
        self.closed = False
        self.begun = False
        """Our headers have been sent."""
        self.trailers: bytes | None = None
        """The block that ends it, once everything before is sent."""
        self.queued_bytes = 0
        self._line = line
        self._pieces: list[bytes | memoryview] = []
        self._granted = 0
        self._drained: asyncio.Future[None] | None = None

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """Before everything else."""
        if not self.closed:
            self.begun = True
            self._line.write_headers(self.stream_id, block, end=end)
            if end:
                self._line.drop(self, None)

    def send(self, *pieces: bytes) -> None:
        """Bytes of the answer's body, in pieces that are joined only on the way out."""
        if not self.closed and self.trailers is None:
            waits = self.queued_bytes  # then it has its turn, or waits for its window
            self._pieces += pieces
            self.queued_bytes = waits + sum(map(len, pieces))
            if not waits:
                self._line.ready(self)

    def finish(self, trailers: bytes) -> None:
        """End with these trailers, after what waits."""
        if not self.closed and self.trailers is None:
            self.trailers = trailers
            if not self.queued_bytes:
                self._line.ready(self)

    def reset(self, code: int = CANCEL) -> None:
        """End it at once."""
        if not self.closed:
            self._line.drop(self, code)

    def taken(self, size: int) -> None:
        """Credit the peer with received bytes that are no longer held here."""
        self._granted += size
        if self._granted * 2 >= self.receive_window and not self.closed and not self.peer_ended:
            size, self._granted = self._granted, 0
            self._line.grant(self, size)

    async def drained(self, bytes_max: int) -> None:
        """Wait until at most this number of bytes waits to be sent, or the stream is over."""
        while self.queued_bytes > bytes_max and not self.closed:
            waiter = self._drained = self._line.loop.create_future()
            await waiter

    # The connection's side.

    def take(self, size: int, out: list[bytes | memoryview]) -> None:
        """Move this number of waiting bytes to ``out``."""
        pieces = self._pieces
        self.queued_bytes -= size
        self.credit -= size
        if not self.queued_bytes:
            out += pieces
            pieces.clear()
        else:
            whole = 0
            while (length := len(pieces[whole])) <= size:
                size -= length
                whole += 1
            out += pieces[:whole]
            del pieces[:whole]
            if size:  # cut without a copy
                view = memoryview(pieces[0])
                out.append(view[:size])
                pieces[0] = view[size:]
        if self._drained is not None:
            self.wake()

    def wake(self) -> None:
        """Who waits for room may look again."""
        waiter, self._drained = self._drained, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def lost(self) -> None:
        """Nothing can be sent any more."""
        self.closed = True
        self._pieces.clear()
        self.queued_bytes = 0
        self.wake()


# What one HTTP/2 connection has to send: frames of its own at once, streams in their turns.
#
# Always true: a stream gets one frame per turn, as far as its window and the connection's allow, so one
# that is not read holds no other up; what is written in one turn of the loop goes out in one piece, of
# bodies about ``_PUMP_BYTES`` at most. The peer's initial window is kept once and not in each stream, so
# that a frame that changes a window costs the same however many streams there are.


_PUMP_BYTES = 256 * 1024
_TURN_BYTES = 64
"""Cost of a frame beyond its bytes: many short frames take as long as few long ones."""


class SendScheduler:
    """``ended`` is called with a stream whose last frame has been written. ``frame_bytes_max`` is the
    peer's."""

    def __init__(self, transport: asyncio.Transport, ended: Callable[[Stream], None]) -> None:
        self.frame_bytes_max = h2.FRAME_BYTES_MIN
        self.paused = False
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._ended = ended
        self._waiting: OrderedDict[Stream, None] = OrderedDict()  # in the order of their turns
        self._blocked: dict[Stream, None] = {}  # have bytes to send, and no window
        self._ending: OrderedDict[Stream, None] = OrderedDict()  # send only trailers, without a window
        self._window = h2.WINDOW_DEFAULT
        self._stream_window = h2.WINDOW_DEFAULT
        self._widened = False
        self._out: list[bytes | memoryview] = []
        self._due = False  # a pump will come

    def grow(self, increment: int) -> None:
        """The peer lets the connection send more. Raises ``H2Error``."""
        self._window += increment
        if self._window > h2.WINDOW_MAX:
            raise H2Error(h2.FLOW_CONTROL_ERROR, "a window beyond its limit")

    def widen(self, window: int) -> None:
        """Set the initial window of all streams, open ones included (RFC 9113, section 6.9.2).

        A window beyond the limit is found when its stream is next."""
        self._widened = self._widened or window > self._stream_window
        self._stream_window = window

    def unblock(self) -> int:
        """Give turns to the streams that have a window since ``widen``; the work, in control frames."""
        if not self._widened:
            return 0
        self._widened = False
        blocked = len(self._blocked)
        for stream in [each for each in self._blocked if self._window_of(each) > 0]:
            del self._blocked[stream]
            self._waiting[stream] = None
        return (blocked >> 4) + ((blocked - len(self._blocked)) >> 2)

    def _window_of(self, stream: Stream) -> int:
        return stream.credit + self._stream_window

    def write(self, data: bytes) -> None:
        """Frames of the connection's own."""
        self._out.append(data)
        self._pump_soon()

    def ready(self, stream: Stream) -> None:
        """It has something to send, or its window has grown. Raises ``H2Error`` for a window beyond its
        limit, which is the stream's error alone."""
        window = self._window_of(stream)
        if window > h2.WINDOW_MAX:
            raise H2Error(h2.FLOW_CONTROL_ERROR, "a window beyond its limit")
        if not stream.queued_bytes:
            if stream.trailers is None:
                return
            self._ending[stream] = None
        elif window <= 0:
            self._blocked[stream] = None
            return
        else:
            self._blocked.pop(stream, None)
            self._waiting[stream] = None
        self._pump_soon()

    def forget(self, stream: Stream) -> None:
        """It is over."""
        for streams in (self._waiting, self._blocked, self._ending):
            streams.pop(stream, None)

    def hold(self) -> None:
        """Announce a later ``pump``, which sends all that is written until then."""
        self._due = True

    def _pump_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Send what waits, each stream in its turn, as far as the windows and the socket allow."""
        self._due = True  # what is written meanwhile goes out below
        room = _PUMP_BYTES
        while self._ending and room > 0 and not self.paused:
            room -= self._end(next(iter(self._ending)))
        while self._waiting and self._window > 0 and room > 0 and not self.paused:
            room -= self._turn(next(iter(self._waiting)))
        self.flush()
        self._due = False
        if (self._ending or (self._waiting and self._window > 0)) and not self.paused:
            self._pump_soon()

    def _turn(self, stream: Stream) -> int:
        """Send a frame of its body; what that counts."""
        del self._waiting[stream]
        window = self._window_of(stream)
        size = min(stream.queued_bytes, window, self.frame_bytes_max, self._window)
        if size > 0:
            self._window -= size
            self._out.append(h2.frame_head(h2.DATA, 0, stream.stream_id, size))
            stream.take(size, self._out)
        if stream.queued_bytes:
            if window > size:
                self._waiting[stream] = None
            else:
                self._blocked[stream] = None
        elif stream.trailers is not None:
            self._end(stream)
        return max(0, size) + _TURN_BYTES

    def _end(self, stream: Stream) -> int:
        """Send its trailers; what that counts."""
        self._ending.pop(stream, None)
        trailers = stream.trailers or b""
        flags = h2.END_HEADERS | h2.END_STREAM
        self._out.append(h2.frame(h2.HEADERS, flags, stream.stream_id, trailers))
        self._ended(stream)
        return len(trailers) + _TURN_BYTES

    def flush(self) -> None:
        """Hand what was written to the socket."""
        if self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def clear(self) -> None:
        """Drop everything: the peer is gone."""
        self._out.clear()
