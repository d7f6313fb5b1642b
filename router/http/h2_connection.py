"""One HTTP/2 connection of a gateway, the server's side (RFC 9113), on asyncio.

Every stream goes to the handler that ``opener`` gives it. What always holds: whatever the peer sends beyond
a limit, or against the protocol, ends the connection with a GOAWAY that says why; whatever ends a stream but
its own handler, its handler hears of it; each state that waits for the peer alone has a deadline; the work
for one read is linear in its bytes, and done in turns of the loop of ``_WORK_MAX`` each; a stream whose peer
does not read it holds no other one up. Priorities and unknown frames are ignored. Nothing is pushed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated, cast

import msgspec

from router.http import h2_codec as h2
from router.http.h2_codec import Field, FrameReader, H2Error, H2Frame, HeaderBlocks, HeaderDecoder
from router.http.h2_streams import SendScheduler, Stream, StreamHandler
from router.http.settings import HandshakeStats
from router.http.sockets import NEVER, Sweeper

# How many frames without content a peer may send in a second.
#
# Always true: beyond it the connection ends; the clock is read only when a budget is used up.


class ControlBudget:
    """Of one connection."""

    def __init__(self, per_s: int, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = per_s
        self._from_s = clock()

    def spend(self, cost: int) -> None:
        """A frame without content. Raises ``H2Error`` where there were too many in this second."""
        self._left -= cost
        if self._left >= 0:
            return
        now = self._clock()
        if now - self._from_s < 1.0:
            raise H2Error(h2.ENHANCE_YOUR_CALM, "too many control frames")
        self._from_s = now
        self._left = self._per_s


# Limits of HTTP/2 connections, and what happened at them. Names carry units; all defaults live here.


class H2Settings(msgspec.Struct, frozen=True):
    """Limits of the connections of a gateway."""

    handshake_timeout_s: float = 10.0
    """Time-out of a connection's TLS handshake, and from then on until its HTTP/2 preface and settings are
    there, in seconds."""
    stall_timeout_s: float = 60.0
    """A connection that takes nothing of what waits to be sent to it for this long is cut, in seconds."""
    connections_max: int = 256
    """Most connections; further ones are closed at once. A gateway holds one for each of its threads."""
    streams_max: int = 4096
    """Most requests at one time on one connection; further ones are refused."""
    stream_window_bytes: int = 1024 * 1024
    """Bytes of one stream that may be under way to here and not taken yet."""
    header_bytes_max: int = 32 * 1024
    """Largest head of a stream; a larger one ends its connection."""
    control_frames_per_s_max: int = 20_000
    """Most frames without content (pings, settings, window updates) that a connection may send per second; a
    reset of a running stream counts as ten. One that sends more is ended."""


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


_WINDOW_BYTES = 16 * 1024 * 1024
"""Of the whole connection, granted again as bytes come: what is held is bounded by stream."""
_FRAME_BYTES = 64 * 1024
_RESET_COST = 10
_WORK_MAX = 4096
"""Of one turn of the loop: a frame without content counts 1 and takes about 2 us, all others more."""
_OPEN_WORK = 32
_BLOCK_BYTES = 8
"""Of a header block for each 1 more: a byte of Huffman code takes about 1 us."""
_SETTING_BYTES = 12
_DATA_WORK = 4
_DATA_BYTES = 64
"""Of data for each 1 more: the shortest messages take about 2 us for each 5 bytes."""
_DRAIN = b"\0draining"[:8]
Opener = Callable[[Stream, list[Field]], StreamHandler | None]
"""Takes a new stream with its header fields; None: it has been answered, or reset, already."""


class H2Connection(asyncio.Protocol):
    """See the module. ``members`` are the connections of one server."""

    def __init__(
        self,
        opener: Opener,
        settings: H2Settings,
        *,
        stats: H2Stats,
        clock: Callable[[], float],
        sweeper: Sweeper,
        members: set[H2Connection],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline = NEVER
        self._opener = opener
        self._settings = settings
        self._stats = stats
        self._clock = clock
        self._sweeper = sweeper
        self._members = members
        self._transport: asyncio.Transport  # from connection_made on, as the next
        self._outbox: SendScheduler
        self._preface = b""
        self._reader = FrameReader(_FRAME_BYTES)
        self._frames: Iterator[H2Frame] = iter(())  # that have come and wait for their turn
        self._unread: deque[bytes] = deque()  # and what came behind them
        self._work = 0
        self._reading = False  # a turn of the loop is to come for them
        self._decoder = HeaderDecoder(settings.header_bytes_max)
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._settled = False  # the peer's settings have come
        self._blocks = HeaderBlocks(settings.header_bytes_max)
        self._budget = ControlBudget(settings.control_frames_per_s_max, clock)
        self._received = 0
        self._draining = self._final = self._over = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._outbox = SendScheduler(self._transport, lambda stream: self.drop(stream, None))
        if len(self._members) >= self._settings.connections_max:
            self._stats.connections_refused += 1
            self._transport.abort()
            return
        self._members.add(self)
        self._stats.connections += 1
        self._stats.connections_open += 1
        self._sweeper.add(self)
        self.deadline = self._clock() + self._settings.handshake_timeout_s
        ours = {
            h2.SETTINGS_MAX_CONCURRENT_STREAMS: self._settings.streams_max,
            h2.SETTINGS_INITIAL_WINDOW_SIZE: self._settings.stream_window_bytes,
            h2.SETTINGS_MAX_FRAME_SIZE: _FRAME_BYTES,
            h2.SETTINGS_MAX_HEADER_LIST_SIZE: self._settings.header_bytes_max,
        }
        self._outbox.write(h2.settings_frame(ours) + h2.window_frame(0, _WINDOW_BYTES - h2.WINDOW_DEFAULT))

    def connection_lost(self, exc: Exception | None) -> None:
        if self not in self._members:
            return
        self._members.discard(self)
        self._stats.connections_open -= 1
        self._sweeper.discard(self)
        self._outbox.clear()
        self._lose_all()

    def eof_received(self) -> None:
        """The peer sends no more: asyncio closes the connection, on which nothing is sent any more."""
        self._lose_all()

    def data_received(self, data: bytes) -> None:
        self._unread.append(data)
        if not self._reading:
            self._read()

    def _read(self) -> None:
        """Process received bytes, as far as the work for one turn of the loop allows."""
        paused, self._reading = self._reading, False
        self._work = 0
        self._outbox.hold()
        try:
            while self._work < _WORK_MAX and not self._over and not self._transport.is_closing():
                if (found := next(self._frames, None)) is not None:
                    self._work += 1
                    self._take(found)
                elif self._unread:
                    data = self._unread.popleft()
                    if len(self._preface) < len(h2.PREFACE):
                        data = self._take_preface(data)
                    self._frames = self._reader.feed(data)
                else:
                    break
            else:
                self._read_later()
            self._budget.spend(self._outbox.unblock())
        except H2Error as error:
            self._stats.connections_broken += 1
            self._end(error.code, str(error))
        else:
            if paused and not self._reading:
                self._transport.resume_reading()
            self._outbox.pump()

    def _read_later(self) -> None:
        if not self._over and not self._transport.is_closing():
            self._reading = True
            self._transport.pause_reading()  # which may be called again
            self.loop.call_soon(self._read)

    def _take_preface(self, data: bytes) -> bytes:
        """Process the frames behind the preface."""
        need = len(h2.PREFACE) - len(self._preface)
        self._preface += data[:need]
        if not h2.PREFACE.startswith(self._preface):
            raise H2Error(h2.PROTOCOL_ERROR, "this port speaks HTTP/2 only")
        return data[need:]

    def pause_writing(self) -> None:
        self._outbox.paused = True
        self.deadline = self._clock() + self._settings.stall_timeout_s

    def resume_writing(self) -> None:
        self._outbox.paused = False
        self.deadline = NEVER
        self._outbox.pump()

    def expire(self) -> None:
        """The deadline passed; what it was for follows from the state."""
        self.deadline = NEVER
        if self._settled:
            self._stats.stalled_connections += 1
        else:
            self._stats.handshake_timeouts += 1
        self._transport.abort()

    # What the peer sends.

    def _take(self, found: H2Frame) -> None:
        kind = found.kind
        if kind == h2.DATA and self._settled and not self._blocks.begun:
            self._on_data(found)
            return
        if self._blocks.begun and kind != h2.CONTINUATION:
            raise H2Error(h2.PROTOCOL_ERROR, "a frame within a header block")
        if not self._settled and kind != h2.SETTINGS:
            raise H2Error(h2.PROTOCOL_ERROR, "the first frame is no SETTINGS")
        if kind in (h2.HEADERS, h2.CONTINUATION):
            if (whole := self._blocks.add(found)) is not None:
                self._on_block(*whole)
        else:
            # A reset of a stream that is over is how Envoy ends each of its calls: only others are an attack.
            cuts = kind == h2.RST_STREAM and found.stream_id in self._streams
            self._budget.spend(_RESET_COST if cuts else 1)
            self._work += len(found.payload) // _SETTING_BYTES
            self._on_control(found)

    def _on_control(self, found: H2Frame) -> None:
        kind, stream_id = found.kind, found.stream_id
        if kind == h2.WINDOW_UPDATE:
            self._on_window(stream_id, h2.word(found.payload) & h2.WINDOW_MAX)
        elif kind == h2.RST_STREAM:
            h2.word(found.payload)
            self._known(stream_id)
            stream = self._streams.get(stream_id)
            if stream is not None:
                self._stats.streams_reset += 1
                self._lose(stream)
        elif kind in (h2.SETTINGS, h2.PING, h2.GOAWAY):
            if stream_id:
                raise H2Error(h2.PROTOCOL_ERROR, "a frame of the connection on a stream")
            if kind == h2.SETTINGS:
                self._on_settings(found)
            elif kind == h2.PING:
                self._on_ping(found)
        elif kind == h2.PUSH_PROMISE:
            raise H2Error(h2.PROTOCOL_ERROR, "a client pushes nothing")

    def _known(self, stream_id: int) -> None:
        if stream_id > self._last_id or not stream_id % 2:
            raise H2Error(h2.PROTOCOL_ERROR, "a frame of a stream that was never opened")

    def _on_settings(self, found: H2Frame) -> None:
        if found.flags & h2.ACK:
            if found.payload:
                raise H2Error(h2.FRAME_SIZE_ERROR, "an acknowledgement with content")
            return
        values = h2.read_settings(found.payload)
        window = values.get(h2.SETTINGS_INITIAL_WINDOW_SIZE)
        if window is not None:
            if window > h2.WINDOW_MAX:
                raise H2Error(h2.FLOW_CONTROL_ERROR, f"a window of {window} bytes")
            self._outbox.widen(window)
        size = values.get(h2.SETTINGS_MAX_FRAME_SIZE, self._outbox.frame_bytes_max)
        if not h2.FRAME_BYTES_MIN <= size <= h2.FRAME_BYTES_MAX:
            raise H2Error(h2.PROTOCOL_ERROR, f"frames of {size} bytes")
        self._outbox.frame_bytes_max = min(size, _FRAME_BYTES)
        if not self._settled:
            self._settled = True
            self.deadline = NEVER
        self._outbox.write(h2.frame(h2.SETTINGS, h2.ACK, 0))

    def _on_ping(self, found: H2Frame) -> None:
        if len(found.payload) != 8:
            raise H2Error(h2.FRAME_SIZE_ERROR, "a PING of another size")
        if not found.flags & h2.ACK:
            self._outbox.write(h2.frame(h2.PING, h2.ACK, 0, found.payload))
        elif self._draining and found.payload == _DRAIN:
            self._final = True  # the peer knows: streams that it opened before have come
            self._outbox.write(h2.goaway_frame(self._last_id, h2.NO_ERROR))
            self._close_if_done()

    def _on_window(self, stream_id: int, increment: int) -> None:
        if not increment:
            raise H2Error(h2.PROTOCOL_ERROR, "a window update of nothing")
        if not stream_id:
            self._outbox.grow(increment)
            return
        self._known(stream_id)
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.credit += increment
        try:
            self._outbox.ready(stream)
        except H2Error as error:
            self._stats.streams_broken += 1
            self._lose(stream, error.code)

    def _on_data(self, found: H2Frame) -> None:
        data = found.payload
        size = len(data)
        self._work += _DATA_WORK + size // _DATA_BYTES
        self._received += size
        if self._received * 2 >= _WINDOW_BYTES:
            self._outbox.write(h2.window_frame(0, self._received))
            self._received = 0
        if found.flags & h2.PADDED:
            data = h2.unpadded(found)
        ends = found.flags & h2.END_STREAM
        if not data and not ends:
            self._budget.spend(1)
        stream = self._streams.get(found.stream_id)
        if stream is None:
            self._known(found.stream_id)
            return  # of one that has ended here: was under way
        if stream.peer_ended:
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise H2Error(h2.FLOW_CONTROL_ERROR, "more data than the window allows")
        if size > len(data):
            stream.taken(size - len(data))
        if data and stream.handler is not None:
            stream.handler.on_data(data)
        if ends:
            self._peer_ended(stream)

    def _on_block(self, found: H2Frame, block: bytes) -> None:
        self._work += _OPEN_WORK + len(block) // _BLOCK_BYTES
        fields = self._decoder.decode(block)  # also of a stream that is refused: the tables must stay equal
        stream_id, ends = found.stream_id, bool(found.flags & h2.END_STREAM)
        if stream_id > self._last_id and stream_id % 2:
            self._last_id = stream_id
            self._open(stream_id, fields, ends=ends)
            return
        self._known(stream_id)
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.peer_ended:  # trailers
            if not ends:
                raise H2Error(h2.PROTOCOL_ERROR, "trailers that end nothing")
            self._peer_ended(stream)

    def _open(self, stream_id: int, fields: list[Field], *, ends: bool) -> None:
        if self._final or len(self._streams) >= self._settings.streams_max:
            self._stats.streams_refused += 1
            self._outbox.write(h2.reset_frame(stream_id, h2.REFUSED_STREAM))
            return
        stream = Stream(self, stream_id, receive_window=self._settings.stream_window_bytes)
        self._streams[stream_id] = stream
        self._stats.streams += 1
        self._stats.streams_open += 1
        handler = self._opener(stream, fields)
        if handler is not None and not stream.closed:
            stream.handler = handler
            if ends:
                self._peer_ended(stream)

    def _peer_ended(self, stream: Stream) -> None:
        stream.peer_ended = True
        if stream.handler is not None:
            stream.handler.on_end()

    # What is sent.

    def ready(self, stream: Stream) -> None:
        """Implement ``StreamLine``."""
        try:
            self._outbox.ready(stream)
        except H2Error as error:  # settings have brought it beyond the limit
            self.loop.call_soon(self._end, error.code, str(error))

    def write_headers(self, stream_id: int, block: bytes, *, end: bool) -> None:
        """Implement ``StreamLine``."""
        flags = h2.END_HEADERS | (h2.END_STREAM if end else 0)
        self._outbox.write(h2.frame(h2.HEADERS, flags, stream_id, block))

    def grant(self, stream: Stream, size: int) -> None:
        """Implement ``StreamLine``."""
        stream.receive_window += size
        self._outbox.write(h2.window_frame(stream.stream_id, size))

    def drop(self, stream: Stream, code: int | None) -> None:
        """Implement ``StreamLine``."""
        if code is None and not stream.peer_ended:
            code = h2.NO_ERROR  # the answer is whole; what the peer still sends is not needed
        if code is not None:
            self._outbox.write(h2.reset_frame(stream.stream_id, code))
        self._forget(stream)

    def _lose(self, stream: Stream, code: int | None = None) -> None:
        """It ended otherwise than by its handler; ``code``: tell the peer so."""
        handler = stream.handler
        if code is not None:
            self._outbox.write(h2.reset_frame(stream.stream_id, code))
        self._forget(stream)
        if handler is not None:
            handler.on_lost()

    def _lose_all(self) -> None:
        """Nothing can be sent on any of them."""
        self._over = True
        for stream in list(self._streams.values()):
            self._lose(stream)

    def _forget(self, stream: Stream) -> None:
        stream.handler = None
        if self._streams.pop(stream.stream_id, None) is not None:
            self._stats.streams_open -= 1
        self._outbox.forget(stream)
        stream.lost()
        self._close_if_done()

    # Its end.

    def drain(self) -> None:
        """Let the peer open its streams elsewhere; close when those that are open have ended. Idempotent."""
        if not self._draining and self._settled:
            self._draining = True
            self._outbox.write(h2.goaway_frame(h2.WINDOW_MAX, h2.NO_ERROR, "draining"))
            self._outbox.write(h2.frame(h2.PING, 0, 0, _DRAIN))

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def _close_if_done(self) -> None:
        if self._final and not self._streams and not self._over:
            self._close()

    def _end(self, code: int, why: str) -> None:
        if self._over:
            return
        self._outbox.write(h2.goaway_frame(self._last_id, code, why))
        self._lose_all()  # the peer may delay the connection's end, and must not delay theirs
        self._close()

    def _close(self) -> None:
        """Once what was said has been taken."""
        self._outbox.flush()
        self.deadline = self._clock() + self._settings.stall_timeout_s
        self._transport.close()
