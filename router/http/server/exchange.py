"""One request and its answer at the ASGI seam of the listener: ``receive``, ``send``, and the task between.

Answers without a content-length are chunked for HTTP/1.1 and end with the connection for HTTP/1.0. An
application that returns without having completed its answer gets the connection cut, so that a client
never takes half an answer for a whole one.
"""

from __future__ import annotations

import asyncio
import http
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from router.http.server.capacity import Capacity
from router.http.server.disconnect import EXTENSION, Message
from router.openai.errors import ApiError, internal_error

_log = structlog.get_logger()
_DISCONNECT: Message = {"type": "http.disconnect"}
_JOIN_BYTES_MAX = 64 * 1024  # larger pieces are written without being copied


def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode()


_PHRASES = {status.value: status.phrase for status in http.HTTPStatus}
_STATUS_LINES = {status: _status_line(status) for status in range(100, 1000)}


def error_answer(error: ApiError) -> bytes:
    """A whole answer that closes its connection, for requests that never reached the application."""
    body = error.body()
    headers = b"".join([b"%b: %b\r\n" % header for header in error.headers])
    return b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b" % (
        _STATUS_LINES[error.status],
        len(body),
        headers,
        body,
    )


class Line(Protocol):
    """What an exchange needs of the connection it belongs to."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    capacity: Capacity
    write_paused: asyncio.Future[None] | None
    closing_soon: bool

    def resume_reading(self) -> None:
        """The application took what had been read ahead."""

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is written whole."""

    def abort(self) -> None:
        """Close at once: the answer cannot be completed."""


