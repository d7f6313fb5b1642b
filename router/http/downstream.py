"""One HTTP/1.1 connection of a client (RFC 9112): parsing, limits, time-outs, pipelining, and how it ends.

Takes the place of uvicorn's protocol class because that one has no header, body or stall time-out, no limit
on header bytes, closes on a client that is still sending, and loses the body of a request that offers an
upgrade. Requests are answered one after another in the order they came (pipelining). What always holds:
every state but "the application is working" has a deadline; whatever the client sends beyond its limits ends
in an OpenAI-shaped error and a closed connection, after the answers to what came whole before it; the work
for one read is linear in its bytes, however they are cut into chunks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import httptools
from uvicorn.server import ServerState

from router.http.listener import LINGER_S_MAX, PROBE_PATHS, ListenConfig, client_of
from router.http.request_cycle import (
    RequestCycle,
    connection_scope,
    error_answer,
    head_problem,
    request_scope,
)
from router.http.settings import ListenSettings, ListenStats
from router.http.sockets import NEVER, is_last
from router.openai.errors import (
    ApiError,
    bad_request,
    head_too_large,
    no_tunnel,
    request_timeout,
    too_many_bodies,
    too_many_connections,
)

_LINGER_BYTES_MAX = 64 * 1024 * 1024
PIPELINED_MAX = 16
"""Most requests that one connection may have waiting (HTTP pipelining); beyond it, reading pauses."""


class ClientConnection(asyncio.Protocol):
    """See the module. uvicorn makes one per accepted connection."""

    __slots__ = (
        *("_app_state", "_body_due", "_client", "_current", "_ending", "_last_word", "_lingered_bytes"),
        *("_queue", "_reader", "_spare", "_state", "_sweeper", "app", "capacity", "clock"),
        *("closing_soon", "deadline", "loop", "nothing", "read_paused", "settings", "stats", "transport"),
        *("write_paused",),
    )

    def __init__(
        self,
        config: ListenConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.settings = config.listen
        self.stats = config.listen_stats
        self.clock = config.clock
        self.loop = _loop or asyncio.get_running_loop()
        self.app = config.loaded_app
        self._state = server_state
        self._app_state = app_state
        self._sweeper = config.sweeper
        self.capacity = config.capacity
        self._client = ""
        self._spare = False
        self.transport: asyncio.Transport  # from connection_made on
        self._reader: RequestReader  # from connection_made on, too
        self._current: RequestCycle | None = None
        self._queue: deque[RequestCycle] = deque()
        self._body_due = NEVER
        self._last_word: ApiError | None = None  # for after the requests that came before what was refused
        self.read_paused = False
        self.write_paused: asyncio.Future[None] | None = None  # done when the client has caught up
        self.nothing: asyncio.Future[None] = self.loop.create_future()
        self.nothing.set_result(None)
        self._lingered_bytes = -1  # >= 0: only throwing away what still comes
        self.closing_soon = config.lame
        """Answers say that the connection closes behind them. One that had begun before, and said nothing, is
        kept to that: its client may be sending the next request."""
        self._ending = False
        self.deadline = NEVER

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.stats.connections += 1
        self.stats.descriptor_shortages += is_last(transport.get_extra_info("socket"))
        self._client = client_of(transport.get_extra_info("peername"))
        self._spare = not self.capacity.enter(self._client)
        if self._spare:
            self.capacity.add_spare(self)
        else:
            self._state.connections.add(self)  # type: ignore[arg-type]  # uvicorn's set of its own protocols
        self._sweeper.add(self)
        scope = self.shared_scope(transport, self._app_state)
        self._reader = RequestReader(self, scope, self.settings, self.stats)
        self.deadline = self.clock() + self.settings.header_timeout_s

    def shared_scope(self, transport: asyncio.BaseTransport, app_state: dict[str, Any]) -> dict[str, Any]:
        """The part of the ASGI scope that its requests share."""
        return connection_scope(transport, app_state)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._state.connections:
            self._state.connections.discard(self)
            self.capacity.leave(self._client)
        self.capacity.drop_spare(self)
        self._sweeper.discard(self)
        self._leave()
        self.resume_writing()

    def eof_received(self) -> None:
        # A client that left and one that closed its sending side alone look alike until the answer is written
        # (FIN): following the second would let engines compute whole answers for the first.
        self._leave()

    def data_received(self, data: bytes) -> None:
        if self._lingered_bytes >= 0:
            self._throw_away(len(data))
            return
        reader = self._reader
        try:
            try:
                reader.read(data, self.clock())
            finally:
                if reader.came and self._lingered_bytes < 0 and self.write_paused is None:
                    self._rearm()
        except RefusedRequestError as refused:
            self._refuse(refused.error)

    def pause_writing(self) -> None:
        self.write_paused = self.loop.create_future()
        self._rearm()

    def resume_writing(self) -> None:
        if self.write_paused is not None:
            if not self.write_paused.done():
                self.write_paused.set_result(None)
            self.write_paused = None
            self._rearm()

    def expire(self) -> None:
        """The deadline passed; what it was for follows from the state."""
        self.deadline = NEVER
        if self.write_paused is not None:
            self.stats.stalled_clients += 1
            self.transport.abort()
        elif self._lingered_bytes >= 0 or self.transport.is_closing():
            self.transport.abort()
        elif self._reader.exchange is not None and self._reader.exchange is self._current:
            self.stats.body_timeouts += 1
            self._time_out("The request body did not arrive in time.")
        elif self._reader.in_head:
            self.stats.header_timeouts += 1
            self._time_out("The request head did not arrive in time.")
        else:
            self._close()

    def _time_out(self, message: str) -> None:
        if self._current is not None and self._current.started:
            self.transport.abort()
        else:
            self._refuse(request_timeout(message))

    def shutdown(self) -> None:
        """The server ends: idle connections close now, busy ones after their answer."""
        self.closing_soon = self._ending = True
        if self._current is None and not self._reader.in_head and self._lingered_bytes < 0:
            self._close()

    @property
    def busy(self) -> bool:
        """A request is being answered."""
        return self._current is not None

    # RequestReader

    def head_came(self, scope: dict[str, Any], *, keep_alive: bool, expects: bool) -> RequestCycle:
        """A request begins, or waits for those before it. Raises ``RefusedRequestError``."""
        if self._spare and scope["path"] not in PROBE_PATHS:
            self.stats.connections_refused += 1
            raise RefusedRequestError(too_many_connections())
        exchange = RequestCycle(self, scope, keep_alive and not self._spare, expects)
        if self._current is None:
            self._begin(exchange, self._reader.read_s)
        else:
            self._queue.append(exchange)
            if len(self._queue) >= PIPELINED_MAX:
                self.stats.pipeline_pauses += 1
                self.pause_reading()
        return exchange

    def body_came(self, exchange: RequestCycle, data: bytes, *, last: bool) -> None:
        """A piece of its body: for the application, and for the time that it may take."""
        waiting = exchange.body_received(data)
        if waiting < 0:
            self.stats.bodies_refused += 1
            self._refuse(too_many_bodies())
            return
        if not last and exchange is self._current:
            read_s = self._reader.read_s
            earned_s = len(data) / self.settings.body_bytes_per_s_min
            self._body_due = min(self._body_due + earned_s, read_s + self.settings.body_grace_s)
        if waiting > self.settings.body_ahead_bytes_max:
            self.pause_reading()

    def trailer_began(self) -> None:
        """From its first field on a trailer has the time that a head has."""
        self._body_due = min(self._body_due, self._reader.read_s + self.settings.header_timeout_s)

    # Exchanges

    def _begin(self, exchange: RequestCycle, now: float) -> None:
        self._current = exchange
        self._body_due = now + self.settings.body_grace_s
        self.stats.requests += 1
        tasks = self._state.tasks
        # Not by ``create_task``: a name of its own costs more than the rest of a task.
        task = exchange.task = asyncio.Task(exchange.run(self.app, tasks), loop=self.loop, name="request")
        tasks.add(task)

    def answered(self, *, keep_alive: bool) -> None:
        """The current answer is complete: go on with the next request, or close."""
        body_open = self._reader.exchange is self._current
        self._current = None
        if not keep_alive or self._ending:
            if body_open:
                self._linger()
            else:
                self._close()
            return
        if body_open:
            self._reader.exchange = None  # the rest of that body is parsed and dropped
        now = self.clock()
        if self._reader.in_head:  # what has begun to come meanwhile
            self._reader.head_due = now + self.settings.header_timeout_s
        if self._queue:
            self._begin(self._queue.popleft(), now)
        elif self._last_word is not None:
            self._refuse(self._last_word)
            return
        if self.read_paused:
            self.resume_reading()
        self._rearm()

    def _rearm(self) -> None:
        """The deadline that belongs to the state."""
        settings, current = self.settings, self._current
        if self.write_paused is not None:
            self.deadline = self.clock() + settings.stall_timeout_s
        elif self.read_paused:
            self.deadline = NEVER  # the application is waited for
        elif current is not None:
            body_open = self._reader.exchange is current
            self.deadline = (
                min(self.clock() + settings.body_timeout_s, self._body_due) if body_open else NEVER
            )
        elif self._reader.in_head:
            self.deadline = self._reader.head_due
        else:
            self.deadline = self.clock() + settings.keepalive_timeout_s

    def _close(self) -> None:
        """Close after what is written has been taken, which a client may delay only so long."""
        self.transport.close()
        self.deadline = self.clock() + self.settings.stall_timeout_s

    def abort(self) -> None:
        """Cut the connection: the answer cannot be completed, and the client must notice."""
        self.transport.abort()

    def pause_reading(self) -> None:
        """Until the application takes what has come. The client is not to blame for the wait."""
        if not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()
            self._rearm()

    def resume_reading(self) -> None:
        """The application wants more; that waits while as many requests are queued as may be."""
        room = len(self._queue) < PIPELINED_MAX
        if self.read_paused and room and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()
            self._body_due = self.clock() + self.settings.body_grace_s
            self._rearm()

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no proper request, after what came whole before it, and close."""
        if self._reader.exchange is not None and self._queue and self._reader.exchange is self._queue[-1]:
            self._queue.pop()  # what is refused is this one's body
            self._reader.exchange = None
        if self._current is not None and self._reader.exchange is None:
            self._last_word = error
            self._throw_away_from_here()
            return
        if self._current is None or not self._current.started:
            self.transport.write(error_answer(error))
        self._leave()
        self._linger()

    def _leave(self) -> None:
        for exchange in (self._current, *self._queue):
            if exchange is not None:
                exchange.leave()
        self._queue.clear()
        self._current = None
        self._reader.exchange = None

    def _linger(self) -> None:
        """Close for writing, and throw away what still comes for a while.

        Closing at once would reset the connection, and the client would lose the answer it has been sent.
        """
        transport = self.transport
        if transport.is_closing():
            return
        self._throw_away_from_here()
        self.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self.deadline = self.clock() + LINGER_S_MAX

    def _throw_away_from_here(self) -> None:
        self._reader.stop()
        self._lingered_bytes = 0

    def _throw_away(self, size: int) -> None:
        self._lingered_bytes += size
        if self._lingered_bytes > _LINGER_BYTES_MAX:
            self.abort()


