"""One request of a client and its answer, from the listener to what answers it, with the task of that.

Responses without a content-length are chunked for HTTP/1.1, and end with the connection for HTTP/1.0 (RFC
9112, section 6.3). If an application returns without a complete response the connection is closed at once,
so that the client does not take a part of the response for all of it.
"""

from __future__ import annotations

import asyncio
import enum
import http
import random
import re
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import msgspec
import structlog

from kvatlas.router.http.client_head import ClientHead, Header
from kvatlas.router.http.listener import Capacity
from kvatlas.router.openai.errors import ApiError, internal_error


class ClientRequest(Protocol):
    """One request of a client and its answer, as applications see them; of the listener or of a gateway."""

    head: ClientHead
    carrier: Any
    """``Carrier`` that takes the request to its engine, where that is not this process; None otherwise."""
    policy: Callable[[list[Header]], list[Header]] | None
    """Goes over the fields of the answer's head."""
    task: asyncio.Task[Any] | None
    """The one that answers it."""

    @property
    def peer(self) -> bytes:
        """The client's address; empty if unknown, or another one's."""

    @property
    def connection_scope(self) -> dict[str, Any]:
        """The connection's part of the scope of an ASGI application."""

    @property
    def disconnected(self) -> bool:
        """Whether the client has left before the end of the answer."""

    def watch(self) -> None:
        """From now on ``task`` is cancelled, at any await, when the client leaves."""

    def unwatch(self) -> None:
        """End ``watch``."""

    def complete_body(self) -> bytes | None:
        """Return all of the body if it has arrived; otherwise None. To be called before ``read``."""

    async def read(self) -> tuple[bytes, bool] | None:
        """Return the next piece of the body, and whether more is to come; None once the client has left, or
        the answer is over, for which this waits after the last piece."""

    def start(self, status: int, fields: list[Header], length: bytes | None) -> None:
        """Set the answer's head, which is sent with the first body bytes. ``length``: the value of
        ``content-length`` in ``fields``, empty if there is none; None: unknown."""

    def write(self, data: bytes, *, more: bool) -> Awaitable[None] | None:
        """Send body bytes; no effect once the client has left. If this returns an awaitable, await it before
        the next ``write``."""


async def answer_whole(request: ClientRequest, status: int, fields: list[Header], body: bytes) -> None:
    """Answer in one piece."""
    request.start(status, fields, None)
    if (waits := request.write(body, more=False)) is not None:
        await waits


_log = structlog.get_logger()
ResponseHead = tuple[int, Iterable[Header], bytes | None]
"""Status, fields, and the value of ``content-length`` in them: empty if there is none, None if unknown."""
_NO_HEAD: ResponseHead = (0, (), None)
# Larger pieces are written without being copied.
_JOIN_BYTES_MAX = 64 * 1024


_PHRASES = {status.value: status.phrase for status in http.HTTPStatus}
_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}".encode() for status in range(100, 1000)
}


_PLAIN = re.compile(rb"[!-~]{1,256}")


def request_id_of(fields: Iterable[Header]) -> bytes:
    """The client's ``x-request-id``, or a new one if it has none that can be answered and logged."""
    given = next((value for name, value in fields if name == b"x-request-id"), b"")
    return given if _PLAIN.fullmatch(given) else b"%032x" % random.getrandbits(128)


def error_response_bytes(error: ApiError, request_id: bytes) -> bytes:
    """Encode a complete response that closes its connection, for requests rejected before the application."""
    body = error.body()
    headers = b"".join([b"%b: %b\r\n" % header for header in (*error.headers, (b"x-request-id", request_id))])
    return b"%b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b" % (
        _STATUS_LINES[error.status],
        len(body),
        headers,
        body,
    )


