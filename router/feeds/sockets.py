"""ZMQ sockets of a feed: the live stream, replay requests, snapshot requests, and SGLang's load.

A socket is read from an asyncio loop, message by message, without a future per message. ZMQ's descriptor
signals only changes (edge-triggered), so a socket is always read until it is empty before the loop waits
again. One reader per socket; the socket is closed with its reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from types import TracebackType
from typing import Annotated, Final, NamedTuple, Self, TypeVar

import msgspec
import structlog
import zmq

from kvatlas.publisher.event_decoder import decode_in_pieces
from kvatlas.publisher.events import AllBlocksCleared, DecodedBatch, EventDecodeError
from kvatlas.publisher.snapshot import REQUEST
from kvatlas.router.feeds.base import (
    Cut,
    FeedSettings,
    FeedStats,
    Frame,
    ResyncError,
    SnapshotUnsupportedError,
    WireError,
    replay_in_pieces,
)
from kvatlas.router.http.keepalive import KEEPALIVE_COUNT, KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S

_log = structlog.get_logger()
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


# Fetches everything that an engine holds, with the snapshot protocol of its publisher, which is recognised
# by its response.
#
# All of them understand one request, ``[b"", b"snapshot"]`` from a new DEALER, and it is harmless to others:
# a publisher that only replays reads the eight bytes as a seq beyond its last and answers with its end
# marker. Addresses are tried in the order given (the engine's snapshot socket, then its replay socket), each
# with ``replay_timeout_s`` of silence allowed; the one that answered is tried first the next time. Responses:
#
# - ``[b"", seq, publisher_id, chunk, ...]``, one message: vLLM #57789 and our publisher. ``seq`` is signed,
#   -1 an empty history, below that "none now";
# - ``[b"", topic, resume_seq, payload]`` until the end marker, ``resume_seq`` the next live seq: vLLM #50134;
# - the end marker alone: no snapshots here.


_END_SEQ = b"\xff" * 8
# Batches of up to 1024 blocks each: about a millisecond of the sink's time.
_EVENTS_PER_PIECE = 4


SNAPSHOT_BYTES_MAX = 256 << 20
"""A larger snapshot is abandoned and a replay is requested: it is about 5 million blocks."""


class SnapshotClient:
    """Fetches snapshots; implements ``kvatlas.router.feeds.base.SnapshotSource``."""

    def __init__(
        self,
        endpoints: list[str],
        context: zmq.Context[zmq.Socket[bytes]],
        settings: FeedSettings,
        clock: Callable[[], float],
    ) -> None:
        self._endpoints = endpoints
        self._context = context
        self._settings = settings
        self._clock = clock

    async def fetch(self) -> AsyncGenerator[DecodedBatch | Cut, None]:
        """Request a snapshot and yield its batches, then its cut."""
        failure: ResyncError | None = None
        for endpoint in list(self._endpoints):
            with MessageReader(self._context.socket(zmq.DEALER)) as reader:
                try:
                    first = await self._ask(endpoint, reader)
                except SnapshotUnsupportedError:
                    continue
                except ResyncError as error:
                    failure = error
                    continue
                self._endpoints.remove(endpoint)
                self._endpoints.insert(0, endpoint)
                work = Slice(self._clock)
                work.begin()
                pieces = _whole(first) if _is_one_message(first) else None
                if pieces is not None:
                    for piece in pieces:
                        if piece is not None:
                            yield piece
                        await work.yield_to_loop()
                    return
                async for part in self._stream(endpoint, reader, first, work):
                    yield part
                    await work.yield_to_loop()
                return
        raise failure or SnapshotUnsupportedError("no snapshots here")

    async def _ask(self, endpoint: str, reader: MessageReader) -> list[bytes]:
        """Return the first message of the response, without its empty frame."""
        reader.socket.set(zmq.RCVHWM, self._settings.receive_queue_max)
        reader.socket.set(zmq.MAXMSGSIZE, SNAPSHOT_BYTES_MAX)  # limit of one frame
        try:
            reader.socket.connect(endpoint)
            reader.socket.send_multipart([b"", REQUEST], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise ResyncError(f"{endpoint}: {error}") from error
        first = await self._next(endpoint, reader)
        if len(first) >= 2 and _END_SEQ in first[:2] and not first[-1]:
            raise SnapshotUnsupportedError(endpoint)
        return first

    async def _next(self, endpoint: str, reader: MessageReader) -> list[bytes]:
        message = await receive(reader, endpoint, self._settings.replay_timeout_s)
        return message[1:] if message and message[0] == b"" else message

    async def _stream(
        self, endpoint: str, reader: MessageReader, first: list[bytes], work: Slice
    ) -> AsyncGenerator[DecodedBatch | Cut, None]:
        """Read vLLM #50134's form: numbered messages that all carry the seq to continue from."""
        resume, offload, size = first[1] if len(first) == 3 else b"", False, 0
        message = first
        while True:
            if len(message) != 3 or len(message[1]) != 8:
                raise ResyncError(f"{endpoint}: no snapshot message: {len(message)} frames")
            if message[1] == _END_SEQ:
                break
            if message[1] != resume:
                raise ResyncError(f"{endpoint}: the snapshot changed during transfer")
            size += len(message[2])
            batch = await work.all(_decode(message[2]))
            if message is first and not (batch.events and isinstance(batch.events[0], AllBlocksCleared)):
                raise ResyncError(f"{endpoint}: a replay instead of the requested snapshot")
            if size > SNAPSHOT_BYTES_MAX:
                raise ResyncError(f"{endpoint}: snapshot over {SNAPSHOT_BYTES_MAX} bytes")
            offload = offload or _shows_offload(batch)
            for piece in _split(batch):
                yield piece
            message = await self._next(endpoint, reader)
        yield Cut(int.from_bytes(resume, "big") - 1, None, offload)


def _is_one_message(frames: list[bytes]) -> bool:
    """Whether it is vLLM #57789's form: an 8-byte cut, then a 16-byte id."""
    return len(frames) >= 2 and len(frames[0]) == 8 and len(frames[1]) == 16


def _whole(frames: list[bytes]) -> Iterator[DecodedBatch | Cut | None]:
    """Yield the pieces of a response in one message; None where the event loop may run."""
    seq = int.from_bytes(frames[0], "big", signed=True)
    if seq < -1:
        raise ResyncError(f"the publisher has no snapshot now ({seq})")
    if sum(map(len, frames)) > SNAPSHOT_BYTES_MAX:
        raise ResyncError(f"snapshot over {SNAPSHOT_BYTES_MAX} bytes")
    offload = False
    for chunk in frames[2:]:
        batch = yield from _decode(chunk)
        offload = offload or _shows_offload(batch)
        yield from _split(batch)
    yield Cut(seq, frames[1], offload)


def _decode(payload: bytes) -> Generator[None, None, DecodedBatch]:
    try:
        batch = yield from decode_in_pieces(payload)
    except EventDecodeError as error:
        raise ResyncError(f"snapshot: {error}") from None
    if batch.rejected:
        raise ResyncError(f"snapshot: {batch.rejected[0]}")
    return batch


def _split(batch: DecodedBatch) -> Iterator[DecodedBatch]:
    for start in range(0, len(batch.events), _EVENTS_PER_PIECE):
        yield msgspec.structs.replace(batch, events=batch.events[start : start + _EVENTS_PER_PIECE])


def _shows_offload(batch: DecodedBatch) -> bool:
    return any(
        not isinstance(event, AllBlocksCleared) and event.medium not in {None, "GPU"}
        for event in batch.events
    )


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
