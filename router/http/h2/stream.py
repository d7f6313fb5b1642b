"""One HTTP/2 stream: what waits to be sent on it, under the peer's window, and what may still be received.

Sending is by its connection, which gives each stream its turn; so one that its peer does not read holds no
other one up. Always true: after ``reset``, or the peer's reset, nothing is sent and nothing is told.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from router.http.h2.frames import CANCEL


class StreamHandler(Protocol):
    """Is told what comes on a stream; nothing after ``on_end`` and ``on_lost``, but ``on_lost``."""

    def on_data(self, data: bytes) -> None:
        """A piece of what the peer sends. Call ``Stream.taken`` once there is room for more."""

    def on_end(self) -> None:
        """The peer has sent all."""

    def on_lost(self) -> None:
        """The peer reset it, or the connection is gone: nothing can be sent any more."""


class StreamLine(Protocol):
    """What a stream needs of its connection."""

    loop: asyncio.AbstractEventLoop

    def ready(self, stream: Stream) -> None:
        """It has something to send."""

    def write_headers(self, stream_id: int, block: bytes, *, end: bool) -> None:
        """Send a header block now."""

    def grant(self, stream: Stream, size: int) -> None:
        """Let the peer send so much more on it."""

    def drop(self, stream: Stream, code: int | None) -> None:
        """It is over; ``code``: tell the peer so."""


class Stream:
    """See the module. ``credit``: what the peer allowed beyond the window that all streams begin with, less
    what was sent; ``receive_window``: what the peer still may send."""

    __slots__ = (
        *("_drained", "_granted", "_line", "_pieces", "begun", "closed", "credit", "handler", "peer_ended"),
        *("queued_bytes", "receive_window", "stream_id", "trailers"),
    )

    def __init__(self, line: StreamLine, stream_id: int, *, receive_window: int) -> None:
        self.stream_id = stream_id
        self.credit = 0
        self.receive_window = receive_window
        self.handler: StreamHandler | None = None
        self.peer_ended = False
        self.closed = False
        self.begun = False
        """Our headers have been sent."""
        self.trailers: bytes | None = None
        """The block that ends it, once everything before is sent."""
        self.queued_bytes = 0
        self._line = line
        self._pieces: list[bytes | memoryview] = []
        self._granted = 0
        self._drained: asyncio.Future[None] | None = None

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """Before everything else."""
        if not self.closed:
            self.begun = True
            self._line.write_headers(self.stream_id, block, end=end)
            if end:
                self._line.drop(self, None)

    def send(self, *pieces: bytes) -> None:
        """Bytes of the answer's body, in pieces that are joined only on the way out."""
        if not self.closed and self.trailers is None:
            waits = self.queued_bytes  # then it has its turn, or waits for its window
            self._pieces += pieces
            self.queued_bytes = waits + sum(map(len, pieces))
            if not waits:
                self._line.ready(self)

    def finish(self, trailers: bytes) -> None:
        """End with these trailers, after what waits."""
        if not self.closed and self.trailers is None:
            self.trailers = trailers
            if not self.queued_bytes:
                self._line.ready(self)

    def reset(self, code: int = CANCEL) -> None:
        """End it at once."""
        if not self.closed:
            self._line.drop(self, code)

    def taken(self, size: int) -> None:
        """So many bytes that were received are held no more, or elsewhere: the peer may send as many."""
        self._granted += size
        if self._granted * 2 >= self.receive_window and not self.closed and not self.peer_ended:
            size, self._granted = self._granted, 0
            self._line.grant(self, size)

    async def drained(self, bytes_max: int) -> None:
        """Wait until at most so many bytes wait to be sent, or the stream is over."""
        while self.queued_bytes > bytes_max and not self.closed:
            waiter = self._drained = self._line.loop.create_future()
            await waiter

    # The connection's side.

    def take(self, size: int, out: list[bytes | memoryview]) -> None:
        """So many of the bytes that wait are sent: they go to ``out``."""
        pieces = self._pieces
        self.queued_bytes -= size
        self.credit -= size
        if not self.queued_bytes:
            out += pieces
            pieces.clear()
        else:
            whole = 0
            while (length := len(pieces[whole])) <= size:
                size -= length
                whole += 1
            out += pieces[:whole]
            del pieces[:whole]
            if size:  # cut without a copy
                view = memoryview(pieces[0])
                out.append(view[:size])
                pieces[0] = view[size:]
        if self._drained is not None:
            self.wake()

    def wake(self) -> None:
        """Who waits for room may look again."""
        waiter, self._drained = self._drained, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def lost(self) -> None:
        """Nothing can be sent any more."""
        self.closed = True
        self._pieces.clear()
        self.queued_bytes = 0
        self.wake()
