"""One HTTP/1.1 connection to an engine: an asyncio protocol around httptools' response parser.

One exchange at a time: ``start`` sends a request, ``has_head`` tells when status and headers are there,
``read`` gives body bytes exactly as they arrived together, ``release`` ends the exchange. Interim (1xx)
answers are skipped.
What always holds: nothing of one answer can reach the next (bytes after an answer's end, and every answer
whose end is the connection's end, make the connection unfit for reuse); buffered bytes are bounded (reading
pauses), and so are head and trailer; every wait ends, by data, by the deadline the sweeper watches, or by the
connection's loss.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Annotated, Literal, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from router.http.sockets import NEVER, Sweeper, ran_out, tick_for

# Limits and time-outs of connections to engines. Names carry units; all defaults live here.


class ClientSettings(msgspec.Struct, frozen=True):
    """Connections to engines: time-outs and bounds."""

    connect_timeout_s: float = 3.0
    """Time-out of a connection to an engine, in seconds."""
    stream_head_timeout_s: float = 30.0
    """Streams: time-out until the engine's status line, in seconds. vLLM sends it before the prefill, so
    an engine that is silent for longer hangs."""
    first_byte_timeout_s: float = 600.0
    """Time-out until the first byte of the answer's body, in seconds: queue and prefill; without
    streaming, the whole generation."""
    idle_timeout_s: float = 120.0
    """Longest pause between two pieces of an answer that has begun, in seconds."""
    engine_connections_max: int = 4096
    """Most open connections to one server; requests beyond it try another engine, or get 503."""
    idle_connections_max: int = 256
    """Most idle connections kept open to one server."""
    keepalive_s: float = 4.0
    """How long an idle connection to an engine is kept. Less than the 5 s after which vLLM closes it, so
    that reuse rarely meets a closing connection."""
    head_bytes_max: int = 64 * 1024
    """Largest answer head of an engine."""
    read_ahead_bytes_max: int = 256 * 1024
    """Bytes of an answer held for a slow client; beyond it, reading from the engine pauses."""


# Counters of connections to engines; the metrics exporter reads them.


class ClientStats(msgspec.Struct):
    """Connections to engines. Monotone."""

    stale_reconnects: Annotated[int, "kvatlas_proxy_stale_reconnects_total"] = 0
    """Kept-alive connections that died before a response byte and were replaced for free."""
    engine_connects: Annotated[int, "kvatlas_proxy_engine_connects_total"] = 0
    """Connections opened to engines."""
    engine_pool_overflows: Annotated[int, "kvatlas_proxy_engine_pool_overflows_total"] = 0
    """Requests that found ``engine_connections_max`` connections of an engine in use."""
    descriptor_shortages: Annotated[int, "kvatlas_proxy_descriptor_shortages_total"] = 0
    """Connections to engines that this process had no file descriptor for."""
    read_pauses: Annotated[int, "kvatlas_proxy_read_pauses_total"] = 0
    """Times reading from an engine paused because the client was slower."""


_FIELD_SIGNS = 4
"""Bytes of a field's line besides name and value."""

Reason = Literal["refused", "reset", "timeout", "broken_stream", "overflow", "aborted"]


