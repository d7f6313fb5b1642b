"""Records raw frames of live feeds, in order, into a ``CaptureWriter``. One ``SourceRecorder`` per engine
subscribes first, requests the history from the replay socket, and continues with the live stream without a
gap (``CaptureOrder``). Frames that are unavailable are counted. Nothing is decoded here, and frames are
passed on in batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvatlas.router.feeds.actions import RequestReplay
from kvatlas.router.feeds.base import FeedSettings
from kvatlas.router.feeds.sockets import MessageReader, live_socket
from kvatlas.router.tools.capture_writer import CaptureLine
from kvatlas.router.tools.event_order import CaptureOrder, RecordStats

_END_SEQ = b"\xff" * 8
_SEQ_MAX = (1 << 63) - 1
# Messages ZMQ buffers for us: memory is cheaper than a lost frame.
_RECEIVE_QUEUE_MAX = 100_000
# Messages read before yielding to the event loop: about two milliseconds (measured).
_TURN_MESSAGES = 256
# Seconds to sleep after a batch that emptied the socket: waking up for every few messages costs more than
# processing them.
_PAUSE_S = 0.002
# Thread switch interval in seconds while recording. With Python's default of 5 ms the writer thread, which
# requests the GIL several times per piece, falls behind at half the frame rate (measured).
_SWITCH_S = 0.0005


class FrameSink(Protocol):
    """Destination of recorded frames."""

    def put(self, frames: list[CaptureLine]) -> int:
        """Queue frames in order. Returns how many were accepted; the rest are dropped."""


class RecordSource(msgspec.Struct, frozen=True):
    """One stream to record; ``source`` is its name in the capture."""

    source: str
    events: str
    replay: str | None = None
    topic: str = ""


class SourceRecorder:
    """Records one source until ``finish`` is called. ``wall`` returns seconds since the epoch."""

    def __init__(
        self,
        source: RecordSource,
        sink: FrameSink,
        *,
        settings: FeedSettings | None = None,
        wall: Callable[[], float] = time.time,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.stats = RecordStats(source.source)
        self._source = source
        self._sink = sink
        self._settings = settings or FeedSettings(receive_queue_max=_RECEIVE_QUEUE_MAX)
        self._wall = wall
        self._context = context or zmq.Context.instance()
        self._order = CaptureOrder(self.stats, has_replay=source.replay is not None)
        self._topic_frame, self._topic = b"", ""
        self._live: MessageReader | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._fetched: RequestReplay | None = None
        self._finishing = asyncio.Event()

    async def run(self) -> None:
        """Record until ``finish`` is called. Raises ``zmq.ZMQError`` for an invalid endpoint."""
        with contextlib.ExitStack() as stack:
            live = live_socket(self._context, self._source.topic, self._settings)
            self._live = reader = stack.enter_context(MessageReader(live))
            monitor = stack.enter_context(MessageReader(reader.socket.get_monitor_socket()))
            stack.callback(reader.socket.disable_monitor)
            reader.socket.connect(self._source.events)
            self._forward()
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
            while self._turn(reader):
                pass
            await self._settle()
            for error in ended:
                if isinstance(error, Exception):
                    raise error

    def finish(self) -> None:
        """Make ``run`` record what has arrived and return."""
        self._finishing.set()

    async def _settle(self) -> None:
        """Write the held frames once the last response is complete; frames still missing are lost."""
        while not self._order.settled:
            if self._fetching is not None:
                await asyncio.wait([self._fetching])
            else:
                self._order.abandon()
                self._forward()
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])

    async def _read(self, reader: MessageReader) -> None:
        while True:
            taken = self._turn(reader)
            if not taken:
                await reader.wait()
            elif taken < _TURN_MESSAGES:
                await reader.rest(_PAUSE_S)
            else:
                await asyncio.sleep(0)

    def _turn(self, reader: MessageReader) -> int:
        """Read and pass on up to ``_TURN_MESSAGES`` available messages; returns their number."""
        messages = reader.take_many(_TURN_MESSAGES)
        order, now = self._order, self._wall()
        for message in messages:
            frame = self._frame(message, now)
            if frame is not None:
                order.live(frame)
        if messages:
            self._forward()
        return len(messages)

    async def _watch(self, monitor: MessageReader) -> None:
        while True:
            while (message := monitor.take()) is not None:
                if parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.stats.connected = True
            await monitor.wait()

    def _frame(self, message: list[bytes], now: float) -> CaptureLine | None:
        """Convert ``[topic, seq, payload]`` to a frame; None, and counted, if malformed."""
        if len(message) == 3:
            topic, seq_frame, payload = message
            seq = int.from_bytes(seq_frame[:8], "big")
            whole = len(seq_frame) in {8, 24} and seq <= _SEQ_MAX
            if whole and len(payload) <= self._settings.payload_bytes_max:
                if topic != self._topic_frame:
                    self._topic_frame, self._topic = topic, topic.decode(errors="replace")
                return CaptureLine(self._source.source, now, self._topic, seq, payload)
        self.stats.malformed += 1
        return None

    def _forward(self) -> None:
        """Pass on the frames that are in order, and fetch missing ones."""
        frames, stats = self._order.take(), self.stats
        if frames and (taken := self._sink.put(frames)):
            stats.frames += taken
            stats.last_seq = frames[taken - 1].seq
            if stats.first_seq is None:
                stats.first_seq = frames[0].seq
        request = self._order.request
        if self._fetching is None:
            if request is not None and self._source.replay is not None:
                self._fetched = request
                self._fetching = asyncio.create_task(self._fetch(self._source.replay, request))
        elif request is not self._fetched and self._fetching is not asyncio.current_task():
            self._fetching.cancel()

    async def _fetch(self, endpoint: str, request: RequestReplay) -> None:
        try:
            await self._replay(endpoint, request)
        except (TimeoutError, zmq.ZMQError):
            self.stats.replay_failures += 1
            if request is self._order.request:
                self._order.abandon()
        finally:
            self._fetching = None
            self._order.response_ended(request)
            self._forward()

    async def _replay(self, endpoint: str, request: RequestReplay) -> None:
        """Read the response of the replay socket. Raises ``TimeoutError`` if it falls silent."""
        with MessageReader(self._context.socket(zmq.DEALER)) as reader:
            reader.socket.set(zmq.RCVHWM, self._settings.receive_queue_max)
            reader.socket.set(zmq.MAXMSGSIZE, 4 * self._settings.payload_bytes_max)
            reader.socket.connect(endpoint)
            reader.socket.send_multipart([b"", request.from_seq.to_bytes(8, "big")], zmq.NOBLOCK)
            while True:
                messages = reader.take_many(_TURN_MESSAGES)
                if not messages:
                    async with asyncio.timeout(self._settings.replay_timeout_s):
                        await reader.wait()
                    continue
                if not self._order.holds and self._live is not None:
                    self._turn(self._live)
                going_on = self._take_replayed(request, messages)
                self._forward()
                if not going_on:
                    return
                await asyncio.sleep(0)

    def _take_replayed(self, request: RequestReplay, messages: list[list[bytes]]) -> bool:
        """Process messages of the response; False at its end, or once the rest of it is useless."""
        now = self._wall()
        for message in messages:
            body = message[1:] if message and message[0] == b"" else message
            if len(body) in {2, 3} and body[-2] == _END_SEQ:
                return False
            if len(body) == 2:
                body = [self._source.topic.encode(), *body]  # older publishers omit the topic
            frame = self._frame(body, now)
            if frame is not None and not self._order.replayed(request, frame):
                return False
        return True


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Shorten the thread switch interval, so that the writer thread gets the GIL soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def record(
    recorders: Sequence[SourceRecorder],
    *,
    stop: asyncio.Event,
    seconds: float | None,
    ended: Callable[[], bool],
) -> None:
    """Run all recorders until ``stop`` is set, ``seconds`` have passed, or ``ended`` says writing has."""
    loop = asyncio.get_running_loop()
    deadline = float("inf") if seconds is None else loop.time() + seconds
    with _short_switch_interval():
        async with asyncio.TaskGroup() as tasks:
            for recorder in recorders:
                tasks.create_task(recorder.run())
            while not ended() and not stop.is_set() and loop.time() < deadline:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(0.25, max(0.0, deadline - loop.time()))):
                        await stop.wait()
            for recorder in recorders:
                recorder.finish()
