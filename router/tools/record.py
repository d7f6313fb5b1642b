"""Raw frames of live feeds, in order, into a ``CaptureWriter``.

One ``SourceRecorder`` per engine: it subscribes first, asks the replay socket for the history, holds live
frames back meanwhile, and goes on without a seam. A gap in the seqs is asked for again in the same way; a
seq that goes back is a restarted engine. What could not be had is counted, never papered over. Nothing is
decoded here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import xxhash
import zmq
from zmq.utils.monitor import parse_monitor_message

from router.feeds.base import FeedSettings
from router.feeds.sockets import MessageReader, Slice

_END_SEQ = b"\xff" * 8
_SEQ_MAX = (1 << 63) - 1
_RECENT_MAX = 16_384
"""Digests kept, to tell a frame that came both live and from history from one of a restarted engine."""
_HOLD_BYTES_MAX = 64 << 20
_RECEIVE_QUEUE_MAX = 100_000
"""Messages ZMQ keeps for us: a recorder would rather spend memory than lose a frame."""


class FrameSink(Protocol):
    """Where recorded frames go."""

    def put(self, source: str, recv_ts: float, topic: str, seq: int, payload: bytes) -> bool:
        """Take one frame; False where it had to be left out."""


class RecordSource(msgspec.Struct, frozen=True):
    """One stream to record; ``source`` is its name in the capture."""

    source: str
    events: str
    replay: str | None = None
    topic: str = ""


class SourceStats(msgspec.Struct):
    """Plain counters of one source."""

    source: str
    connected: bool = False
    frames: int = 0
    """Handed to the writer, history included."""
    history_frames: int = 0
    """Of those, from the replay socket."""
    first_seq: int | None = None
    last_seq: int | None = None
    gaps: int = 0
    lost_frames: int = 0
    """Seqs that neither the live stream nor the replay socket gave, after the first frame."""
    duplicates: int = 0
    restarts: int = 0
    malformed: int = 0
    replay_failures: int = 0


class _Frame(msgspec.Struct, frozen=True, gc=False):
    recv_ts: float
    topic: str
    seq: int
    payload: bytes


class SourceRecorder:
    """Records one source until it is told to ``finish``. ``wall`` gives seconds since the epoch."""

    def __init__(
        self,
        source: RecordSource,
        sink: FrameSink,
        *,
        settings: FeedSettings | None = None,
        wall: Callable[[], float] = time.time,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.stats = SourceStats(source.source)
        self._source = source
        self._sink = sink
        self._settings = settings or FeedSettings(receive_queue_max=_RECEIVE_QUEUE_MAX)
        self._wall = wall
        self._context = context or zmq.Context.instance()
        self._next = 0 if source.replay is not None else None
        self._recent: dict[int, int] = {}
        self._held: deque[_Frame] = deque()
        self._held_bytes = 0
        self._fetching: asyncio.Task[None] | None = None
        self._hopeless: int | None = None
        self._finishing = asyncio.Event()

    async def run(self) -> None:
        """Record until ``finish``. Raises ``zmq.ZMQError`` for an endpoint that is none."""
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(MessageReader(self._subscribe()))
            monitor = stack.enter_context(MessageReader(reader.socket.get_monitor_socket()))
            stack.callback(reader.socket.disable_monitor)
            reader.socket.connect(self._source.events)
            self._fetch_from(0)
            tasks = [
                asyncio.create_task(self._read(reader)),
                asyncio.create_task(self._watch(monitor)),
                asyncio.create_task(self._finishing.wait()),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            while (message := reader.take()) is not None:
                self._live(message)
            await self._settle()
            for error in ended:
                if isinstance(error, Exception):
                    raise error

    async def _settle(self) -> None:
        """Write what is held once the last answer is in; what is still missing then is lost."""
        while self._fetching is not None or self._held:
            if self._fetching is not None:
                await self._fetching
            else:
                self._hopeless = self._next
                self._release()

    def finish(self) -> None:
        """Let ``run`` take what has arrived and return."""
        self._finishing.set()

    def _subscribe(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.SUB)
        socket.set(zmq.RCVHWM, self._settings.receive_queue_max)
        socket.set(zmq.MAXMSGSIZE, 4 * self._settings.payload_bytes_max)
        socket.set(zmq.SUBSCRIBE, self._source.topic.encode())
        return socket

    async def _read(self, reader: MessageReader) -> None:
        work = Slice(time.monotonic, 0.005)
        while True:
            message = reader.take()
            if message is None:
                await reader.wait()
                work.begin()
                continue
            self._live(message)
            await work.breathe()

    async def _watch(self, monitor: MessageReader) -> None:
        while True:
            while (message := monitor.take()) is not None:
                if parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.stats.connected = True
            await monitor.wait()

    def _live(self, message: list[bytes]) -> None:
        frame = self._frame(message) if len(message) == 3 else None
        if frame is None:
            self.stats.malformed += 1
        elif self._fetching is None:
            self._accept(frame)
        elif self._held_bytes + len(frame.payload) <= _HOLD_BYTES_MAX:
            self._hold(frame)
        # One that cannot be held shows as a gap after what is held, and is asked for again then.

    def _hold(self, frame: _Frame) -> None:
        self._held.append(frame)
        self._held_bytes += len(frame.payload)

    def _frame(self, message: list[bytes]) -> _Frame | None:
        topic, seq_frame, payload = message
        seq = int.from_bytes(seq_frame[:8], "big")
        if len(seq_frame) not in {8, 24} or seq > _SEQ_MAX or len(payload) > self._settings.payload_bytes_max:
            return None
        return _Frame(self._wall(), topic.decode(errors="replace"), seq, payload)

    def _accept(self, frame: _Frame) -> None:
        """Write one live frame, or begin to ask for what is missing before it."""
        if self._next is None:
            self._next = frame.seq
        if frame.seq < self._next:
            if self._recent.get(frame.seq) == xxhash.xxh3_64_intdigest(frame.payload):
                self.stats.duplicates += 1
                return
            self.stats.restarts += 1
            self._recent.clear()
            self._next, self._hopeless = 0, None
        if frame.seq > self._next:
            if self._source.replay is not None and self._hopeless != self._next:
                self.stats.gaps += self.stats.first_seq is not None
                self._hold(frame)
                self._fetch_from(self._next)
                return
            self._lose(frame.seq)
        self._write(frame)

    def _lose(self, seq: int) -> None:
        """Go on at ``seq``; what was missing before the very first frame is history that nobody has."""
        if self.stats.first_seq is not None and self._next is not None:
            self.stats.gaps += self._source.replay is None
            self.stats.lost_frames += seq - self._next
        self._next = seq

    def _write(self, frame: _Frame) -> None:
        self._next = frame.seq + 1
        self._recent[frame.seq] = xxhash.xxh3_64_intdigest(frame.payload)
        if len(self._recent) > _RECENT_MAX:
            del self._recent[next(iter(self._recent))]
        if self._sink.put(self.stats.source, frame.recv_ts, frame.topic, frame.seq, frame.payload):
            self.stats.frames += 1
            self.stats.last_seq = frame.seq
            if self.stats.first_seq is None:
                self.stats.first_seq = frame.seq

    # History and gaps.

    def _fetch_from(self, seq: int) -> None:
        if self._source.replay is not None and self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch(self._source.replay, seq))

    async def _fetch(self, endpoint: str, seq: int) -> None:
        try:
            await self._replayed(endpoint, seq)
        except (TimeoutError, zmq.ZMQError):
            self.stats.replay_failures += 1
        finally:
            self._fetching = None
            if self._next == seq:
                self._hopeless = seq
            self._release()

    async def _replayed(self, endpoint: str, seq: int) -> None:
        """Write the answer of the replay socket. Raises ``TimeoutError`` where it falls silent."""
        with MessageReader(self._context.socket(zmq.DEALER)) as reader:
            reader.socket.set(zmq.RCVHWM, self._settings.receive_queue_max)
            reader.socket.set(zmq.MAXMSGSIZE, 4 * self._settings.payload_bytes_max)
            reader.socket.connect(endpoint)
            reader.socket.send_multipart([b"", seq.to_bytes(8, "big")], zmq.NOBLOCK)
            work = Slice(time.monotonic, 0.005)
            while True:
                message = reader.take()
                if message is None:
                    async with asyncio.timeout(self._settings.replay_timeout_s):
                        await reader.wait()
                    continue
                body = message[1:] if message and message[0] == b"" else message
                if len(body) in {2, 3} and body[-2] == _END_SEQ:
                    return
                self._replayed_frame(body)
                await work.breathe()

    def _replayed_frame(self, body: list[bytes]) -> None:
        if len(body) == 2:
            body = [self._source.topic.encode(), *body]  # older publishers leave the topic out
        frame = self._frame(body) if len(body) == 3 else None
        if frame is None:
            self.stats.malformed += 1
        elif self._next is not None and frame.seq >= self._next:
            self._fill_from_held(frame.seq)
            if frame.seq > self._next:
                self._lose(frame.seq)
            self.stats.history_frames += 1
            self._write(frame)

    def _fill_from_held(self, seq: int) -> None:
        """Write the held frames before ``seq``: the engine's history may begin after them."""
        while self._held and self._next is not None and self._next <= self._held[0].seq < seq:
            frame = self._held.popleft()
            self._held_bytes -= len(frame.payload)
            if frame.seq > self._next:
                self._lose(frame.seq)
            self._write(frame)

    def _release(self) -> None:
        """Write what was held; stops where a new gap is being asked for."""
        held, self._held, self._held_bytes = self._held, deque(), 0
        while held and self._fetching is None:
            self._accept(held.popleft())
        for frame in held:
            self._hold(frame)


async def record(
    recorders: Sequence[SourceRecorder],
    *,
    stop: asyncio.Event,
    seconds: float | None,
    ended: Callable[[], bool],
) -> None:
    """Run all recorders until ``stop`` is set, ``seconds`` have passed, or ``ended`` says that there is no
    use."""
    async with asyncio.TaskGroup() as tasks:
        for recorder in recorders:
            tasks.create_task(recorder.run())
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        while not ended() and (deadline is None or asyncio.get_running_loop().time() < deadline):
            left_s = 0.25 if deadline is None else deadline - asyncio.get_running_loop().time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(0.25, max(0.0, left_s))):
                    await stop.wait()
                break
        for recorder in recorders:
            recorder.finish()
