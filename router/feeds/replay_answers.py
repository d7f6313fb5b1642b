"""Handles the response to a replay request.

A replay also requests the last applied batch (the anchor): if it comes back unchanged, the process is the
followed one. If there is an anchor, nothing is applied before it.
"""

from __future__ import annotations

from kvatlas.router.feeds.frames import Frame
from kvatlas.router.feeds.recovery import Recovery, Repair, RepairKind


class ReplayAnswers:
    """Inputs and decisions of a feed machine about replayed batches."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._position = recovery.position

    def replayed(self, now: float, request_id: int, frame: Frame) -> None:
        """Handle a batch of the response."""
        repair = self._recovery.answered(request_id)
        if repair is None:
            return
        repair.saw(frame.seq)
        if self._position.is_foreign(frame):
            self._recovery.replaced(now)
        elif repair.kind is not RepairKind.RESYNC:
            self._take(now, repair, frame)
        elif frame.seq == 0:
            self._commit_resync(now, repair, frame)

    def ended(self, now: float, request_id: int) -> None:
        """Handle the end of the response, as marked by the publisher."""
        recovery = self._recovery
        repair = recovery.answered(request_id)
        if repair is None:
            return
        recovery.stats.replays += 1
        if repair.kind is RepairKind.RESYNC:  # the answer had no seq 0
            recovery.trust.rolled = repair.lowest_seq is not None
            recovery.give_up(now, repair)
        else:
            self._complete(now, repair)

    def failed(self, now: float, request_id: int) -> None:
        """Handle a request without a response, or with one that broke off."""
        recovery = self._recovery
        repair = recovery.answered(request_id)
        if repair is None:
            return
        recovery.stats.replay_failures += 1
        if not repair.holds:  # no batch waits for it
            recovery.give_up(now, repair)
        else:
            recovery.ask_again(now, repair)

    def _take(self, now: float, repair: Repair, frame: Frame) -> None:
        position, recovery = self._position, self._recovery
        if not repair.anchored and position.is_same(frame):
            self._anchored(now, repair)
        if frame.seq < position.next_seq:
            known = position.recent.digest(frame.seq)
            if known is not None and known != frame.digest:
                recovery.replaced(now)
            elif known is not None and not repair.anchored:
                self._anchored(now, repair)
            return
        repair.deadline = now + recovery.settings.hold_s_max
        # A batch without room stands behind a hole, which vLLM leaves when its socket is full, and is
        # requested again; or the response begins too late.
        hole = repair.anchored and repair.lowest_seq == repair.from_seq
        if not self._keep(repair, frame) and not hole:
            self._roll_past(now, repair)

    def _keep(self, repair: Repair, frame: Frame) -> bool:
        """Apply a batch at the position, else hold it; False if there is no room."""
        position = self._position
        if frame.seq == position.next_seq and repair.anchored:
            position.apply(frame)
            position.drain()
            return True
        return position.hold(frame)

    def _anchored(self, now: float, repair: Repair) -> None:
        repair.anchored = True
        repair.deadline = now + self._recovery.settings.hold_s_max
        self._recovery.unverified = False
        if repair.kind is RepairKind.CHECK:
            repair.kind = RepairKind.GAP
        self._position.drain()

    def _complete(self, now: float, repair: Repair) -> None:
        position, recovery = self._position, self._recovery
        if not repair.anchored and repair.kind is RepairKind.CHECK:
            # The engine's oldest batch is newer than our last, or its newest older: not proven to be the
            # followed process. Start again with everything it still has.
            recovery.replaced(now)
            return
        if not repair.anchored and repair.kind is RepairKind.LATE:
            position.drop_held()
            recovery.start(now, RepairKind.CHECK)
            return
        if repair.lowest_seq is not None and repair.lowest_seq > repair.from_seq:
            self._roll_past(now, repair)
        position.drain()
        if position.is_whole:
            recovery.done(now)
        else:
            recovery.ask_again(now, repair)

    def _roll_past(self, now: float, repair: Repair) -> None:
        """Continue from the publisher's first buffered batch: its buffer begins after what we need."""
        position, recovery = self._position, self._recovery
        if not repair.anchored and repair.kind in {RepairKind.CHECK, RepairKind.LATE}:
            recovery.replaced(now)
            return
        repair.anchored = True
        lowest = position.held.lowest()
        if lowest is not None and lowest > position.next_seq:
            recovery.trust.rolled = True
            position.skip_to(lowest, "history_rolled")
            # Nothing before it exists: a batch without room from here on is requested again.
            repair.from_seq = lowest
        position.drain()

    def _commit_resync(self, now: float, repair: Repair, frame: Frame) -> None:
        """Drop the known state and rebuild it: the replay reaches seq 0."""
        recovery = self._recovery
        recovery.forget()
        recovery.stats.resyncs += 1
        self._position.next_seq = 0
        repair.kind, repair.anchored, repair.lowest_seq = RepairKind.HISTORY, True, 0
        self._take(now, repair, frame)
