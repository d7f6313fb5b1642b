"""A block index that replicas share: each engine is followed by the replica that holds its lease.

There is a ``MirroredIndex`` per model, which the feeds write to. Invariant: a feed runs only while its
engine's lease is held here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvatlas.router.feeds.manager import FeedManager
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.replication.descriptions import Descriptions
from kvatlas.router.replication.leases import LeaseCandidate
from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.service import REFRESH_S, SharedState, Work, restarting

# Delay in seconds until a feed's new state or an engine's new layout is published to other replicas.
_DESCRIBE_S = 0.02


class SharedIndex(SharedState):
    """Shared index of a router. Call ``attach`` before ``run``; placement uses ``lookup``."""

    shares_blocks = True

    # Set by ``attach``.
    _feeds: FeedManager
    _residency: ModelIndexes
    _descriptions: Descriptions

    def attach(self, feeds: FeedManager, residency: ModelIndexes) -> None:
        """Set the feeds that start and stop with the leases, and the residency to describe to other
        replicas.
        """
        self._feeds, self._residency, self._descriptions = feeds, residency, Descriptions()
        self.lookup.own_rows = lambda model, hashes: residency.scope(model).index.lookup(hashes)

    def index_of(self, model: str) -> MirroredIndex:
        """Return the index that the feeds of a model's engines write to, created on first use."""
        found = self._mirrors.get(model)
        if found is None:
            self.scope(model)  # also of engines without events the load is reported
            found = MirroredIndex(self._write_client, model, on_lost=self.lease_manager.lost)
            self._mirrors[model] = found
            if self._tasks is not None:
                self._tasks.create_task(restarting(found.run), name=f"mirror {model}")
        return found

    def follows(self, engine: EngineAddress, model: str) -> bool:
        return self.lease_manager.is_candidate(engine, model)

    def follow(self, engine: EngineAddress, model: str, tasks: asyncio.TaskGroup) -> None:
        """Follow the engine here, if the lease can be acquired."""
        # Feeds start and stop with their leases.
        del tasks
        self.lookup.assign(engine.engine_id, model)
        self.lease_manager.add_candidate(engine, model)

    def stop(self, engine_id: str) -> None:
        self.lease_manager.remove_candidate(engine_id)
        self.lookup.remove(engine_id)

    def stop_all(self) -> None:
        """Stop all feeds. ``close`` releases the leases."""
        for engine_id in list(self.lease_manager.held):
            self.lease_manager.remove_candidate(engine_id)

    def leads(self, first: str | None) -> bool | None:
        """Implement ``SharedState``: who follows the first engine."""
        return None if first is None else self.lease_manager.follows(first)

    def _scope_of(self, engine_id: str) -> str | None:
        return self.lookup.model_of(engine_id)

    async def _lease_acquired(self, candidate: LeaseCandidate, token: int, again: bool) -> None:
        """Take over as writer, and start the feed unless it runs already."""
        engine_id = candidate.engine.engine_id
        await self.index_of(candidate.model).take_over(engine_id, token)
        self._descriptions.forget(engine_id)
        if not again and self._tasks is not None:
            self._feeds.follow(candidate.engine, candidate.model, self._tasks)

    def _lease_ended(self, model: str, engine_id: str) -> None:
        """Stop writing and stop the feed."""
        self._descriptions.forget(engine_id)
        self.index_of(model).drop(engine_id)
        self._feeds.stop(engine_id)

    def _works(self) -> Iterable[Work]:
        return self._describe_engines, self._refresh_periodically, *(m.run for m in self._mirrors.values())

    async def _describe_engines(self) -> None:
        """Publish changed descriptions of the engines followed here."""
        while True:
            for engine_id, held in list(self.lease_manager.held.items()):
                model, mirror = held.model, self.index_of(held.model)
                self._descriptions.renew(engine_id, model, mirror, self._residency, self._feeds)
            await asyncio.sleep(_DESCRIBE_S)

    async def _refresh_periodically(self) -> None:
        """Read the registry also without requests, so that explain and metrics stay current."""
        while True:
            await self.lookup.refresh()
            await asyncio.sleep(REFRESH_S)
