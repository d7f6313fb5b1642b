"""Pending writes of the engines of one writer in one scope, and their flush to the index servers.

Nothing is written before a generation was claimed; after a claim everything that the memory index holds is
written. A generation is claimed when an engine is taken over, forgotten or cleared, when too much of it
changed, when the registry or the engine's slot was lost, and when the servers changed. An engine that cannot
get a new generation because the server is full, or whose changes could not be written for the length of a
lease, is invalidated, so that readers ignore it. If that fails too, its lease cannot be renewed either.
Everything held is written again within two thirds of its time to live, which also restores evicted blocks.

Batches of an engine carry the lease's token and a rising number. The server refuses a batch that was
overtaken by another writer, or by a later batch of this one on another connection. Invariant: blocks taken
from an engine's pending list are either acknowledged by the server or pending again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

import numpy as np
import structlog

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Words
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.replication import block_scripts
from kvatlas.router.replication.codec import pack_records
from kvatlas.router.replication.keys import partition_of
from kvatlas.router.replication.master import ScriptCall
from kvatlas.router.replication.pattern_codes import Codes, PatternCodes
from kvatlas.router.replication.pending import Batch, MirrorStats, PendingEngine
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable, Reply, ServerError
from kvatlas.router.replication.registry import (
    EngineSlot,
    EpochChanged,
    LeaseLost,
    Registry,
    Scope,
)
from kvatlas.router.replication.registry_gc import RegistryGc

_LOG = structlog.get_logger()

# Number of blocks of one engine written before the next engine's turn.
_SLICE = 2048
# Seconds between two checks that the registry has not been replaced.
IDLE_S = 0.25
TOUCHED_MAX = 1 << 18
"""Changed blocks of one engine that may wait; beyond it all its blocks are written again."""
SCRIPT_BLOCKS = 512
"""Of one script call, during which Redis answers no other client."""
AUDIT_S = 60.0


class WriteQueue:
    """The engines of one writer in one scope.

    Used by one task at a time, except for ``touch`` and ``invalidate``.
    """

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
        engine = self.engines.get(engine_id)
        if engine is not None:
            self.touch_engine(engine, hashes)
            self._on_change()

    def invalidate(self, engine_id: str) -> None:
        """Claim a new generation for an engine that was cleared or replaced as a whole."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            engine.invalidate(whole=not self.memory.planes(engine_id))
            self._on_change()

    def refresh(self) -> None:
        period_s, now = self.settings.block_ttl_s / 3, _now()
        for engine_id, engine in self.engines.items():
            engine.refresh(partial(self.memory.blocks_of, engine_id), now, period_s)

    async def audit(self) -> None:
        """Audit the registry once a minute.

        Engines whose slot in the registry differs claim another; engines without a writer are removed from
        the registry.
        """
        now = _now()
        if now < self._audit_at:
            return
        view = await self._gc.run(self.settings.block_ttl_s)
        self._audit_at = now + AUDIT_S
        for engine_id, engine in self.engines.items():
            if engine.slot is not None and (view is None or view.slots.get(engine_id) != engine.slot):
                self.counters.lost_slots += 1
                engine.invalidate(whole=False)
                self._on_change()

    async def take_over(self, engine_id: str, token: int) -> None:
        """Become the writer of an engine. Raises ``EpochChanged`` to be called again."""
        scope = await self.current_scope()
        engine = PendingEngine(token, whole=False)
        await self.registry.fence(scope, engine_id, token)
        await self.claim(scope, engine_id, engine)
        self.engines[engine_id] = engine

    async def current_scope(self) -> Scope:
        """Return the scope on the current servers; if either changed, every engine has to be claimed
        again.
        """
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
        """Read the scope again before the next write: another writer created a new epoch."""
        self._scope = None

    def succeeded(self) -> None:
        """Record that a flush wrote everything."""
        self._failing_since = None

    async def failed(self, error: IndexUnavailable) -> None:
        # After the length of a lease, engines with unwritten changes are invalidated.
        now = _now()
        if self._failing_since is None:
            self._failing_since = now
        if error.reason == "OOM" or now - self._failing_since < self.settings.lease_s:
            # A full server still accepts removals.
            return
        for engine_id, engine in list(self.engines.items()):
            if engine.slot is not None and not engine.idle:
                engine.invalidate(whole=False)
                try:
                    await self.registry.invalidate(engine_id, engine.token)
                except LeaseLost:
                    self.drop_fenced(engine_id, engine)
                except IndexUnavailable:
                    # The lease cannot be renewed either, so readers will mark the engine stale.
                    return

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
        if not engine.touch(hashes, TOUCHED_MAX):
            self.counters.overflows += 1

    def drop_fenced(self, engine_id: str, engine: PendingEngine) -> None:
        """Forget an engine that another writer holds."""
        if self.engines.get(engine_id) is engine:
            self.counters.fenced += 1
            _LOG.warning("another replica writes this engine now", engine=engine_id)
            del self.engines[engine_id]
            self.memory.forget(engine_id)
            self._on_lost(engine_id)


