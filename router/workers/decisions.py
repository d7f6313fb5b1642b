"""
Only the lead makes decisions, so all workers see one order of changes. It sends them to its siblings before
it answers the change, and again every ``_REPEAT_S``, for workers that missed them or did not know the
server yet. A new lead restores them from a sibling, and applies them until its own sources have reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kvatlas.router.fleet.engines import AdminDecisions, DesiredState
from kvatlas.router.workers.context import LEAD, WorkerContext
from kvatlas.router.workers.sibling_calls import SiblingCalls

DECISIONS_PATH = "/worker/decisions"
_REPEAT_S = 1.0


class SharedDecisions:
    """Replicated decisions. ``applied`` updates the fleet; ``unsynced``: sources without a report yet."""

    def __init__(
        self,
        worker: WorkerContext,
        desired: DesiredState,
        calls: SiblingCalls,
        *,
        applied: Callable[[], None],
        unsynced: Callable[[], list[str]],
    ) -> None:
        self._worker = worker
        self._desired = desired
        self._calls = calls
        self._applied = applied
        self._unsynced = unsynced
        self._restored = AdminDecisions()
        self._last_sent = AdminDecisions()

    def state(self) -> bytes:
        return msgspec.json.encode(self._desired.decisions())

    def adopt(self, state: bytes) -> None:
        """Adopt the lead's decisions. Raises ``msgspec.MsgspecError``."""
        self._adopt(msgspec.json.decode(state, type=AdminDecisions))

    async def restore(self) -> None:
        """Restore the decisions from a sibling if this worker replaces a dead one."""
        if self._worker.life == 0:
            return
        for state in (await self._calls.call_all(DECISIONS_PATH)).values():
            self._restored = msgspec.json.decode(state, type=AdminDecisions)
            self._adopt(self._restored)
            return

    async def changed(self) -> None:
        """Send the lead's changed decisions; return when the siblings answered or their time is over."""
        self._restored = AdminDecisions()
        await self._send()

    async def run(self) -> None:
        """Send the decisions periodically, until cancelled."""
        while self._worker.slot == LEAD:
            await asyncio.sleep(_REPEAT_S)
            if self._restored.any:
                self._adopt(self._restored)
                if not self._unsynced():
                    self._restored = AdminDecisions()
            if self._last_sent.any or self._desired.decisions().any:
                await self._send()

    async def _send(self) -> None:
        self._last_sent = self._desired.decisions()
        await self._calls.call_all(DECISIONS_PATH, method="PUT", body=self.state())

    def _adopt(self, decisions: AdminDecisions) -> None:
        if decisions != self._desired.decisions():
            self._desired.adopt(decisions)
            self._applied()


PREFIX = "/worker/"
