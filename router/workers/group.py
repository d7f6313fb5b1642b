"""One worker's connections to its siblings: ``gossip`` (requests), ``calls`` and ``control`` (pages),
``decisions`` (of the administrator). A router without workers has no group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from kvatlas.router.api.metrics_page import Sources
from kvatlas.router.fleet.engines import DesiredState
from kvatlas.router.workers.context import LEAD, WorkerContext
from kvatlas.router.workers.control_port import ControlPort
from kvatlas.router.workers.decisions import SharedDecisions
from kvatlas.router.workers.gossip import SiblingGossip
from kvatlas.router.workers.merged_view import AggregateView
from kvatlas.router.workers.sibling_calls import SiblingCalls


class WorkerGroup:
    """A worker and its siblings. The lead serves ``whole``, the ASGI application for all workers."""

    def __init__(
        self,
        worker: WorkerContext,
        gossip: SiblingGossip,
        desired: DesiredState,
        *,
        applied: Callable[[], None],
        unsynced: Callable[[], list[str]],
        body_bytes_max: int,
    ) -> None:
        self.worker = worker
        self.gossip = gossip
        self.calls = SiblingCalls(worker, body_bytes_max=body_bytes_max)
        self.decisions = SharedDecisions(worker, desired, self.calls, applied=applied, unsynced=unsynced)

    @property
    def leads(self) -> bool:
        """Whether this worker serves the ops port for all."""
        return self.worker.slot == LEAD

    def view(self, sources: Sources) -> AggregateView:
        """Return the workers' state for the ops port."""
        return AggregateView(self.worker, sources, self.calls)

    @asynccontextmanager
    async def working(self, view: AggregateView, whole: Any) -> AsyncIterator[None]:
        """Exchange state with the siblings for the duration of the context."""
        async with self.calls, asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self.gossip.run())]
            await self.decisions.restore()
            background.append(tasks.create_task(self.decisions.run()))
            try:
                async with ControlPort(self.worker, view, self.decisions, whole).listening():
                    yield
            finally:
                for task in background:
                    task.cancel()
