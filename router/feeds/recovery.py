"""Repair of a feed: the repair in progress, its requests, and how it ends.

``FeedMachine`` (live batches), ``ReplayAnswers`` and ``SnapshotAnswers`` decide when; the moves are here, so
that at most one repair is in progress, and every request made before it is void.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from router.feeds.base import FeedSettings, FeedStats, Frame
from router.feeds.position import NOWHERE, Action, HeldBatches, Position, RequestReplay, RequestSnapshot

# A feed's attempts to become whole by replay: the one in progress, and how far replay is to be trusted.


class RepairKind(Enum):
    """Why a replay was asked for; the value is the reason shown in the feed's state."""

    HISTORY = "history"
    """From seq 0: the engine is new to us, restarted, or is being re-synced."""
    GAP = "gap"
    CHECK = "check"
    """After a disconnect or a silence: is it the same process, and what did it say meanwhile?"""
    SNAPSHOT = "snapshot"
    """All that the engine holds is asked for, and nothing is known meanwhile: as HISTORY, and before it."""
    REFRESH = "refresh"
    """The same while what is known stays in use and live batches keep applying."""
    RESYNC = "resync"
    """Asked for seq 0 without holding anything back; becomes HISTORY once seq 0 turns up."""


class Repair(msgspec.Struct):
    """The repair in progress. ``deadline`` is when it is given up unless it makes progress before."""

    kind: RepairKind
    deadline: float
    request_id: int = 0
    from_seq: int = 0
    attempts: int = 0
    applied_before: int = 0
    """``Position.applied`` when the request was made."""
    anchored: bool = False
    """An already applied batch came back unchanged: the replay is of the process that we follow."""
    lowest_seq: int | None = None
    """Lowest seq of the answer to this request."""

    @property
    def holds(self) -> bool:
        """Whether live batches wait for this repair."""
        return self.kind not in {RepairKind.RESYNC, RepairKind.REFRESH}

    @property
    def by_snapshot(self) -> bool:
        """Whether the answer is a snapshot."""
        return self.kind in {RepairKind.SNAPSHOT, RepairKind.REFRESH}

    def asked(self, request_id: int, from_seq: int, applied: int) -> None:
        """A request was made; what the answer to an earlier one said no longer counts."""
        self.request_id = request_id
        self.from_seq = from_seq
        self.applied_before = applied
        self.lowest_seq = None

    def saw(self, seq: int) -> None:
        """A batch of the answer came in."""
        if self.lowest_seq is None or seq < self.lowest_seq:
            self.lowest_seq = seq


class ReplayTrust:
    """Whether replay is worth waiting for, and when to try again to become whole after it failed."""

    def __init__(self, settings: FeedSettings) -> None:
        self._settings = settings
        # The publisher no longer has seq 0, so a full re-sync cannot succeed.
        self.rolled = False
        self._try_at: float | None = None
        self._distrusted_until = float("-inf")
        self._backoff_s = settings.resync_backoff_s

    def reset(self) -> None:
        """A new stream: nothing is known against it."""
        self.rolled = False
        self._try_at = None
        self.worked()

    def worked(self) -> None:
        """A repair succeeded."""
        self._distrusted_until = float("-inf")
        self._backoff_s = self._settings.resync_backoff_s

    def failed(self, now: float) -> None:
        """A repair was given up: gaps do not wait for replay for a while, then a re-sync is tried."""
        self._distrusted_until = now + self._backoff_s
        self._try_at = None if self.rolled else self._distrusted_until
        self._backoff_s = min(self._backoff_s * 2, self._settings.resync_backoff_s_max)

    def at_once(self, now: float) -> None:
        """Our state is found to be wrong: resync at the next tick, if that can succeed."""
        self._try_at = None if self.rolled else now

    def put_off(self, now: float) -> None:
        """A re-sync had to make way for something more urgent."""
        self._try_at = now + self._backoff_s

    def is_worth_waiting(self, now: float) -> bool:
        return now >= self._distrusted_until

    def take_due(self, now: float) -> bool:
        """Whether it is time to try again; true once for each time it was scheduled."""
        due = self._try_at is not None and now >= self._try_at
        if due:
            self._try_at = None
        return due


