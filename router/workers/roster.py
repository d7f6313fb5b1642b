"""An administrator's decisions at every worker: made at the lead, and told to all others.

The lead tells after each change, before the change is answered, and repeats what is decided every
``_REPEAT_S``, so that a worker that missed it, or did not know the server yet, follows. A new lead asks the
others what was decided, and takes it on again until its own sources have told what there is. Always true:
only the lead changes anything, so there is one order of changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from router.fleet.desired import AdminDecisions, Roster
from router.workers.calls import SiblingCalls
from router.workers.seat import LEAD, WorkerSeat

ROSTER_PATH = "/worker/roster"
_REPEAT_S = 1.0


class SharedRoster:
    """``applied`` makes the fleet what the roster says; ``unheard``: sources that have not told yet."""

    def __init__(
        self,
        seat: WorkerSeat,
        roster: Roster,
        calls: SiblingCalls,
        *,
        applied: Callable[[], None],
        unheard: Callable[[], list[str]],
    ) -> None:
        self._seat = seat
        self._roster = roster
        self._calls = calls
        self._applied = applied
        self._unheard = unheard
        self._restored = AdminDecisions()
        self._told = AdminDecisions()

    def state(self) -> bytes:
        """What is decided, for a sibling."""
        return msgspec.json.encode(self._roster.decisions())

    def adopt(self, state: bytes) -> None:
        """The lead told what is decided. Raises ``msgspec.MsgspecError``."""
        self._adopt(msgspec.json.decode(state, type=AdminDecisions))

    async def restore(self) -> None:
        """At the start of a worker that takes another one's place: what was decided before."""
        if self._seat.life == 0:
            return
        for state in (await self._calls.ask_all(ROSTER_PATH)).values():
            self._restored = msgspec.json.decode(state, type=AdminDecisions)
            self._adopt(self._restored)
            return

    async def changed(self) -> None:
        """The lead's roster changed: returns once the others know, or have had their time."""
        self._restored = AdminDecisions()
        await self._tell()

    async def run(self) -> None:
        """Repeat what is decided, until cancelled."""
        while self._seat.slot == LEAD:
            await asyncio.sleep(_REPEAT_S)
            if self._restored.any:
                self._adopt(self._restored)
                if not self._unheard():
                    self._restored = AdminDecisions()
            if self._told.any or self._roster.decisions().any:
                await self._tell()

    async def _tell(self) -> None:
        self._told = self._roster.decisions()
        await self._calls.ask_all(ROSTER_PATH, method="PUT", body=self.state())

    def _adopt(self, decisions: AdminDecisions) -> None:
        if decisions != self._roster.decisions():
            self._roster.adopt(decisions)
            self._applied()
