"""One connection to a Redis or Valkey server: bytes out, replies in, in order.

Requests are packed by the caller and may hold several commands; the future of a request gets all its replies.
A caller that stops waiting costs nothing: its replies are read and dropped in their turn, so a slow answer
never gets into the next question's place and no connection is thrown away for it.
Always true: what waits is bounded, and a lost connection fails everything that waits on it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import hiredis

_WAITING_MAX = 4096
_BUFFERED_BYTES_MAX = 32 << 20

Reply = Any
"""bytes, int, None, a list of replies, or ``hiredis.ReplyError``."""


class IndexUnavailable(Exception):  # noqa: N818  # a state to be lived with
    """The shared index cannot answer now. ``reason`` is one short word or two, for counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class _Waiter(NamedTuple):
    future: asyncio.Future[list[Reply]]
    replies: list[Reply]
    wanted: int
    since: float


class Link(asyncio.Protocol):
    """See the module; made by ``asyncio.create_connection``."""

    def __init__(self, on_lost: Callable[[], None] = lambda: None) -> None:
        self._parser = hiredis.Reader(notEnoughData=Ellipsis)
        self._waiting: deque[_Waiter] = deque()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self.run_id = ""
        """Names this start of this server; told by the handshake."""
        self.loaded: set[str] = set()

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def waited_s(self) -> float:
        """How long the oldest unanswered request has waited."""
        return self._loop.time() - self._waiting[0].since if self._waiting else 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        try:
            while self._waiting:
                reply = self._parser.gets()
                if reply is Ellipsis:
                    return
                self._take(reply)
        except hiredis.ProtocolError:
            self.abort()

    def _take(self, reply: Reply) -> None:
        waiter = self._waiting[0]
        waiter.replies.append(reply)
        if len(waiter.replies) == waiter.wanted:
            self._waiting.popleft()
            if not waiter.future.done():
                waiter.future.set_result(waiter.replies)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_exception(IndexUnavailable("connection", "lost"))
                future.exception()
        self._on_lost()

    def send(self, payload: bytes, count: int) -> asyncio.Future[list[Reply]]:
        """Ask; the future gets ``count`` replies. Raises ``IndexUnavailable`` if nothing can be sent."""
        if self._transport is None or self._transport.is_closing():
            raise IndexUnavailable("connection", "not connected")
        buffered = self._transport.get_write_buffer_size()
        if len(self._waiting) >= _WAITING_MAX or buffered > _BUFFERED_BYTES_MAX:
            raise IndexUnavailable("busy", "too many requests wait for the server")
        future: asyncio.Future[list[Reply]] = self._loop.create_future()
        self._waiting.append(_Waiter(future, [], count, self._loop.time()))
        self._transport.write(payload)
        return future

    async def ask(self, payload: bytes, count: int, timeout_s: float) -> list[Reply]:
        """``send`` and wait. Raises ``IndexUnavailable`` (``timeout`` when the time is up)."""
        return await within(self.send(payload, count), timeout_s)

    def abort(self) -> None:
        """Close at once; everything that waits fails."""
        if self._transport is not None:
            self._transport.abort()


async def within(future: asyncio.Future[list[Reply]], timeout_s: float) -> list[Reply]:
    """The future's result, or ``IndexUnavailable('timeout')``; cheaper than ``asyncio.wait_for``."""
    if future.done():
        return future.result()
    timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), _expire, future)
    try:
        return await future
    finally:
        timer.cancel()


_GRACE_S = 0.0005


def _expire(future: asyncio.Future[list[Reply]], *, again: bool = True) -> None:
    """One more turn of the loop first: the answer may lie unread in the socket of a busy process."""
    if future.done():
        return
    if again:
        future.get_loop().call_later(_GRACE_S, lambda: _expire(future, again=False))
        return
    future.set_exception(IndexUnavailable("timeout"))


def pack(*args: bytes | str | int) -> bytes:
    """One command in the wire format."""
    return bytes(hiredis.pack_command(args))  # type: ignore[arg-type]  # its stub means tuple[..., ...]
