"""Which stores will be told of in KV events, from their begin to their announcement.

What an event says is kept by an ``EventLog`` while the store is under way, for the request may be gone when
it ends. What always holds: nothing is kept of a store that failed, nor of one that ended without a change of
what is loadable: a tier need not announce again what it has announced before.
"""

from __future__ import annotations

from typing import Any, Protocol

from connectors.scheduler.plans import PlannedBlock
from connectors.scheduler.requests import EngineRequest
from connectors.tier.base import TierChanges


class EventLog(Protocol):
    """Says in KV events what became loadable; ``connectors.scheduler.events`` is the one for vLLM."""

    def submitted(self, request: EngineRequest, block: PlannedBlock) -> None:
        """A store of this block begins: keep what its event will say."""

    def dropped(self, key: bytes) -> None:
        """There will be no event of that store; nothing need be kept of the key."""

    def events(self, changes: TierChanges) -> list[Any]:
        """The events of these changes."""


class PendingEvents:
    """Stands before an event log, or before none where KV events are off."""

    def __init__(self, event_log: EventLog | None) -> None:
        self._log = event_log
        self._ended: set[bytes] = set()
        """Stored well since events were taken, and not begun again."""

    def begun(self, request: EngineRequest, blocks: list[PlannedBlock]) -> None:
        """A job that stores these blocks begins."""
        if self._log is not None:
            for block in blocks:
                self._log.submitted(request, block)
                self._ended.discard(block.key)

    def ended(self, key: bytes, *, ok: bool) -> None:
        """The store of this key ended; what it changed is among the next changes."""
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
        for key in self._ended:
            self._log.dropped(key)
        self._ended.clear()
        return events
