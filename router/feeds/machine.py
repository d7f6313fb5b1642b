"""One engine's event stream as a pure state machine: numbered batches in, actions out.

Batches are applied in order and never twice (``Position``). Batches behind a gap are held (bounded) while a
replay repairs it. A repair without progress for ``hold_s_max``, or whose batches the publisher no longer has,
is given up: the feed applies what it holds and is DEGRADED, with the number of missing batches, until a
restart, a cache clear, a snapshot or a full resync (forget, then replay from seq 0).

If the publisher has snapshots, one is requested instead of the history, and whenever something is unknown;
replay still repairs gaps. The shell stages the answer in the sink; ``snapshot_taken`` decides whether it is
adopted: it must come from the process of the live stream, and batches received after its cut are applied on
top.

The sending process is identified by content. A repair also requests the last applied batch (the anchor) and
compares digests; a seq that goes back is a repetition if its digest is known, and a restart otherwise. A
publisher id, if present, decides alone. After a disconnect nothing is applied until the anchor has been
confirmed, if there is a replay socket. Until the anchor or a batch has confirmed the process, its state is
``unconfirmed``: blocks of a process that may have ended do not count.

Batches without a number are numbered by arrival. Such a feed is never READY, as losses do not show, and after
a disconnect the next batch counts as one of a new process.

What a connection missed before its subscription was in effect is asked for again, a second later. So is what
an answer shows to have been published and no connection has brought; if it was, the connection is half open,
and made again.

Other parts: ``recovery`` (the repair in progress, restarts), ``replay_answers``, ``snapshot_answers``.
No sockets, no logging, no clock: every input carries ``now`` (monotonic seconds) and returns its actions.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from kvatlas.router.feeds.actions import Action, StateChanged
from kvatlas.router.feeds.base import Cut, FeedSettings, FeedState, FeedStats
from kvatlas.router.feeds.frames import UNNUMBERED, Frame
from kvatlas.router.feeds.position import NOWHERE
from kvatlas.router.feeds.recovery import SUBSCRIBED_S, Recovery, RepairKind
from kvatlas.router.feeds.replay_answers import ReplayAnswers
from kvatlas.router.feeds.snapshot_answers import SnapshotAnswers


class FeedMachine:
    """State machine of one feed: inputs carry batches and times, outputs are actions.

    ``stats`` is updated in place.
    """

    def __init__(
        self, settings: FeedSettings, stats: FeedStats, *, has_replay: bool, has_snapshot: bool = False
    ) -> None:
        self._settings = settings
        self._stats = stats
        # State and reason after the last input; the shell shows READY only after it has done the actions.
        self.announced = stats.state, stats.reason
        self.changed: Callable[[], None] = lambda: None
        """Called when ``state`` or ``unconfirmed`` of the stats has changed."""
        self._recovery = Recovery(settings, stats, has_replay=has_replay, has_snapshot=has_snapshot)
        self._position = self._recovery.position
        self._replays = ReplayAnswers(self._recovery)
        self._snapshots = SnapshotAnswers(self._recovery)
        self._connected = False
        # By the socket's monitor, not just inferred from a message.
        self._connection_seen = False
        self._ever_connected = False
        self._unconfirmed = False
        # Of the last live batch of this connection.
        self._live_seq = NOWHERE
        self._unnumbered = False

    # Inputs.

    def connected(self, now: float) -> list[Action]:
        """Handle a (new) connection of the live socket."""
        if not self._connection_seen:
            self._connection_seen = True
            # The repair in progress was triggered by a leftover message, maybe of the previous connection.
            self._recovery.abandon(now)
            self._position.drop_held()
            self._connect(now)
        return self._finish()

    def disconnected(self, now: float) -> list[Action]:
        """The live socket lost its connection: the next message may be from another process."""
        if self._connected:
            self._connected = self._connection_seen = False
            self._live_seq = NOWHERE
            self._unconfirmed = self._position.next_seq > 0
            self._stats.disconnects += 1
            self._recovery.abandon(now)
            # replay still has them; applied after a new process's they would be wrong
            self._position.drop_held()
        return self._finish()

    def live(self, now: float, frame: Frame) -> list[Action]:
        """Handle a batch from the live socket."""
        recovery, position = self._recovery, self._position
        recovery.heard_at = now
        recovery.stale = False
        if not self._connected:
            self._connect(now)
        if frame.seq == UNNUMBERED:
            frame = self._number(now, frame)
        self._note_publisher(now, frame)
        in_step = frame.seq > self._live_seq
        if frame.batch is not None:
            self._live_seq = frame.seq
        if position.is_foreign(frame):
            recovery.restart(now, frame)
        elif frame.batch is None and frame.seq != position.next_seq:
            # May be noise; if it was a batch, its seq will be missing later.
            pass
        elif position.next_seq == NOWHERE:
            position.begin_at(frame)
        elif frame.seq >= position.next_seq:
            self._ahead(now, frame)
        elif position.is_repetition(frame):
            self._stats.duplicate_batches += 1
        elif position.is_late(frame, in_step=in_step):
            self._stats.late_batches += 1
        else:
            recovery.restart(now, frame)
        return self._finish()

    def replayed(self, now: float, request_id: int, frame: Frame) -> list[Action]:
        self._replays.replayed(now, request_id, frame)
        return self._finish()

    def replay_ended(self, now: float, request_id: int) -> list[Action]:
        self._replays.ended(now, request_id)
        return self._finish()

    def replay_failed(self, now: float, request_id: int) -> list[Action]:
        """Handle a request without a response, or with one that broke off."""
        self._replays.failed(now, request_id)
        return self._finish()

    def snapshot_taken(self, now: float, request_id: int, cut: Cut) -> list[Action]:
        """Handle a completely staged snapshot. Without an ``Adopt`` among the returned actions it is void."""
        self._snapshots.taken(now, request_id, cut)
        return self._finish()

    def snapshot_failed(self, now: float, request_id: int, *, unsupported: bool) -> list[Action]:
        """Handle a failed snapshot; ``unsupported``: this publisher never has one."""
        self._snapshots.failed(now, request_id, unsupported=unsupported)
        return self._finish()

    def progress(self, now: float, request_id: int) -> None:
        self._snapshots.progress(now, request_id)

    def distrust(self, now: float, reason: str) -> list[Action]:
        """External evidence contradicts our state: distrust it and schedule a resync."""
        self._position.doubt(reason)
        self._recovery.trust.at_once(now)
        return self._finish()

    def suspect(self, now: float) -> list[Action]:
        """Have the connected process confirmed: the previous one may have ended."""
        recovery = self._recovery
        if self._connected and recovery.has_replay and self._position.next_seq > 0:
            self._unconfirmed = True
            if recovery.repair is None or recovery.repair.kind is not RepairKind.CHECK:
                recovery.start(now, RepairKind.CHECK)
        return self._finish()

    def computed(self, now: float, since: float) -> list[Action]:
        """Handle evidence that the engine stored blocks from ``since`` to ``now``: their events are due."""
        self._recovery.owe(now, since)
        return self._finish()

    def batch_failed(self) -> list[Action]:
        """Handle a batch that the sink refused: its content is missing there."""
        self._position.lose(1, "sink_error")
        return self._finish()

    def tick(self, now: float) -> list[Action]:
        """Advance time; due a few times per second."""
        recovery = self._recovery
        repair = recovery.repair
        if repair is not None and now >= repair.deadline:
            recovery.give_up(now, repair)
        elif repair is None and self._connected:
            refreshing = self._snapshots.refresh(now)
            if not refreshing and recovery.has_replay:
                if recovery.trust.take_due(now):
                    recovery.try_again(now)
                elif not self._unnumbered:
                    recovery.look_late(now)
        self._check_silence(now)
        return self._finish()

    def wants(self, request_id: int) -> bool:
        """Whether the response to this request is still needed."""
        return self._recovery.answered(request_id) is not None

    # Connection and silence.

    def _connect(self, now: float) -> None:
        recovery = self._recovery
        reconnected = self._ever_connected
        self._connected = self._ever_connected = True
        recovery.heard_at, recovery.subscribed_at = now, now + SUBSCRIBED_S
        recovery.late_at = recovery.subscribed_at
        recovery.snapshots.reset()
        recovery.heard_id = None
        recovery.settled = False
        if self._position.next_seq > 0:
            if recovery.has_replay:
                recovery.start(now, RepairKind.CHECK)
            else:
                recovery.unverified = reconnected
        elif recovery.has_replay or recovery.snapshots.usable:
            recovery.start_history(now)
        else:
            recovery.unverified = reconnected and self._position.next_seq != NOWHERE

    def _note_publisher(self, now: float, frame: Frame) -> None:
        recovery = self._recovery
        if frame.batch is not None:
            recovery.heard_id = frame.publisher_id
            recovery.beats = recovery.beats or (frame.publisher_id is not None and not frame.batch.events)
        if recovery.unverified and self._position.is_same(frame):
            recovery.unverified = False
        self._snapshots.add_live(now, frame)

    def _check_silence(self, now: float) -> None:
        recovery = self._recovery
        if recovery.stale or not self._connected or now - recovery.heard_at < self._settings.stale_after_s:
            return
        owes = recovery.owes and recovery.owed_at <= now - self._settings.stale_after_s
        if self._settings.heartbeats or recovery.beats or owes:
            recovery.stale = True
            free = recovery.repair is None or recovery.repair.kind is RepairKind.LATE
            if self._position.next_seq == NOWHERE:
                recovery.reconnect(now)  # nothing is known that could be lost
            elif recovery.has_replay and free and self._position.next_seq > 0:
                recovery.start(now, RepairKind.CHECK)

    # Live batches.

    def _number(self, now: float, frame: Frame) -> Frame:
        """Give a batch without a number the next one."""
        self._unnumbered = True
        position = self._position
        if self._recovery.unverified:
            self._recovery.restart(now, None)
        return replace(frame, seq=max(0, position.next_seq, position.top_seq + 1))

    def _ahead(self, now: float, frame: Frame) -> None:
        recovery = self._recovery
        position, repair = self._position, recovery.repair
        if frame.seq > position.next_seq or (repair is not None and repair.holds):
            recovery.settled = False  # the connection brings batches; whose, a repair shows
        if repair is not None and repair.holds:
            position.hold(frame)
            if repair.kind is not RepairKind.CHECK:
                position.drain()
                if position.is_whole:
                    recovery.done(now)
        elif recovery.unverified and recovery.has_replay:
            position.hold(frame)
            recovery.start(now, RepairKind.CHECK)
        elif frame.seq == position.next_seq:
            if recovery.unverified:
                recovery.unverified = False
                position.doubt("unverified")
            position.apply(frame)
        else:
            self._open_gap(now, frame)

    def _open_gap(self, now: float, frame: Frame) -> None:
        recovery = self._recovery
        self._stats.gaps += 1
        if recovery.repair is not None and recovery.repair.kind is RepairKind.REFRESH:
            # The snapshot will contain the missing batches.
            self._position.skip_to(frame.seq, "gap")
            self._position.apply(frame)
        elif recovery.has_replay and recovery.trust.is_worth_waiting(now):
            self._position.hold(frame)
            recovery.start(now, RepairKind.GAP)
        elif recovery.unverified:
            # No replay, a reconnect, then a gap: it may be a new process. Wrongly crediting the blocks of an
            # ended process is worse than not crediting those of a live one.
            recovery.restart(now, frame)
        else:
            self._position.skip_to(frame.seq, "gap")
            self._position.apply(frame)

    # State.

    def _finish(self) -> list[Action]:
        """Return the collected actions, a change of state last."""
        stats = self._stats
        before = stats.state, stats.unconfirmed
        stats.missing_batches = self._position.missing
        stats.known_batches = self._position.known
        stats.waiting_batches = max(0, self._position.top_seq + 1 - max(self._position.next_seq, 0))
        stats.held_batches = len(self._position.held)
        stats.unconfirmed = self._unconfirmed = self._unconfirmed and not self._is_confirmed
        state, reason = self._state()
        if (state, reason) != self.announced:
            self.announced = stats.state, stats.reason = state, reason
            self._recovery.out.append(StateChanged(state, reason))
        if before != (stats.state, stats.unconfirmed):
            self.changed()
        out = self._recovery.out[:]
        self._recovery.out.clear()
        return out

    @property
    def _is_confirmed(self) -> bool:
        repair = self._recovery.repair
        checks = repair is not None and repair.kind is RepairKind.CHECK
        return self._connected and not self._recovery.unverified and not checks

    def _state(self) -> tuple[FeedState, str]:
        recovery = self._recovery
        repair, position = recovery.repair, self._position
        if not self._ever_connected:
            return FeedState.COLD, ""
        if recovery.stale:
            return FeedState.STALE, "silent"
        if not self._connected:
            return FeedState.DEGRADED, "disconnected"
        if repair is not None and repair.holds:
            replaying = repair.kind in {RepairKind.HISTORY, RepairKind.SNAPSHOT}
            return FeedState.REPLAYING if replaying else FeedState.DEGRADED, repair.kind.value
        if position.unknown:
            return FeedState.DEGRADED, position.unknown
        if recovery.unverified:
            return FeedState.DEGRADED, "unverified"
        # Subscribed: with nothing to ask for the history, no more will be known until it publishes.
        silent = position.next_seq == NOWHERE
        missing = "history_unknown" if silent else "unnumbered" if self._unnumbered else ""
        return FeedState.DEGRADED if missing else FeedState.READY, missing
