"""One request and its answer at the ASGI seam of the listener: ``receive``, ``send``, and the task between.

Answers without a content-length are chunked for HTTP/1.1 and end with the connection for HTTP/1.0. An
application that returns without having completed its answer gets the connection cut, so that a client
never takes half an answer for a whole one.
"""

from __future__ import annotations

import asyncio
import http
import traceback
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
import msgspec
import structlog

from router.http.listener import Capacity
from router.openai.errors import ApiError, internal_error

# What an application is offered besides ASGI: to hear that its client has gone, and to answer without
# messages.
#
# A client that goes cancels the task of its request, at every await of it. Our own listener does that
# itself; a gateway's exchange tells through an ASGI extension; under any other ASGI server a task waits for
# ``http.disconnect``. A middleware that wraps ``send`` is not bypassed:
# it gets messages.


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

EXTENSION = "kvatlas.disconnect"
"""``scope["extensions"][EXTENSION](callback | None)``: call ``callback`` once the client has gone."""
TOLD = "kvatlas.told"
"""``scope[TOLD]``: ``headers`` as a dictionary, of what was said twice the last; may be missing or None."""
OWN = "kvatlas.exchange"
"""``scope["extensions"][OWN]``: the ``RequestCycle`` of a request that came to our own listener."""

Hook = Callable[[Callable[[], None] | None], None]


class DisconnectWatch(msgspec.Struct, eq=False):
    """Cancels the current task when the client goes: ``watch`` after the body was read; always ``unwatch``.
    Our own listener's exchange has both itself."""

    _scope: Scope
    _receive: Receive
    gone: bool = False
    _task: asyncio.Task[Any] | None = None
    _hook: Hook | None = None
    _watcher: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin. No other caller may use ``receive`` from here on."""
        self._task = asyncio.current_task()
        extensions = self._scope.get("extensions")
        self._hook = extensions.get(EXTENSION) if extensions else None
        if self._hook is not None:
            self._hook(self._left)
        else:
            self._watcher = asyncio.get_running_loop().create_task(self._wait())

    def unwatch(self) -> None:
        """Watch no more."""
        if self._hook is not None:
            self._hook(None)
        if self._watcher is not None:
            self._watcher.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()


class Answering(Protocol):
    """One answer: ``begin``, and then pieces, of which the last one has ``more`` False."""

    def begin(self, status: int, fields: list[Header], length: bytes) -> None:
        """Announce the head, which goes out with the first piece. ``length``: the content-length among the
        fields; empty where there is none."""

    def piece(self, data: bytes, *, more: bool) -> Awaitable[None] | None:
        """Give a piece; to be awaited before the next one, if there is something to wait for."""


class Messages(msgspec.Struct, eq=False):
    """An answer by ASGI's ``send``."""

    _send: Send
    _start: Message | None = None

    def begin(self, status: int, fields: list[Header], length: bytes) -> None:
        """Implement ``Answering``."""
        self._start = {"type": "http.response.start", "status": status, "headers": fields}

    async def piece(self, data: bytes, *, more: bool) -> None:
        """Implement ``Answering``."""
        start, self._start = self._start, None
        if start is not None:
            await self._send(start)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


_log = structlog.get_logger()
_DISCONNECT: Message = {"type": "http.disconnect"}
Head = tuple[int, Iterable[Header], bytes | None]
"""Status, fields, and the content-length among them: empty where there is none, None where it is not
declared."""
_JOIN_BYTES_MAX = 64 * 1024  # larger pieces are written without being copied


def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {_PHRASES.get(status, '')}".encode()


_PHRASES = {status.value: status.phrase for status in http.HTTPStatus}
_STATUS_LINES = {status: _status_line(status) for status in range(100, 1000)}


def error_answer(error: ApiError) -> bytes:
    """A whole answer that closes its connection, for requests that never reached the application."""
    body = error.body()
    headers = b"".join([b"%b: %b\r\n" % header for header in error.headers])
    return b"%b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b" % (
        _STATUS_LINES[error.status],
        len(body),
        headers,
        body,
    )


class Line(Protocol):
    """Services that an exchange needs of its connection."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    capacity: Capacity
    write_paused: asyncio.Future[None] | None
    nothing: asyncio.Future[None]
    """To be waited for where there is nothing to wait for: done."""
    read_paused: bool
    closing_soon: bool

    def resume_reading(self) -> None:
        """The application took what had been read ahead."""

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is written whole."""

    def abort(self) -> None:
        """Close at once: the answer cannot be completed."""


