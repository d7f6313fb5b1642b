"""One worker's part in a crew: what it tells its siblings, asks them, and answers them.

Composed here, so that the router has one thing to hold: ``gossip`` (requests), ``calls`` and ``control``
(pages), ``roster`` (decisions). Without workers there is no crew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from router.api.metrics.page import Sources
from router.fleet.desired import Roster
from router.workers.calls import SiblingCalls
from router.workers.control import ControlPort, find_response
from router.workers.gossip import SiblingGossip
from router.workers.roster import SharedRoster
from router.workers.seat import LEAD, WorkerSeat
from router.workers.view import WholeView


class Crew:
    """``whole`` is the ASGI application that answers for the router as a whole: used at the lead only."""

    def __init__(
        self,
        seat: WorkerSeat,
        gossip: SiblingGossip,
        roster: Roster,
        *,
        applied: Callable[[], None],
        unheard: Callable[[], list[str]],
    ) -> None:
        self.seat = seat
        self.gossip = gossip
        self.calls = SiblingCalls(seat)
        gossip.responses.sources.append(partial(find_response, self.calls))
        self.roster = SharedRoster(seat, roster, self.calls, applied=applied, unheard=unheard)

    @property
    def leads(self) -> bool:
        """This worker answers for all."""
        return self.seat.slot == LEAD

    def view(self, sources: Sources) -> WholeView:
        """What the ops port shows."""
        return WholeView(self.seat, sources, self.calls)

    @asynccontextmanager
    async def working(self, view: WholeView, whole: Any) -> AsyncIterator[None]:
        """Tell, ask and answer for as long as the context lasts."""
        async with self.calls, asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self.gossip.run())]
            await self.roster.restore()
            background.append(tasks.create_task(self.roster.run()))
            try:
                async with ControlPort(
                    self.seat, view, self.roster, self.gossip.responses, whole
                ).listening():
                    yield
            finally:
                for task in background:
                    task.cancel()