class UpstreamError(Exception):
    """An engine did not answer whole. ``sent``: the engine may have seen (some of) the request.

    ``refused``: no connection; ``reset``: lost or nonsense before the head was whole; ``timeout``;
    ``broken_stream``: lost after the head; ``overflow``: our own limit of connections; ``aborted``: its
    answer says that it gave the request up.
    """

    def __init__(self, reason: Reason, *, sent: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent
        self.stale = False
        """It was a kept connection, which the engine may have closed before it saw anything."""
        self.abandoned = False
        """Its engine went down: the request is no reason for that."""


class UpstreamConnection(asyncio.Protocol):
    """See the module. Made by ``UpstreamClient``; used from the event loop only."""

    __slots__ = (
        *("_active", "_body_end", "_buffered", "_clock", "_error", "_fed_bytes", "_fields", "_head_bytes"),
        *("_head_done", "_keep", "_loop", "_method", "_on_lost", "_parser", "_paused", "_pieces"),
        *("_settings", "_stats", "_step", "_transport", "_unfinished_bytes", "_waiter", "_weighed"),
        *("answered", "complete", "deadline", "headers", "lost", "on_body", "status"),
    )

    def __init__(
        self,
        settings: ClientSettings,
        stats: ClientStats,
        clock: Callable[[], float],
        on_lost: Callable[[UpstreamConnection], None],
    ) -> None:
        self._settings = settings
        self._stats = stats
        self._clock = clock
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._step: Callable[[], bool] | None = None
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # called by the parser without a Python frame in between
        self._parser = httptools.HttpResponseParser(self)
        self.deadline = NEVER
        self.lost = False
        self._active = False
        self._reset("GET")

    def _reset(self, method: str) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        self.answered = False  # a byte of the answer has arrived
        self._method = method
        self._head_done = False
        self._fields = self.headers  # where the parser's go: later to the trailer's
        self._weighed = 0  # number of them that are in ``_head_bytes``
        self._head_bytes = 0  # of the head, later of the trailer: what the parser has given
        self._fed_bytes = 0  # which the head is not larger than
        self._unfinished_bytes = 0  # and what it was fed since without giving anything
        self._body_end = -1  # number of pieces when the answer ended
        self._keep = False
        self._error: UpstreamError | None = None
        self._buffered = 0
        self._paused = False
        self._pieces.clear()

    # The exchange, as the client of this class sees it.

    def start(self, method: str, head: bytes, body: bytes, head_timeout_s: float) -> None:
        """Send a request. ``head`` is the whole head with its blank line."""
        transport = self._transport
        self._reset(method)
        self._active = True
        if self.lost or transport is None:
            self._error = UpstreamError("reset")
            return
        self.deadline = self._clock() + head_timeout_s
        if not body:
            transport.write(head)
        else:
            transport.writelines((head, body))

    def has_head(self) -> bool:
        """``status`` and ``headers`` are there. Raises ``UpstreamError`` if they never will be."""
        if not self._head_done and self._error is not None:
            raise self._error
        return self._head_done

    async def read(self) -> bytes:
        """The body bytes that have arrived, at least one; ``b""`` at the end. Raises ``UpstreamError``."""
        while (data := self.take()) is None:
            await self.changed()
        return data

    def take(self) -> bytes | None:
        """Return what ``read`` would without waiting; None: nothing has arrived."""
        pieces = self._pieces
        if not pieces:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            return None
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._buffered = 0
        if self._paused:
            self._resume()
        return data

    def changed(self, step: Callable[[], bool] | None = None) -> asyncio.Future[None]:
        """Done at the next thing that happens here; with ``step``, which is called for each, at the first one
        that this says False to, or raises, and so this does."""
        waiter = self._waiter = self._loop.create_future()
        self._step = step
        return waiter

    @property
    def finished(self) -> bool:
        """Everything has been read: no ``read`` will give another byte."""
        return self.complete and not self._pieces

    def usable(self) -> bool:
        """Idle and, as far as is known, still open at the other end."""
        return not self.lost and self._transport is not None and not self._transport.is_closing()

    def release(self) -> bool:
        """End the exchange. True: fit for another one; else the connection is being closed."""
        transport = self._transport
        if self._active and self.complete and self._keep and not self.lost and transport is not None:
            self._active = False
            if transport.get_write_buffer_size() == 0 and not transport.is_closing():
                self._pieces.clear()
                if self._paused:
                    self._resume()
                self.deadline = self._clock() + self._settings.keepalive_s
                return True
        self.abort()
        return False

    def abort(self) -> None:
        """Close at once: an engine sees its client gone."""
        self._active = False
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """The deadline passed: an idle connection is closed, a waiting exchange fails."""
        self.deadline = NEVER
        if self._active and not self.complete:
            self._error = self._error or UpstreamError("timeout")
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None:
            return
        if waiter.done():  # who waited was cancelled
            self._waiter = self._step = None
            return
        if self._step is not None:
            try:
                if self._step():
                    return
            except Exception as error:  # noqa: BLE001  # the waiter's own
                waiter.set_exception(error)
                self._waiter = self._step = None
                return
        self._waiter = self._step = None
        waiter.set_result(None)

    def _resume(self) -> None:
        self._paused = False
        if self._transport is not None and not self.lost:
            self._transport.resume_reading()
        if not self.complete:
            self.deadline = self._clock() + self._settings.idle_timeout_s

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._active:
            self.abort()  # unsolicited: it must not be taken for the next answer
            return
        if self.complete:
            self._keep = False
            return
        if not self._head_done:
            self.answered = True
            self._fed_bytes += len(data)
        pieces, fields = len(self._pieces), len(self._fields)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._keep = False
            if not self.complete:
                self._fail()
        if self._body_end >= 0:
            if len(self._pieces) > self._body_end:
                del self._pieces[self._body_end :]
            if self._method == "HEAD":
                self._parser = httptools.HttpResponseParser(self)
        elif self._head_done and len(self._pieces) > pieces:
            self._unfinished_bytes = 0
            self._buffer(len(data))
        else:  # a part of a head, of a trailer, or of a chunk's frame: the parser keeps it and tells nothing
            given = len(self._fields) > fields
            self._unfinished_bytes = 0 if given else self._unfinished_bytes + len(data)
            if self._too_large():
                self._fail()
        self._wake()

    def _too_large(self) -> bool:
        """Count the head's or trailer's fields that came, once each: whether they are too many."""
        new = self._fields[self._weighed :] if self._weighed else self._fields
        self._weighed += len(new)
        self._head_bytes += sum([len(name) + len(value) for name, value in new], _FIELD_SIGNS * len(new))
        return self._head_bytes + self._unfinished_bytes > self._settings.head_bytes_max

    def _buffer(self, size: int) -> None:
        self._buffered += size
        if self._paused:
            return
        if self._buffered > self._settings.read_ahead_bytes_max and self._transport is not None:
            self._transport.pause_reading()
            self._paused = True
            self._stats.read_pauses += 1
            self.deadline = NEVER  # now the client is waited for, not the engine
        else:
            self.deadline = self._clock() + self._settings.idle_timeout_s

    def _fail(self) -> None:
        """Nonsense from the engine: like a lost connection."""
        self._error = self._error or UpstreamError("broken_stream" if self._head_done else "reset")
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._keep = False
        self.deadline = NEVER
        if self._active and not self.complete and self._error is None:
            if exc is None and self._head_done and not self._framed():
                self._finish()  # the end of the connection is the end of this body
            else:
                self._fail()
        self._on_lost(self)
        self._wake()

    # httptools

    def on_message_begin(self) -> None:
        if self.complete:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._head_done:
            return  # of a second, unsolicited answer
        if self._fed_bytes > self._settings.head_bytes_max and self._too_large():
            raise OverflowError  # the parser gives up
        status = self._parser.get_status_code()
        if status < 200:
            self._too_large()
            self.headers = self._fields = []
            self._weighed = 0
            return
        self._fields, self._weighed, self._head_bytes = [], 0, 0
        self.status = status
        self._head_done = True
        self._keep = self._parser.should_keep_alive()
        self.deadline = self._clock() + self._settings.first_byte_timeout_s
        if self._method == "HEAD":
            self._finish()

    def _framed(self) -> bool:
        """The head says where the body ends."""
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def on_message_complete(self) -> None:
        if self._head_done and not self.complete:
            self._finish()

    def _finish(self) -> None:
        self.complete = True
        self._body_end = len(self._pieces)
        self.deadline = NEVER


# Keep-alive connections to engines: a bounded pool per origin, and the free second try on a stale one.
#
# An idle connection that the engine closed may look alive until it is written to. A reused connection that
# dies before a byte of the answer is therefore replaced once by a fresh one, to the same engine, without
# counting as a failure. Methods that must not be sent twice never reuse a connection.


REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "POST"})
"""Inference is POSTed and may be repeated; everything else is sent at most once."""


