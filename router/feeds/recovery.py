"""Repair of a feed: the repair in progress, its requests, their responses, and how it ends.

``FeedMachine`` (live batches), ``ReplayAnswers`` and ``SnapshotAnswers`` decide; the operations are those of
``Recovery``, so that at most one repair is in progress, and every request made before it is void. Pure.
"""

from __future__ import annotations

import math
from enum import Enum

import msgspec

from kvatlas.router.feeds.actions import Action, Reconnect, RequestReplay, RequestSnapshot
from kvatlas.router.feeds.base import FeedSettings, FeedStats
from kvatlas.router.feeds.frames import Frame
from kvatlas.router.feeds.position import NOWHERE, HeldBatches, Position


class RepairKind(Enum):
    """Why a replay was requested; the value is the reason shown in the feed's state."""

    HISTORY = "history"
    """From seq 0: the engine is new to us, restarted, or is being resynced."""
    GAP = "gap"
    CHECK = "check"
    """After a disconnect or a silence: is it the same process, and what did it send meanwhile?"""
    SNAPSHOT = "snapshot"
    """A snapshot is requested while nothing is known: instead of HISTORY, and before it."""
    REFRESH = "refresh"
    """A snapshot is requested; the known state stays in use and live batches are applied."""
    LATE = "late"
    """A second look at what the connection may have missed; live batches are applied meanwhile."""
    RESYNC = "resync"
    """Seq 0 is requested without holding batches back; becomes HISTORY once seq 0 arrives."""


class Repair(msgspec.Struct):
    """The repair in progress. ``deadline``: when it is given up unless it makes progress before."""

    kind: RepairKind
    deadline: float
    request_id: int = 0
    from_seq: int = 0
    attempts: int = 0
    applied_before: int = 0
    """``Position.applied`` at the time of the request."""
    anchored: bool = False
    """An applied batch came back unchanged: the replay is from the followed process."""
    lowest_seq: int | None = None
    """Lowest seq of the answer to this request."""

    @property
    def holds(self) -> bool:
        """Whether live batches wait for this repair."""
        return self.kind not in {RepairKind.RESYNC, RepairKind.REFRESH, RepairKind.LATE}

    @property
    def by_snapshot(self) -> bool:
        return self.kind in {RepairKind.SNAPSHOT, RepairKind.REFRESH}

    def asked(self, request_id: int, from_seq: int, applied: int) -> None:
        """Record a new request; the response to an earlier one no longer counts."""
        self.request_id = request_id
        self.from_seq = from_seq
        self.applied_before = applied
        self.lowest_seq = None

    def saw(self, seq: int) -> None:
        """Record a batch of the response."""
        self.lowest_seq = seq if self.lowest_seq is None else min(seq, self.lowest_seq)


REPLAY_ATTEMPTS_MAX = 3
"""Replay requests in a row without progress before a repair is given up."""
RESTART_PAUSE_S = 1.0
"""No engine restarts twice within it: two of them publish at one address, each of their batches looks like a
restart, and neither must be asked for its whole history for every batch of the other."""
RECONNECT_PAUSE_S = 30.0
"""As long as keepalive may take to end a connection: behind an address of two engines, of which one publishes
and the other replays, it would not help to connect more often."""
SUBSCRIBED_S = 1.0
"""Seconds from a connection until its subscription is in effect. libzmq's PUB reads it with its next message,
and of a burst only some time into it (``max_command_delay``): what it sends before is lost, and behind
the last batch of a burst nothing shows the gap."""


class ReplayTrust:
    """Whether replay is worth waiting for, and when to retry a resync after a failure."""

    def __init__(self, settings: FeedSettings) -> None:
        self._settings = settings
        # The publisher no longer has seq 0, so a full resync cannot succeed.
        self.rolled = False
        self._try_at: float | None = None
        self._distrusted_until = float("-inf")
        self._backoff_s = settings.resync_backoff_s

    def reset(self) -> None:
        """Start over with a new stream."""
        self.rolled = False
        self._try_at = None
        self.worked()

    def worked(self) -> None:
        """Record a successful repair."""
        self._distrusted_until = float("-inf")
        self._backoff_s = self._settings.resync_backoff_s

    def failed(self, now: float) -> None:
        """Record a repair that was given up: gaps do not wait for replay for a while, then a resync is
        tried."""
        self._distrusted_until = now + self._backoff_s
        self._try_at = None if self.rolled else self._distrusted_until
        self._backoff_s = min(self._backoff_s * 2, self._settings.resync_backoff_s_max)

    def at_once(self, now: float) -> None:
        """Schedule a resync for the next tick, if it can succeed: the known state was found to be wrong."""
        self._try_at = None if self.rolled else now

    def put_off(self, now: float) -> None:
        """Reschedule a resync that was displaced by something more urgent."""
        self._try_at = now + self._backoff_s

    def is_worth_waiting(self, now: float) -> bool:
        return now >= self._distrusted_until

    def take_due(self, now: float) -> bool:
        """Whether a retry is due; true once each time one was scheduled."""
        due = self._try_at is not None and now >= self._try_at
        if due:
            self._try_at = None
        return due


