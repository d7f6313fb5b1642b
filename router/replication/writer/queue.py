"""The engines of one writer in one scope: what is still to be written of each, and whether it counts.

Nothing counts before a generation was claimed, and the first thing after a claim is what memory holds then.
That is done when an engine is taken over, forgotten or cleared, when too much of it changed, when the books
were lost, when the servers are others than before, and when the seat is gone. An engine that cannot be given
a new generation because the server is full, or whose changes could not be written for as long as a lease
runs, is disowned: readers believe nothing of it. Where that cannot be said, no lease can be renewed either.
Everything held is written again within two thirds of its time to live, which also heals what eviction took.
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
from router.replication.writer.dirty import MirrorStats, Pending
from router.replication.writer.gc import Sweep

__all__ = ["IDLE_S", "MirrorStats", "Outbox"]

_LOG = structlog.get_logger()

_SLICE = 2048
"""Blocks of one engine written before the next engine gets its turn."""
IDLE_S = 0.25
"""How often a writer looks whether the books are still the ones it knows."""
AUDIT_S = 60.0


class Outbox:
    """The engines of one writer in one scope. One task at a time, but for ``touch`` and ``unseat``."""

    def __init__(
        self,
        client: Client,
        registry: Registry,
        memory: MemoryIndex,
        on_lost: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self.engines: dict[str, Pending] = {}
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
        self._sweep = Sweep(registry)

    def touch(self, engine_id: str, hashes: Sequence[BlockHash]) -> None:
        """These blocks of an engine changed."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            self.touch_engine(engine, hashes)
            self._on_change()

    def unseat(self, engine_id: str) -> None:
        """The engine lost more than can be told block by block: nothing written counts any more."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            engine.unseat(whole=not self.memory.planes(engine_id))
            self._on_change()

    def refresh(self) -> None:
        """Put the blocks whose turn it is to be written again on the waiting list."""
        period_s, now = self.settings.block_ttl_s / 3, _now()
        for engine_id, engine in self.engines.items():
            engine.refresh(partial(self.memory.blocks_of, engine_id), now, period_s)

    async def audit(self) -> None:
        """Once a minute: every engine has the seat it believes to have, or claims another; what nobody writes
        any more goes from the books."""
        now = _now()
        if now < self._audit_at:
            return
        view = await self._sweep.run(self.settings.block_ttl_s)
        self._audit_at = now + AUDIT_S
        for engine_id, engine in self.engines.items():
            if engine.seat is not None and (view is None or view.seats.get(engine_id) != engine.seat):
                self.counters.lost_seats += 1
                engine.unseat(whole=False)
                self._on_change()

    async def take_over(self, engine_id: str, token: int) -> None:
        """See ``MirroredIndex.take_over``; raises ``EpochChanged`` to be called again."""
        scope = await self.settle()
        engine = Pending(token, whole=False)
        await self.registry.fence(scope, engine_id, token)
        await self.claim(scope, engine_id, engine)
        self.engines[engine_id] = engine

    async def settle(self) -> Scope:
        """The scope as it stands on the servers as they are; everything is claimed anew if either changed."""
        identity, now = self.client.identity, _now()
        if self._scope is not None and self._scope.home == identity and now - self._checked < IDLE_S:
            return self._scope
        scope = await self.registry.open()
        if scope.home != identity:
            await self.registry.rehome(scope)
            scope = await self.registry.open()
        if scope != self._scope:
            self.counters.scope_changes += self._scope is not None
            self.codes.clear()
            for engine in self.engines.values():
                engine.unseat(whole=False)
            self._scope = scope
        self._checked = now
        return scope

    def begin_anew(self) -> None:
        """The scope was begun anew by another: look at it again."""
        self._scope = None

    def succeeded(self) -> None:
        """A flush wrote everything."""
        self._failing_since = None

    async def failed(self, error: IndexUnavailable) -> None:
        """A flush failed. Where that goes on, what waits to be written must not be believed any more."""
        now = _now()
        if self._failing_since is None:
            self._failing_since = now
        if error.reason == "OOM" or now - self._failing_since < self.settings.lease_s:
            return  # a full server takes removals still
        for engine_id, engine in list(self.engines.items()):
            if engine.seat is not None and not engine.idle:
                engine.unseat(whole=False)
                try:
                    await self.registry.disown(engine_id, engine.token)
                except LeaseLost:
                    self.lose(engine_id, engine)
                except IndexUnavailable:
                    return  # nor can the lease be renewed, which says the same

    async def claim(self, scope: Scope, engine_id: str, engine: Pending) -> None:
        """A new generation, and everything memory holds of the engine waiting to be written under it."""
        try:
            seat = await self.registry.claim(scope, engine_id, engine.token)
        except ServerError as error:
            if error.reason == "OOM":
                await self.registry.disown(engine_id, engine.token)
            raise
        except EpochChanged:
            self._scope = None
            raise
        self.counters.claims += 1
        engine.seated(seat, _now())
        if not engine.whole:
            held = self.memory.blocks_of(engine_id)
            self.counters.remirrors += len(held) > 0
            engine.touched, engine.backlog = set(), [held]

    def touch_engine(self, engine: Pending, hashes: Sequence[BlockHash]) -> None:
        """These blocks are to be looked at (again)."""
        if not engine.touch(hashes, self.settings.touched_max):
            self.counters.overflows += 1

    def lose(self, engine_id: str, engine: Pending) -> None:
        """Another writer holds the engine: what is known of it here is worth nothing any more."""
        if self.engines.get(engine_id) is engine:
            self.counters.fenced += 1
            _LOG.warning("another replica writes this engine now", engine=engine_id)
            del self.engines[engine_id]
            self.memory.forget(engine_id)
            self._on_lost(engine_id)


def _now() -> float:
    return asyncio.get_running_loop().time()