def _now() -> float:
    return asyncio.get_running_loop().time()


class Flush:
    """One run over all pending blocks. ``run`` is called once; it may be cancelled."""

    def __init__(self, queue: WriteQueue) -> None:
        self._queue = queue
        # Engines whose pending list was empty at some time since the start.
        self._drained: set[PendingEngine] = set()
        # Batches of the next round: built, not sent.
        self._ready: list[Batch] = []

    async def run(self) -> None:
        """Write everything pending now. Raises ``IndexUnavailable``; ``EpochChanged`` to be called again.

        Changes that arrive meanwhile are written too, with priority, but not waited for.
        """
        await self._queue.current_scope()
        failure: IndexUnavailable | None = None
        while failure is None and (self._ready or not self._done):
            sending, self._ready = self._ready, []
            # The next round is built while the server processes this one.
            try:
                made, written = await asyncio.gather(self._make_round(), self._write(sending))
            except BaseException:
                self._again(*sending, *self._ready)
                raise
            failure = made or written
        if failure is None:
            self._queue.succeeded()
            return
        self._again(*self._ready)
        if isinstance(failure, EpochChanged):
            self._queue.reopen_scope()
        raise failure

    @property
    def _done(self) -> bool:
        return self._drained.issuperset(self._queue.engines.values())

    def _again(self, *batches: Batch) -> None:
        """Return the blocks of these batches to the pending list."""
        for batch in batches:
            if batch.finish():
                self._queue.touch_engine(batch.engine, batch.hashes)
                self._drained.discard(batch.engine)

    async def _make_round(self) -> IndexUnavailable | None:
        """Build batches of one slice of every engine."""
        for engine_id, engine in [] if self._done else list(self._queue.engines.items()):
            try:
                if not engine.idle:
                    await self._make_some(await self._queue.current_scope(), engine_id, engine)
            except LeaseLost:
                self._queue.drop_fenced(engine_id, engine)
            except IndexUnavailable as error:
                return error
            if engine.idle:
                self._drained.add(engine)
        return None

    async def _make_some(self, scope: Scope, engine_id: str, engine: PendingEngine) -> None:
        """Claim and describe if due, then build batches of one slice of blocks."""
        if engine.slot is None:
            await self._queue.claim(scope, engine_id, engine)
        if engine.facts_due:
            await self._describe(scope, engine_id, engine)
        slot, hashes = engine.slot, engine.take(_SLICE)
        names = states = hashes
        if engine.learned is not None:
            hashes, names, states = engine.learned.named(hashes)
        if not hashes:
            return
        try:
            codes = await self._queue.codes.codes_of(scope, self._queue.memory, engine_id, states)
            if slot is not None and engine.slot is slot and self._queue.engines.get(engine_id) is engine:
                words = np.array(names, np.uint64)
                self._ready += self._batches(scope, engine_id, engine, slot, hashes, words, codes)
                return
        except BaseException:
            self._queue.touch_engine(engine, hashes)
            raise
        # Invalidated or lost meanwhile: read the blocks again.
        self._queue.touch_engine(engine, hashes)

    async def _describe(self, scope: Scope, engine_id: str, engine: PendingEngine) -> None:
        facts = engine.facts
        try:
            await self._queue.registry.describe(scope, engine_id, engine.token, facts)
        except IndexUnavailable as error:
            # Other replicas would continue to predict with the old description.
            if error.reason == "OOM":
                engine.invalidate(whole=False)
                await self._queue.registry.invalidate(engine_id, engine.token)
            raise
        engine.facts_due = engine.facts is not facts

    def _batches(
        self,
        scope: Scope,
        engine_id: str,
        engine: PendingEngine,
        slot: EngineSlot,
        hashes: list[BlockHash],
        words: Words,
        codes: Codes,
    ) -> Iterator[Batch]:
        """Yield one script call per partition and ``SCRIPT_BLOCKS`` blocks; ``words`` are the names of
        ``hashes``."""
        queue, settings = self._queue, self._queue.settings
        ttls = int(settings.block_ttl_s * 1000), int(settings.control_ttl_s * 1000)
        partitions = partition_of(words, scope.partitions)
        for partition in range(scope.partitions):
            mine = np.flatnonzero(partitions == partition)
            fence = queue.registry.keys.fence(partition, scope.partitions)
            prefix = queue.registry.keys.prefix(scope.epoch, partition, scope.partitions)
            for start in range(0, len(mine), SCRIPT_BLOCKS):
                part = mine[start : start + SCRIPT_BLOCKS]
                records = pack_records(words[part], codes[part], slot.generation, scope.code_bytes)
                place = (prefix, slot.number, scope.code_bytes + 1)
                who = (engine_id, engine.token, next(queue.numbers))
                call = ScriptCall(block_scripts.WRITE, [fence], (*who, *place, *ttls, records))
                those = [hashes[number] for number in part.tolist()]
                yield Batch(engine_id, engine, those, call, queue.codes.provisional)

    async def _write(self, batches: list[Batch]) -> IndexUnavailable | None:
        """Send batches in order; unwritten blocks become pending again. Returns the last failure, if any."""
        failure: IndexUnavailable | None = None
        replies = await self._queue.client.batch([batch.call for batch in batches])
        for batch, reply in zip(batches, replies, strict=True):
            failure = await self._answered(batch, reply) or failure
        return failure

    async def _answered(self, batch: Batch, reply: Reply) -> IndexUnavailable | None:
        queue, engine_id, engine = self._queue, batch.engine_id, batch.engine
        if isinstance(reply, IndexUnavailable):
            self._again(batch)
            return None if reply.reason == "NOSCRIPT" else reply
        word, changed, refused = reply
        match word:
            case b"OK":
                queue.counters.blocks_written += int(changed)
                if refused or batch.provisional:
                    queue.counters.blocks_refused += int(refused)
                    self._again(batch)
                    return IndexUnavailable("OOM", "the server has no room")
            case b"LATE":
                queue.counters.late_batches += 1
                self._again(batch)
            case b"NOFENCE":
                queue.counters.lost_fences += 1
                engine.invalidate(whole=False)
                self._drained.discard(engine)
                batch.finish()
                return await self._fence_again(engine_id, engine)
            case _:
                queue.drop_fenced(engine_id, engine)
        batch.finish()
        return None

    async def _fence_again(self, engine_id: str, engine: PendingEngine) -> IndexUnavailable | None:
        """Recreate the fence that the server lost; the claim that follows checks the lease."""
        try:
            await self._queue.registry.fence(await self._queue.current_scope(), engine_id, engine.token)
        except LeaseLost:
            self._queue.drop_fenced(engine_id, engine)
        except IndexUnavailable as error:
            return error
        return None
