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
from collections.abc import Callable
from typing import Literal, cast

import httptools

from router.http.client.settings import ClientSettings
from router.http.client.stats import ClientStats
from router.http.deadlines import NEVER

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
        """What ``read`` would give without waiting; None: nothing yet."""
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
            self.abort()  # nobody asked: never let it be taken for the next answer
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
            return  # of a second answer that nobody asked for
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