class SnapshotTrust:
    """Whether the publisher may have a snapshot, and when to ask for one again after it had none."""

    def __init__(self, settings: FeedSettings, *, available: bool) -> None:
        self._settings = settings
        self._available = available
        self._not_before = float("-inf")
        self._backoff_s = settings.resync_backoff_s
        self.usable = available

    def reset(self) -> None:
        """Another process may answer now."""
        self.usable = self._available
        self.worked()

    def worked(self) -> None:
        """A snapshot was fetched; reset the back-off."""
        self._not_before = float("-inf")
        self._backoff_s = self._settings.resync_backoff_s

    def failed(self, now: float) -> None:
        """None was had this time."""
        self._not_before = now + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, self._settings.resync_backoff_s_max)

    def may_ask(self, now: float) -> bool:
        return self.usable and now >= self._not_before


class Recovery:
    """The state that the parts of a feed machine share, and its moves. ``out`` are the actions so far."""

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
        # Live batches, applied or not, since a REFRESH was asked for.
        self.tail = HeldBatches(batches_max=settings.hold_batches_max, bytes_max=settings.hold_bytes_max)
        # Publisher named by the last live batch.
        self.heard_id: bytes | None = None
        self.heard_at = 0.0
        # This publisher marks idle seconds.
        self.beats = False
        # Reconnected, and could not find out whether to the same process.
        self.unverified = False
        self.stale = False
        self._request_id = 0

    def answered(self, request_id: int) -> Repair | None:
        """The repair in progress, if it is the one that this request is for."""
        repair = self.repair
        return repair if repair is not None and repair.request_id == request_id else None

    def start_history(self, now: float) -> None:
        """Nothing is known: have it told, by a snapshot if there may be one."""
        self.position.next_seq = 0
        self.start(now, RepairKind.SNAPSHOT if self.snapshots.may_ask(now) else RepairKind.HISTORY)

    def start(self, now: float, kind: RepairKind) -> None:
        """Begin a repair in the place of the one in progress, if any."""
        self.abandon(now)
        self.repair = Repair(kind, now + self.settings.hold_s_max)
        self._request(self.repair, 0.0)

    def abandon(self, now: float) -> None:
        """Something more urgent than the repair in progress; a full re-sync is put off, others are void."""
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
        """At once after progress (the answer had a hole or broke off), else a bounded number of times."""
        if self.position.applied > repair.applied_before:
            repair.attempts = 0
            repair.deadline = now + self.settings.hold_s_max
            self._request(repair, 0.0)
            return
        repair.attempts += 1
        if repair.attempts >= self.settings.replay_attempts_max:
            self.give_up(now, repair)
        else:
            self._request(repair, self.settings.replay_backoff_s * 2 ** (repair.attempts - 1))

    def done(self, now: float) -> None:
        """The repair in progress made the feed whole."""
        self.repair = None
        self.stale = self.unverified = False
        self.heard_at = now
        self.trust.worked()

    def give_up(self, now: float, repair: Repair) -> None:
        """Go on with what is held, in order, and remember what is missing."""
        if repair.by_snapshot:
            self.no_snapshot(now, repair)
            return
        self._go_on(now, repair)

    def no_snapshot(self, now: float, repair: Repair) -> None:
        """Ask again later; where nothing is known, the replayed history comes next."""
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
            # Live batches that cannot be shown to be of the process followed are taken for a new one's.
            self.unverified = not position.held
            if position.held:
                self.forget()
                self.stats.restarts += 1
                position.next_seq = 0
        if repair.holds:
            position.skip_all("replay_failed")
            if position.next_seq == 0:
                position.next_seq = NOWHERE  # nothing heard at all: the next live batch tells where we are
        self.trust.failed(now)

    def try_again(self, now: float) -> None:
        """Some time after a given-up repair: is a complete picture to be had by now?"""
        if self.position.next_seq == NOWHERE:
            self.start_history(now)
        elif self.position.unknown:
            self.start(now, RepairKind.RESYNC)
        elif self.unverified:
            self.start(now, RepairKind.CHECK)

    def restart(self, now: float, frame: Frame | None) -> None:
        """A new process speaks: nothing of the old one is true any more. ``frame`` is a live one of it."""
        self.stats.restarts += 1
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
            self.start_history(now)

    def forget(self) -> None:
        """Drop everything known of the engine and of its publisher."""
        self.position.forget()
        self.unverified = self.beats = False
        self.trust.reset()
        self.snapshots.reset()
