"""The asyncio shell of a feed: SUB socket, its monitor, replay requests and a ticker around ``FeedMachine``.

All tasks run in one loop and call the machine synchronously. The returned actions are queued in that order
and performed by one task at a time, so the sink sees the machine's order even if a task is interrupted. A
burst is processed in slices of ``SLICE_S``. Nothing a publisher sends ends a feed; it ends by ``close`` or
when ``run`` is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine

import msgspec
import structlog
import zmq

from kvatlas.publisher.events import GROUPS_MAX, UNKNOWN_TYPES_MAX, DecodedBatch
from kvatlas.router.feeds.actions import (
    Action,
    Adopt,
    Apply,
    Forget,
    Reconnect,
    RequestReplay,
    RequestSnapshot,
    StateChanged,
)
from kvatlas.router.feeds.base import (
    Cut,
    FeedSettings,
    FeedSink,
    FeedState,
    FeedStats,
    Resync,
    ResyncError,
    SnapshotSource,
    SnapshotUnsupportedError,
)
from kvatlas.router.feeds.frames import WireError, live_in_pieces
from kvatlas.router.feeds.machine import FeedMachine
from kvatlas.router.feeds.snapshot_client import SnapshotClient
from kvatlas.router.feeds.sockets import (
    MessageReader,
    ReplayResync,
    Slice,
    connection_events,
    live_socket,
    monitored,
)
from kvatlas.router.index.engine import continues_series

_log = structlog.get_logger()


# A larger batch is passed to the sink in pieces. A series of stores that is not divided makes them longer, by
# less than GROUPS_MAX events, as group numbers rise within it.
_PIECE_EVENTS_MIN = 64
_PIECE_EVENTS_MAX = _PIECE_EVENTS_MIN + GROUPS_MAX


class Feed:
    """The event stream of one engine (and data-parallel rank).

    ``replay_endpoint`` None: gaps cannot be repaired. Snapshots are requested at ``snapshot_endpoint``, then
    at ``replay_endpoint``. ``clock`` is monotonic, ``wall`` in seconds since the epoch. ``resync`` and
    ``snapshots`` replace the strategies. ``logged_types``: unknown event types that were already logged,
    shared by all feeds. ``changed`` is called when ``state`` or ``unconfirmed`` of ``stats`` has changed.
    ``run`` may be called once.
    """

    def __init__(
        self,
        engine_id: str,
        events_endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        sink: FeedSink,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        settings: FeedSettings | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        resync: Resync | None = None,
        snapshot_endpoint: str | None = None,
        snapshots: SnapshotSource | None = None,
        logged_types: set[str] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine_id = engine_id
        self.events_endpoint = events_endpoint
        self.replay_endpoint = replay_endpoint
        self.stats = FeedStats()
        self._topic = topic
        self._sink = sink
        self._clock = clock
        self._wall = wall
        self._settings = settings or FeedSettings()
        self._context = context or zmq.Context.instance()
        if resync is None and replay_endpoint is not None:
            resync = ReplayResync(replay_endpoint, self._context, self.stats, self._settings, clock)
        self._resync = resync
        places = [endpoint for endpoint in (snapshot_endpoint, replay_endpoint) if endpoint is not None]
        if snapshots is None and places and self._settings.snapshots:
            snapshots = SnapshotClient(places, self._context, self._settings, clock)
        self._snapshots = snapshots
        self._machine = FeedMachine(
            self._settings, self.stats, has_replay=resync is not None, has_snapshot=snapshots is not None
        )
        self._machine.changed = self._changed = changed
        self._actions: deque[Action] = deque()
        self._performing = asyncio.Lock()
        self._parsing = asyncio.Lock()
        self._live: zmq.Socket[bytes] | None = None
        """While it is connected."""
        self._tasks: asyncio.TaskGroup | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._log = _log.bind(engine=engine_id)
        self._logged_types = set[str]() if logged_types is None else logged_types

    @property
    def state(self) -> FeedState:
        return self.stats.state

    async def run(self) -> None:
        """Follow the stream until ``close``; cancelling it leaves the sink as it is.

        Raises ``zmq.ZMQError`` for an invalid events endpoint.
        """
        with contextlib.ExitStack() as stack:
            live = live_socket(self._context, self._topic, self._settings)
            reader, monitor = monitored(live, self.events_endpoint, stack)
            self._live = live
            stack.callback(setattr, self, "_live", None)
            async with asyncio.TaskGroup() as self._tasks:
                running = [
                    self._tasks.create_task(self._read_live(reader, monitor)),
                    self._tasks.create_task(self._watch(monitor)),
                    self._tasks.create_task(self._tick()),
                ]
                await self._closed.wait()
                for task in [*running, self._fetching]:
                    if task is not None:
                        task.cancel()

    def close(self) -> None:
        """End ``run`` and drop the engine from the sink; a second call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._actions.clear()
            self._sink.unstage(self.engine_id)
            self._sink.forget(self.engine_id)

    def computed(self, since: float) -> None:
        """Tell the feed that the engine stored blocks since then (clock seconds). If their events do not
        come, it becomes STALE."""
        self._actions.extend(self._machine.computed(self._clock(), since))

    def distrust(self, reason: str) -> None:
        """Report that the state derived from this feed is wrong: it is distrusted and fetched again."""
        self._actions.extend(self._machine.distrust(self._clock(), reason))

    def suspect(self) -> None:
        """Tell the feed that the engine's process may have ended. Its blocks count once it is confirmed."""
        self._actions.extend(self._machine.suspect(self._clock()))

    def reconnect(self) -> None:
        """Connect to the engine again: its process has ended, and the connection was never closed. So it is
        when a machine loses power; libzmq would notice at the next probe, up to half a minute later."""
        if self._live is None:
            return
        self._actions.extend(self._machine.disconnected(self._clock()))
        self._live.disconnect(self.events_endpoint)
        self._live.connect(self.events_endpoint)

    # Tasks.

    async def _read_live(self, reader: MessageReader, monitor: MessageReader) -> None:
        work = Slice(self._clock)
        while True:
            message = await work.next_of(reader)
            # An event of the connection from before this message.
            if monitor.pending:
                await self._read_monitor(monitor)
            # Events of the connection meanwhile came after this message.
            async with self._parsing:
                actions = await self._take_live(message, work)
            await self._perform(actions)
            await work.yield_to_loop()

    async def _take_live(self, message: list[bytes], work: Slice) -> list[Action]:
        try:
            steps = live_in_pieces(message, payload_bytes_max=self._settings.payload_bytes_max)
            frame = await work.all(steps)
        except WireError as error:
            self.stats.malformed(error.reason)
            return []
        now = self._clock()
        if frame.fault is not None:
            self.stats.malformed(frame.fault)
        if frame.batch is not None:
            self.stats.last_batch_monotonic = now
            self.stats.lag_s = self._wall() - frame.batch.ts
        return self._machine.live(now, frame)

    async def _watch(self, monitor: MessageReader) -> None:
        while True:
            async with self._parsing:
                await self._read_monitor(monitor)
            await monitor.wait()

    async def _read_monitor(self, monitor: MessageReader) -> None:
        for event in connection_events(monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                await self._perform(self._machine.connected(self._clock()))
            elif event == zmq.EVENT_DISCONNECTED:
                await self._perform(self._machine.disconnected(self._clock()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_s)
            await self._perform(self._machine.tick(self._clock()))

    async def _fetch(self, request: RequestReplay, resync: Resync) -> None:
        """Carry out one replay request, as long as the machine still wants the answer."""
        await asyncio.sleep(request.delay_s)
        try:
            async with contextlib.aclosing(resync.fetch(request.from_seq)) as frames:
                async for frame in frames:
                    await self._perform(self._machine.replayed(self._clock(), request.request_id, frame))
                    if not self._machine.wants(request.request_id):
                        return
        except ResyncError as error:
            self._log.warning("replay_failed", error=str(error), from_seq=request.from_seq)
            await self._perform(self._machine.replay_failed(self._clock(), request.request_id))
        else:
            await self._perform(self._machine.replay_ended(self._clock(), request.request_id))

    async def _take_snapshot(self, request: RequestSnapshot, source: SnapshotSource) -> None:
        """Carry out one snapshot request: stage the answer, and let the machine decide on it."""
        await asyncio.sleep(request.delay_s)
        kept = False
        try:
            async with contextlib.aclosing(source.fetch()) as pieces:
                async for piece in pieces:
                    if not self._machine.wants(request.request_id):
                        return
                    if isinstance(piece, Cut):
                        actions = self._machine.snapshot_taken(self._clock(), request.request_id, piece)
                        kept = any(isinstance(action, Adopt) for action in actions)
                        await self._perform(actions)
                        return
                    self._sink.stage(self.engine_id, piece)
                    self._machine.progress(self._clock(), request.request_id)
        except SnapshotUnsupportedError:
            await self._no_snapshot(request, unsupported=True)
        except ResyncError as error:
            self._log.warning("snapshot_failed", error=str(error))
            await self._no_snapshot(request, unsupported=False)
        except Exception:  # noqa: BLE001  # a bug in the index must not end the feed for good
            self.stats.sink_errors += 1
            self._log.exception("sink_refused_snapshot")
            await self._no_snapshot(request, unsupported=False)
        finally:
            if not kept:
                self._sink.unstage(self.engine_id)

    async def _no_snapshot(self, request: RequestSnapshot, *, unsupported: bool) -> None:
        now = self._clock()
        await self._perform(self._machine.snapshot_failed(now, request.request_id, unsupported=unsupported))

    # Actions.

    async def _perform(self, actions: list[Action]) -> None:
        """Queue actions and wait until the queue is empty; only one task processes it at a time."""
        # Cancellation loses nothing: the next caller processes the rest of the queue.
        self._actions.extend(actions)
        if self.stats.state is FeedState.READY and len(self._actions) > 1:
            for action in actions:
                if isinstance(action, StateChanged) and action.state is FeedState.READY:
                    self.stats.state, self.stats.reason = FeedState.REPLAYING, "applying"
                    self._changed()
        async with self._performing:
            work = Slice(self._clock)
            work.begin()
            while self._actions and not self._closed.is_set():
                action = self._actions.popleft()
                if isinstance(action, Apply) and len(action.batch.events) > _PIECE_EVENTS_MAX:
                    self._actions.extendleft(reversed(_pieces(action.batch)))
                    continue
                self._do(action)
                await work.yield_to_loop()

    def _do(self, action: Action) -> None:
        match action:
            case Apply():
                self._apply(action)
            case Forget():
                self._sink.forget(self.engine_id)
            case RequestReplay() if self._resync is not None:
                self._request(action, self._fetch(action, self._resync))
            case RequestSnapshot() if self._snapshots is not None:
                self._request(action, self._take_snapshot(action, self._snapshots))
            case Adopt():
                self._sink.adopt(self.engine_id)
            case Reconnect():
                self.reconnect()
            case StateChanged():
                if (action.state, action.reason) == self._machine.announced:
                    self.stats.state, self.stats.reason = action.state, action.reason
                    self._changed()
                self._log.info("feed_state", state=str(action.state), reason=action.reason)

    def _apply(self, action: Apply) -> None:
        if action.batch.unknown:
            self._log_types(action.batch.unknown)
        try:
            self._sink.apply(self.engine_id, action.batch)
        except Exception:  # noqa: BLE001  # a bug in the index must not end the feed for good
            self.stats.sink_errors += 1
            self._log.exception("sink_refused_batch", seq=self.stats.last_seq)
            self._actions.extend(self._machine.batch_failed())

    def _log_types(self, names: list[str]) -> None:
        for name in names:
            if name not in self._logged_types and len(self._logged_types) < UNKNOWN_TYPES_MAX:
                self._logged_types.add(name)
                self._log.warning("events of an unknown type are skipped", type=name)

    def _request(self, request: RequestReplay | RequestSnapshot, work: Coroutine[None, None, None]) -> None:
        """Start fetching."""
        # The previous request is void; its task ends, unless it is the running one.
        if self._tasks is None or not self._machine.wants(request.request_id):
            work.close()
            return
        if self._fetching is not None and self._fetching is not asyncio.current_task():
            self._fetching.cancel()
        self._fetching = self._tasks.create_task(work)


def _pieces(batch: DecodedBatch) -> list[Apply]:
    """Return the batch in small pieces, in order; its faults are reported with the first."""
    events, pieces, start = batch.events, [], 0
    while start < len(events):
        end = start + _PIECE_EVENTS_MIN
        while end < len(events) and continues_series(events[end - 1], events[end]):
            end += 1
        pieces.append(events[start:end])
        start = end
    replace = msgspec.structs.replace
    return [
        Apply(
            replace(batch, events=piece, rejected=[], unknown=[]) if number else replace(batch, events=piece)
        )
        for number, piece in enumerate(pieces)
    ]
