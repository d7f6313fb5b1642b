"""Processing of a snapshot response, and when a snapshot is requested again.

The shell stages the response in the sink, beside the known state. It is adopted only if it comes from the
process of the live stream; batches received after its cut are applied on top of it.
"""

from __future__ import annotations

from kvatlas.router.feeds.base import Cut
from kvatlas.router.feeds.frames import Frame
from kvatlas.router.feeds.position import NOWHERE
from kvatlas.router.feeds.recovery import Recovery, RepairKind


class SnapshotAnswers:
    """Inputs and decisions of a feed machine about snapshots."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery

    def taken(self, now: float, request_id: int, cut: Cut) -> None:
        """Handle a completely staged response; it is adopted, or void."""
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
        """Handle a failed request; ``unsupported``: this publisher never has a snapshot."""
        repair = self._recovery.answered(request_id)
        if repair is None:
            return
        if unsupported:
            self._recovery.snapshots.usable = False
        self._recovery.no_snapshot(now, repair)

    def progress(self, now: float, request_id: int) -> None:
        repair = self._recovery.answered(request_id)
        if repair is not None:
            repair.deadline = now + self._recovery.settings.hold_s_max

    def add_live(self, now: float, frame: Frame) -> None:
        """Keep a live frame that the requested snapshot may not cover, until the snapshot has arrived."""
        recovery = self._recovery
        repair = recovery.repair
        if repair is not None and repair.kind is RepairKind.REFRESH and not recovery.tail.put(frame):
            recovery.stats.buffer_overflows += 1
            recovery.no_snapshot(now, repair)

    def refresh(self, now: float) -> bool:
        """Request everything again if part of the state is unknown; the known state stays in use
        meanwhile.
        """
        recovery = self._recovery
        if not (recovery.position.unknown or recovery.unverified) or not recovery.snapshots.may_ask(now):
            return False
        recovery.tail.clear()
        if recovery.position.next_seq == NOWHERE:
            recovery.start_history(now)
        else:
            recovery.start(now, RepairKind.REFRESH)
        return True