class Origin(msgspec.Struct, gc=False):
    """Where a base URL leads, and the connections there."""

    host: str
    port: int
    tls: bool
    host_header: bytes
    path_prefix: bytes
    idle: list[UpstreamConnection]
    open: int = 0

    @classmethod
    def of(cls, base_url: str) -> Origin:
        """Parse ``http(s)://host[:port][/prefix]``. Raises ``ValueError`` for anything else."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"not an http(s) URL: {base_url!r}")
        tls = url.scheme == "https"
        return cls(
            host=url.hostname,
            port=url.port or (443 if tls else 80),
            tls=tls,
            host_header=url.netloc.rpartition("@")[2].encode(),
            path_prefix=url.path.rstrip("/").encode(),
            idle=[],
        )


class UpstreamClient:
    """Asks engines. One per event loop; ``close`` when done. ``tls`` is for ``https://`` origins."""

    def __init__(
        self,
        settings: ClientSettings,
        stats: ClientStats,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._stats = stats
        self._clock = clock
        self._origins: dict[str, Origin] = {}
        self._tls = tls or ssl.create_default_context()
        self._sweeper = Sweeper(clock, _tick(settings))
        self._owner: dict[UpstreamConnection, Origin] = {}
        self.configure(settings)

    def configure(self, settings: ClientSettings) -> None:
        """Set limits for new connections."""
        self._settings = settings
        self._sweeper.tick_s = min(self._sweeper.tick_s, _tick(settings))

    def origin(self, base_url: str) -> Origin:
        """The origin of an engine; made on first use, dropped by ``forget``."""
        origin = self._origins.get(base_url)
        if origin is None:
            origin = self._origins[base_url] = Origin.of(base_url)
        return origin

    async def exchange(
        self,
        origin: Origin,
        method: str,
        head: bytes,
        body: bytes,
        head_timeout_s: float,
        *,
        once: Callable[[], None] | None = None,
    ) -> UpstreamConnection:
        """Send a request and wait for the answer's head. Raises ``UpstreamError``.

        The caller owns the connection until ``done``; when this raises (cancelled, too) it is closed.
        ``once``: the request is written once at most, and this is called right before; what it raises ends
        the exchange.
        """
        stale = False
        connection = self._reusable(origin) if method in REPEATABLE else None
        if connection is not None:
            try:
                if once is not None:
                    once()
                connection.start(method, head, body, head_timeout_s)
                while not connection.has_head():
                    await connection.changed()
            except UpstreamError as error:
                error.stale = error.reason == "reset" and not connection.answered
                if not error.stale or once is not None:
                    raise
                self._stats.stale_reconnects += 1
                stale = True
            except BaseException:
                connection.abort()
                raise
            else:
                return connection
        try:
            connection = await self._connect(origin)
        except UpstreamError as error:
            error.sent = (
                error.sent or stale
            )  # the stale connection may have taken the request, and the engine
            raise
        try:
            if once is not None:
                once()
            connection.start(method, head, body, head_timeout_s)
            while not connection.has_head():
                await connection.changed()
        except BaseException:
            connection.abort()
            raise
        return connection

    def _reusable(self, origin: Origin) -> UpstreamConnection | None:
        while origin.idle:
            connection = origin.idle.pop()
            if connection.usable():
                return connection
        return None

    def done(self, connection: UpstreamConnection) -> None:
        """The exchange is over, whole or not: keep the connection if it can be used again."""
        if connection.release():
            idle = self._owner[connection].idle
            if len(idle) < self._settings.idle_connections_max:
                idle.append(connection)
            else:
                connection.abort()

    async def _connect(self, origin: Origin) -> UpstreamConnection:
        if origin.open >= self._settings.engine_connections_max:
            self._stats.engine_pool_overflows += 1
            raise UpstreamError("overflow", sent=False)
        origin.open += 1
        connection = UpstreamConnection(self._settings, self._stats, self._clock, self._lost)
        self._owner[connection] = origin
        self._stats.engine_connects += 1
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except TimeoutError:
            self._lost(connection)
            raise UpstreamError("timeout", sent=False) from None
        except OSError as error:
            self._lost(connection)
            if ran_out(error):
                self._stats.descriptor_shortages += 1
                raise UpstreamError("overflow", sent=False) from None
            raise UpstreamError("refused", sent=False) from None
        except BaseException:
            connection.abort()
            self._lost(connection)
            raise
        if not connection.lost:
            self._sweeper.add(connection)
        return connection

    def _lost(self, connection: UpstreamConnection) -> None:
        origin = self._owner.pop(connection, None)
        if origin is None:
            return
        self._sweeper.discard(connection)
        origin.open -= 1
        if connection in origin.idle:
            origin.idle.remove(connection)

    def forget(self, base_url: str) -> None:
        """The engine left the fleet: close what is idle; running exchanges end by themselves."""
        origin = self._origins.pop(base_url, None)
        if origin is not None:
            while origin.idle:
                origin.idle.pop().abort()

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._owner):
            connection.abort()
            self._lost(connection)
        self._origins.clear()


def _tick(settings: ClientSettings) -> float:
    return tick_for(
        settings.keepalive_s,
        settings.stream_head_timeout_s,
        settings.first_byte_timeout_s,
        settings.idle_timeout_s,
    )
