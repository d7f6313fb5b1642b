"""Order of sending on one connection: control frames at once, streams in turn.

Invariants: a stream sends one frame per turn, within its window and the connection's, so one that is not
read blocks no other one; frames of one turn of the loop are written in one piece, with about
``_FLUSH_BYTES_MAX`` of bodies at most. The initial window is kept once and not in each stream, so a
SETTINGS frame that changes it costs the same for any number of streams.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from kvatlas.router.http import h2_codec as h2
from kvatlas.router.http.h2_codec import H2Error
from kvatlas.router.http.h2_streams import Stream

_FLUSH_BYTES_MAX = 256 * 1024
# Cost of a frame in addition to its bytes, so that many short frames count as much as few long ones.
_FRAME_COST_BYTES = 64


class SendScheduler:
    """Sends the frames of one connection.

    ``on_stream_sent`` is called with a stream whose last frame is written. ``frame_bytes_max`` is the peer's
    SETTINGS_MAX_FRAME_SIZE.
    """

    def __init__(self, transport: asyncio.Transport, on_stream_sent: Callable[[Stream], None]) -> None:
        self.frame_bytes_max = h2.FRAME_BYTES_MIN
        self.paused = False
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._on_stream_sent = on_stream_sent
        self._sendable: OrderedDict[Stream, None] = OrderedDict()  # in the order of their turns
        self._blocked: dict[Stream, None] = {}  # have data to send, and no window
        self._trailers_only: OrderedDict[Stream, None] = (
            OrderedDict()
        )  # have trailers only, which need no window
        self._window = h2.WINDOW_DEFAULT
        self._stream_window = h2.WINDOW_DEFAULT
        self._window_increased = False
        self._out: list[bytes | memoryview] = []
        self._flush_scheduled = False  # or corked

    def increase_window(self, increment: int) -> None:
        """Add to the window of the connection. Raises ``H2Error`` beyond its limit (section 6.9.1)."""
        self._window += increment
        if self._window > h2.WINDOW_MAX:
            raise H2Error(h2.FLOW_CONTROL_ERROR, "a window beyond its limit")

    def set_initial_window(self, window: int) -> None:
        """Set the initial window of all streams, open ones included (RFC 9113, section 6.9.2)."""
        # A window beyond the limit raises when its stream is scheduled next.
        self._window_increased = self._window_increased or window > self._stream_window
        self._stream_window = window

    def unblock_streams(self) -> int:
        """Schedule blocked streams after a larger initial window.

        Returns the work done, in control frames.
        """
        if not self._window_increased:
            return 0
        self._window_increased = False
        blocked = len(self._blocked)
        for stream in [each for each in self._blocked if self._window_of(each) > 0]:
            del self._blocked[stream]
            self._sendable[stream] = None
        return (blocked >> 4) + ((blocked - len(self._blocked)) >> 2)

    def _window_of(self, stream: Stream) -> int:
        return stream.window_credit + self._stream_window

    def write_control(self, data: bytes) -> None:
        """Write frames that no window limits."""
        self._out.append(data)
        self._schedule_flush()

    def schedule(self, stream: Stream) -> None:
        """Queue a stream that has data or trailers, or a larger window.

        Raises ``H2Error`` for a window beyond its limit, which is an error of this stream alone.
        """
        window = self._window_of(stream)
        if window > h2.WINDOW_MAX:
            raise H2Error(h2.FLOW_CONTROL_ERROR, "a window beyond its limit")
        if not stream.queued_bytes:
            if stream.trailers is None:
                return
            self._trailers_only[stream] = None
        elif window <= 0:
            self._blocked[stream] = None
            return
        else:
            self._blocked.pop(stream, None)
            self._sendable[stream] = None
        self._schedule_flush()

    def remove(self, stream: Stream) -> None:
        """Forget an ended stream."""
        for streams in (self._sendable, self._blocked, self._trailers_only):
            streams.pop(stream, None)

    def cork(self) -> None:
        """Suppress automatic flushes. The caller must call ``flush``."""
        self._flush_scheduled = True

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write control frames, and data of each stream in turn, within the windows and the socket buffer."""
        # Frames added meanwhile are written below.
        self._flush_scheduled = True
        room = _FLUSH_BYTES_MAX
        while self._trailers_only and room > 0 and not self.paused:
            room -= self._send_trailers_frame(next(iter(self._trailers_only)))
        while self._sendable and self._window > 0 and room > 0 and not self.paused:
            room -= self._send_data_frame(next(iter(self._sendable)))
        self.write_pending()
        self._flush_scheduled = False
        if (self._trailers_only or (self._sendable and self._window > 0)) and not self.paused:
            self._schedule_flush()

    def _send_data_frame(self, stream: Stream) -> int:
        """Add one DATA frame. Returns its cost in bytes."""
        del self._sendable[stream]
        window = self._window_of(stream)
        size = min(stream.queued_bytes, window, self.frame_bytes_max, self._window)
        if size > 0:
            self._window -= size
            self._out.append(h2.frame_header(h2.DATA, 0, stream.stream_id, size))
            stream.pop_data(size, self._out)
        if stream.queued_bytes:
            if window > size:
                self._sendable[stream] = None
            else:
                self._blocked[stream] = None
        elif stream.trailers is not None:
            self._send_trailers_frame(stream)
        return max(0, size) + _FRAME_COST_BYTES

    def _send_trailers_frame(self, stream: Stream) -> int:
        """Add the trailers. Returns their cost in bytes."""
        self._trailers_only.pop(stream, None)
        trailers = stream.trailers or b""
        flags = h2.END_HEADERS | h2.END_STREAM
        self._out.append(h2.frame(h2.HEADERS, flags, stream.stream_id, trailers))
        self._on_stream_sent(stream)
        return len(trailers) + _FRAME_COST_BYTES

    def write_pending(self) -> None:
        """Write the collected frames to the socket."""
        if self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def clear(self) -> None:
        """Drop the collected frames of a lost connection."""
        self._out.clear()
