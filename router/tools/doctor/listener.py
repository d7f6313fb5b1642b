"""Observe one engine's live event socket and replay socket.

Not a ``Feed``, which repairs and hides the faults that the doctor looks for, but the same rules of order
(``StreamOrder``). The replay socket gets one request for the whole history; live messages are buffered
meanwhile, then all are applied in the order of their numbers. It subscribes to every topic, so that a wrong
topic can be distinguished from silence. No message can end a listener; it ends by cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

import msgspec
import zmq

from kvatlas.publisher.events import DecodedBatch
from kvatlas.router.feeds.actions import Apply, Forget
from kvatlas.router.feeds.base import ResyncError
from kvatlas.router.feeds.frames import Frame, WireError, parse_live, parse_replay
from kvatlas.router.feeds.sockets import MessageReader, Slice, connection_events, monitored, receive
from kvatlas.router.tools.doctor.event_counts import EventCounts
from kvatlas.router.tools.event_order import StreamOrder


class Connectivity(StrEnum):
    """How far a socket connection got."""

    NONE = "none"
    """No address, or an invalid one."""
    REFUSED = "refused"
    """Nothing accepts connections at the address."""
    NO_HANDSHAKE = "no_handshake"
    """Something accepts connections but is not the expected socket."""
    UP = "up"


class ReplayState(StrEnum):
    """State of the single replay request."""

    NOT_ASKED = "not_asked"
    WAITING = "waiting"
    COMPLETE = "complete"
    CUT_SHORT = "cut_short"
    """It began to respond and stopped."""
    SILENT = "silent"


class Observation(msgspec.Struct):
    """Everything received from one engine."""

    events_link: Connectivity = Connectivity.NONE
    events_problem: str = ""
    replay_link: Connectivity = Connectivity.NONE
    replay_state: ReplayState = ReplayState.NOT_ASKED
    replay_problem: str = ""
    disconnects: int = 0
    live_batches: int = 0
    replayed_batches: int = 0
    first_seq: int | None = None
    """Lowest number still available from replay."""
    missing: int = 0
    """Numbers skipped among the received ones."""
    restarts: int = 0
    malformed: Counter[str] = msgspec.field(default_factory=Counter)
    topics: set[str] = msgspec.field(default_factory=set)
    sink_problem: str = ""
    """Why a batch could not be applied to the index."""
    lags_s: list[float] = msgspec.field(default_factory=list)
    """Local clock minus the time stamp of live batches, in seconds."""


_HELD_MAX = 20_000
# Number of malformed messages after which a replay socket is abandoned.
_STRANGE_MAX = 16
# Total replay timeout, as a multiple of the idle timeout.
_REPLAY_TIMEOUTS = 10
_RESEND_S = 0.05
_TOPICS_MAX = 16
_MESSAGE_BYTES_MAX = 256 << 20


class EventSink(Protocol):
    """Destination of a listener's batches."""

    def apply(self, engine_id: str, batch: DecodedBatch) -> None:
        """Apply one batch; called in the order of their numbers."""

    def forget(self, engine_id: str) -> None:
        """Discard the engine's state: the engine restarted."""


