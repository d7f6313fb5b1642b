"""One client connection: HTTP/1.1 parsing (httptools), its time-outs and limits, and its queue of requests.

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

from router.http.deadlines import NEVER
from router.http.server.capacity import PROBE_PATHS, client_of
from router.http.server.config import ListenConfig
from router.http.server.exchange import Exchange, error_answer
from router.http.server.scope import connection_scope, head_problem, request_scope
from router.openai.errors import (
    ApiError,
    bad_request,
    head_too_large,
    no_tunnel,
    request_timeout,
    too_many_bodies,
    too_many_connections,
)

_FIELD_SIGNS = 4
"""Bytes of a field's line besides name and value."""
_UPGRADE_FIELDS = frozenset((b"upgrade", b"connection", b"http2-settings"))
_LINGER_BYTES_MAX = 64 * 1024 * 1024


class _RefusedError(Exception):
    """``error`` is the answer. Raised in a callback of the parser, which gives up, or after it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.code)
        self.error = error


class ClientConnection(asyncio.Protocol):
    """See the module. uvicorn makes one per accepted connection."""

    __slots__ = (
        *("_app_state", "_body_due", "_client", "_current", "_ending", "_fed_bytes", "_fields"),
        *("_given", "_head_bytes", "_head_due", "_in_head", "_in_trailer", "_last_word"),
        *("_lingered_bytes", "_parser", "_pieces", "_queue", "_read_bytes", "_read_s", "_reading"),
        *("_scope", "_spare", "_state", "_sweeper", "_unfinished_bytes", "_url", "_weighed", "app"),
        *("capacity", "clock", "closing_soon", "deadline", "loop", "nothing", "on_body", "read_paused"),
        *("settings", "stats", "transport", "write_paused"),
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
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # called by the parser without a Python frame in between
        self._parser = httptools.HttpRequestParser(self)
        self._current: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._reading: Exchange | None = None  # whose body is being received
        self._in_head = False
        self._in_trailer = False
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []  # of the head, then of the trailer
        self._weighed = 0  # number of them that are in ``_head_bytes``
        self._head_bytes = 0  # of the head or trailer: what the parser has given
        self._unfinished_bytes = 0  # and what it was fed since without giving anything
        self._fed_bytes = 0  # since the read that the message began in, which is not less than its head
        self._read_bytes = 0  # of this read
        self._read_s = 0.0  # when it came
        self._given = False
        self._head_due = NEVER
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
        self._client = client_of(transport.get_extra_info("peername"))
        self._spare = not self.capacity.enter(self._client)
        if self._spare:
            self.capacity.add_spare(self)
        else:
            self._state.connections.add(self)  # type: ignore[arg-type]  # uvicorn's set of its own protocols
        self._sweeper.add(self)
        self._scope = connection_scope(transport, self._app_state)
        self.deadline = self.clock() + self.settings.header_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._state.connections:
            self._state.connections.discard(self)
            self.capacity.leave(self._client)
        self.capacity.drop_spare(self)
        self._sweeper.discard(self)
        self._leave()
        self.resume_writing()

    def eof_received(self) -> None:
        # A client that closed its sending side waits for no answer: nobody but broken scripts does that.
        self._leave()

    def data_received(self, data: bytes) -> None:
        if self._lingered_bytes >= 0:
            self._throw_away(len(data))
            return
        rest: bytes | memoryview = data
        try:
            while rest and self._lingered_bytes < 0:
                try:
                    self._parse(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    rest = memoryview(rest)[upgrade.args[0] :]
                    self._decline_upgrade()
        except httptools.HttpParserError as error:
            refused = error.__context__
            if isinstance(refused, _RefusedError):
                self._refuse(refused.error)
            else:
                self.stats.bad_requests += 1
                self._refuse(bad_request("invalid_http", "This is not a valid HTTP/1.1 request."))
        except _RefusedError as refused:
            self._refuse(refused.error)

    def _parse(self, data: bytes | memoryview) -> None:
        """Feed the parser. Raises what it raises."""
        self._given = False
        self._read_s = self.clock()
        self._read_bytes = size = len(data)
        self._fed_bytes += size
        known = len(self._fields)
        try:
            self._parser.feed_data(data)
            if self._in_head or self._reading is not None:
                self._check_unfinished(size, known)
        finally:
            came = self._given
            if self._pieces:
                self._hand_over()
                came = True
            if came and self._lingered_bytes < 0 and self.write_paused is None:
                self._rearm()

    def _check_unfinished(self, size: int, known: int) -> None:
        """A message goes on behind this read, before which its head or trailer had so many known fields.

        The parser keeps what is not yet a whole field or chunk frame, and tells nothing of it.
        """
        fields = len(self._fields)
        given = self._given or self._pieces or fields > known
        self._unfinished_bytes = 0 if given else self._unfinished_bytes + size
        if fields and not self._in_head:
            self._begin_trailer()
        self._weigh_fields(self._unfinished_bytes)

    def _weigh_fields(self, more_bytes: int = 0) -> None:
        """Count the head's or trailer's fields that came, once each. Raises ``_RefusedError`` where they, and
        so many bytes more, are too many."""
        new = self._fields[self._weighed :] if self._weighed else self._fields
        self._weighed += len(new)
        self._head_bytes += sum([len(name) + len(value) for name, value in new], _FIELD_SIGNS * len(new))
        line_bytes = len(self._url) if self._in_head else 0
        if line_bytes + self._head_bytes + more_bytes > self.settings.header_bytes_max:
            raise _RefusedError(self._head_too_large())

    def _head_too_large(self) -> ApiError:
        self.stats.header_overflows += 1
        return head_too_large(self.settings.header_bytes_max)

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
        elif self._reading is not None and self._reading is self._current:
            self.stats.body_timeouts += 1
            self._time_out("The request body did not arrive in time.")
        elif self._in_head:
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
        if self._current is None and not self._in_head and self._lingered_bytes < 0:
            self._close()

    @property
    def busy(self) -> bool:
        """A request is being answered."""
        return self._current is not None

    # httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._fields = []
        self._in_head, self._in_trailer = True, False
        self._weighed = self._head_bytes = 0
        self._fed_bytes = self._read_bytes
        self._head_due = self._read_s + self.settings.header_timeout_s
        self._given = True

    def on_url(self, url: bytes) -> None:
        self._given = True
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))

    def _begin_trailer(self) -> None:
        """From its first field on a trailer has the bytes and the time that a head has."""
        if self._in_trailer:
            return
        self._in_trailer = self._given = True
        self._body_due = min(self._body_due, self._read_s + self.settings.header_timeout_s)

    def on_headers_complete(self) -> None:
        if self._lingered_bytes >= 0:
            return  # behind what was refused, in the same read
        parser = self._parser
        method = parser.get_method()
        if method == b"CONNECT":
            raise _RefusedError(no_tunnel())
        if parser.should_upgrade():
            return
        if self._fed_bytes > self.settings.header_bytes_max:
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
        self._in_head = False
        self._fields = []
        self._weighed = self._head_bytes = 0
        self._given = True
        scope = request_scope(self._scope, version, method, self._url, fields, told)
        if self._spare and scope["path"] not in PROBE_PATHS:
            self.stats.connections_refused += 1
            raise _RefusedError(too_many_connections())
        keep_alive = persists and version == "1.1" and not self._spare
        expects = b"expect" in told and _expects(fields)
        exchange = Exchange(self, scope, keep_alive, expects)
        self._reading = exchange
        if self._current is None:
            self._begin(exchange, self._read_s)
        else:
            self._queue.append(exchange)
            if len(self._queue) >= self.settings.pipelined_max:
                self.stats.pipeline_pauses += 1
                self.pause_reading()

    def _look_for_problems(self, version: str, hosts: int) -> None:
        """Raises ``_RefusedError`` where the head has one."""
        if problem := head_problem(version, self._url, hosts):
            self.stats.bad_requests += 1
            raise _RefusedError(bad_request("invalid_http", problem))

    def _hand_over(self, *, last: bool = False) -> None:
        """Give the request the body bytes that the parser found in this read, in one piece."""
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        exchange = self._reading
        if exchange is None:
            return
        waiting = exchange.body_received(data)
        if waiting < 0:
            self.stats.bodies_refused += 1
            self._refuse(too_many_bodies())
            return
        if not last and exchange is self._current:
            earned_s = len(data) / self.settings.body_bytes_per_s_min
            self._body_due = min(self._body_due + earned_s, self._read_s + self.settings.body_grace_s)
        if waiting > self.settings.body_ahead_bytes_max:
            self.pause_reading()

    def on_message_complete(self) -> None:
        if self._pieces:
            self._hand_over(last=True)
        if self._fields and not self._in_head:
            self._weigh_fields()
        self._given = True
        exchange, self._reading = self._reading, None
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

    # Exchanges

    def _begin(self, exchange: Exchange, now: float) -> None:
        self._current = exchange
        self._body_due = now + self.settings.body_grace_s
        self.stats.requests += 1
        tasks = self._state.tasks
        # Not by ``create_task``: a name of its own costs more than the rest of a task.
        task = exchange.task = asyncio.Task(exchange.run(self.app, tasks), loop=self.loop, name="request")
        tasks.add(task)

    def answered(self, *, keep_alive: bool) -> None:
        """The current answer is complete: go on with the next request, or close."""
        body_open = self._reading is self._current
        self._current = None
        if not keep_alive or self._ending:
            if body_open:
                self._linger()
            else:
                self._close()
            return
        if body_open:
            self._reading = None  # the rest of that body is parsed and dropped
        if self.read_paused:
            self.resume_reading()
        now = self.clock()
        if self._in_head:  # what has begun to come meanwhile
            self._head_due = now + self.settings.header_timeout_s
        if self._queue:
            self._begin(self._queue.popleft(), now)
        elif self._last_word is not None:
            self._refuse(self._last_word)
            return
        self._rearm()

    def _rearm(self) -> None:
        """The deadline that belongs to the state."""
        settings, current = self.settings, self._current
        if self.write_paused is not None:
            self.deadline = self.clock() + settings.stall_timeout_s
        elif self.read_paused:
            self.deadline = NEVER  # the application is waited for
        elif current is not None:
            body_open = self._reading is current
            self.deadline = (
                min(self.clock() + settings.body_timeout_s, self._body_due) if body_open else NEVER
            )
        elif self._in_head:
            self.deadline = self._head_due
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
        """The application wants more."""
        if self.read_paused and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()
            self._body_due = self.clock() + self.settings.body_grace_s
            self._rearm()

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no proper request, after what came whole before it, and close."""
        if self._reading is not None and self._queue and self._reading is self._queue[-1]:
            self._queue.pop()  # what is refused is this one's body
            self._reading = None
        if self._current is not None and self._reading is None:
            self._last_word = error
            self._in_head = False
            self._lingered_bytes = 0  # what still comes is thrown away
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
        self._reading = None

    def _linger(self) -> None:
        """Close for writing, and throw away what still comes for a while.

        Closing at once would reset the connection, and the client would lose the answer it has been sent.
        """
        transport = self.transport
        if transport.is_closing():
            return
        self._in_head = False
        self._lingered_bytes = 0
        self.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self.deadline = self.clock() + self.settings.linger_s_max

    def _throw_away(self, size: int) -> None:
        self._lingered_bytes += size
        if self._lingered_bytes > _LINGER_BYTES_MAX:
            self.abort()


def _expects(fields: list[tuple[bytes, bytes]]) -> bool:
    """Whether the client waits to be told to send the body."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in fields)
