"""One HTTP/2 connection of a gateway, the server's side (RFC 9113), on asyncio.

``open_handler`` returns the handler of each new stream. Invariants: a violation of the protocol or of
a limit ends the connection with a GOAWAY that carries the reason; a handler learns of every end of its stream
that it did not cause; each state that waits for the peer alone has a deadline; the work for one read is
linear in its bytes, and split into turns of the loop of ``_WORK_MAX`` each; a stream that its peer does not
read blocks no other one. Priorities and unknown frames are ignored. Nothing is pushed.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated, cast

from kvatlas.router.http import h2_codec as h2
from kvatlas.router.http.deadlines import NEVER, Sweeper
from kvatlas.router.http.h2_codec import FrameReader, H2Error, H2Frame, HeaderBlockAssembler
from kvatlas.router.http.h2_sending import SendScheduler
from kvatlas.router.http.h2_streams import STREAM_HALF_CLOSED, STREAM_OPEN, Stream, StreamHandler
from kvatlas.router.http.hpack_decoding import Field, HeaderDecoder
from kvatlas.router.http.settings import HandshakeStats


class ControlFrameBudget:
    """Control frames that one connection may still send in this second: each costs work without carrying
    content (RFC 9113, section 10.5). The clock is read only when the budget of a second is used up."""

    def __init__(self, per_s: int, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = per_s
        self._from_s = clock()

    def spend(self, cost: int) -> None:
        """Count a frame without content. Raises ``H2Error`` if there were too many in this second."""
        self._left -= cost
        if self._left >= 0:
            return
        now = self._clock()
        if now - self._from_s < 1.0:
            raise H2Error(h2.ENHANCE_YOUR_CALM, "too many control frames")
        self._from_s = now
        self._left = self._per_s


# For a connection's TLS handshake, and from then on until its HTTP/2 preface and settings are there.
HANDSHAKE_TIMEOUT_S = 10.0
# A connection that takes nothing of what waits to be sent to it for this long is cut.
STALL_TIMEOUT_S = 60.0
# Requests at one time on one connection; further ones are refused. Envoy's circuit breaker allows 1,024 by
# default.
STREAMS_MAX = 4096
# Of one stream that may be under way to here and not taken yet: a request of 1 MB in one round trip.
STREAM_WINDOW_BYTES = 1 << 20
# Of a stream's head; a larger one ends its connection.
HEADER_BYTES_MAX = 32 * 1024
# Frames without content (pings, settings, window updates) of a connection; a reset of a running stream counts
# as ten. A connection that sends more is ended (CVE-2023-44487).
CONTROL_FRAMES_PER_S_MAX = 20_000


class H2Stats(HandshakeStats):
    """Counters of what peers did."""

    connections: Annotated[int, "kvatlas_epp_connections_total"] = 0
    """Connections accepted from gateways."""
    connections_open: Annotated[int, "kvatlas_epp_connections_open"] = 0
    """Connections of gateways now."""
    connections_refused: Annotated[int, "kvatlas_epp_connections_refused_total"] = 0
    """Connections refused because there were too many."""
    connections_broken: Annotated[int, "kvatlas_epp_connections_broken_total"] = 0
    """Connections ended because the peer broke the protocol or a limit of it."""
    handshake_timeouts: Annotated[int, "kvatlas_epp_handshake_timeouts_total"] = 0
    """Connections closed because they did not begin to speak HTTP/2 in time."""
    stalled_connections: Annotated[int, "kvatlas_epp_stalled_connections_total"] = 0
    """Connections cut because they took nothing of what was to be sent."""
    streams: Annotated[int, "kvatlas_epp_streams_total"] = 0
    """Streams opened by gateways, health checks included."""
    streams_open: Annotated[int, "kvatlas_epp_streams_open"] = 0
    """Streams now."""
    streams_refused: Annotated[int, "kvatlas_epp_streams_refused_total"] = 0
    """Streams refused because their connection had too many, or was ending."""
    streams_reset: Annotated[int, "kvatlas_epp_streams_reset_total"] = 0
    """Streams that a gateway reset."""
    streams_broken: Annotated[int, "kvatlas_epp_streams_broken_total"] = 0
    """Streams ended because the gateway broke a limit of theirs."""


# Receive window of the connection, extended as bytes arrive: buffered bytes are bounded by stream.
_WINDOW_BYTES = 16 * 1024 * 1024
_FRAME_BYTES = 64 * 1024
_RESET_COST = 10
# Work in one turn of the loop: a frame without content counts 1 and takes about 2 us, all others more.
_WORK_MAX = 4096
_OPEN_WORK = 32
# Bytes of a header block that count 1: a byte of Huffman code takes about 1 us.
_BLOCK_BYTES = 8
_SETTING_BYTES = 12
_DATA_WORK = 4
# Bytes of data that count 1: the shortest messages take about 2 us for each 5 bytes.
_DATA_BYTES = 64
_DRAIN_PING = b"\0draining"[:8]
StreamOpener = Callable[[Stream, list[Field]], StreamHandler | None]
"""Called with a new stream and its header fields; None: the stream is already answered or reset."""


class H2State(enum.Enum):
    """State of the connection.

    AWAITING_PREFACE  -> AWAITING_SETTINGS  the client's preface (RFC 9113, section 3.4)
    AWAITING_SETTINGS -> OPEN               its SETTINGS frame, which must be the first one
    OPEN              -> DRAINING           ``drain``: GOAWAY with the highest stream id, and a PING (6.8)
    DRAINING          -> LAST_STREAMS       the PING's acknowledgement; GOAWAY with the last stream: later
                                            streams are refused (6.8)
    LAST_STREAMS      -> CLOSED             the last stream has ended
    any               -> CLOSED             an error (section 5.4.1), the peer's end, or a lost connection
    """

    AWAITING_PREFACE = enum.auto()
    AWAITING_SETTINGS = enum.auto()
    OPEN = enum.auto()
    DRAINING = enum.auto()
    LAST_STREAMS = enum.auto()
    CLOSED = enum.auto()


# Bound once: access to a member through its enum takes 0.4 us in Python 3.11.
_AWAITING_PREFACE, _AWAITING_SETTINGS, _OPEN, _DRAINING, _LAST_STREAMS, _CLOSED = H2State


class H2Connection(asyncio.Protocol):
    """One connection of a client. ``connections`` are the open connections of the server, in order."""

    def __init__(
        self,
        open_handler: StreamOpener,
        *,
        stats: H2Stats,
        clock: Callable[[], float],
        sweeper: Sweeper,
        connections: dict[H2Connection, None],
        connections_max: int,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline = NEVER
        self._open_handler = open_handler
        self._connections_max = connections_max
        self._stats = stats
        self._clock = clock
        self._sweeper = sweeper
        self._connections = connections
        # Set in connection_made, like the next.
        self._transport: asyncio.Transport
        self._scheduler: SendScheduler
        self._state = _AWAITING_PREFACE
        self._preface = b""
        self._reader = FrameReader(_FRAME_BYTES)
        self._frames: Iterator[H2Frame] = iter(())  # of the last read, to be processed
        self._unread: deque[bytes] = deque()  # reads after it
        self._work = 0
        self._process_scheduled = False  # in a later turn of the loop
        self._decoder = HeaderDecoder(HEADER_BYTES_MAX)
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._header_blocks = HeaderBlockAssembler(HEADER_BYTES_MAX)
        self._budget = ControlFrameBudget(CONTROL_FRAMES_PER_S_MAX, clock)
        self._unacknowledged_bytes = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._scheduler = SendScheduler(self._transport, lambda stream: self.close_stream(stream, None))
        if len(self._connections) >= self._connections_max:
            self._stats.connections_refused += 1
            self._transport.abort()
            return
        self._connections[self] = None
        self._stats.connections += 1
        self._stats.connections_open += 1
        self._sweeper.add(self)
        self.deadline = self._clock() + HANDSHAKE_TIMEOUT_S
        ours = {
            h2.SETTINGS_MAX_CONCURRENT_STREAMS: STREAMS_MAX,
            h2.SETTINGS_INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            h2.SETTINGS_MAX_FRAME_SIZE: _FRAME_BYTES,
            h2.SETTINGS_MAX_HEADER_LIST_SIZE: HEADER_BYTES_MAX,
        }
        self._scheduler.write_control(
            h2.settings_frame(ours) + h2.window_update_frame(0, _WINDOW_BYTES - h2.WINDOW_DEFAULT)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if self not in self._connections:
            return
        del self._connections[self]
        self._stats.connections_open -= 1
        self._sweeper.discard(self)
        self._scheduler.clear()
        self._abort_streams()

    def eof_received(self) -> None:
        """Abort all streams: asyncio closes the connection when the peer has sent its end."""
        self._abort_streams()

    def data_received(self, data: bytes) -> None:
        self._unread.append(data)
        if not self._process_scheduled:
            self._process()

    def _process(self) -> None:
        """Process received bytes, as far as the work for one turn of the loop allows."""
        paused, self._process_scheduled = self._process_scheduled, False
        self._work = 0
        self._scheduler.cork()
        try:
            while self._work < _WORK_MAX and self._state is not _CLOSED and not self._transport.is_closing():
                if (frame := next(self._frames, None)) is not None:
                    self._work += 1
                    self._on_frame(frame)
                elif self._unread:
                    data = self._unread.popleft()
                    if self._state is _AWAITING_PREFACE:
                        data = self._consume_preface(data)
                    self._frames = self._reader.feed(data)
                else:
                    break
            else:
                self._process_later()
            self._budget.spend(self._scheduler.unblock_streams())
        except H2Error as error:
            self._stats.connections_broken += 1
            self._terminate(error.code, str(error))
        else:
            if paused and not self._process_scheduled:
                self._transport.resume_reading()
            self._scheduler.flush()

    def _process_later(self) -> None:
        if self._state is not _CLOSED and not self._transport.is_closing():
            self._process_scheduled = True
            self._transport.pause_reading()  # no effect if paused already
            self.loop.call_soon(self._process)

    def _consume_preface(self, data: bytes) -> bytes:
        """Compare the preface; return the bytes after it."""
        need = len(h2.PREFACE) - len(self._preface)
        self._preface += data[:need]
        if not h2.PREFACE.startswith(self._preface):
            raise H2Error(h2.PROTOCOL_ERROR, "this port speaks HTTP/2 only")
        if len(self._preface) == len(h2.PREFACE):
            self._state = _AWAITING_SETTINGS
        return data[need:]

    def pause_writing(self) -> None:
        self._scheduler.paused = True
        self.deadline = self._clock() + STALL_TIMEOUT_S

    def resume_writing(self) -> None:
        self._scheduler.paused = False
        self.deadline = NEVER
        self._scheduler.flush()

    def expire(self) -> None:
        """Close after the deadline, which the state determines."""
        self.deadline = NEVER
        if self._state in (_AWAITING_PREFACE, _AWAITING_SETTINGS):
            self._stats.handshake_timeouts += 1
        else:
            self._stats.stalled_connections += 1
        self._transport.abort()

    # Received frames.

    def _on_frame(self, received: H2Frame) -> None:
        kind = received.kind
        settled = self._state is not _AWAITING_SETTINGS
        if kind == h2.DATA and settled and not self._header_blocks.incomplete:
            self._on_data(received)
            return
        if self._header_blocks.incomplete and kind != h2.CONTINUATION:
            raise H2Error(h2.PROTOCOL_ERROR, "a frame within a header block")
        if not settled and kind != h2.SETTINGS:
            raise H2Error(h2.PROTOCOL_ERROR, "the first frame is no SETTINGS")
        if kind in (h2.HEADERS, h2.CONTINUATION):
            if (whole := self._header_blocks.add(received)) is not None:
                self._on_header_block(*whole)
        else:
            # Envoy resets a finished stream at the end of each of its calls. Only resets of running streams
            # may be an attack (rapid reset, CVE-2023-44487).
            cancels = kind == h2.RST_STREAM and received.stream_id in self._streams
            self._budget.spend(_RESET_COST if cancels else 1)
            self._work += len(received.payload) // _SETTING_BYTES
            self._on_control(received)

    def _on_control(self, received: H2Frame) -> None:
        kind, stream_id = received.kind, received.stream_id
        if kind == h2.WINDOW_UPDATE:
            self._on_window_update(stream_id, h2.parse_uint32(received.payload) & h2.WINDOW_MAX)
        elif kind == h2.RST_STREAM:
            h2.parse_uint32(received.payload)
            self._check_stream_id(stream_id)
            stream = self._streams.get(stream_id)
            if stream is not None:
                self._stats.streams_reset += 1
                self._abort_stream(stream)
        elif kind in (h2.SETTINGS, h2.PING, h2.GOAWAY):
            if stream_id:
                raise H2Error(h2.PROTOCOL_ERROR, "a frame of the connection on a stream")
            if kind == h2.SETTINGS:
                self._on_settings(received)
            elif kind == h2.PING:
                self._on_ping(received)
        elif kind == h2.PUSH_PROMISE:
            # Section 8.4: a server must treat PUSH_PROMISE as an error.
            raise H2Error(h2.PROTOCOL_ERROR, "a client pushes nothing")

    def _check_stream_id(self, stream_id: int) -> None:
        # Client streams have odd numbers; on idle ones only HEADERS and PRIORITY are allowed (sections 5.1.1,
        # 5.1).
        if stream_id > self._last_id or not stream_id % 2:
            raise H2Error(h2.PROTOCOL_ERROR, "a frame of a stream that was never opened")

    def _on_settings(self, received: H2Frame) -> None:
        # Section 6.5: an acknowledgement has no payload.
        if received.flags & h2.ACK:
            if received.payload:
                raise H2Error(h2.FRAME_SIZE_ERROR, "an acknowledgement with content")
            return
        values = h2.parse_settings(received.payload)
        window = values.get(h2.SETTINGS_INITIAL_WINDOW_SIZE)
        if window is not None:
            # Section 6.5.2: limits of the values, and the codes of their errors.
            if window > h2.WINDOW_MAX:
                raise H2Error(h2.FLOW_CONTROL_ERROR, f"a window of {window} bytes")
            self._scheduler.set_initial_window(window)
        size = values.get(h2.SETTINGS_MAX_FRAME_SIZE, self._scheduler.frame_bytes_max)
        if not h2.FRAME_BYTES_MIN <= size <= h2.FRAME_BYTES_MAX:
            raise H2Error(h2.PROTOCOL_ERROR, f"frames of {size} bytes")
        self._scheduler.frame_bytes_max = min(size, _FRAME_BYTES)
        if self._state is _AWAITING_SETTINGS:
            self._state = _OPEN
            self.deadline = NEVER
        self._scheduler.write_control(h2.frame(h2.SETTINGS, h2.ACK, 0))

    def _on_ping(self, received: H2Frame) -> None:
        # Section 6.7: the payload has 8 bytes; every PING is acknowledged with the same payload.
        if len(received.payload) != 8:
            raise H2Error(h2.FRAME_SIZE_ERROR, "a PING of another size")
        if not received.flags & h2.ACK:
            self._scheduler.write_control(h2.frame(h2.PING, h2.ACK, 0, received.payload))
        elif self._state in (_DRAINING, _LAST_STREAMS) and received.payload == _DRAIN_PING:
            # Streams opened before the GOAWAY have arrived.
            self._state = _LAST_STREAMS
            self._scheduler.write_control(h2.goaway_frame(self._last_id, h2.NO_ERROR))
            self._close_if_done()

    def _on_window_update(self, stream_id: int, increment: int) -> None:
        # Section 6.9: an increment of 0 is an error.
        if not increment:
            raise H2Error(h2.PROTOCOL_ERROR, "a window update of nothing")
        if not stream_id:
            self._scheduler.increase_window(increment)
            return
        self._check_stream_id(stream_id)
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.window_credit += increment
        try:
            self._scheduler.schedule(stream)
        except H2Error as error:
            self._stats.streams_broken += 1
            self._abort_stream(stream, error.code)

    def _on_data(self, received: H2Frame) -> None:
        size = len(received.payload)
        self._work += _DATA_WORK + size // _DATA_BYTES
        self._unacknowledged_bytes += size
        if self._unacknowledged_bytes * 2 >= _WINDOW_BYTES:
            self._scheduler.write_control(h2.window_update_frame(0, self._unacknowledged_bytes))
            self._unacknowledged_bytes = 0
        data = h2.strip_padding(received)
        ends = received.flags & h2.END_STREAM
        if not data and not ends:
            self._budget.spend(1)
        stream = self._streams.get(received.stream_id)
        if stream is None:
            self._check_stream_id(received.stream_id)
            # Sent before the peer knew of the stream's end.
            return
        if stream.state is not STREAM_OPEN:
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise H2Error(h2.FLOW_CONTROL_ERROR, "more data than the window allows")
        if size > len(data):
            stream.acknowledge_data(size - len(data))
        if data and stream.handler is not None:
            stream.handler.on_data(data)
        if ends:
            self._peer_ended(stream)

    def _on_header_block(self, received: H2Frame, block: bytes) -> None:
        self._work += _OPEN_WORK + len(block) // _BLOCK_BYTES
        fields = self._decoder.decode(
            block
        )  # also for a refused stream, to keep both tables equal (RFC 7541, 2.2)
        stream_id, ends = received.stream_id, bool(received.flags & h2.END_STREAM)
        # Section 5.1.1: each new stream has a greater number than all before it.
        if stream_id > self._last_id and stream_id % 2:
            self._last_id = stream_id
            self._open(stream_id, fields, ends=ends)
            return
        self._check_stream_id(stream_id)
        stream = self._streams.get(stream_id)
        if stream is not None and stream.state is STREAM_OPEN:  # trailers (RFC 9113, section 8.1)
            if not ends:
                raise H2Error(h2.PROTOCOL_ERROR, "trailers that end nothing")
            self._peer_ended(stream)

    def _open(self, stream_id: int, fields: list[Field], *, ends: bool) -> None:
        if self._state is _LAST_STREAMS or len(self._streams) >= STREAMS_MAX:
            self._stats.streams_refused += 1
            self._scheduler.write_control(h2.rst_stream_frame(stream_id, h2.REFUSED_STREAM))
            return
        stream = Stream(self, stream_id, receive_window=STREAM_WINDOW_BYTES)
        self._streams[stream_id] = stream
        self._stats.streams += 1
        self._stats.streams_open += 1
        handler = self._open_handler(stream, fields)
        if handler is not None and not stream.closed:
            stream.handler = handler
            if ends:
                self._peer_ended(stream)

    def _peer_ended(self, stream: Stream) -> None:
        stream.state = STREAM_HALF_CLOSED
        if stream.handler is not None:
            stream.handler.on_end()

    # Sent frames: ``StreamConnection``.

    def schedule(self, stream: Stream) -> None:
        """Implement ``StreamConnection``."""
        try:
            self._scheduler.schedule(stream)
        except H2Error as error:
            # A SETTINGS frame has raised the window beyond its limit.
            self.loop.call_soon(self._terminate, error.code, str(error))

    def write_headers(self, stream_id: int, block: bytes, *, end: bool) -> None:
        """Implement ``StreamConnection``."""
        flags = h2.END_HEADERS | (h2.END_STREAM if end else 0)
        self._scheduler.write_control(h2.frame(h2.HEADERS, flags, stream_id, block))

    def send_window_update(self, stream: Stream, size: int) -> None:
        """Implement ``StreamConnection``."""
        stream.receive_window += size
        self._scheduler.write_control(h2.window_update_frame(stream.stream_id, size))

    def close_stream(self, stream: Stream, code: int | None) -> None:
        """Implement ``StreamConnection``."""
        if code is None and stream.state is STREAM_OPEN:
            # The response is complete without the rest of the request (RFC 9113, 8.1).
            code = h2.NO_ERROR
        if code is not None:
            self._scheduler.write_control(h2.rst_stream_frame(stream.stream_id, code))
        self._remove_stream(stream)

    def _abort_stream(self, stream: Stream, code: int | None = None) -> None:
        """End a stream that its handler has not ended; ``code``: send RST_STREAM."""
        handler = stream.handler
        if code is not None:
            self._scheduler.write_control(h2.rst_stream_frame(stream.stream_id, code))
        self._remove_stream(stream)
        if handler is not None:
            handler.on_lost()

    def _abort_streams(self) -> None:
        """Close: nothing can be sent on any stream."""
        self._state = _CLOSED
        for stream in list(self._streams.values()):
            self._abort_stream(stream)

    def _remove_stream(self, stream: Stream) -> None:
        stream.handler = None
        if self._streams.pop(stream.stream_id, None) is not None:
            self._stats.streams_open -= 1
        self._scheduler.remove(stream)
        stream.close()
        self._close_if_done()

    # End of the connection.

    def drain(self) -> None:
        """Refuse new streams after the peer knows; close when the open ones have ended. Idempotent."""
        if self._state is _OPEN:
            self._state = _DRAINING
            self._scheduler.write_control(h2.goaway_frame(h2.WINDOW_MAX, h2.NO_ERROR, "draining"))
            self._scheduler.write_control(h2.frame(h2.PING, 0, 0, _DRAIN_PING))

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def _close_if_done(self) -> None:
        if self._state is _LAST_STREAMS and not self._streams:
            self._close()

    def _terminate(self, code: int, why: str) -> None:
        if self._state is _CLOSED:
            return
        self._scheduler.write_control(h2.goaway_frame(self._last_id, code, why))
        # now: the peer may delay the connection's end.
        self._abort_streams()
        self._close()

    def _close(self) -> None:
        """Close once the written bytes have been sent, at the latest after ``STALL_TIMEOUT_S``."""
        self._state = _CLOSED
        self._scheduler.write_pending()
        self.deadline = self._clock() + STALL_TIMEOUT_S
        self._transport.close()