class RequestCycle(msgspec.Struct, eq=False):
    """See the module. Belongs to one connection; used from the event loop only."""

    _connection: Line
    _scope: dict[str, Any]
    _keep_alive: bool
    _expects: bool
    """The client waits to be told to send the body."""
    task: asyncio.Task[None] | None = None
    started: bool = False
    """Bytes of the answer have been written."""
    _start: Head | None = None
    """Goes out with the first of the body, in one packet."""
    _body: list[bytes] = []
    """Bytes that wait for the application."""
    _body_bytes: int = 0
    _held_bytes: int = 0
    """Of the whole body, until the application is done with it."""
    _body_whole: bool = False
    _body_given: bool = False
    _waiter: asyncio.Future[None] | None = None
    _watched: bool = False
    gone: bool = False
    """The client has gone."""
    _begun: bool = False
    _done: bool = False
    _chunked: bool = False
    _left: int = -1
    """Bytes of the answer still to come; -1: unknown."""

    # The connection's side.

    def body_received(self, data: bytes) -> int:
        """A piece of the request body; returns how many bytes wait for the application, or -1 if all bodies
        together have no room for it."""
        if self._done or self.gone:
            return 0  # it will not be asked for
        if not self._connection.capacity.take(len(data)):
            return -1
        self._held_bytes += len(data)
        self._body.append(data)
        self._body_bytes += len(data)
        if self._waiter is not None:
            self._wake()
        return self._body_bytes

    def body_ended(self) -> None:
        """The request is whole."""
        self._body_whole = True
        if self._waiter is not None:
            self._wake()

    def leave(self) -> None:
        """The client has gone."""
        if self.gone or self._done:
            return
        self.gone = True
        if not self._begun:
            self._free()
        self._wake()
        self._cancel()

    async def run(self, app: Any, tasks: set[asyncio.Task[None]]) -> None:
        """Await ``task``; it leaves ``tasks`` at its end."""
        connection = self._connection
        self._begun = True
        self._scope["extensions"] = {OWN: self}
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
            if self.task is not None:
                tasks.discard(self.task)
            # Both refer back to this: no cycle for the collector to find.
            self.task = None
            del self._scope["extensions"]
        if not self._done and not self.gone:
            connection.abort()

    def _free(self) -> None:
        """Release the body."""
        self._body.clear()
        self._connection.capacity.give(self._held_bytes)
        self._held_bytes = 0

    async def _fail(self) -> None:
        if self.started or self.gone:
            return
        self._start = None  # what was announced has not been written
        self._chunked = False
        self._left = -1
        body = internal_error().body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    # The application's side.

    def watch(self) -> None:
        """Implement ``DisconnectWatch``."""
        self._watched = True
        if self.gone:
            self._cancel()

    def unwatch(self) -> None:
        """Implement ``DisconnectWatch``."""
        self._watched = False

    def _cancel(self) -> None:
        if self._watched and self.task is not None:
            self.task.cancel()

    async def receive(self) -> Message:
        """ASGI ``receive``."""
        connection = self._connection
        if self._expects and not self._body_whole and not self.gone and not self.started:
            self._expects = False
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.gone or self._done):
            if self._body or (self._body_whole and not self._body_given):
                return {"type": "http.request", "body": self._take(), "more_body": not self._body_whole}
            waiter = self._waiter = connection.loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        return _DISCONNECT

    def whole_body(self) -> bytes | None:
        """The body, where all of it has come; asked for instead of ``receive``, or before it."""
        if not self._body_whole or self._body_given or self.gone:
            return None
        return self._take()

    def _take(self) -> bytes:
        """Bytes that wait for the application."""
        waiting = self._body
        body = waiting[0] if len(waiting) == 1 else b"".join(waiting)
        waiting.clear()
        self._body_bytes = 0
        self._body_given = self._body_whole
        if self._connection.read_paused:
            self._connection.resume_reading()
        return body

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI ``send``. Waits while the client is too slow; silent once it has gone."""
        connection = self._connection
        if connection.write_paused is not None:
            return self._send_later(message, connection.write_paused)
        self._send(message)
        return connection.nothing

    async def _send_later(self, message: Message, caught_up: asyncio.Future[None]) -> None:
        await asyncio.shield(caught_up)
        self._send(message)

    def _send(self, message: Message) -> None:
        if self.gone:
            return
        if self._start is None:
            if message["type"] != "http.response.start":
                raise RuntimeError(f"expected http.response.start, got {message['type']}")
            self._start = message["status"], message.get("headers", ()), None
        elif self._done or message["type"] != "http.response.body":
            raise RuntimeError(f"unexpected {message['type']}")
        else:
            self._send_body(message.get("body", b""), message.get("more_body", False))

    def begin(self, status: int, fields: list[Header], length: bytes) -> None:
        """Implement ``Answering``. No field is ``connection``."""
        self._start = status, fields, length

    def piece(self, data: bytes, *, more: bool) -> Awaitable[None] | None:
        """Implement ``Answering``."""
        if self._connection.write_paused is not None:
            return self._piece_later(data, more, self._connection.write_paused)
        if not self.gone:
            self._send_body(data, more)
        return None

    async def _piece_later(self, data: bytes, more: bool, caught_up: asyncio.Future[None]) -> None:
        await asyncio.shield(caught_up)
        if not self.gone:
            self._send_body(data, more)

    def _build_head(self, head: Head) -> bytes:
        status, headers, length = head
        lines = [_STATUS_LINES[status], *map(b": ".join, headers), b""]
        block = b"\r\n".join(lines)
        if block.count(b"\n") >= len(lines) or block.count(b"\r") >= len(lines):
            raise RuntimeError("a header field of the answer contains a line end")
        says_close = False
        if length is None:
            lowered = block.lower()
            length = _value(lowered, b"\r\ncontent-length: ")
            says_close = lowered.find(b"\r\nconnection: ") >= 0 and _says_close(headers)
        more = b""
        if self._scope["method"] == "HEAD" or status in (204, 304):
            self._left = 0
        elif length:
            self._left = int(length)
        elif self._scope["http_version"] == "1.1":
            self._chunked = True
            more = b"transfer-encoding: chunked\r\n"
        else:
            self._keep_alive = False
        if says_close or self._connection.closing_soon:
            self._keep_alive = False
        if not self._keep_alive and not says_close:
            more += b"connection: close\r\n"
        return block + more + b"\r\n"

    def _send_body(self, body: bytes, more: bool) -> None:
        if self.started and self._chunked and more and 0 < len(body) < _JOIN_BYTES_MAX:
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        begin = b"" if self.started or self._start is None else self._build_head(self._start)
        if self._scope["method"] == "HEAD":
            body = b""
        if self._left >= 0:
            self._left -= len(body)
            if self._left < 0 or (self._left > 0 and not more):
                raise RuntimeError("the answer's body does not fit its content-length")
        self.started = True
        end = b""
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
            self._done = True
            if self._waiter is not None:
                self._wake()
            self._connection.answered(keep_alive=self._keep_alive)


def _value(lowered: bytes, name: bytes) -> bytes:
    """Of the last field of this name, given with what stands around it; empty where there is none."""
    at = lowered.rfind(name)
    if at < 0:
        return b""
    at += len(name)
    return lowered[at : lowered.index(b"\r", at)]


def _says_close(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"connection" and b"close" in value.lower() for name, value in headers)


# The ASGI scope of a request: what its connection knows, and what its head says.


ASGI = {"version": "3.0", "spec_version": "2.4"}


def connection_scope(transport: asyncio.BaseTransport, state: dict[str, Any]) -> dict[str, Any]:
    """The part that all requests of a connection share. ``state`` is the lifespan's."""
    return {
        "type": "http",
        "asgi": ASGI,
        "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        "root_path": "",
        "server": _address(transport.get_extra_info("sockname")),
        "client": _address(transport.get_extra_info("peername")),
        "state": state,
    }


def head_problem(version: str, url: bytes, hosts: int) -> str:
    """Return the fault of a parsed head with this number of Host fields; empty: none."""
    if b"#" in url:
        # Engines cut the fragment off, so that a path would be judged here and another one be answered there.
        return "The request target contains '#', which is no part of it: leave it out, or write %23."
    if hosts != 1 and (hosts or version == "1.1"):
        return f"The request has {hosts} Host fields; HTTP/1.1 asks for exactly one."
    return ""


def request_scope(
    connection: dict[str, Any],
    version: str,
    method: bytes,
    url: bytes,
    headers: list[tuple[bytes, bytes]],
    told: dict[bytes, bytes] | None = None,
) -> dict[str, Any]:
    """The scope of one request. Raises ``HttpParserInvalidURLError`` for an absolute URL that is none."""
    if url.startswith(b"/"):
        raw_path, _, query = url.partition(b"?")
    elif url == b"*":
        raw_path, query = url, b""
    else:
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path or b"/", parsed.query or b""
    path = raw_path.decode("latin-1")
    return {
        **connection,
        "http_version": version,
        "method": method.decode("ascii"),
        "path": unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": headers,
        TOLD: told,
        "state": connection["state"].copy(),
    }


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
