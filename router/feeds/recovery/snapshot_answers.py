"""What a feed does with the answer to a snapshot request, and when it asks for a snapshot anew.

The shell stages the answer in the sink, beside what is known. It is adopted only if it is of the process that
is heard; batches heard after its cut are applied on top of it.
"""

from __future__ import annotations

from router.feeds.base import Cut
from router.feeds.position import NOWHERE
from router.feeds.recovery.recovery import Recovery
from router.feeds.recovery.repair import RepairKind
from router.feeds.wire import Frame


class SnapshotAnswers:
    """Inputs and decisions of a feed machine about snapshots."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery

    def taken(self, now: float, request_id: int, cut: Cut) -> None:
        """The answer is staged whole; it is adopted, or void."""
        recovery = self._recovery
        repair = recovery.answered(request_id)
        if repair is None:
            return
        position = recovery.position
        followed = position.publisher_id
        heard = recovery.heard_id or (None if recovery.unverified else followed)
        if cut.publisher_id is not None and heard is not None and cut.publisher_id != heard:
            recovery.no_snapshot(now, repair)
            return
        recovery.stats.snapshots += 1
        recovery.repair = None
        tail = (recovery.tail if repair.kind is RepairKind.REFRESH else position.held).frames()
        if cut.publisher_id is not None and followed is not None and cut.publisher_id != followed:
            recovery.stats.restarts += 1
            recovery.forget()
        position.adopt(cut, tail)
        recovery.tail.clear()
        recovery.snapshots.worked()
        if position.is_whole:
            recovery.done(now)
        elif recovery.has_replay:
            recovery.start(now, RepairKind.GAP)
        else:
            position.skip_all("gap")

    def failed(self, now: float, request_id: int, *, unsupported: bool) -> None:
        """No usable answer; ``unsupported``: this publisher never will have one."""
        repair = self._recovery.answered(request_id)
        if repair is None:
            return
        if unsupported:
            self._recovery.snapshots.usable = False
        self._recovery.no_snapshot(now, repair)

    def progress(self, now: float, request_id: int) -> None:
        """The answer is coming in."""
        repair = self._recovery.answered(request_id)
        if repair is not None:
            repair.deadline = now + self._recovery.settings.hold_s_max

    def hear(self, now: float, frame: Frame) -> None:
        """A live frame that the snapshot asked for may not cover: kept until it is here."""
        recovery = self._recovery
        repair = recovery.repair
        if repair is not None and repair.kind is RepairKind.REFRESH and not recovery.tail.put(frame):
            recovery.stats.buffer_overflows += 1
            recovery.no_snapshot(now, repair)

    def refresh(self, now: float) -> bool:
        """Where something is unknown, have all of it anew while what is known stays in use."""
        recovery = self._recovery
        if not (recovery.position.unknown or recovery.unverified) or not recovery.snapshots.may_ask(now):
            return False
        recovery.tail.clear()
        if recovery.position.next_seq == NOWHERE:
            recovery.start_history(now)
        else:
            recovery.start(now, RepairKind.REFRESH)
        return True
