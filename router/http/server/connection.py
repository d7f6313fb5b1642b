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
    """Raised in a callback of the parser, which gives up; ``error`` is the answer."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.code)
        self.error = error


class ClientConnection(asyncio.Protocol):
    """See the module. uvicorn makes one per accepted connection."""

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
        self._head_bytes = 0  # of the head or trailer: what the parser has given
        self._unfinished_bytes = 0  # and what it was fed since without giving anything
        self._given = False
        self._body_due = NEVER
        self._last_word: ApiError | None = None  # for after the requests that came before what was refused
        self._read_paused = False
        self.write_paused: asyncio.Future[None] | None = None  # done when the client has caught up
        self._lingered_bytes = -1  # >= 0: only throwing away what still comes
        self.closing_soon = config.lame
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

    def _parse(self, data: bytes | memoryview) -> None:
        """Feed the parser. Raises what it raises."""
        self._given = False
        try:
            self._parser.feed_data(data)
            # The parser keeps what is not yet a whole field or chunk frame, and tells nothing of it.
            given = self._given or self._pieces
            self._unfinished_bytes = 0 if given else self._unfinished_bytes + len(data)
            too_large = self._head_bytes + self._unfinished_bytes > self.settings.header_bytes_max
            if too_large and (self._in_head or self._reading is not None):
                self._refuse(self._head_too_large())
        finally:
            self._hand_over()

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
        """The server drains: idle connections close now, busy ones after their answer."""
        self.closing_soon = True
        if self._current is None and not self._in_head and self._lingered_bytes < 0:
            self._close()

    @property
    def busy(self) -> bool:
        """A request is being answered."""
        return self._current is not None

    # httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._hosts = 0
        self._expects = False
        self._in_head, self._in_trailer = True, False
        self._head_bytes, self._given = 0, True
        if self._current is None:
            self.deadline = self.clock() + self.settings.header_timeout_s

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer: allowed to be dropped
            self._begin_trailer()
            self._count_head(len(name) + len(value) + _FIELD_SIGNS)
            return
        # As ``_count_head`` does, without a call for every field.
        self._given = True
        size = self._head_bytes = self._head_bytes + len(name) + len(value) + _FIELD_SIGNS
        if size > self.settings.header_bytes_max:
            raise _RefusedError(self._head_too_large())
        name = name.lower()
        if name == b"host":
            self._hosts += 1
        elif name == b"expect" and value.lower() == b"100-continue":
            self._expects = True
        self._headers.append((name, value))

    def _count_head(self, size: int) -> None:
        self._given = True
        self._head_bytes += size
        if self._head_bytes > self.settings.header_bytes_max:
            raise _RefusedError(self._head_too_large())

    def _begin_trailer(self) -> None:
        """From its first field on a trailer has the bytes and the time that a head has."""
        if self._in_trailer:
            return
        self._in_trailer = True
        self._body_due = min(self._body_due, self.clock() + self.settings.header_timeout_s)
        self._rearm()

    def on_headers_complete(self) -> None:
        if self._lingered_bytes >= 0:
            return  # behind what was refused, in the same read
        parser = self._parser
        method = parser.get_method()
        if method == b"CONNECT":
            raise _RefusedError(no_tunnel())
        if parser.should_upgrade():
            return
        version = parser.get_http_version()
        problem = head_problem(version, self._url, self._hosts)
        if problem:
            self.stats.bad_requests += 1
            raise _RefusedError(bad_request("invalid_http", problem))
        self._in_head = False
        self._head_bytes, self._given = 0, True
        scope = request_scope(self._scope, version, method, self._url, self._headers)
        if self._spare and scope["path"] not in PROBE_PATHS:
            self.stats.connections_refused += 1
            raise _RefusedError(too_many_connections())
        keep_alive = parser.should_keep_alive() and not self._spare
        exchange = Exchange(self, scope, keep_alive, self._expects)
        self._reading = exchange
        if self._current is None:
            self._begin(exchange)
            self._rearm()
        else:
            self._queue.append(exchange)
            if len(self._queue) >= self.settings.pipelined_max:
                self.stats.pipeline_pauses += 1
                self.pause_reading()

    def _hand_over(self) -> None:
        """Give the request the body bytes that the parser found in this read, in one piece."""
        pieces = self._pieces
        if not pieces:
            return
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
        if exchange is self._current:
            now = self.clock()
            grace_end = now + self.settings.body_grace_s
            earned_s = len(data) / self.settings.body_bytes_per_s_min
            self._body_due = min(self._body_due + earned_s, grace_end)
            if self.write_paused is None and not self._read_paused:
                self.deadline = min(now + self.settings.body_timeout_s, self._body_due)
        if waiting > self.settings.body_ahead_bytes_max:
            self.pause_reading()

    def on_message_complete(self) -> None:
        self._hand_over()
        self._given = True
        exchange, self._reading = self._reading, None
        if exchange is None:
            return
        exchange.body_ended()
        if exchange is self._current and self.write_paused is None:
            self.deadline = NEVER

    def _decline_upgrade(self) -> None:
        """Parse the request again without its offer to upgrade, which a server may ignore.

        httptools takes everything after such a head for the other protocol and would lose the body.
        """
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), self._url, version)]
        lines += [
            b"%b: %b\r\n" % (name, value) for name, value in self._headers if name not in _UPGRADE_FIELDS
        ]
        self._parser = httptools.HttpRequestParser(self)
        self._parse(b"".join((*lines, b"\r\n")))

    # Exchanges

    def _begin(self, exchange: Exchange) -> None:
        self._current = exchange
        self._body_due = self.clock() + self.settings.body_grace_s
        self.stats.requests += 1
        self._state.total_requests += 1
        task = self.loop.create_task(exchange.run(self.app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def answered(self, *, keep_alive: bool) -> None:
        """The current answer is complete: go on with the next request, or close."""
        body_open = self._reading is self._current
        self._current = None
        if not keep_alive or self.closing_soon:
            if body_open:
                self._linger()
            else:
                self._close()
            return
        if body_open:
            self._reading = None  # the rest of that body is parsed and dropped
        if self._read_paused:
            self.resume_reading()
        if self._queue:
            self._begin(self._queue.popleft())
        elif self._last_word is not None:
            self._refuse(self._last_word)
            return
        self._rearm()

    def _rearm(self) -> None:
        """The deadline that belongs to the state."""
        settings = self.settings
        if self.write_paused is not None:
            wait_s = settings.stall_timeout_s
        elif self._read_paused:
            wait_s = NEVER  # the application is waited for
        elif self._current is not None:
            wait_s = NEVER
            if self._reading is self._current:
                wait_s = min(settings.body_timeout_s, self._body_due - self.clock())
        elif self._in_head:
            wait_s = settings.header_timeout_s
        else:
            wait_s = settings.keepalive_timeout_s
        self.deadline = self.clock() + wait_s

    def _close(self) -> None:
        """Close after what is written has been taken, which a client may delay only so long."""
        self.transport.close()
        self.deadline = self.clock() + self.settings.stall_timeout_s

    def abort(self) -> None:
        """Cut the connection: the answer cannot be completed, and the client must notice."""
        self.transport.abort()

    def pause_reading(self) -> None:
        """Until the application takes what has come. The client is not to blame for the wait."""
        if not self._read_paused and not self.transport.is_closing():
            self._read_paused = True
            self.transport.pause_reading()
            self._rearm()

    def resume_reading(self) -> None:
        """The application wants more."""
        if self._read_paused and not self.transport.is_closing():
            self._read_paused = False
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
