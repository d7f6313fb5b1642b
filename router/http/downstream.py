"""One HTTP/1.1 connection of a client (RFC 9112): parsing, limits, time-outs, pipelining, and how it ends.

Takes the place of uvicorn's protocol class because that one has no header, body or stall time-out, no limit
on header bytes, closes on a client that is still sending, and loses the body of a request that offers an
upgrade. Requests are answered in the order of their arrival (pipelining, section 9.3.2). Invariants:
every state but "the application is working" has a deadline; a request beyond the limits ends in an
OpenAI-shaped error and a closed connection, after the responses to the complete requests before it; the work
for one read is linear in its bytes, however they are cut into chunks.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from typing import Any, cast

import httptools
from uvicorn.server import ServerState

from kvatlas.router.http.asgi import answering, connection_scope
from kvatlas.router.http.client_head import ClientHead, Header, head_error, target_parts
from kvatlas.router.http.deadlines import NEVER
from kvatlas.router.http.descriptors import is_last_descriptor
from kvatlas.router.http.known_heads import KnownHeads, head_key, without_fields
from kvatlas.router.http.listen_config import BODY_GRACE_S, LINGER_S_MAX, ListenConfig
from kvatlas.router.http.listener import PROBE_PATHS, client_key
from kvatlas.router.http.request_cycle import RequestCycle, error_response_bytes, request_id_of
from kvatlas.router.http.settings import ListenSettings, ListenStats
from kvatlas.router.openai.apis import PROMPT_APIS
from kvatlas.router.openai.errors import (
    ApiError,
    bad_request,
    head_too_large,
    no_tunnel,
    request_timeout,
    too_many_bodies,
    too_many_connections,
)

_LINGER_BYTES_MAX = 64 * 1024 * 1024
# Most requests that one connection may have waiting (HTTP pipelining); beyond it, reading pauses.
PIPELINED_MAX = 16
# Of a body held for the application; beyond it, reading from the client pauses.
BODY_AHEAD_BYTES_MAX = 256 * 1024


class DownstreamConnection(asyncio.Protocol):
    """Implements uvicorn's ``http`` protocol class: one instance for each accepted connection."""

    __slots__ = (
        "_answer",
        "_app_state",
        "_body_deadline",
        "_client_key",
        "_current",
        "_deferred_error",
        "_discarded_bytes",
        "_probe_only",
        "_queue",
        "_reader",
        "_refusals",
        "_server_state",
        "_shutting_down",
        "_sweeper",
        "capacity",
        "clock",
        "deadline",
        "draining",
        "loop",
        "peer",
        "read_paused",
        "scope",
        "settings",
        "stats",
        "transport",
        "write_paused",
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
        self._answer = answering(config.loaded_app)
        self._server_state = server_state
        self._app_state = app_state
        self._sweeper = config.sweeper
        self._refusals = config.refusals
        self.capacity = config.capacity
        self._client_key = ""
        self._probe_only = False
        # From connection_made on.
        self.transport: asyncio.Transport
        self.scope: dict[str, Any]
        self.peer = b""
        self._reader = RequestReader(self, self.settings, self.stats, config.heads)
        self._current: RequestCycle | None = None
        self._queue: deque[RequestCycle] = deque()
        self._body_deadline = NEVER
        self._deferred_error: ApiError | None = None
        """Response to a rejected request, sent after those to the requests before it."""
        self.read_paused = False
        # Done when the client has caught up.
        self.write_paused: asyncio.Future[None] | None = None
        self._discarded_bytes = 0
        self.draining = config.draining
        """Responses carry ``connection: close`` (RFC 9112, section 9.6). A response that began before
        without it keeps the connection open: its client may be sending the next request."""
        self._shutting_down = False
        """The connection closes after the current response."""
        self.deadline = NEVER

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.stats.connections += 1
        self.stats.descriptor_shortages += is_last_descriptor(transport.get_extra_info("socket"))
        self._client_key = client_key(transport.get_extra_info("peername"))
        self._probe_only = not self.capacity.add_connection(self._client_key)
        if self._probe_only:
            self.capacity.add_probe_only(self)
        else:
            self._server_state.connections.add(self)  # type: ignore[arg-type]  # uvicorn's set of its own protocols
        self._sweeper.add(self)
        self.scope = self.shared_scope(transport, self._app_state)
        if self.scope["client"] is not None:
            self.peer = self.scope["client"][0].encode()
        self.deadline = self.clock() + self.settings.header_timeout_s

    def shared_scope(self, transport: asyncio.BaseTransport, app_state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of the ASGI scope that all requests of this connection share."""
        return connection_scope(transport, app_state)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._server_state.connections:
            self._server_state.connections.discard(self)
            self.capacity.remove_connection(self._client_key)
        self.capacity.remove_probe_only(self)
        self._sweeper.discard(self)
        self._disconnect_cycles()
        self.resume_writing()

    def eof_received(self) -> None:
        # A client that left and one that closed its sending side alone look alike until the answer is written
        # (FIN): following the second would let engines compute whole answers for the first.
        self._disconnect_cycles()

    def data_received(self, data: bytes) -> None:
        if self._reader.state is _DISCARDING:
            self._discard(len(data))
            return
        reader = self._reader
        try:
            try:
                reader.read(data, self.clock())
            finally:
                if reader.progressed and reader.state is not _DISCARDING and self.write_paused is None:
                    self._set_deadline()
        except RejectedRequestError as rejected:
            self._reject(rejected.error)

    def pause_writing(self) -> None:
        self.write_paused = self.loop.create_future()
        self._set_deadline()

    def resume_writing(self) -> None:
        if self.write_paused is not None:
            if not self.write_paused.done():
                self.write_paused.set_result(None)
            self.write_paused = None
            self._set_deadline()

    def expire(self) -> None:
        """The deadline passed; what it was for follows from the state."""
        self.deadline = NEVER
        if self.write_paused is not None:
            self.stats.stalled_clients += 1
            self.transport.abort()
        elif self._reader.state is _DISCARDING or self.transport.is_closing():
            self.transport.abort()
        elif self._reader.cycle is not None and self._reader.cycle is self._current:
            self.stats.body_timeouts += 1
            self._on_timeout("The request body did not arrive in time.")
        elif self._reader.state is _HEAD:
            self.stats.header_timeouts += 1
            self._on_timeout("The request head did not arrive in time.")
        else:
            self._close()

    def _on_timeout(self, message: str) -> None:
        if self._current is not None and self._current.started:
            self.transport.abort()
        else:
            self._reject(request_timeout(message))

    def shutdown(self) -> None:
        """Close now if idle, otherwise after the current response."""
        self.draining = self._shutting_down = True
        if self._current is None and self._reader.state not in (_HEAD, _DISCARDING):
            self._close()

    # Called by RequestReader.

    def on_head(self, head: ClientHead) -> RequestCycle:
        """Start a request, or queue it behind those before it. Raises ``RejectedRequestError``."""
        if self._probe_only and head.path not in PROBE_PATHS:
            self.stats.connections_refused += 1
            raise RejectedRequestError(too_many_connections())
        cycle = RequestCycle(self, head, self.peer, head.keep_alive and not self._probe_only)
        if self._current is None:
            self._start_cycle(cycle, self._reader.received_s)
        else:
            self._queue.append(cycle)
            if len(self._queue) >= PIPELINED_MAX:
                self.stats.pipeline_pauses += 1
                self.pause_reading()
        return cycle

    def on_body_bytes(self, cycle: RequestCycle, data: bytes, *, last: bool) -> None:
        """Pass body bytes to the application, and extend the deadline of the body."""
        waiting = cycle.body_received(data)
        if waiting < 0:
            self.stats.bodies_refused += 1
            self._reject(too_many_bodies())
            return
        if not last and cycle is self._current:
            received_s = self._reader.received_s
            earned_s = len(data) / self.settings.body_bytes_per_s_min
            self._body_deadline = min(self._body_deadline + earned_s, received_s + BODY_GRACE_S)
        if waiting > BODY_AHEAD_BYTES_MAX:
            self.pause_reading()

    def on_trailer_start(self) -> None:
        """Give the trailer as much time as a head, from its first field on."""
        self._body_deadline = min(
            self._body_deadline, self._reader.received_s + self.settings.header_timeout_s
        )

    # Called by RequestCycle, and the order of requests.

    def _start_cycle(self, cycle: RequestCycle, now: float) -> None:
        self._current = cycle
        self._body_deadline = now + BODY_GRACE_S
        self.stats.requests += 1
        tasks = self._server_state.tasks
        # Not by ``create_task``: a name of its own costs more than the rest of a task.
        task = cycle.task = asyncio.Task(cycle.run(self._answer, tasks), loop=self.loop, name="request")
        tasks.add(task)

    def on_response_complete(self, *, keep_alive: bool) -> None:
        """Start the next request after a complete response, or close."""
        body_open = self._reader.cycle is self._current
        self._current = None
        if not keep_alive or self._shutting_down:
            if body_open:
                self._begin_lingering_close()
            else:
                self._close()
            return
        if body_open:
            # The rest of that body is parsed and dropped.
            self._reader.cycle = None
        now = self.clock()
        # Its time begins now, not while it was queued.
        if self._reader.state is _HEAD:
            self._reader.head_deadline = now + self.settings.header_timeout_s
        if self._queue:
            self._start_cycle(self._queue.popleft(), now)
        elif self._deferred_error is not None:
            self._reject(self._deferred_error)
            return
        if self.read_paused:
            self.resume_reading()
        self._set_deadline()

    def _set_deadline(self) -> None:
        """Set the deadline of the current state."""
        settings, current = self.settings, self._current
        if self.write_paused is not None:
            self.deadline = self.clock() + settings.stall_timeout_s
        elif self.read_paused:
            # Waiting for the application, not for the client.
            self.deadline = NEVER
        elif current is not None:
            body_open = self._reader.cycle is current
            self.deadline = (
                min(self.clock() + settings.body_timeout_s, self._body_deadline) if body_open else NEVER
            )
        elif self._reader.state is _HEAD:
            self.deadline = self._reader.head_deadline
        else:
            self.deadline = self.clock() + settings.keepalive_timeout_s

    def _close(self) -> None:
        """Close once the written bytes have been sent, at the latest after ``stall_timeout_s``."""
        self.transport.close()
        self.deadline = self.clock() + self.settings.stall_timeout_s

    def abort(self) -> None:
        """Close at once: the response cannot be completed, and the client must notice."""
        self.transport.abort()

    def pause_reading(self) -> None:
        """Stop reading until the application has taken the body bytes. No client time-out runs meanwhile."""
        if not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()
            self._set_deadline()

    def resume_reading(self) -> None:
        """Read again for the application, unless ``PIPELINED_MAX`` requests are queued."""
        room = len(self._queue) < PIPELINED_MAX
        if self.read_paused and room and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()
            self._body_deadline = self.clock() + BODY_GRACE_S
            self._set_deadline()

    def _reject(self, error: ApiError) -> None:
        """Answer a rejected request after the requests before it, and close."""
        if self._reader.cycle is not None and self._queue and self._reader.cycle is self._queue[-1]:
            # The rejected body is this request's; what has come of it is given back.
            self._queue.pop().on_disconnect()
            self._reader.cycle = None
        if self._current is not None and self._reader.cycle is None:
            self._deferred_error = error
            self._begin_discarding()
            return
        if self._current is None or not self._current.started:
            request_id = self._reader.request_id()
            self.transport.write(error_response_bytes(error, request_id))
            self._refusals.note(error, request_id, client=self._client_key)
        self._disconnect_cycles()
        self._begin_lingering_close()

    def _disconnect_cycles(self) -> None:
        for cycle in (self._current, *self._queue):
            if cycle is not None:
                cycle.on_disconnect()
        self._queue.clear()
        self._current = None
        self._reader.cycle = None

    def _begin_lingering_close(self) -> None:
        """Close for writing, and discard received bytes until the client closes (RFC 9112, section 9.6)."""
        # Closing both directions at once would reset the connection: the client could lose the response.
        transport = self.transport
        if transport.is_closing():
            return
        self._begin_discarding()
        self.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self.deadline = self.clock() + LINGER_S_MAX

    def _begin_discarding(self) -> None:
        self._reader.stop()
        self._discarded_bytes = 0

    def _discard(self, size: int) -> None:
        self._discarded_bytes += size
        if self._discarded_bytes > _LINGER_BYTES_MAX:
            self.abort()


# Bytes of a field line besides name and value: ``: `` and CRLF (RFC 9112, section 5).
_FIELD_OVERHEAD_BYTES = 4
_UPGRADE_FIELDS = frozenset((b"upgrade", b"connection", b"http2-settings"))


class RejectedRequestError(Exception):
    """``error`` is the response. Raised in a callback of the parser, which then stops, or after it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.code)
        self.error = error


class ReadState(enum.Enum):
    """Part of the HTTP/1.1 message stream that is being received (RFC 9112, section 2.1).

    IDLE          -> HEAD        the first byte of a request line
    HEAD          -> BODY        the empty line after the fields; also for a request without content
    BODY          -> TRAILER     the first field after the last chunk (section 7.1.2)
    BODY, TRAILER -> IDLE        the end of the message (section 6.3)
    any           -> DISCARDING  ``stop``: a request was rejected, or the connection is closing (section 9.6)
    """

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    TRAILER = enum.auto()
    DISCARDING = enum.auto()


# Bound once: access to a member through its enum takes 0.4 us in Python 3.11.
_IDLE, _HEAD, _BODY, _TRAILER, _DISCARDING = ReadState


class RequestReader:
    """Parses requests with httptools, whose callbacks collect a head's fields and a body's bytes.

    The connection gets each head once it is complete, and the body bytes once for each read. A head or
    trailer beyond its limits is rejected before it is complete. An offer to upgrade is declined. No request
    begins after ``stop``.
    """

    __slots__ = (
        "_callback_seen",
        "_chunks",
        "_connection",
        "_counted_fields",
        "_fed_bytes",
        "_fields",
        "_goes_on",
        "_head_bytes",
        "_key",
        "_known",
        "_parser",
        "_read_bytes",
        "_settings",
        "_stats",
        "_unparsed_bytes",
        "_url",
        "cycle",
        "head_deadline",
        "on_body",
        "progressed",
        "received_s",
        "state",
    )

    def __init__(
        self,
        connection: DownstreamConnection,
        settings: ListenSettings,
        stats: ListenStats,
        known: KnownHeads[ClientHead],
    ) -> None:
        self._known = known
        # Of the head that comes, if it may become known.
        self._key = b""
        # No request said that it is the last one: the parser would refuse what follows.
        self._goes_on = True
        self._connection = connection
        self._settings = settings
        self._stats = stats
        self._chunks: list[bytes] = []
        # Called by the parser without a Python frame in between.
        self.on_body = self._chunks.append
        self._parser = httptools.HttpRequestParser(self)
        self.cycle: RequestCycle | None = None
        """Request whose body is being received; None: its bytes are dropped."""
        self.state = _IDLE
        self._url = b""
        self._fields: list[Header] = []  # of the head, then of the trailer
        # Number of fields that ``_head_bytes`` includes.
        self._counted_fields = 0
        # Size of the parsed fields of the head or trailer.
        self._head_bytes = 0
        # Bytes fed to the parser since its last callback.
        self._unparsed_bytes = 0
        # Bytes since the read in which the message began: an upper bound of its head.
        self._fed_bytes = 0
        self._read_bytes = 0  # size of the current read
        self.received_s = 0.0
        """Time of the last read."""
        self._callback_seen = False
        self.progressed = False
        """The last read completed more than a part of a head's line."""
        self.head_deadline = NEVER

    def request_id(self) -> bytes:
        """The id of the request that is being received, or was last; a new one if it has none."""
        cycle = self.cycle
        return request_id_of(self._fields) if cycle is None else cycle.request_id()

    def stop(self) -> None:
        """Discard whatever arrives from here on."""
        self.state = _DISCARDING

    def read(self, data: bytes, now: float) -> None:
        """Parse received bytes. Raises ``RejectedRequestError``."""
        self.received_s, self.progressed = now, False
        if self.state is _IDLE and self._goes_on:
            self._key, begin = head_key(data, self._settings.header_bytes_max)
            head = self._known.by_key.get(self._key)
            if head is not None and self._take_known(head, data[begin:]):
                return
        rest: bytes | memoryview = data
        try:
            while rest and self.state is not _DISCARDING:
                try:
                    self._parse(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    rest = memoryview(rest)[upgrade.args[0] :]
                    self._decline_upgrade()
        except httptools.HttpParserError as error:
            rejected = error.__context__
            if isinstance(rejected, RejectedRequestError):
                raise rejected from None
            self._stats.bad_requests += 1
            raise RejectedRequestError(
                bad_request("invalid_http", "This is not a valid HTTP/1.1 request.")
            ) from error

    def _take_known(self, head: ClientHead, body: bytes) -> bool:
        """Pass a whole request on without the parser; False: there is no room for its body."""
        connection = self._connection
        if not connection.capacity.reserve_body(len(body)):
            return False
        try:
            connection.on_head(head).body_came(body)
        except RejectedRequestError:
            connection.capacity.release_body(len(body))
            raise
        if connection.write_paused is None:
            # Nothing more is waited for of the client.
            connection.deadline = NEVER
        return True

    def _parse(self, data: bytes | memoryview) -> None:
        """Feed the parser. Raises what it raises."""
        self._callback_seen = False
        self._read_bytes = size = len(data)
        self._fed_bytes += size
        fields_before = len(self._fields)
        try:
            self._parser.feed_data(data)
            if self.state is _HEAD or self.cycle is not None:
                self._check_unfinished(size, fields_before)
        finally:
            if self._callback_seen:
                self.progressed = True
            if self._chunks:
                self._deliver_body()
                self.progressed = True

    def _check_unfinished(self, size: int, fields_before: int) -> None:
        """Count the bytes of an unfinished head, trailer or chunk frame after a read.

        ``fields_before``: fields before the read.
        """
        # The parser buffers these parts without a callback.
        fields = len(self._fields)
        parsed = self._callback_seen or self._chunks or fields > fields_before
        self._unparsed_bytes = 0 if parsed else self._unparsed_bytes + size
        if fields and self.state is _BODY:
            self.state = _TRAILER
            self._callback_seen = True
            self._connection.on_trailer_start()
        self._check_head_size(self._unparsed_bytes)

    def _check_head_size(self, more_bytes: int = 0) -> None:
        """Add the new fields to the size of the head or trailer, each once.

        Raises ``RejectedRequestError`` if the size with ``more_bytes`` exceeds ``header_bytes_max``.
        """
        new = self._fields[self._counted_fields :] if self._counted_fields else self._fields
        self._counted_fields += len(new)
        self._head_bytes += sum(
            [len(name) + len(value) for name, value in new], _FIELD_OVERHEAD_BYTES * len(new)
        )
        line_bytes = len(self._url) if self.state is _HEAD else 0
        if line_bytes + self._head_bytes + more_bytes > self._settings.header_bytes_max:
            self._stats.header_overflows += 1
            raise RejectedRequestError(head_too_large(self._settings.header_bytes_max))

    def _deliver_body(self, *, last: bool = False) -> None:
        """Pass the body bytes of this read to the request, in one piece."""
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if self.cycle is not None:
            self._connection.on_body_bytes(self.cycle, data, last=last)

    # httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._fields = []
        if self.state is not _DISCARDING:
            self.state = _HEAD
        self._counted_fields = self._head_bytes = 0
        self._fed_bytes = self._read_bytes
        self.head_deadline = self.received_s + self._settings.header_timeout_s
        self._callback_seen = True

    def on_url(self, url: bytes) -> None:
        self._callback_seen = True
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.state is _DISCARDING:
            # After a rejected request in the same read.
            return
        parser = self._parser
        method = parser.get_method()
        if method == b"CONNECT":
            raise RejectedRequestError(no_tunnel())
        if parser.should_upgrade():
            return
        if self._fed_bytes > self._settings.header_bytes_max:
            self._check_head_size()
        fields = self._fields
        by_name = dict(fields)
        keep_alive: bool = parser.should_keep_alive()
        # Only HTTP/1.1 persists by default (RFC 9112, section 9.3); the parser formats its version slowly.
        explicit = b"connection" in by_name or b"proxy-connection" in by_name
        version = "1.1" if keep_alive and not explicit else parser.get_http_version()
        hosts: int = b"host" in by_name
        if len(by_name) < len(fields):  # a field is repeated
            hosts = [name for name, _ in fields].count(b"host")
        if hosts != 1 or self._url.find(b"#") >= 0:
            self._check_request_head(version, hosts)
        self.state = _BODY
        self._fields = []
        self._counted_fields = self._head_bytes = 0
        self._callback_seen = True
        head = ClientHead(
            method.decode("ascii"),
            *target_parts(self._url),
            fields,
            by_name,
            version,
            keep_alive and version == "1.1",
            b"expect" in by_name and _has_expect_continue(fields),
        )
        self._goes_on = head.keep_alive
        if self._key:
            self._keep(self._key, head)
            self._key = b""
        self.cycle = self._connection.on_head(head)

    def _keep(self, key: bytes, head: ClientHead) -> None:
        """Make a head known that may be used for another body."""
        if head.keep_alive and head.method == "POST" and head.path in PROMPT_APIS and self._known.again(key):
            self._known.keep(key, head.with_fields(without_fields(head.fields, b"content-length")))

    def _check_request_head(self, version: str, hosts: int) -> None:
        """Raise ``RejectedRequestError`` for an invalid head."""
        if problem := head_error(version, self._url, hosts):
            self._stats.bad_requests += 1
            raise RejectedRequestError(bad_request("invalid_http", problem))

    def on_message_complete(self) -> None:
        if self._chunks:
            self._deliver_body(last=True)
        # Still HEAD: an upgrade was offered.
        if self.state in (_BODY, _TRAILER):
            if self._fields:
                self._check_head_size()
            self.state = _IDLE
        self._callback_seen = True
        cycle, self.cycle = self.cycle, None
        if cycle is not None:
            cycle.body_ended()

    def _decline_upgrade(self) -> None:
        """Parse the request again without its offer to upgrade, which a server may ignore (RFC 9110, 7.8)."""
        # Httptools takes everything after such a head for the other protocol and would lose the body.
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), self._url, version)]
        lines += [
            b"%b: %b\r\n" % (name, value) for name, value in self._fields if name not in _UPGRADE_FIELDS
        ]
        self._parser = httptools.HttpRequestParser(self)
        self._parse(b"".join((*lines, b"\r\n")))


def _has_expect_continue(fields: list[Header]) -> bool:
    """Return whether the client waits for ``100 Continue`` (RFC 9110, section 10.1.1)."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in fields)