class EventListener:
    """Receives one engine's messages and passes its batches to ``sink``.

    ``run`` may be called once. ``replay_timeout_s``: how long the replay socket may be silent, in seconds.
    """

    def __init__(
        self, engine_id: str, events: str, replay: str | None, sink: EventSink, *, replay_timeout_s: float
    ) -> None:
        self.seen = Observation()
        self.event_counts = EventCounts()
        # Set once the history has been received, or is unavailable.
        self.settled = asyncio.Event()
        self._engine_id = engine_id
        self._events = events
        self._replay = replay
        self._sink = sink
        self._timeout_s = replay_timeout_s
        self._order = StreamOrder()
        self._held: dict[int, tuple[Frame, bytes]] = {}
        self._up = asyncio.Event()

    async def run(self) -> None:
        """Listen until cancelled."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        with contextlib.ExitStack() as stack:
            try:
                live, monitor = _connect(context, zmq.SUB, self._events, stack)
            except zmq.ZMQError as problem:
                self.seen.events_problem = str(problem)
                await self._ask_replay()
                self._flush()
                await asyncio.Event().wait()
                return
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_live(live))
                tasks.create_task(self._watch_live(monitor))
                tasks.create_task(self._history())

    async def _history(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._up.wait()
        await self._ask_replay()
        self._flush()

    # The live socket.

    async def _read_live(self, reader: MessageReader) -> None:
        work = Slice(time.monotonic)
        while True:
            self._take_live(await work.next_of(reader))
            await work.yield_to_loop()

    def _take_live(self, message: list[bytes]) -> None:
        try:
            frame = parse_live(message)
        except WireError as problem:
            self.seen.malformed[problem.reason] += 1
            return
        if len(self.seen.topics) < _TOPICS_MAX:
            self.seen.topics.add(message[0].decode("utf-8", "replace"))
        self.seen.live_batches += 1
        if frame.fault is not None:
            self.seen.malformed[frame.fault] += 1
        if frame.batch is not None and len(self.seen.lags_s) < _HELD_MAX:
            self.seen.lags_s.append(time.time() - frame.batch.ts)
        if self.settled.is_set():
            self._apply(frame, message[2])
        elif len(self._held) < _HELD_MAX:
            self._held[frame.seq] = frame, message[2]

    async def _watch_live(self, monitor: MessageReader) -> None:
        async for event in _monitored(monitor):
            self.seen.events_link = _further(self.seen.events_link, event)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._up.set()
            elif event == zmq.EVENT_DISCONNECTED and self.seen.events_link is Connectivity.UP:
                self.seen.disconnects += 1

    # The replay socket.

    async def _ask_replay(self) -> None:
        if self._replay is None:
            return
        self.seen.replay_state = ReplayState.WAITING
        with contextlib.ExitStack() as stack:
            try:
                reader, monitor = _connect(zmq.Context.instance(), zmq.DEALER, self._replay, stack)
            except zmq.ZMQError as problem:
                self.seen.replay_state, self.seen.replay_problem = ReplayState.SILENT, str(problem)
                return
            watching = asyncio.gather(self._watch_replay(monitor), _request_replay(reader))
            try:
                async with asyncio.timeout(_REPLAY_TIMEOUTS * self._timeout_s):
                    await self._read_replay(reader)
            except TimeoutError:
                self.seen.replay_state = ReplayState.CUT_SHORT
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _watch_replay(self, monitor: MessageReader) -> None:
        async for event in _monitored(monitor):
            self.seen.replay_link = _further(self.seen.replay_link, event)

    async def _read_replay(self, reader: MessageReader) -> None:
        """Read the response; a foreign service may send garbage endlessly or very slowly."""
        seen = self.seen
        work = Slice(time.monotonic)
        strange = 0
        seen.replay_state = ReplayState.CUT_SHORT
        while seen.replayed_batches < _HELD_MAX and strange < _STRANGE_MAX:
            message = await self._next(reader)
            if message is None:
                seen.replay_state = ReplayState.CUT_SHORT if seen.replayed_batches else ReplayState.SILENT
                return
            try:
                frame = parse_replay(message)
            except WireError as problem:
                seen.malformed[problem.reason] += 1
                strange += 1
                continue
            if frame is None:
                seen.replay_state = ReplayState.COMPLETE
                return
            seen.replayed_batches += 1
            if seen.first_seq is None or frame.seq < seen.first_seq:
                seen.first_seq = frame.seq
            if frame.fault is not None:
                seen.malformed[frame.fault] += 1
            self._held[frame.seq] = frame, message[-1]
            await work.yield_to_loop()

    async def _next(self, reader: MessageReader) -> list[bytes] | None:
        """Return the next message; None after ``replay_timeout_s`` of silence."""
        try:
            return await receive(reader, self._replay or "", self._timeout_s)
        except ResyncError:
            return None

    def _flush(self) -> None:
        for seq in sorted(self._held):
            self._apply(*self._held[seq])
        self._held.clear()
        self.settled.set()

    def _apply(self, frame: Frame, payload: bytes) -> None:
        seen, feed = self.seen, self._order.stats
        repeated = feed.duplicate_batches
        actions = self._order.live(time.monotonic(), frame)
        seen.restarts, seen.missing = feed.restarts, self._order.lost.count
        if feed.duplicate_batches > repeated:
            return
        self.event_counts.add(frame, payload)
        for action in actions:
            if isinstance(action, Forget):
                self._sink.forget(self._engine_id)
            elif isinstance(action, Apply):
                self._pass_on(action.batch)

    def _pass_on(self, batch: DecodedBatch) -> None:
        try:
            self._sink.apply(self._engine_id, batch)
        except Exception as problem:  # noqa: BLE001  malformed events must not end the examination
            self.seen.sink_problem = f"{type(problem).__name__}: {problem}"[:200]


async def _request_replay(reader: MessageReader) -> None:
    """Request the whole history once a connection exists:

    ZMQ drops the queue of a connection whose handshake failed, and has no queue until it reconnects.
    """
    while True:
        try:
            reader.socket.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
        except zmq.Again:
            await asyncio.sleep(_RESEND_S)
        else:
            return


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, stack: contextlib.ExitStack
) -> tuple[MessageReader, MessageReader]:
    """Create a connecting socket and its monitor, closed with ``stack``. Raises ``zmq.ZMQError``."""
    socket = context.socket(kind)
    socket.set(zmq.RCVHWM, _HELD_MAX)
    socket.set(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
    if kind == zmq.SUB:
        socket.set(zmq.SUBSCRIBE, b"")
    return monitored(socket, endpoint, stack)


async def _monitored(monitor: MessageReader) -> AsyncIterator[int]:
    """Yield the events of a monitor socket, without end."""
    while True:
        for event in connection_events(monitor):
            yield event
        await monitor.wait()


_LINK_OF_EVENT = {
    int(zmq.EVENT_CONNECT_DELAYED): Connectivity.REFUSED,
    int(zmq.EVENT_CONNECTED): Connectivity.NO_HANDSHAKE,
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): Connectivity.UP,
}
_ORDER = list(Connectivity)


def _further(link: Connectivity, event: int) -> Connectivity:
    """Return the most advanced connection state after one more monitor event."""
    return max(link, _LINK_OF_EVENT.get(event, Connectivity.NONE), key=_ORDER.index)
