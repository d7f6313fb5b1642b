"""A feed's attempts to become whole by replay: the one in progress, and how far replay is to be trusted."""

from __future__ import annotations

from enum import Enum

import msgspec

from router.feeds.base import FeedSettings


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
        self.rolled = False
        """The publisher no longer has seq 0, so a full re-sync cannot succeed."""
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
        """What is known is found to be wrong: the next tick is to re-sync, where that can succeed."""
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
