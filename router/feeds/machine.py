"""One engine's event stream as a pure state machine: numbered batches in, actions out.

Batches are applied in order and never twice (``Position``). What arrives ahead of a gap is held (bounded)
while a replay repairs it. A repair that makes no progress for ``hold_s_max``, or whose batches the
publisher no longer has, is given up: the feed goes on with what it holds, and is DEGRADED with the count of
missing batches until a restart, a cache clear, a snapshot or a full re-sync (forget, then replay from seq 0).

Where the publisher has snapshots, one is asked for instead of the history, and whenever something is unknown;
replay still mends gaps. Its answer is staged in the sink by the shell; ``snapshot_taken`` decides whether it
is adopted: it must be of the process that is heard, and batches heard after its cut are applied on top.

Which process is speaking is told by content: a repair also asks for the batch applied last (the anchor) and
compares digests, and a seq that goes back is a repetition if its digest is known and a restart otherwise. A
publisher id, where there is one, decides alone. After a disconnect nothing is applied until the anchor has
been confirmed, as far as there is a replay socket.

No sockets, no logging, no clock: every input carries ``now`` (monotonic seconds) and returns its actions.
"""

from __future__ import annotations

from router.feeds.actions import Action, RequestReplay, RequestSnapshot, StateChanged
from router.feeds.base import Cut, FeedSettings, FeedState, FeedStats
from router.feeds.position import NOWHERE, Position
from router.feeds.repair import Repair, RepairKind, ReplayTrust, SnapshotTrust
from router.feeds.window import HeldBatches
from router.feeds.wire import Frame