class CycleConnection(Protocol):
    """Services that a request cycle needs of its connection."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    capacity: Capacity
    write_paused: asyncio.Future[None] | None
    scope: dict[str, Any]
    read_paused: bool
    draining: bool

    def resume_reading(self) -> None:
        """Read from the socket again: the application has taken the buffered body."""

    def on_response_complete(self, *, keep_alive: bool) -> None:
        """Handle the end of a complete response."""

    def abort(self) -> None:
        """Close at once: the response cannot be completed."""


class RequestBodyState(enum.Enum):
    """Progress of the request body.

    RECEIVING -> COMPLETE   the end of the message (RFC 9112, section 6.3)
    COMPLETE  -> DELIVERED  the application has received the last bytes
    """

    RECEIVING = enum.auto()
    COMPLETE = enum.auto()
    DELIVERED = enum.auto()


# Bound once: access to a member through its enum takes 0.4 us in Python 3.11.
_BODY_RECEIVING, _BODY_COMPLETE, _BODY_DELIVERED = RequestBodyState


class ResponseState(enum.Enum):
    """Progress of the response. On one connection only one is past PENDING (RFC 9112, section 9.3.2).

    PENDING       -> RUNNING        the application is called
    RUNNING       -> HEAD_BUFFERED  ``start``: the head waits for the first body bytes
    HEAD_BUFFERED -> RUNNING        the application failed, and 500 is sent instead
    RUNNING, HEAD_BUFFERED -> SENDING  the first bytes are written (RFC 9112, section 6)
    SENDING       -> COMPLETE       the last body bytes are written
    any but COMPLETE -> DISCONNECTED  the client closed its sending side or the connection
    """

    PENDING = enum.auto()
    RUNNING = enum.auto()
    HEAD_BUFFERED = enum.auto()
    SENDING = enum.auto()
    COMPLETE = enum.auto()
    DISCONNECTED = enum.auto()


# Bound once: access to a member through its enum takes 0.4 us in Python 3.11.
_PENDING, _RUNNING, _HEAD_BUFFERED, _SENDING, _COMPLETE, _DISCONNECTED = ResponseState


class RequestCycle(msgspec.Struct, eq=False):
    """One request of a ``CycleConnection``; used from the event loop only."""

    _connection: CycleConnection
    head: ClientHead
    peer: bytes
    _keep_alive: bool
    carrier: None = None
    policy: Callable[[list[Header]], list[Header]] | None = None
    task: asyncio.Task[None] | None = None
    _continued: bool = False
    """``100 Continue`` has been sent."""
    _response: ResponseState = _PENDING
    _head: ResponseHead = _NO_HEAD
    """Sent with the first body bytes, in one packet."""
    _request_body: RequestBodyState = _BODY_RECEIVING
    _body_chunks: list[bytes] = []
    """Bytes received and not yet taken by the application."""
    _body_bytes: int = 0
    _reserved_bytes: int = 0
    """Bytes of the body counted in the connection's ``capacity`` until the application returns."""
    _waiter: asyncio.Future[None] | None = None
    _cancel_on_disconnect: bool = False
    _chunked: bool = False
    _remaining_bytes: int = -1
    """Bytes of the response body still to be sent; -1: unknown."""

    @property
    def connection_scope(self) -> dict[str, Any]:
        """Implement ``ClientRequest``."""
        return self._connection.scope

    @property
    def started(self) -> bool:
        """Whether bytes of the response have been written; False after a disconnect."""
        return self._response in (_SENDING, _COMPLETE)

    @property
    def disconnected(self) -> bool:
        """Whether the client has disconnected before the end of the response."""
        return self._response is _DISCONNECTED

    # Called by the connection.

    def body_received(self, data: bytes) -> int:
        """Buffer body bytes for the application.

        Returns the number of buffered bytes, or -1 if ``bodies_bytes_max`` of the listener is exceeded.
        """
        if self._response in (_COMPLETE, _DISCONNECTED):
            # The application will not read them.
            return 0
        if not self._connection.capacity.reserve_body(len(data)):
            return -1
        self._reserved_bytes += len(data)
        self._body_chunks.append(data)
        self._body_bytes += len(data)
        if self._waiter is not None:
            self._wake()
        return self._body_bytes

    def body_came(self, data: bytes) -> None:
        """Take the whole body of a request that has just begun, which is counted in ``capacity`` already."""
        self._request_body = _BODY_COMPLETE
        self._body_bytes = self._reserved_bytes = len(data)
        self._body_chunks.append(data)

    def body_ended(self) -> None:
        """Mark the request as complete."""
        self._request_body = _BODY_COMPLETE
        if self._waiter is not None:
            self._wake()

    def on_disconnect(self) -> None:
        """Cancel the task if it is watched. No effect after a complete response."""
        state = self._response
        if state in (_COMPLETE, _DISCONNECTED):
            return
        self._response = _DISCONNECTED
        if state is _PENDING:
            self._release_body()
        self._wake()
        self._cancel_task()

    async def run(
        self, answer: Callable[[ClientRequest], Awaitable[None]], tasks: set[asyncio.Task[None]]
    ) -> None:
        """Have the request answered. The task removes itself from ``tasks`` at its end."""
        connection = self._connection
        if self._response is _PENDING:
            self._response = _RUNNING
        try:
            await answer(self)
        except asyncio.CancelledError:
            connection.abort()
            raise
        except Exception as error:  # noqa: BLE001  # whatever the application raises: log, answer, go on
            # As text: a traceback rendered with its locals would log prompts and credentials.
            trace = "".join(traceback.format_exception(error))
            request_id = self.request_id()
            known = request_id.decode("latin-1")
            _log.error("request failed", path=self.head.path, request_id=known, traceback=trace)
            await self._answer_internal_error(request_id)
        finally:
            self._release_body()
            if self.task is not None:
                tasks.discard(self.task)
            # It refers back to this: no cycle for the collector to find.
            self.task = None
        if self._response not in (_COMPLETE, _DISCONNECTED):
            connection.abort()

    def _release_body(self) -> None:
        """Drop the buffered body and its share of the capacity."""
        self._body_chunks.clear()
        self._connection.capacity.release_body(self._reserved_bytes)
        self._reserved_bytes = 0

    def request_id(self) -> bytes:
        """The client's name for the request, or a new one."""
        return request_id_of(self.head.fields)

    async def _answer_internal_error(self, request_id: bytes) -> None:
        if self._response not in (_RUNNING, _HEAD_BUFFERED):
            return
        # A buffered head has not been written.
        self._response = _RUNNING
        self._chunked = False
        self._remaining_bytes = -1
        body = internal_error().body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", request_id),
        ]
        await answer_whole(self, 500, headers, body)

    # Called by the application.

    def watch(self) -> None:
        """Implement ``ClientRequest``."""
        self._cancel_on_disconnect = True
        if self._response is _DISCONNECTED:
            self._cancel_task()

    def unwatch(self) -> None:
        """Implement ``ClientRequest``."""
        self._cancel_on_disconnect = False

    def _cancel_task(self) -> None:
        if self._cancel_on_disconnect and self.task is not None:
            self.task.cancel()

    async def read(self) -> tuple[bytes, bool] | None:
        """Implement ``ClientRequest``."""
        connection = self._connection
        if (
            self.head.expects_continue
            and not self._continued
            and self._request_body is _BODY_RECEIVING
            and self._response in (_RUNNING, _HEAD_BUFFERED)
        ):
            self._continued = True
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while self._response not in (_COMPLETE, _DISCONNECTED):
            if self._body_chunks or self._request_body is _BODY_COMPLETE:
                more = self._request_body is _BODY_RECEIVING
                return self._take_body(), more
            waiter = self._waiter = connection.loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        return None

    def complete_body(self) -> bytes | None:
        """Implement ``ClientRequest``."""
        if self._request_body is not _BODY_COMPLETE or self._response is _DISCONNECTED:
            return None
        return self._take_body()

    def _take_body(self) -> bytes:
        """Return the buffered body bytes."""
        chunks = self._body_chunks
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._body_bytes = 0
        if self._request_body is _BODY_COMPLETE:
            self._request_body = _BODY_DELIVERED
        if self._connection.read_paused:
            self._connection.resume_reading()
        return body

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def start(self, status: int, fields: list[Header], length: bytes | None) -> None:
        """Implement ``ClientRequest``."""
        self._head = status, fields if self.policy is None else self.policy(fields), length
        if self._response is _RUNNING:
            self._response = _HEAD_BUFFERED

    def write(self, data: bytes, *, more: bool) -> Awaitable[None] | None:
        """Implement ``ClientRequest``."""
        connection = self._connection
        if connection.write_paused is not None:
            return self._write_later(data, more, connection.write_paused)
        if self._response is _SENDING and self._chunked and more and 0 < len(data) < _JOIN_BYTES_MAX:
            connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        elif self._response is not _DISCONNECTED:
            self._send_body(data, more)
        return None

    async def _write_later(self, data: bytes, more: bool, caught_up: asyncio.Future[None]) -> None:
        await asyncio.shield(caught_up)
        if not self.disconnected:
            self._send_body(data, more)

    def _encode_head(self, head: ResponseHead) -> bytes:
        status, headers, length = head
        lines = [_STATUS_LINES[status], *map(b": ".join, headers), b""]
        block = b"\r\n".join(lines)
        # A line end in a field would start another field or response (RFC 9110, section 5.5).
        if block.count(b"\n") >= len(lines) or block.count(b"\r") >= len(lines):
            raise RuntimeError("a header field of the answer contains a line end")
        has_close = False
        if length is None:
            lowered = block.lower()
            length = _last_value(lowered, b"\r\ncontent-length: ")
            has_close = lowered.find(b"\r\nconnection: ") >= 0 and _has_close(headers)
        more = b""
        # These responses have no content, whatever their fields say (RFC 9112, section 6.3, rule 1).
        if self.head.method == "HEAD" or status in (204, 304):
            self._remaining_bytes = 0
        elif length:
            self._remaining_bytes = int(length)
        elif self.head.version == "1.1":
            self._chunked = True
            more = b"transfer-encoding: chunked\r\n"
        else:
            self._keep_alive = False
        if has_close or self._connection.draining:
            self._keep_alive = False
        if not self._keep_alive and not has_close:
            more += b"connection: close\r\n"
        return block + more + b"\r\n"

    def _send_body(self, body: bytes, more: bool) -> None:
        begin = self._encode_head(self._head) if self._response is _HEAD_BUFFERED else b""
        if self.head.method == "HEAD":
            body = b""
        if self._remaining_bytes >= 0:
            self._remaining_bytes -= len(body)
            if self._remaining_bytes < 0 or (self._remaining_bytes > 0 and not more):
                raise RuntimeError("the answer's body does not fit its content-length")
        self._response = _SENDING
        end = b""
        # Each chunk has its size in front, and an empty one is the last (RFC 9112, section 7.1).
        if self._chunked:
            if body:
                begin = b"%b%x\r\n" % (begin, len(body))
                end = b"\r\n"
            if not more:
                end += b"0\r\n\r\n"
        if len(body) < _JOIN_BYTES_MAX:
            self._connection.transport.write(b"".join((begin, body, end)))
        else:
            self._connection.transport.writelines((begin, body, end))
        if not more:
            self._response = _COMPLETE
            if self._waiter is not None:
                self._wake()
            self._connection.on_response_complete(keep_alive=self._keep_alive)


def _last_value(lowered: bytes, name: bytes) -> bytes:
    """Return the value of the last field with this name, which includes the delimiters; empty if none."""
    at = lowered.rfind(name)
    if at < 0:
        return b""
    at += len(name)
    return lowered[at : lowered.index(b"\r", at)]


def _has_close(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"connection" and b"close" in value.lower() for name, value in headers)
