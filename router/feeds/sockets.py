"""ZMQ sockets of a feed: the live stream, replay requests, snapshot requests, and SGLang's load.

A socket is read from an asyncio loop, message by message, without a future per message. ZMQ's descriptor
signals only changes (edge-triggered), so a socket is always read until it is empty before the loop waits
again. One reader per socket; the socket is closed with its reader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from types import TracebackType
from typing import Self, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvatlas.router.feeds.base import FeedSettings, FeedStats, ResyncError
from kvatlas.router.feeds.frames import Frame, WireError, replay_in_pieces
from kvatlas.router.http.keepalive import KEEPALIVE_COUNT, KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S

_Result = TypeVar("_Result")
_RECONNECT_MS, _RECONNECT_MS_MAX = 100, 2000
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE_S,
    zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_INTERVAL_S,
    zmq.TCP_KEEPALIVE_CNT: KEEPALIVE_COUNT,
}


def live_socket(
    context: zmq.Context[zmq.Socket[bytes]], topic: str, settings: FeedSettings
) -> zmq.Socket[bytes]:
    """Make a SUB socket for an engine's live stream, not connected yet."""
    # Four times the decoded size: beyond that the connection is cut to save memory.
    return subscribed(context, topic, settings.receive_queue_max, 4 * settings.payload_bytes_max)


def subscribed(
    context: zmq.Context[zmq.Socket[bytes]], topic: str, messages_max: int, message_bytes_max: int
) -> zmq.Socket[bytes]:
    """Make a SUB socket, not connected yet."""
    socket = context.socket(zmq.SUB)
    socket.set(zmq.RCVHWM, messages_max)
    socket.set(zmq.MAXMSGSIZE, message_bytes_max)
    socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS_MAX)
    for option, value in _KEEPALIVE.items():
        socket.set(option, value)
    socket.set(zmq.SUBSCRIBE, topic.encode())
    return socket


class MessageReader:
    """Owns a socket and reads it; a context manager that closes it.

    ``send_multipart`` on the same socket is allowed between reads: the next read polls before it waits.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._loop = asyncio.get_running_loop()
        self._readable = asyncio.Event()
        self._loop.add_reader(socket.fileno(), self._readable.set)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self) -> list[bytes] | None:
        """Return the next message that has already arrived, or None."""
        self._readable.clear()
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def take_many(self, count: int) -> list[list[bytes]]:
        """Return up to ``count`` messages that have already arrived; fewer if there are no more now."""
        self._readable.clear()
        receive = self.socket.recv_multipart
        messages: list[list[bytes]] = []
        try:
            while len(messages) < count:
                messages.append(receive(zmq.NOBLOCK))
        except zmq.Again:
            pass
        return messages

    @property
    def pending(self) -> bool:
        """Whether a message has arrived; cheaper than ``take`` if the answer is mostly no."""
        return bool(self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)  # type: ignore[operator, arg-type]

    async def wait(self) -> None:
        """Return when the socket may have become readable; call it only after ``take`` returned None, or
        ``take_many`` less than ``count``."""
        await self._readable.wait()

    async def rest(self, seconds: float) -> None:
        # The descriptor is not watched meanwhile: it would wake the loop continuously.
        self._loop.remove_reader(self.socket.fileno())
        try:
            await asyncio.sleep(seconds)
        finally:
            if not self.socket.closed:
                self._loop.add_reader(self.socket.fileno(), self._readable.set)

    def close(self) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self.socket.fileno())
            self.socket.close(linger=0)


def monitored(
    socket: zmq.Socket[bytes], endpoint: str, stack: contextlib.ExitStack
) -> tuple[MessageReader, MessageReader]:
    """Connect a socket; returns its reader and that of its monitor, which are closed with ``stack``. Raises
    ``zmq.ZMQError`` for an invalid endpoint."""
    reader = stack.enter_context(MessageReader(socket))
    monitor = stack.enter_context(MessageReader(socket.get_monitor_socket()))
    stack.callback(socket.disable_monitor)
    socket.connect(endpoint)
    return reader, monitor


def connection_events(monitor: MessageReader) -> Iterator[int]:
    """Yield the events of the connection (``zmq.EVENT_...``) that have already come."""
    while (message := monitor.take()) is not None:
        yield int(parse_monitor_message(message)["event"])


async def receive(reader: MessageReader, endpoint: str, timeout_s: float) -> list[bytes]:
    """Return the next message. Raises ``ResyncError``, naming ``endpoint``, after ``timeout_s`` of
    silence."""
    if (message := reader.take()) is not None:
        return message
    try:
        async with asyncio.timeout(timeout_s):
            while (message := reader.take()) is None:
                await reader.wait()
    except TimeoutError:
        raise ResyncError(f"{endpoint}: silent for {timeout_s} s") from None
    return message


SLICE_S = 0.002
"""Longest time a feed works before other tasks of the event loop run; an event is never split."""


class Slice:
    """Yields to the event loop whenever ``SLICE_S`` have passed since the last time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = 0.0

    def begin(self) -> None:
        """Start a slice; call it when work begins after a wait."""
        self._until = self._clock() + SLICE_S

    async def yield_to_loop(self) -> None:
        """Yield if the slice is used up; call it after each piece of work."""
        if self._clock() >= self._until:
            await asyncio.sleep(0)
            self.begin()

    async def next_of(self, reader: MessageReader) -> list[bytes]:
        """Return a reader's next message; a wait for it ends the slice."""
        while (message := reader.take()) is None:
            await reader.wait()
            self.begin()
        return message

    async def all(self, steps: Generator[None, None, _Result]) -> _Result:
        """Run a generator to its end and return its result; the loop gets control between its steps."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: _Result = end.value
                return result
            await self.yield_to_loop()


class ReplayResync:
    """Requests batches from an engine's replay ROUTER socket; the one ``Resync`` strategy in use.

    Each request uses a new DEALER, so that its response cannot be confused with that of another request.
    Malformed messages are counted in ``stats`` and skipped.
    """

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        stats: FeedStats,
        settings: FeedSettings,
        clock: Callable[[], float],
    ) -> None:
        self._endpoint = endpoint
        self._context = context
        self._stats = stats
        self._settings = settings
        self._clock = clock

    async def fetch(self, from_seq: int) -> AsyncGenerator[Frame, None]:
        """Request a replay from ``from_seq`` and yield its frames."""
        socket = self._context.socket(zmq.DEALER)
        with MessageReader(socket) as reader:
            socket.set(zmq.RCVHWM, self._settings.receive_queue_max)
            socket.set(zmq.MAXMSGSIZE, 4 * self._settings.payload_bytes_max)
            try:
                socket.connect(self._endpoint)
                socket.send_multipart([b"", from_seq.to_bytes(8, "big")], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise ResyncError(f"{self._endpoint}: {error}") from error
            work = Slice(self._clock)
            while True:
                message = await receive(reader, self._endpoint, self._settings.replay_timeout_s)
                try:
                    steps = replay_in_pieces(message, payload_bytes_max=self._settings.payload_bytes_max)
                    frame = await work.all(steps)
                except WireError as error:
                    self._stats.malformed(error.reason)
                    await work.yield_to_loop()
                    continue
                if frame is None:
                    return
                if frame.fault:
                    self._stats.malformed(frame.fault)
                yield frame
                await work.yield_to_loop()
