"""One attempt to make a feed whole again by replay, over one or several requests."""

from __future__ import annotations

from enum import Enum

import msgspec


class RepairKind(Enum):
    """Why a replay was asked for; the value is the reason shown in the feed's state."""

    HISTORY = "history"
    """From seq 0: the engine is new to us, restarted, or is being re-synced."""
    GAP = "gap"
    CHECK = "check"
    """After a disconnect or a silence: is it the same process, and what did it say meanwhile?"""
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
        return self.kind is not RepairKind.RESYNC

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
