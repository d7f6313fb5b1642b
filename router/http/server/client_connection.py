"""One client connection: its time-outs, its queue of requests, and how it ends; ``request_reader.py`` parses.

Takes the place of uvicorn's protocol class because that one has no header, body or stall time-out, no limit
on header bytes, closes on a client that is still sending, and loses the body of a request that offers an
upgrade. Requests are answered one after another in the order they came (pipelining). What always holds:
every state but "the application is working" has a deadline; whatever the client sends beyond its limits ends
in an OpenAI-shaped error and a closed connection, after the answers to what came whole before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

from uvicorn.server import ServerState

from router.http.server.capacity import PROBE_PATHS, client_of
from router.http.server.config import LINGER_S_MAX, ListenConfig
from router.http.server.request_cycle import RequestCycle, connection_scope, error_answer
from router.http.server.request_reader import RefusedRequestError, RequestReader
from router.http.sockets import NEVER, is_last
from router.openai.errors import ApiError, request_timeout, too_many_bodies, too_many_connections

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
