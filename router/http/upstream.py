"""HTTP/1.1 client for engines (RFC 9112): a connection around httptools' response parser.

One request at a time: ``send_request``, then ``head_received`` once status and headers have arrived, ``read``
for body bytes exactly as they arrived together, and ``make_idle``. Interim (1xx) responses are skipped.
Invariants: no byte of one response can reach the next (bytes after a response's end, and a response
that ends with the connection, prevent reuse); buffered bytes are bounded (reading pauses), and so are head
and trailer; every wait ends by data, by the deadline that the sweeper watches, or by the connection's loss.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Literal, cast

import httptools

from kvatlas.router.http.deadlines import NEVER
from kvatlas.router.http.keepalive import keep_alive
from kvatlas.router.http.known_heads import KnownHeads, head_key, without_date, without_fields
from kvatlas.router.http.settings import ClientSettings, ClientStats

# Kept open to one server: about as many requests as one engine runs at once.
IDLE_CONNECTIONS_MAX = 256
# Of a response's head, and of its trailer.
HEAD_BYTES_MAX = 64 * 1024
# Of a response held for a slow client; beyond it, reading from the engine pauses.
READ_AHEAD_BYTES_MAX = 256 * 1024
_OK = 200
# Bytes of a field line besides name and value: ``: `` and CRLF (RFC 9112, section 5).
_FIELD_OVERHEAD_BYTES = 4

Reason = Literal["refused", "reset", "timeout", "broken_stream", "overflow", "aborted"]


class UpstreamError(Exception):
    """No complete response of an engine. ``sent``: the engine may have received some of the request.

    ``refused``: no connection; ``reset``: lost or invalid before the head was complete; ``timeout``;
    ``broken_stream``: lost after the head; ``overflow``: our own limit of connections; ``aborted``: the
    response says that the engine aborted the request.
    """

    def __init__(self, reason: Reason, *, sent: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent
        self.stale = False
        """A reused connection failed, which the engine may have closed before it received the request."""
        self.abandoned = False
        """The engine went down for a reason other than this request."""


class UpstreamState(enum.Enum):
    """State of the connection.

    NEW, IDLE         -> ACTIVE   ``send_request``
    ACTIVE            -> IDLE     ``make_idle`` after a complete response, if persistent (RFC 9112, 9.3)
    NEW, ACTIVE, IDLE -> CLOSING  ``abort``
    any               -> CLOSED   ``connection_lost``
    """

    NEW = enum.auto()
    ACTIVE = enum.auto()
    IDLE = enum.auto()
    CLOSING = enum.auto()
    CLOSED = enum.auto()


KnownAnswers = KnownHeads[list[tuple[bytes, bytes]]]
"""Fields of answers with status 200."""


# Bound once: access to a member through its enum takes 0.4 us in Python 3.11.
_NEW, _ACTIVE, _IDLE, _CLOSING, _CLOSED = UpstreamState


class UpstreamResponseState(enum.Enum):
    """Progress of the response to the last request; ``send_request`` starts at WAITING.

    WAITING -> HEAD      the first byte
    HEAD    -> HEAD      an interim response (RFC 9110, section 15.2)
    HEAD    -> BODY      status and fields of the final response
    BODY    -> COMPLETE  the end by length, last chunk, or close (RFC 9112, section 6.3)
    """

    WAITING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    COMPLETE = enum.auto()


# Bound once: access to a member through its enum takes 0.4 us in Python 3.11.
_WAITING, _HEAD, _BODY, _COMPLETE = UpstreamResponseState


_WITHOUT_HEAD = (_WAITING, _HEAD)


class UpstreamConnection(asyncio.Protocol):
    """One connection of ``UpstreamClient``; used from the event loop only."""

    __slots__ = (
        "_buffered_bytes",
        "_chunks",
        "_chunks_at_end",
        "_clock",
        "_counted_fields",
        "_dated",
        "_error",
        "_fields",
        "_head_bytes",
        "_head_fed_bytes",
        "_keep_alive",
        "_key",
        "_known",
        "_loop",
        "_method",
        "_on_lost",
        "_parser",
        "_paused",
        "_response",
        "_settings",
        "_state",
        "_stats",
        "_step",
        "_transport",
        "_unparsed_bytes",
        "_waiter",
        "_waits_until",
        "connecting",
        "deadline",
        "headers",
        "heard_s",
        "on_body",
        "status",
    )

    def __init__(
        self,
        settings: ClientSettings,
        stats: ClientStats,
        clock: Callable[[], float],
        on_lost: Callable[[UpstreamConnection], None],
        known: KnownAnswers | None = None,
    ) -> None:
        self._known = known or KnownAnswers()
        self._key = b""  # of the head that comes, if it may become known
        self._dated = False
        """``date`` is left out of it."""
        self._settings = settings
        self._stats = stats
        self._clock = clock
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._step: Callable[[bytes], bool] | None = None
        self._chunks: list[bytes] = []
        # Called by the parser without a Python frame in between.
        self.on_body = self._chunks.append
        self._parser = httptools.HttpResponseParser(self)
        self.deadline = self._waits_until = NEVER
        self.heard_s = -NEVER
        """When the last piece of a body came."""
        self.connecting: asyncio.Timeout | None = None  # ended by ``expire``
        self._state = _NEW
        self._reset("GET")

    def _reset(self, method: str) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._response = _WAITING
        self._method = method
        # The parser appends here; after the head, to the trailer.
        self._fields = self.headers
        # Number of fields that ``_head_bytes`` includes.
        self._counted_fields = 0
        # Size of the parsed fields of the head, later of the trailer.
        self._head_bytes = 0
        # Bytes received before the end of the head: an upper bound of its size.
        self._head_fed_bytes = 0
        # Bytes fed to the parser since its last callback.
        self._unparsed_bytes = 0
        # Number of chunks when the response ended.
        self._chunks_at_end = -1
        self._keep_alive = False
        self._error: UpstreamError | None = None
        self._buffered_bytes = 0
        self._paused = False
        self._chunks.clear()

    @property
    def response_started(self) -> bool:
        """Whether a byte of the response has arrived."""
        return self._response is not _WAITING

    @property
    def complete(self) -> bool:
        """Whether all of the response has arrived."""
        return self._response is _COMPLETE

    @property
    def closed(self) -> bool:
        """Whether the connection is lost."""
        return self._state is _CLOSED

    def send_request(self, method: str, head: bytes, body: bytes | memoryview, head_timeout_s: float) -> None:
        """Send a request. ``head`` is the whole head with its blank line."""
        transport = self._transport
        self._reset(method)
        if self._state is _CLOSED or transport is None:
            self._error = UpstreamError("reset")
            return
        self._state = _ACTIVE
        self.deadline = self._clock() + head_timeout_s
        if not body:
            transport.write(head)
        else:
            transport.writelines((head, body))

    def head_received(self) -> bool:
        """Return whether ``status`` and ``headers`` are set. Raises ``UpstreamError`` after a failure."""
        if self._response not in _WITHOUT_HEAD:
            return True
        if self._error is not None:
            raise self._error
        return False

    async def read(self) -> bytes:
        """Return the received body bytes, at least one; ``b""`` at the end. Raises ``UpstreamError``."""
        while (data := self.read_nowait()) is None:
            await self.next_event()
        return data

    def read_nowait(self) -> bytes | None:
        """Return what ``read`` would without waiting; None: nothing has arrived."""
        chunks = self._chunks
        if not chunks:
            if self._response is _COMPLETE:
                return b""
            if self._error is not None:
                raise self._error
            return None
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered_bytes = 0
        if self._paused:
            self._resume()
        return data

    def next_event(self, step: Callable[[bytes], bool] | None = None) -> asyncio.Future[None]:
        """Return a future that is done at the next event: data, an error, the end.

        ``step`` gets data instead, as it comes, until it returns False, or raises what the future raises.
        What comes with the end is left for ``read_nowait``.
        """
        # That saves a task switch for each chunk.
        waiter = self._waiter = self._loop.create_future()
        self._step = step
        return waiter

    @property
    def at_eof(self) -> bool:
        """Whether all of the response has been read."""
        return self._response is _COMPLETE and not self._chunks

    def is_available(self) -> bool:
        """Return whether the connection can take a request; the engine may still have closed it."""
        transport = self._transport
        return transport is not None and self._state is not _CLOSED and not transport.is_closing()

    def make_idle(self) -> bool:
        """End the request. Returns whether another may follow; otherwise the connection is closed."""
        transport = self._transport
        if (
            self._state is _ACTIVE
            and self._response is _COMPLETE
            and self._keep_alive
            and transport is not None
            # A response that came before the whole request was sent: the rest would be read as the next
            # request (RFC 9112, section 9.6).
            and transport.get_write_buffer_size() == 0
            and not transport.is_closing()
        ):
            self._state = _IDLE
            self._chunks.clear()
            if self._paused:
                self._resume()
            self.deadline = self._clock() + self._settings.keepalive_s
            return True
        self.abort()
        return False

    def abort(self) -> None:
        """Close at once, which cancels the request on the engine."""
        if self._state is not _CLOSED:
            self._state = _CLOSING
        if self._transport is not None:
            self._transport.abort()

    def lose(self, since_s: float) -> bool:
        """The process at its other end is gone since then, which the connection need not show (a machine that
        lost power, a middlebox that forgot it). Returns whether the request under way failed by that: not one
        whose answer has come, or of which something came since, as another process brings it."""
        if self._state is not _ACTIVE or self._response is _COMPLETE:
            return False
        # A paused one has more to bring, perhaps.
        if self._paused or self.heard_s >= since_s:
            return False
        self._fail()
        self._wake()
        return True

    def expire(self) -> None:
        """Close after the deadline; a request under way fails with ``timeout``."""
        self.deadline = NEVER
        if self.connecting is not None:
            self.connecting.reschedule(0.0)
        if self._state is _ACTIVE and self._response is not _COMPLETE:
            self._error = self._error or UpstreamError("timeout")
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter, self._step = self._waiter, None, None
        if waiter is not None and not waiter.done():  # done: the waiting task was cancelled
            waiter.set_result(None)

    def _take_step(self, step: Callable[[bytes], bool]) -> bool:
        """Give what has come to ``step``; False: the waiting task was cancelled."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return False
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._waits_until, self.heard_s = self.deadline, self._clock()
        self.deadline = self.heard_s + self._settings.idle_timeout_s
        try:
            if not step(data):
                self._wake()
        except Exception as error:  # noqa: BLE001  # raised in the waiting task
            self._waiter = self._step = None
            waiter.set_exception(error)
        return True

    def _resume(self) -> None:
        self._paused = False
        if self._transport is not None and self._state is not _CLOSED:
            self._transport.resume_reading()
        if self._response is not _COMPLETE:
            self.deadline = self._waits_until = self._clock() + self._settings.idle_timeout_s

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport)

    def data_received(self, data: bytes) -> None:
        if self._state is not _ACTIVE:
            # Unsolicited bytes: they must not be taken for the next response (RFC 9112, 9.2).
            self.abort()
            return
        if self._response is _COMPLETE:
            self._keep_alive = False
            return
        if self._response is not _BODY and self._takes_head(data):
            return
        chunks, fields = len(self._chunks), len(self._fields)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep_alive = False
            if not self.complete:
                self._fail(error)
        if self._chunks_at_end >= 0:
            self._ended()
        elif self._response is _BODY and len(self._chunks) > chunks:
            self._unparsed_bytes = 0
            if self._step is not None and self._take_step(self._step):
                return
            self._buffer(len(data))
        else:
            # A part of a head, a trailer, or a chunk's frame, which the parser buffers without a callback.
            # httptools buffers an incomplete field without a callback; counting bytes since the last one
            # bounds it.
            parsed = len(self._fields) > fields
            self._unparsed_bytes = 0 if parsed else self._unparsed_bytes + len(data)
            if self._exceeds_head_limit():
                self._fail()
        self._wake()

    def _takes_head(self, data: bytes) -> bool:
        """Whether this is a whole answer whose head is known; then it needs no parser. Otherwise it is a part
        of a head, for the parser."""
        self._key = b""
        if self._response is _WAITING and self._method != "HEAD":
            key, begin = head_key(data, HEAD_BYTES_MAX)
            self._key, date = without_date(key)
            self._dated = bool(date)
            fields = self._known.by_key.get(self._key)
            if fields is not None:
                body = data[begin:]
                self.status, self.headers = _OK, [*fields, (b"content-length", b"%d" % len(body))]
                if date:
                    self.headers.append((b"date", date))
                if body:
                    self._chunks.append(body)
                self._keep_alive = True
                self._end_response()
                self._wake()
                return True
        self._response = _HEAD
        self._head_fed_bytes += len(data)
        return False

    def _ended(self) -> None:
        """The answer ended in this read."""
        # Bytes after the end of the response: they must not reach the client as part of it.
        if len(self._chunks) > self._chunks_at_end:
            del self._chunks[self._chunks_at_end :]
        # The parser expects a body after the head of a response to HEAD (RFC 9110, section 9.3.2).
        if self._method == "HEAD":
            self._parser = httptools.HttpResponseParser(self)
        if self._key and self.status == _OK and self._keep_alive and self._known.again(self._key):
            fields = without_fields(self.headers, b"content-length", b"date")
            # One with another time, or another way to write it, would lose that.
            if len(self.headers) - len(fields) == 1 + self._dated:
                self._known.keep(self._key, fields)

    def _exceeds_head_limit(self) -> bool:
        """Add the new fields to the size of the head or trailer; return whether it is too large."""
        new = self._fields[self._counted_fields :] if self._counted_fields else self._fields
        self._counted_fields += len(new)
        self._head_bytes += sum(
            [len(name) + len(value) for name, value in new], _FIELD_OVERHEAD_BYTES * len(new)
        )
        return self._head_bytes + self._unparsed_bytes > HEAD_BYTES_MAX

    def _buffer(self, size: int) -> None:
        self._buffered_bytes += size
        if self._paused:
            return
        if self._buffered_bytes > READ_AHEAD_BYTES_MAX and self._transport is not None:
            self._transport.pause_reading()
            self._paused = True
            self._stats.read_pauses += 1
            # Waiting for the client, not for the engine.
            self.deadline = NEVER
        else:
            self._waits_until, self.heard_s = self.deadline, self._clock()
            self.deadline = self.heard_s + self._settings.idle_timeout_s

    def kept_alive(self) -> None:
        """Forget that the last piece came: it was no part of an answer, and the time-out of the wait for one
        goes on."""
        if self._response is _BODY and not self._paused:
            self.deadline = self._waits_until

    def _fail(self, cause: Exception | None = None) -> None:
        """Fail the request, and close: the connection is lost or its bytes are invalid."""
        if self._error is None:
            self._error = UpstreamError("reset" if self._response in _WITHOUT_HEAD else "broken_stream")
            self._error.__cause__ = cause
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        was_active = self._state is _ACTIVE
        self._state = _CLOSED
        self._keep_alive = False
        self.deadline = NEVER
        if was_active and not self.complete and self._error is None:
            in_body = self._response is _BODY
            if exc is None and in_body and not self._has_body_length():
                # The close ends this body (RFC 9112, section 6.3, rule 8).
                self._end_response()
            else:
                self._fail()
        self._on_lost(self)
        self._wake()

    # httptools

    def on_message_begin(self) -> None:
        if self._response is _COMPLETE:
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._response not in _WITHOUT_HEAD:
            # The head of a second, unsolicited response.
            return
        # Counting fields costs more than the parser: done only if the bytes received could exceed the limit.
        if self._head_fed_bytes > HEAD_BYTES_MAX and self._exceeds_head_limit():
            raise OverflowError  # stops the parser
        status = self._parser.get_status_code()
        if status < 100:
            raise ValueError(status)  # no status of HTTP (RFC 9110, section 15); stops the parser
        if status < 200:
            self._exceeds_head_limit()
            self.headers = self._fields = []
            self._counted_fields = 0
            return
        self._fields, self._counted_fields, self._head_bytes = [], 0, 0
        self.status = status
        self._response = _BODY
        self._keep_alive = self._parser.should_keep_alive()
        # The head came, the body may be computed for long: a time-out of its own.
        self.deadline = self._waits_until = self._clock() + self._settings.first_byte_timeout_s
        if self._method == "HEAD":
            self._end_response()

    def _has_body_length(self) -> bool:
        """Return whether the head defines the end of the body."""
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def on_message_complete(self) -> None:
        if self._response is _BODY:
            self._end_response()

    def _end_response(self) -> None:
        self._response = _COMPLETE
        self._chunks_at_end = len(self._chunks)
        self.deadline = NEVER
