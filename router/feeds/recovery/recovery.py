"""What a feed does to become whole: the repair in progress, what is asked for, and how a repair ends.

``FeedMachine`` (live batches), ``ReplayAnswers`` and ``SnapshotAnswers`` decide when; the moves are here, so
that at most one repair is in progress, whoever began it, and every request made before it is void.
"""

from __future__ import annotations

from router.feeds.actions import Action, RequestReplay, RequestSnapshot
from router.feeds.base import FeedSettings, FeedStats
from router.feeds.position import NOWHERE, Position
from router.feeds.recovery.repair import Repair, RepairKind, ReplayTrust, SnapshotTrust
from router.feeds.window import HeldBatches
from router.feeds.wire import Frame


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
        self.tail = HeldBatches(batches_max=settings.hold_batches_max, bytes_max=settings.hold_bytes_max)
        """Live batches, applied or not, since a REFRESH was asked for."""
        self.heard_id: bytes | None = None
        """Publisher named by the last live batch."""
        self.heard_at = 0.0
        self.beats = False
        """This publisher marks idle seconds."""
        self.unverified = False
        """Reconnected, and could not find out whether to the same process."""
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
