"""What one HTTP/2 connection has to send: frames of its own at once, streams in their turns.

Always true: a stream gets one frame per turn, as far as its window and the connection's allow, so one that is
not read holds no other up; what is written in one turn of the loop goes out in one piece, of bodies about
``_PUMP_BYTES`` at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.http.h2 import frames as h2
from router.http.h2.frames import H2Error
from router.http.h2.stream import Stream

_PUMP_BYTES = 256 * 1024


class Outbox:
    """``ended`` is told of a stream whose last frame has been written. ``frame_bytes_max`` is the peer's."""

    def __init__(self, transport: asyncio.Transport, ended: Callable[[Stream], None]) -> None:
        self.frame_bytes_max = h2.FRAME_BYTES_MIN
        self.paused = False
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._ended = ended
        self._waiting: dict[Stream, None] = {}  # in the order of their turns
        self._window = h2.WINDOW_DEFAULT
        self._out: list[bytes | memoryview] = []
        self._due = False  # a pump will come

    def grow(self, increment: int) -> None:
        """The peer lets the connection send more. Raises ``H2Error``."""
        self._window += increment
        if self._window > h2.WINDOW_MAX:
            raise H2Error(h2.FLOW_CONTROL_ERROR, "a window beyond its limit")

    def write(self, data: bytes) -> None:
        """Frames of the connection's own."""
        self._out.append(data)
        self._pump_soon()

    def ready(self, stream: Stream) -> None:
        """It has something to send, or its window has grown."""
        self._waiting[stream] = None
        self._pump_soon()

    def forget(self, stream: Stream) -> None:
        """It is over."""
        self._waiting.pop(stream, None)

    def hold(self) -> None:
        """Whoever says this will pump: what is written until then goes out with it."""
        self._due = True

    def _pump_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Send what waits, each stream in its turn, as far as the windows and the socket allow."""
        self._due = True  # what is written meanwhile goes out below
        room = _PUMP_BYTES
        while self._waiting and not self.paused:
            left = room
            for stream in list(self._waiting):
                left -= self._turn(stream)
            if left == room or left <= 0:
                break
            room = left
        self.flush()
        self._due = False
        if self._waiting and self._window > 0 and not self.paused:
            self._pump_soon()

    def _turn(self, stream: Stream) -> int:
        """Bytes of its body that were sent."""
        size = min(stream.queued_bytes, stream.send_window, self.frame_bytes_max, self._window)
        if size > 0:
            self._window -= size
            self._out.append(h2.frame_head(h2.DATA, 0, stream.stream_id, size))
            stream.take(size, self._out)
        elif stream.queued_bytes and not self._window:
            return 0  # waits for the connection's window, unlike those that only end
        if stream.queued_bytes and stream.send_window > 0:
            return size
        self._waiting.pop(stream, None)
        if not stream.queued_bytes and stream.trailers is not None:
            flags = h2.END_HEADERS | h2.END_STREAM
            self._out.append(h2.frame(h2.HEADERS, flags, stream.stream_id, stream.trailers))
            self._ended(stream)
        return max(0, size)

    def flush(self) -> None:
        """Hand what was written to the socket."""
        if self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def clear(self) -> None:
        """There is nobody to send to."""
        self._out.clear()