class SnapshotTrust:
    """Whether the publisher may have a snapshot, and when to request one again after it had none."""

    def __init__(self, settings: FeedSettings, *, available: bool) -> None:
        self._settings = settings
        self._available = available
        self._not_before = float("-inf")
        self._backoff_s = settings.resync_backoff_s
        self.usable = available

    def reset(self) -> None:
        """Start over with another process."""
        self.usable = self._available
        self.worked()

    def worked(self) -> None:
        """A snapshot was fetched; reset the back-off."""
        self._not_before = float("-inf")
        self._backoff_s = self._settings.resync_backoff_s

    def failed(self, now: float) -> None:
        self._not_before = now + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, self._settings.resync_backoff_s_max)

    def may_ask(self, now: float) -> bool:
        return self.usable and now >= self._not_before


class Recovery:
    """State shared by the parts of a feed machine, and its operations. ``out``: the actions so far."""

    def __init__(
        self, settings: FeedSettings, stats: FeedStats, *, has_replay: bool, has_snapshot: bool
    ) -> None:
        self.settings = settings
        self.stats = stats
        self.has_replay = has_replay
        self.out: list[Action] = []
        self.position = Position(settings, stats, self.out)
        self.repair: Repair | None = None
        self.trust = ReplayTrust(settings)
        self.snapshots = SnapshotTrust(settings, available=has_snapshot)
        # Live batches, applied or not, since a REFRESH was requested.
        self.tail = HeldBatches(batches_max=settings.hold_batches_max, bytes_max=settings.hold_bytes_max)
        # Publisher named by the last live batch.
        self.heard_id: bytes | None = None
        self.heard_at = 0.0
        # Whether this publisher sends heartbeats.
        self.beats = False
        # Reconnected, without a way to find out whether to the same process.
        self.unverified = False
        self.stale = False
        # When the subscription of this connection is in effect, and when to ask what it may have missed.
        self.subscribed_at = 0.0
        self.late_at: float | None = None
        # When an answer showed that batches are due which the connection had not brought; the position then.
        self.owed_at, self._owed_seq = -math.inf, math.inf
        # The process behind this connection was the followed one, and no batch has cast doubt on it.
        self.settled = False
        self._request_id = 0
        self._restarted_at = self._reconnected_at = float("-inf")

    def answered(self, request_id: int) -> Repair | None:
        """Return the repair in progress if this request belongs to it."""
        repair = self.repair
        return repair if repair is not None and repair.request_id == request_id else None

    def start_history(self, now: float, delay_s: float = 0.0) -> None:
        """Request everything: a snapshot if there may be one, else the history."""
        self.position.next_seq = 0
        kind = RepairKind.SNAPSHOT if self.snapshots.may_ask(now) else RepairKind.HISTORY
        self.start(now, kind, delay_s)

    def start(self, now: float, kind: RepairKind, delay_s: float = 0.0) -> None:
        """Start a repair, which replaces the one in progress."""
        self.abandon(now)
        self.repair = Repair(kind, now + self.settings.hold_s_max)
        self._request(self.repair, delay_s)

    def abandon(self, now: float) -> None:
        """Abandon the repair in progress for something more urgent; a full resync is postponed, others are
        void."""
        if self.repair is not None and self.repair.kind is RepairKind.RESYNC:
            self.trust.put_off(now)
        self.repair = None

    def _request(self, repair: Repair, delay_s: float) -> None:
        self._request_id += 1
        from_seq = 0 if repair.kind is RepairKind.RESYNC else max(self.position.next_seq - 1, 0)
        repair.asked(self._request_id, from_seq, self.position.applied)
        repair.anchored = self.position.next_seq <= 0
        if repair.by_snapshot:
            self.out.append(RequestSnapshot(self._request_id, delay_s))
        else:
            self.out.append(RequestReplay(self._request_id, from_seq, delay_s))

    def ask_again(self, now: float, repair: Repair) -> None:
        """Repeat the request: at once after progress (a hole, or a broken response), else a bounded number of
        times."""
        if self.position.applied > repair.applied_before:
            repair.attempts = 0
            repair.deadline = now + self.settings.hold_s_max
            self._request(repair, 0.0)
            return
        repair.attempts += 1
        if repair.attempts >= REPLAY_ATTEMPTS_MAX:
            self.give_up(now, repair)
        else:
            self._request(repair, self.settings.replay_backoff_s * 2 ** (repair.attempts - 1))

    def done(self, now: float) -> None:
        """End the repair in progress, which made the feed complete. A connection that did not bring what the
        answer has is half open."""
        if self.owes and self.position.next_seq > self._owed_seq:
            self.reconnect(now)
        self.repair = None
        self.stale = self.unverified = False
        self.settled = True
        self.heard_at = now
        self.trust.worked()

    @property
    def owes(self) -> bool:
        """Whether batches are due, and the connection has brought none since before."""
        return self.heard_at < self.owed_at

    def owe(self, now: float, since: float) -> None:
        """Record that batches were published from ``since`` to ``now``, and look for them if none came."""
        if self.heard_at < since and not self.owes:
            # What was sent before its subscription was in effect, a sound connection does not bring either.
            subscribed = since >= self.subscribed_at
            self.owed_at, self._owed_seq = now, max(self.position.next_seq, 0) if subscribed else math.inf
            if self.late_at is None:
                self.late_at = now + SUBSCRIBED_S

    def give_up(self, now: float, repair: Repair) -> None:
        """Apply what is held, in order, and record what is missing."""
        if repair.kind is RepairKind.LATE:
            self.repair = None
        elif repair.by_snapshot:
            self.no_snapshot(now, repair)
        else:
            self._go_on(now, repair)

    def look_late(self, now: float) -> None:
        """Ask what the connection may have missed, if that is due."""
        if self.late_at is not None and now >= self.late_at:
            missed = self.owes or self.late_at == self.subscribed_at
            self.late_at = None
            if missed and self.position.next_seq != NOWHERE:
                self.start(now, RepairKind.LATE)

    def no_snapshot(self, now: float, repair: Repair) -> None:
        """Handle a missing snapshot: retry later; if nothing is known, replay the history first."""
        self.tail.clear()
        self.repair = None
        if self.snapshots.usable:
            self.stats.snapshot_failures += 1
            self.snapshots.failed(now)
        if repair.kind is RepairKind.SNAPSHOT:
            if self.has_replay:
                self.start(now, RepairKind.HISTORY)
            else:
                self._go_on(now, repair)

    def _go_on(self, now: float, repair: Repair) -> None:
        self.repair = None
        position = self.position
        if repair.kind is RepairKind.CHECK:
            # Live batches that cannot be attributed to the followed process count as a new one's.
            self.unverified = not position.held
            if position.held:
                self.forget()
                self.stats.restarts += 1
                position.next_seq = 0
        if repair.holds:
            position.skip_all("replay_failed")
            if position.next_seq == 0:
                # Nothing received: the next live batch gives the position.
                position.next_seq = NOWHERE
        self.trust.failed(now)

    def try_again(self, now: float) -> None:
        """Retry to get the complete state some time after a repair was given up."""
        if self.position.next_seq == NOWHERE:
            self.start_history(now)
        elif self.position.unknown:
            self.start(now, RepairKind.RESYNC)
        elif self.unverified:
            self.start(now, RepairKind.CHECK)

    def restart(self, now: float, frame: Frame | None) -> None:
        """Drop all state of the old process when a new one sends. ``frame``: a live frame of the new one."""
        self.stats.restarts += 1
        again, self._restarted_at = now - self._restarted_at < RESTART_PAUSE_S, now
        self.repair = None
        self.forget()
        position = self.position
        position.drop_held()
        if frame is not None:
            position.publisher_id = frame.publisher_id
            if frame.batch is None:
                frame = None
        if not self.has_replay and not self.snapshots.usable:
            if frame is not None:
                position.begin_at(frame)
            return
        position.next_seq = 0
        if frame is not None:
            position.hold(frame)
            position.drain()
        if position.next_seq == 0:
            self.start_history(now, RESTART_PAUSE_S if again else 0.0)

    def replaced(self, now: float) -> None:
        """Handle a new process that an answer shows. A connection that was the old one's, and has brought
        nothing since, is half open, as after a loss of power."""
        self.restart(now, None)
        if self.settled:
            self.reconnect(now)

    def reconnect(self, now: float) -> None:
        """Make the connection again, unless it was a short while ago."""
        if now - self._reconnected_at >= RECONNECT_PAUSE_S:
            self.settled, self._reconnected_at = False, now
            self.out.append(Reconnect())

    def forget(self) -> None:
        """Drop all state of the engine and of its publisher."""
        self.position.forget()
        self.unverified = self.beats = False
        self.trust.reset()
        self.snapshots.reset()
