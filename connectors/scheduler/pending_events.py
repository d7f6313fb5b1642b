"""KV events of running stores.

An ``EventLog`` keeps the content of an event while its store runs, because the request may have ended
before the store does. Invariant: nothing is kept of a store that failed, nor of one that ended without
making a block loadable (a tier may have announced the block before).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvatlas.connectors.scheduler.plans import EngineRequest, PlannedBlock
from kvatlas.connectors.tier.base import TierChanges

if TYPE_CHECKING:
    pass


class EventLog(Protocol):
    """Makes KV events of blocks that became loadable; ``kvatlas.connectors.reports`` is vLLM's form."""

    def submitted(self, request: EngineRequest, block: PlannedBlock) -> None:
        """Keep the content of the event of this block, whose store begins."""

    def dropped(self, key: bytes) -> None:
        """Drop the content kept for this key; its store will have no event."""

    def events(self, changes: TierChanges) -> list[Any]:
        """Make the events of these changes."""


class PendingEvents:
    """Wrapper of an event log; without one (KV events off) it does nothing."""

    def __init__(self, event_log: EventLog | None) -> None:
        self._log = event_log
        # Keys stored successfully since events were taken, and not begun again.
        self._ended: set[bytes] = set()

    def begun(self, request: EngineRequest, blocks: list[PlannedBlock]) -> None:
        """Handle the begin of a job that stores these blocks."""
        if self._log is not None:
            for block in blocks:
                self._log.submitted(request, block)
                self._ended.discard(block.key)

    def ended(self, key: bytes, *, ok: bool) -> None:
        """Handle the end of this key's store; the next changes include its result."""
        if self._log is None:
            return
        if ok:
            self._ended.add(key)
        else:
            self._log.dropped(key)

    def take(self, changes: TierChanges) -> list[Any]:
        """The events of all changes since the last call."""
        if self._log is None:
            return []
        events = self._log.events(changes)
        # Stored without becoming loadable now, e.g. because the tier had announced the block before.
        for key in self._ended:
            self._log.dropped(key)
        self._ended.clear()
        return events