class Exchange:
    """See the module. Belongs to one connection; used from the event loop only."""

    __slots__ = (
        "_begun",
        "_body",
        "_body_bytes",
        "_body_given",
        "_body_whole",
        "_chunked",
        "_connection",
        "_done",
        "_expects",
        "_gone",
        "_head",
        "_held_bytes",
        "_keep_alive",
        "_left",
        "_on_left",
        "_scope",
        "_waiter",
        "started",
    )

    def __init__(self, connection: Line, scope: dict[str, Any], keep_alive: bool, expects: bool) -> None:
        scope["extensions"] = {EXTENSION: self.on_disconnect}
        self.started = False
        """Bytes of the answer have been written."""
        self._head: bytes | None = None
        self._connection = connection
        self._scope = scope
        self._keep_alive = keep_alive and scope["http_version"] == "1.1"
        self._expects = expects
        self._body: list[bytes] = []
        self._body_bytes = 0  # waiting for the application
        self._held_bytes = 0  # of the whole body, until the application is done with it
        self._body_whole = False
        self._body_given = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_left: Callable[[], None] | None = None
        self._gone = False
        self._begun = False
        self._done = False
        self._chunked = False
        self._left = -1  # bytes of the answer still to come; -1: unknown

    # The connection's side.

    def body_received(self, data: bytes) -> int:
        """A piece of the request body; returns how many bytes wait for the application, or -1 if all bodies
        together have no room for it."""
        if self._done or self._gone:
            return 0  # nobody will ask for it
        if not self._connection.capacity.take(len(data)):
            return -1
        self._held_bytes += len(data)
        self._body.append(data)
        self._body_bytes += len(data)
        self._wake()
        return self._body_bytes

    def body_ended(self) -> None:
        """The request is whole."""
        self._body_whole = True
        self._wake()

    def leave(self) -> None:
        """The client has gone."""
        if self._gone or self._done:
            return
        self._gone = True
        if not self._begun:
            self._free()
        self._wake()
        if self._on_left is not None:
            self._on_left()

    async def run(self, app: Any) -> None:
        """The task of this exchange."""
        connection = self._connection
        self._begun = True
        try:
            await app(self._scope, self.receive, self.send)
        except asyncio.CancelledError:
            connection.abort()
            raise
        except Exception as error:  # noqa: BLE001  # whatever the application raises: log, answer, go on
            # As text: a traceback rendered with its locals would log prompts and credentials.
            trace = "".join(traceback.format_exception(error))
            _log.error("request failed", path=self._scope["path"], traceback=trace)
            await self._fail()
        finally:
            self._free()
        if not self._done and not self._gone:
            connection.abort()
        del self._scope["extensions"]  # it refers back to this: no cycle for the collector to find

    def _free(self) -> None:
        """Nobody holds the body any more."""
        self._body.clear()
        self._connection.capacity.give(self._held_bytes)
        self._held_bytes = 0

    async def _fail(self) -> None:
        if self.started or self._gone:
            return
        self._head = None  # what was announced has not been written
        self._chunked = False
        self._left = -1
        body = internal_error().body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    # The application's side.

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        """The extension ``router.http.server.disconnect.EXTENSION``."""
        self._on_left = callback
        if callback is not None and self._gone:
            callback()

    async def receive(self) -> Message:
        """ASGI ``receive``."""
        connection = self._connection
        if self._expects and not self._body_whole and not self._gone and not self.started:
            self._expects = False
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._gone or self._done):
            if self._body or (self._body_whole and not self._body_given):
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
                self._body_bytes = 0
                self._body_given = self._body_whole
                connection.resume_reading()
                return {"type": "http.request", "body": body, "more_body": not self._body_whole}
            waiter = self._waiter = connection.loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        return _DISCONNECT

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def send(self, message: Message) -> None:
        """ASGI ``send``. Waits while the client is too slow; silent once it has gone."""
        connection = self._connection
        if connection.write_paused is not None:
            await asyncio.shield(connection.write_paused)
        if self._gone:
            return
        if self._head is None:
            if message["type"] != "http.response.start":
                raise RuntimeError(f"expected http.response.start, got {message['type']}")
            self._head = self._build_head(message)  # goes out with the first of the body, in one packet
        elif self._done or message["type"] != "http.response.body":
            raise RuntimeError(f"unexpected {message['type']}")
        else:
            self._send_body(message.get("body", b""), message.get("more_body", False))

    def _build_head(self, message: Message) -> bytes:
        status = message["status"]
        headers = message.get("headers", ())
        lines = [_STATUS_LINES[status]]
        says_close = False
        for name, value in headers:
            lines.append(b"%b: %b\r\n" % (name, value))
            lowered = name.lower()
            if lowered == b"content-length":
                self._left = int(value)
            elif lowered == b"connection" and b"close" in value.lower():
                self._keep_alive = False
                says_close = True
        bodiless = self._scope["method"] == "HEAD" or status in (204, 304)
        if bodiless:
            self._left = 0
        elif self._left < 0:
            if self._scope["http_version"] == "1.1":
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self._keep_alive = False
        if self._connection.closing_soon:
            self._keep_alive = False
        if not self._keep_alive and not says_close:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        block = b"".join(lines)
        if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines):
            raise RuntimeError("a header field of the answer contains a line end")
        return block

    def _send_body(self, body: bytes, more: bool) -> None:
        if self.started and self._chunked and more and 0 < len(body) < _JOIN_BYTES_MAX:
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        if self._scope["method"] == "HEAD":
            body = b""
        if self._left >= 0:
            self._left -= len(body)
            if self._left < 0 or (self._left > 0 and not more):
                raise RuntimeError("the answer's body does not fit its content-length")
        begin = b""
        if not self.started:
            self.started = True
            begin = self._head or b""
        end = b""
        if self._chunked:
            if body:
                begin = b"%b%x\r\n" % (begin, len(body))
                end = b"\r\n"
            if not more:
                end += b"0\r\n\r\n"
        if len(body) < _JOIN_BYTES_MAX:
            self._connection.transport.write(b"%b%b%b" % (begin, body, end))
        else:
            self._connection.transport.writelines((begin, body, end))
        if not more:
            self._done = True
            self._wake()
            self._connection.answered(keep_alive=self._keep_alive)