class FeedMachine:
    """See the module's docstring. ``stats`` is updated in place."""

    def __init__(
        self, settings: FeedSettings, stats: FeedStats, *, has_replay: bool, has_snapshot: bool = False
    ) -> None:
        self._settings = settings
        self._stats = stats
        self._has_replay = has_replay
        self._out: list[Action] = []
        self.announced = stats.state, stats.reason
        """State and reason after the last input; the shell shows READY only once its actions are done."""
        self._position = Position(settings, stats, self._out)
        self._repair: Repair | None = None
        self._request_id = 0
        self._trust = ReplayTrust(settings)
        self._snapshots = SnapshotTrust(settings, available=has_snapshot)
        self._tail = HeldBatches(batches_max=settings.hold_batches_max, bytes_max=settings.hold_bytes_max)
        """Live batches, applied or not, since a REFRESH was asked for."""
        self._heard_id: bytes | None = None
        """Publisher named by the last live batch."""
        self._beats = False  # this publisher marks idle seconds
        self._connected = False
        self._connection_seen = False  # by the socket's monitor, not just implied by a message
        self._ever_connected = False
        self._unverified = False  # reconnected, and could not find out whether to the same process
        self._stale = False
        self._traffic_expected = False
        self._heard_at = 0.0

    # Inputs.

    def connected(self, now: float) -> list[Action]:
        """The live socket has a connection (again)."""
        if not self._connection_seen:
            self._connection_seen = True
            self._abandon(now)  # begun on the word of a leftover message, maybe of the connection before
            self._position.drop_held()
            self._connect(now)
        return self._finish()

    def disconnected(self, now: float) -> list[Action]:
        """The live socket lost its connection: whoever answers next may be another process."""
        if self._connected:
            self._connected = self._connection_seen = False
            self._stats.disconnects += 1
            self._abandon(now)
            self._position.drop_held()  # replay has them still; mixed with a new process's they would do harm
        return self._finish()

    def live(self, now: float, frame: Frame) -> list[Action]:
        """A batch from the live socket."""
        self._heard_at = now
        self._stale = False
        if not self._connected:
            self._connect(now)
        position = self._position
        self._note_publisher(now, frame)
        if position.is_foreign(frame):
            self._restart(now, frame)
        elif frame.batch is None and frame.seq != position.next_seq:
            pass  # may be noise; if it was a batch, its seq will turn out to be missing
        elif position.next_seq == NOWHERE:
            position.begin_at(frame)
        elif frame.seq >= position.next_seq:
            self._ahead(now, frame)
        elif position.is_repetition(frame):
            self._stats.duplicate_batches += 1
        elif position.is_late(frame):
            self._stats.late_batches += 1
        else:
            self._restart(now, frame)
        return self._finish()

    def replayed(self, now: float, request_id: int, frame: Frame) -> list[Action]:
        """A batch of the answer to ``request_id``."""
        repair = self._repair
        if repair is None or repair.request_id != request_id:
            return []
        repair.saw(frame.seq)
        if self._position.is_foreign(frame):
            self._restart(now, None)
        elif repair.kind is not RepairKind.RESYNC:
            self._take_replayed(now, repair, frame)
        elif frame.seq == 0:
            self._commit_resync(now, repair, frame)
        return self._finish()

    def replay_ended(self, now: float, request_id: int) -> list[Action]:
        """The answer to ``request_id`` is complete, as far as the publisher says."""
        repair = self._repair
        if repair is None or repair.request_id != request_id:
            return []
        self._stats.replays += 1
        if repair.kind is RepairKind.RESYNC:  # the answer had no seq 0
            self._trust.rolled = repair.lowest_seq is not None
            self._give_up(now, repair)
        else:
            self._answer_complete(now, repair)
        return self._finish()

    def replay_failed(self, now: float, request_id: int) -> list[Action]:
        """No answer to ``request_id``, or it broke off."""
        repair = self._repair
        if repair is None or repair.request_id != request_id:
            return []
        self._stats.replay_failures += 1
        if repair.kind is RepairKind.RESYNC:
            self._give_up(now, repair)
        else:
            self._ask_again(now, repair)
        return self._finish()

    def snapshot_taken(self, now: float, request_id: int, cut: Cut) -> list[Action]:
        """The answer to ``request_id`` is staged whole. Without an ``Adopt`` in what returns it is void."""
        repair = self._repair
        if repair is None or repair.request_id != request_id:
            return []
        position = self._position
        followed = position.publisher_id
        heard = self._heard_id or (None if self._unverified else followed)
        if cut.publisher_id is not None and heard is not None and cut.publisher_id != heard:
            self._no_snapshot(now, repair)
            return self._finish()
        self._stats.snapshots += 1
        self._repair = None
        tail = (self._tail if repair.kind is RepairKind.REFRESH else position.held).frames()
        if cut.publisher_id is not None and followed is not None and cut.publisher_id != followed:
            self._stats.restarts += 1
            self._forget()
        position.adopt(cut, tail)
        self._tail.clear()
        self._snapshots.worked()
        if position.is_whole:
            self._done(now)
        elif self._has_replay:
            self._start(now, RepairKind.GAP)
        else:
            position.skip_all("gap")
        return self._finish()

    def snapshot_failed(self, now: float, request_id: int, *, unsupported: bool) -> list[Action]:
        """No usable answer to ``request_id``; ``unsupported``: this publisher never will have one."""
        repair = self._repair
        if repair is None or repair.request_id != request_id:
            return []
        if unsupported:
            self._snapshots.usable = False
        self._no_snapshot(now, repair)
        return self._finish()

    def progress(self, now: float, request_id: int) -> None:
        """The answer to ``request_id`` is coming in."""
        if self._repair is not None and self._repair.request_id == request_id:
            self._repair.deadline = now + self._settings.hold_s_max

    def distrust(self, now: float, reason: str) -> list[Action]:
        """What is known is shown to be wrong by other means: discount it, and have it all anew."""
        self._position.doubt(reason)
        self._trust.at_once(now)
        return self._finish()

    def expect_traffic(self, now: float, expected: bool) -> list[Action]:
        """Whether the engine is known (from its HTTP side) to be working, so that silence is a fault."""
        if expected and not self._traffic_expected:
            self._heard_at = now
        self._traffic_expected = expected
        return self._finish()

    def batch_failed(self) -> list[Action]:
        """The sink refused a batch that it was handed: its content is missing there."""
        self._position.lose(1, "sink_error")
        return self._finish()

    def tick(self, now: float) -> list[Action]:
        """Time has passed; due a few times per second."""
        repair = self._repair
        if repair is not None and now >= repair.deadline:
            self._give_up(now, repair)
        elif repair is None and self._connected:
            if (self._position.unknown or self._unverified) and self._snapshots.may_ask(now):
                self._refresh(now)
            elif self._has_replay and self._trust.take_due(now):
                self._try_again(now)
        self._check_silence(now)
        return self._finish()

    def wants(self, request_id: int) -> bool:
        """Whether the answer to this request still matters."""
        return self._repair is not None and self._repair.request_id == request_id

    # Connection and silence.

    def _connect(self, now: float) -> None:
        reconnected = self._ever_connected
        self._connected = self._ever_connected = True
        self._heard_at = now
        self._snapshots.reset()
        self._heard_id = None
        if self._position.next_seq > 0:
            if self._has_replay:
                self._start(now, RepairKind.CHECK)
            else:
                self._unverified = reconnected
        elif self._has_replay or self._snapshots.usable:
            self._start_history(now)
        else:
            self._unverified = reconnected and self._position.next_seq != NOWHERE

    def _start_history(self, now: float) -> None:
        """Nothing is known: have it told, by a snapshot if there may be one."""
        self._position.next_seq = 0
        self._start(now, RepairKind.SNAPSHOT if self._snapshots.may_ask(now) else RepairKind.HISTORY)

    def _note_publisher(self, now: float, frame: Frame) -> None:
        if frame.batch is not None:
            self._heard_id = frame.publisher_id
            self._beats = self._beats or (frame.publisher_id is not None and not frame.batch.events)
        if self._unverified and self._position.is_same(frame):
            self._unverified = False
        repair = self._repair
        if repair is not None and repair.kind is RepairKind.REFRESH and not self._tail.put(frame):
            self._stats.buffer_overflows += 1
            self._no_snapshot(now, repair)

    def _check_silence(self, now: float) -> None:
        if self._stale or not self._connected or now - self._heard_at < self._settings.stale_after_s:
            return
        if self._settings.heartbeats or self._traffic_expected or self._beats:
            self._stale = True
            if self._has_replay and self._repair is None and self._position.next_seq > 0:
                self._start(now, RepairKind.CHECK)

    # Live batches.

    def _ahead(self, now: float, frame: Frame) -> None:
        position, repair = self._position, self._repair
        if repair is not None and repair.holds:
            position.hold(frame)
            if repair.kind is not RepairKind.CHECK:
                position.drain()
                if position.is_whole:
                    self._done(now)
        elif self._unverified and self._has_replay:
            position.hold(frame)
            self._start(now, RepairKind.CHECK)
        elif frame.seq == position.next_seq:
            if self._unverified:
                self._unverified = False
                position.doubt("unverified")
            position.apply(frame)
        else:
            self._open_gap(now, frame)

    def _open_gap(self, now: float, frame: Frame) -> None:
        self._stats.gaps += 1
        if self._repair is not None and self._repair.kind is RepairKind.REFRESH:
            self._position.skip_to(frame.seq, "gap")  # the snapshot will make up for it
            self._position.apply(frame)
        elif self._has_replay and self._trust.is_worth_waiting(now):
            self._position.hold(frame)
            self._start(now, RepairKind.GAP)
        elif self._unverified:
            # No replay, a reconnect, then a gap: it may be a new process, and crediting a dead one is worse
            # than not crediting a live one.
            self._restart(now, frame)
        else:
            self._position.skip_to(frame.seq, "gap")
            self._position.apply(frame)

    # Replayed batches.

    def _take_replayed(self, now: float, repair: Repair, frame: Frame) -> None:
        position = self._position
        if not repair.anchored and position.is_same(frame):
            self._anchored(now, repair)
        if frame.seq < position.next_seq:
            known = position.recent.digest(frame.seq)
            if known is not None and known != frame.digest:
                self._restart(now, None)
            elif known is not None and not repair.anchored:
                self._anchored(now, repair)
            return
        repair.deadline = now + self._settings.hold_s_max
        if frame.seq == position.next_seq and repair.anchored:
            position.apply(frame)
            position.drain()
        elif not position.hold(frame):
            self._roll_past(now, repair)

    def _anchored(self, now: float, repair: Repair) -> None:
        repair.anchored = True
        repair.deadline = now + self._settings.hold_s_max
        self._unverified = False
        if repair.kind is RepairKind.CHECK:
            repair.kind = RepairKind.GAP
        self._position.drain()

    def _answer_complete(self, now: float, repair: Repair) -> None:
        position = self._position
        if not repair.anchored and repair.kind is RepairKind.CHECK:
            # The engine's oldest batch is newer than our last, or its newest older: not shown to be the
            # process that we followed. Begin anew, with all that it still has.
            self._restart(now, None)
            return
        if repair.lowest_seq is not None and repair.lowest_seq > repair.from_seq:
            self._roll_past(now, repair)
        position.drain()
        if position.is_whole:
            self._done(now)
        else:
            self._ask_again(now, repair)

    def _roll_past(self, now: float, repair: Repair) -> None:
        """The publisher's buffer begins after what we need: go on from the first batch there is."""
        position = self._position
        if repair.kind is RepairKind.CHECK:
            self._restart(now, None)
            return
        repair.anchored = True
        lowest = position.held.lowest()
        if lowest is not None and lowest > position.next_seq:
            self._trust.rolled = True
            position.skip_to(lowest, "history_rolled")
        position.drain()

    def _commit_resync(self, now: float, repair: Repair, frame: Frame) -> None:
        """Seq 0 is to be had: drop what is known and build it anew from there."""
        self._forget()
        self._stats.resyncs += 1
        self._position.next_seq = 0
        repair.kind, repair.anchored, repair.lowest_seq = RepairKind.HISTORY, True, 0
        self._take_replayed(now, repair, frame)

    # Repairs.

    def _start(self, now: float, kind: RepairKind) -> None:
        self._abandon(now)
        self._repair = Repair(kind, now + self._settings.hold_s_max)
        self._request(self._repair, 0.0)

    def _abandon(self, now: float) -> None:
        """Something more urgent than the repair in progress; a full re-sync is put off, others are void."""
        if self._repair is not None and self._repair.kind is RepairKind.RESYNC:
            self._trust.put_off(now)
        self._repair = None

    def _request(self, repair: Repair, delay_s: float) -> None:
        self._request_id += 1
        from_seq = 0 if repair.kind is RepairKind.RESYNC else max(self._position.next_seq - 1, 0)
        repair.asked(self._request_id, from_seq, self._position.applied)
        repair.anchored = self._position.next_seq <= 0
        if repair.by_snapshot:
            self._out.append(RequestSnapshot(self._request_id, delay_s))
        else:
            self._out.append(RequestReplay(self._request_id, from_seq, delay_s))

    def _ask_again(self, now: float, repair: Repair) -> None:
        """At once after progress (the answer had a hole or broke off), else a bounded number of times."""
        if self._position.applied > repair.applied_before:
            repair.attempts = 0
            repair.deadline = now + self._settings.hold_s_max
            self._request(repair, 0.0)
            return
        repair.attempts += 1
        if repair.attempts >= self._settings.replay_attempts_max:
            self._give_up(now, repair)
        else:
            self._request(repair, self._settings.replay_backoff_s * 2 ** (repair.attempts - 1))

    def _done(self, now: float) -> None:
        self._repair = None
        self._stale = self._unverified = False
        self._heard_at = now
        self._trust.worked()

    def _give_up(self, now: float, repair: Repair) -> None:
        """Go on with what is held, in order, and remember what is missing."""
        if repair.by_snapshot:
            self._no_snapshot(now, repair)
            return
        self._go_on(now, repair)

    def _no_snapshot(self, now: float, repair: Repair) -> None:
        """Ask again later; where nothing is known, the replayed history comes next."""
        self._tail.clear()
        self._repair = None
        if self._snapshots.usable:
            self._stats.snapshot_failures += 1
            self._snapshots.failed(now)
        if repair.kind is RepairKind.SNAPSHOT:
            if self._has_replay:
                self._start(now, RepairKind.HISTORY)
            else:
                self._go_on(now, repair)

    def _refresh(self, now: float) -> None:
        """Have all of it anew by a snapshot, while what is known stays in use."""
        self._tail.clear()
        if self._position.next_seq == NOWHERE:
            self._start_history(now)
        else:
            self._start(now, RepairKind.REFRESH)

    def _go_on(self, now: float, repair: Repair) -> None:
        self._repair = None
        position = self._position
        if repair.kind is RepairKind.CHECK:
            # Live batches that cannot be shown to be of the process followed are taken for a new one's.
            self._unverified = not position.held
            if position.held:
                self._forget()
                self._stats.restarts += 1
                position.next_seq = 0
        if repair.holds:
            position.skip_all("replay_failed")
            if position.next_seq == 0:
                position.next_seq = NOWHERE  # nothing heard at all: the next live batch tells where we are
        self._trust.failed(now)

    def _try_again(self, now: float) -> None:
        """Some time after a given-up repair: is a complete picture to be had by now?"""
        if self._position.next_seq == NOWHERE:
            self._start_history(now)
        elif self._position.unknown:
            self._start(now, RepairKind.RESYNC)
        elif self._unverified:
            self._start(now, RepairKind.CHECK)

    # Restarts.

    def _restart(self, now: float, frame: Frame | None) -> None:
        """A new process speaks: nothing of the old one is true any more. ``frame`` is a live one of it."""
        self._stats.restarts += 1
        self._repair = None
        self._forget()
        position = self._position
        position.drop_held()
        if frame is not None:
            position.publisher_id = frame.publisher_id
            if frame.batch is None:
                frame = None
        if not self._has_replay and not self._snapshots.usable:
            if frame is not None:
                position.begin_at(frame)
            return
        position.next_seq = 0
        if frame is not None:
            position.hold(frame)
            position.drain()
        if position.next_seq == 0:
            self._start_history(now)

    def _forget(self) -> None:
        self._position.forget()
        self._unverified = self._beats = False
        self._trust.reset()
        self._snapshots.reset()

    # State.

    def _finish(self) -> list[Action]:
        """Hand out the actions gathered, the change of state last."""
        stats = self._stats
        stats.missing_batches = self._position.missing
        stats.known_batches = self._position.known
        stats.waiting_batches = max(0, self._position.top_seq + 1 - max(self._position.next_seq, 0))
        stats.held_batches = len(self._position.held)
        state, reason = self._state()
        if (state, reason) != self.announced:
            self.announced = stats.state, stats.reason = state, reason
            self._out.append(StateChanged(state, reason))
        out = self._out[:]
        self._out.clear()
        return out

    def _state(self) -> tuple[FeedState, str]:
        repair, position = self._repair, self._position
        if not self._ever_connected:
            return FeedState.COLD, ""
        if self._stale:
            return FeedState.STALE, "silent"
        if not self._connected:
            return FeedState.DEGRADED, "disconnected"
        if repair is not None and repair.holds:
            replaying = repair.kind in {RepairKind.HISTORY, RepairKind.SNAPSHOT}
            return FeedState.REPLAYING if replaying else FeedState.DEGRADED, repair.kind.value
        if position.unknown:
            return FeedState.DEGRADED, position.unknown
        if self._unverified:
            return FeedState.DEGRADED, "unverified"
        if position.next_seq == NOWHERE:
            asked = self._has_replay or self._snapshots.usable
            return (FeedState.DEGRADED, "history_unknown") if asked else (FeedState.COLD, "")
        return FeedState.READY, ""