_FIELD_SIGNS = 4
"""Bytes of a field's line besides name and value."""
_UPGRADE_FIELDS = frozenset((b"upgrade", b"connection", b"http2-settings"))


class RefusedRequestError(Exception):
    """``error`` is the answer. Raised in a callback of the parser, which gives up, or after it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.code)
        self.error = error


# Requests as httptools parses them: callbacks gather a head's fields and a body's bytes; the connection gets
# each head once it is complete, and a body's bytes once for each read. An offer to upgrade is declined.


class RequestReader:
    """Parses what one client sends. ``connection`` is the part of the scopes that all requests share.

    A head or trailer beyond its limits is refused before it is complete. No request begins after ``stop``.
    """

    __slots__ = (
        *("_connection", "_fed_bytes", "_fields", "_given", "_head_bytes", "_in_trailer", "_parser"),
        *("_pieces", "_read_bytes", "_receiver", "_settings", "_stats", "_stopped", "_unfinished_bytes"),
        *("_url", "_weighed", "came", "exchange", "head_due", "in_head", "on_body", "read_s"),
    )

    def __init__(
        self,
        receiver: ClientConnection,
        connection: dict[str, Any],
        settings: ListenSettings,
        stats: ListenStats,
    ) -> None:
        self._receiver = receiver
        self._connection = connection
        self._settings = settings
        self._stats = stats
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # called by the parser without a Python frame in between
        self._parser = httptools.HttpRequestParser(self)
        self.exchange: RequestCycle | None = None
        """Whose body is being received."""
        self.in_head = False
        self._in_trailer = False
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []  # of the head, then of the trailer
        self._weighed = 0  # number of them that are in ``_head_bytes``
        self._head_bytes = 0  # of the head or trailer: what the parser has given
        self._unfinished_bytes = 0  # and what it was fed since without giving anything
        self._fed_bytes = 0  # since the read that the message began in, which is not less than its head
        self._read_bytes = 0  # of this read
        self.read_s = 0.0
        """When it came."""
        self._given = False
        self.came = False
        """It brought more than a part of a head's line."""
        self.head_due = NEVER
        self._stopped = False

    def stop(self) -> None:
        """Discard whatever arrives from here on."""
        self._stopped, self.in_head = True, False

    def read(self, data: bytes, now: float) -> None:
        """Parse what came. Raises ``RefusedRequestError``."""
        self.read_s, self.came = now, False
        rest: bytes | memoryview = data
        try:
            while rest and not self._stopped:
                try:
                    self._parse(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    rest = memoryview(rest)[upgrade.args[0] :]
                    self._decline_upgrade()
        except httptools.HttpParserError as error:
            refused = error.__context__
            if isinstance(refused, RefusedRequestError):
                raise refused from None
            self._stats.bad_requests += 1
            raise RefusedRequestError(
                bad_request("invalid_http", "This is not a valid HTTP/1.1 request.")
            ) from error

    def _parse(self, data: bytes | memoryview) -> None:
        """Feed the parser. Raises what it raises."""
        self._given = False
        self._read_bytes = size = len(data)
        self._fed_bytes += size
        known = len(self._fields)
        try:
            self._parser.feed_data(data)
            if self.in_head or self.exchange is not None:
                self._check_unfinished(size, known)
        finally:
            if self._given:
                self.came = True
            if self._pieces:
                self._hand_over()
                self.came = True

    def _check_unfinished(self, size: int, known: int) -> None:
        """Count the bytes of an unfinished head, trailer or chunk frame after a read.

        ``known``: fields before the read. The parser keeps unfinished fields and frames without an event.
        """
        fields = len(self._fields)
        given = self._given or self._pieces or fields > known
        self._unfinished_bytes = 0 if given else self._unfinished_bytes + size
        if fields and not self.in_head and not self._in_trailer:
            self._in_trailer = self._given = True
            self._receiver.trailer_began()
        self._weigh_fields(self._unfinished_bytes)

    def _weigh_fields(self, more_bytes: int = 0) -> None:
        """Count the head's or trailer's fields that came, once each. Raises ``RefusedRequestError``
        where they are too many, together with ``more_bytes``."""
        new = self._fields[self._weighed :] if self._weighed else self._fields
        self._weighed += len(new)
        self._head_bytes += sum([len(name) + len(value) for name, value in new], _FIELD_SIGNS * len(new))
        line_bytes = len(self._url) if self.in_head else 0
        if line_bytes + self._head_bytes + more_bytes > self._settings.header_bytes_max:
            self._stats.header_overflows += 1
            raise RefusedRequestError(head_too_large(self._settings.header_bytes_max))

    def _hand_over(self, *, last: bool = False) -> None:
        """Give the request the body bytes that the parser found in this read, in one piece."""
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self.exchange is not None:
            self._receiver.body_came(self.exchange, data, last=last)

    # httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._fields = []
        self.in_head, self._in_trailer = True, False
        self._weighed = self._head_bytes = 0
        self._fed_bytes = self._read_bytes
        self.head_due = self.read_s + self._settings.header_timeout_s
        self._given = True

    def on_url(self, url: bytes) -> None:
        self._given = True
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._stopped:
            return  # behind what was refused, in the same read
        parser = self._parser
        method = parser.get_method()
        if method == b"CONNECT":
            raise RefusedRequestError(no_tunnel())
        if parser.should_upgrade():
            return
        if self._fed_bytes > self._settings.header_bytes_max:
            self._weigh_fields()
        fields = self._fields
        told = dict(fields)
        persists: bool = parser.should_keep_alive()
        # A connection that stays open without being asked to is of 1.1; the parser spells its version slowly.
        asked = b"connection" in told or b"proxy-connection" in told
        version = "1.1" if persists and not asked else parser.get_http_version()
        hosts: int = b"host" in told
        if len(told) < len(fields):  # something was said twice
            hosts = [name for name, _ in fields].count(b"host")
        if hosts != 1 or self._url.find(b"#") >= 0:
            self._look_for_problems(version, hosts)
        self.in_head = False
        self._fields = []
        self._weighed = self._head_bytes = 0
        self._given = True
        scope = request_scope(self._connection, version, method, self._url, fields, told)
        expects = b"expect" in told and _expects(fields)
        self.exchange = self._receiver.head_came(
            scope, keep_alive=persists and version == "1.1", expects=expects
        )

    def _look_for_problems(self, version: str, hosts: int) -> None:
        """Raises ``RefusedRequestError`` where the head has one."""
        if problem := head_problem(version, self._url, hosts):
            self._stats.bad_requests += 1
            raise RefusedRequestError(bad_request("invalid_http", problem))

    def on_message_complete(self) -> None:
        if self._pieces:
            self._hand_over(last=True)
        if self._fields and not self.in_head:
            self._weigh_fields()
        self._given = True
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.body_ended()

    def _decline_upgrade(self) -> None:
        """Parse the request again without its offer to upgrade, which a server may ignore.

        httptools takes everything after such a head for the other protocol and would lose the body.
        """
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), self._url, version)]
        lines += [
            b"%b: %b\r\n" % (name, value) for name, value in self._fields if name not in _UPGRADE_FIELDS
        ]
        self._parser = httptools.HttpRequestParser(self)
        self._parse(b"".join((*lines, b"\r\n")))


def _expects(fields: list[tuple[bytes, bytes]]) -> bool:
    """Whether the client waits to be told to send the body."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in fields)
