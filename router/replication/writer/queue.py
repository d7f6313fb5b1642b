"""The engines of one writer in one scope: what waits to be written of each, and under which generation.

Nothing is written before a generation was claimed; after a claim everything that the memory index holds is
written. A generation is claimed when an engine is taken over, forgotten or cleared, when too much of it
changed, when the registry or the engine's slot was lost, and when the servers changed. An engine that cannot
be given a new generation because the server is full, or whose changes could not be written for the length of
a lease, is invalidated, so that readers ignore it. Where that fails too, its lease cannot be renewed either.
Everything held is written again within two thirds of its time to live, which also restores evicted blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import structlog

from publisher.events import BlockHash
from router.index.store.memory import MemoryIndex
from router.replication.redis.client import Client
from router.replication.redis.errors import IndexUnavailable, ServerError
from router.replication.schema.pattern_codes import PatternCodes
from router.replication.schema.registry import EpochChanged, LeaseLost, Registry, Scope
from router.replication.writer.dirty import MirrorStats, PendingEngine
from router.replication.writer.gc import RegistryGc

__all__ = ["IDLE_S", "MirrorStats", "WriteQueue"]

_LOG = structlog.get_logger()

_SLICE = 2048
"""Blocks of one engine written before the next engine gets its turn."""
IDLE_S = 0.25
"""How often a writer checks that the registry has not been replaced."""
AUDIT_S = 60.0


class WriteQueue:
    """The engines of one writer in one scope. One task at a time, except for ``touch`` and ``invalidate``."""

    def __init__(
        self,
        client: Client,
        registry: Registry,
        memory: MemoryIndex,
        on_lost: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self.engines: dict[str, PendingEngine] = {}
        self.counters = MirrorStats()
        self.client = client
        self.settings = client.settings
        self.registry = registry
        self.memory = memory
        self._on_lost = on_lost
        self._on_change = on_change
        self._scope: Scope | None = None
        self._checked = 0.0
        self.codes = PatternCodes(registry)
        self.numbers = count(1)
        self._failing_since: float | None = None
        self._audit_at = 0.0
        self._gc = RegistryGc(registry)

    def touch(self, engine_id: str, hashes: Sequence[BlockHash]) -> None:
        """Note changed blocks of an engine."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            self.touch_engine(engine, hashes)
            self._on_change()

    def invalidate(self, engine_id: str) -> None:
        """The engine was cleared or replaced as a whole: claim a new generation for it."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            engine.invalidate(whole=not self.memory.planes(engine_id))
            self._on_change()

    def refresh(self) -> None:
        """Put the blocks that are due for a refresh on the waiting list."""
        period_s, now = self.settings.block_ttl_s / 3, _now()
        for engine_id, engine in self.engines.items():
            engine.refresh(partial(self.memory.blocks_of, engine_id), now, period_s)

    async def audit(self) -> None:
        """Once a minute: engines whose slot in the registry differs claim another; engines without a writer
        are removed from the registry."""
        now = _now()
        if now < self._audit_at:
            return
        view = await self._gc.run(self.settings.block_ttl_s)
        self._audit_at = now + AUDIT_S
        for engine_id, engine in self.engines.items():
            if engine.slot is not None and (view is None or view.slots.get(engine_id) != engine.slot):
                self.counters.lost_seats += 1
                engine.invalidate(whole=False)
                self._on_change()

    async def take_over(self, engine_id: str, token: int) -> None:
        """See ``MirroredIndex.take_over``; raises ``EpochChanged`` to be called again."""
        scope = await self.current_scope()
        engine = PendingEngine(token, whole=False)
        await self.registry.fence(scope, engine_id, token)
        await self.claim(scope, engine_id, engine)
        self.engines[engine_id] = engine

    async def current_scope(self) -> Scope:
        """The scope on the current servers; if either changed, every engine is to be claimed again."""
        identity, now = self.client.identity, _now()
        if (
            self._scope is not None
            and self._scope.server_identity == identity
            and now - self._checked < IDLE_S
        ):
            return self._scope
        scope = await self.registry.open()
        if scope.server_identity != identity:
            await self.registry.replace_servers(scope)
            scope = await self.registry.open()
        if scope != self._scope:
            self.counters.scope_changes += self._scope is not None
            self.codes.clear()
            for engine in self.engines.values():
                engine.invalidate(whole=False)
            self._scope = scope
        self._checked = now
        return scope

    def reopen_scope(self) -> None:
        """Another writer created a new epoch: read the scope again before the next write."""
        self._scope = None

    def succeeded(self) -> None:
        """Note that a flush wrote everything."""
        self._failing_since = None

    async def failed(self, error: IndexUnavailable) -> None:
        """Note that a flush failed. After the length of a lease, engines with unwritten changes are
        invalidated."""
        now = _now()
        if self._failing_since is None:
            self._failing_since = now
        if error.reason == "OOM" or now - self._failing_since < self.settings.lease_s:
            return  # a full server still accepts removals
        for engine_id, engine in list(self.engines.items()):
            if engine.slot is not None and not engine.idle:
                engine.invalidate(whole=False)
                try:
                    await self.registry.invalidate(engine_id, engine.token)
                except LeaseLost:
                    self.drop_fenced(engine_id, engine)
                except IndexUnavailable:
                    return  # the lease cannot be renewed either, so readers will call the engine stale

    async def claim(self, scope: Scope, engine_id: str, engine: PendingEngine) -> None:
        """Claim a new generation, and queue everything that the memory index holds of the engine."""
        try:
            slot = await self.registry.claim(scope, engine_id, engine.token)
        except ServerError as error:
            if error.reason == "OOM":
                await self.registry.invalidate(engine_id, engine.token)
            raise
        except EpochChanged:
            self._scope = None
            raise
        self.counters.claims += 1
        engine.claimed(slot, _now())
        if not engine.whole:
            held = self.memory.blocks_of(engine_id)
            self.counters.remirrors += len(held) > 0
            engine.touched, engine.backlog = set(), [held]

    def touch_engine(self, engine: PendingEngine, hashes: Sequence[BlockHash]) -> None:
        """Queue these blocks (again)."""
        if not engine.touch(hashes, self.settings.touched_max):
            self.counters.overflows += 1

    def drop_fenced(self, engine_id: str, engine: PendingEngine) -> None:
        """Another writer holds the engine: forget it here."""
        if self.engines.get(engine_id) is engine:
            self.counters.fenced += 1
            _LOG.warning("another replica writes this engine now", engine=engine_id)
            del self.engines[engine_id]
            self.memory.forget(engine_id)
            self._on_lost(engine_id)


def _now() -> float:
    return asyncio.get_running_loop().time()
