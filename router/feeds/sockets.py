"""Reads ZMQ sockets from an asyncio loop, message by message, without a future per message; among them those
at which SGLang's engines publish their load.

ZMQ's descriptor signals only changes (edge-triggered), so a socket is always read until it is empty before
the loop waits again. One reader per socket; the socket is closed with its reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Annotated, Final, NamedTuple, Self, TypeVar

import msgspec
import structlog
import zmq

from router.feeds.base import FeedSettings, ResyncError

_log = structlog.get_logger()
_Result = TypeVar("_Result")
_RECONNECT_MS, _RECONNECT_MS_MAX = 100, 2000
# TCP keepalive: a dead peer is noticed within a minute; the system's default is two hours.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}


def live_socket(
    context: zmq.Context[zmq.Socket[bytes]], topic: str, settings: FeedSettings
) -> zmq.Socket[bytes]:
    """Make a SUB socket for an engine's live stream, not connected yet."""
    # Four times the decoded size: beyond that the connection is cut to save memory.
    return _subscribed(context, topic, settings.receive_queue_max, 4 * settings.payload_bytes_max)


def _subscribed(
    context: zmq.Context[zmq.Socket[bytes]], topic: str, messages_max: int, message_bytes_max: int
) -> zmq.Socket[bytes]:
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
        """Let messages accumulate."""
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

    async def all(self, steps: Generator[None, None, _Result]) -> _Result:
        """Run a generator to its end and return its result; the loop gets control between its steps."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: _Result = end.value
                return result
            await self.yield_to_loop()


# Load that SGLang's schedulers publish: ``[topic, sequence number, LoadStat]``, at once when it changes and
# once a second otherwise (managers/scheduler_components/load_publisher.py, 0.5.23). Messages wait in a short
# queue and only the latest one counts; a socket that is silent for three heartbeats counts no more.


LOAD_FRESH_S = 3.0
_LOADS_MAX: Final = 16
_LOAD_BYTES_MAX: Final = 4096
# At most twenty readings a second and engine.
_LOAD_PAUSE_S: Final = 0.05
_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class LoadReading(msgspec.Struct, array_like=True, tag="LoadStat", gc=False):
    """The first fields of SGLang's ``LoadStat``; it appends others."""

    running: _Count
    waiting: _Count
    used_tokens: _Count
    """Tokens in the KV cache that are in use, not only cached."""
    max_tokens: _Count
    """Size of the KV cache; 0: unknown."""


_READING: Final = msgspec.msgpack.Decoder(LoadReading)


class _Followed(NamedTuple):
    source: tuple[str, str]
    task: asyncio.Task[None]


class LoadSockets:
    """Follows the load sockets of engines. ``report`` gets each engine's latest reading, None for a message
    that is no ``LoadStat``. ``clock`` is monotonic."""

    def __init__(
        self, report: Callable[[str, LoadReading | None], None], *, clock: Callable[[], float]
    ) -> None:
        self._report = report
        self._clock = clock
        self._followed: dict[str, _Followed] = {}
        self._heard_s: dict[str, float] = {}

    def follow(self, engine_id: str, source: tuple[str, str] | None, tasks: asyncio.TaskGroup | None) -> None:
        """Follow the socket at this address and topic from now on; None: none."""
        known = self._followed.get(engine_id)
        if source == (None if known is None else known.source):
            return
        self.stop(engine_id)
        if source is not None and tasks is not None:
            task = tasks.create_task(self._read(engine_id, *source))
            self._followed[engine_id] = _Followed(source, task)

    def stop(self, engine_id: str) -> None:
        """Stop following an engine."""
        self._heard_s.pop(engine_id, None)
        if (known := self._followed.pop(engine_id, None)) is not None:
            known.task.cancel()

    def stop_all(self) -> None:
        """Stop following every engine."""
        for engine_id in list(self._followed):
            self.stop(engine_id)

    def is_fresh(self, engine_id: str) -> bool:
        """Whether the engine's latest reading counts."""
        heard_s = self._heard_s.get(engine_id)
        return heard_s is not None and self._clock() - heard_s <= LOAD_FRESH_S

    async def _read(self, engine_id: str, endpoint: str, topic: str) -> None:
        socket = _subscribed(zmq.Context.instance(), topic, _LOADS_MAX, _LOAD_BYTES_MAX)
        with MessageReader(socket) as reader:
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                problem = str(error)
                _log.warning("load not followed", engine=engine_id, endpoint=endpoint, problem=problem)
                return
            while True:
                messages = reader.take_many(_LOADS_MAX)
                if not messages:
                    await reader.wait()
                    continue
                reading = _reading(messages[-1])
                if reading is not None:
                    self._heard_s[engine_id] = self._clock()
                self._report(engine_id, reading)
                await reader.rest(_LOAD_PAUSE_S)


def _reading(message: list[bytes]) -> LoadReading | None:
    try:
        return _READING.decode(message[2]) if len(message) == 3 else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
