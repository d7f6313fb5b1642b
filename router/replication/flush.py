"""One flush: the changes of all engines, in batches, in order.

Batches of an engine carry the lease's token and a rising number. The server refuses a batch that was
overtaken by another writer, or by a later batch of this one on another connection. Invariant: blocks taken
from an engine's pending list are either acknowledged by the server or pending again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np

from publisher.events import BlockHash
from router.index.base import Words
from router.replication import scripts
from router.replication.codec import pack_records, partition_of
from router.replication.redis.connection import IndexUnavailable, Reply
from router.replication.redis.topology import ScriptCall
from router.replication.registry import Codes, EngineSlot, EpochChanged, LeaseLost, Scope
from router.replication.write_queue import Batch, PendingEngine, WriteQueue

# Number of blocks of one engine written before the next engine's turn.
_SLICE = 2048


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
            try:  # the next round is built while the server processes this one
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
        if not hashes:
            return
        try:
            codes = await self._queue.codes.codes_of(scope, self._queue.memory, engine_id, hashes)
            if slot is not None and engine.slot is slot and self._queue.engines.get(engine_id) is engine:
                words = np.array(hashes, np.uint64)
                self._ready += self._batches(scope, engine_id, engine, slot, words, codes)
                return
        except BaseException:
            self._queue.touch_engine(engine, hashes)
            raise
        self._queue.touch_engine(engine, hashes)  # invalidated or lost meanwhile: read the blocks again

    async def _describe(self, scope: Scope, engine_id: str, engine: PendingEngine) -> None:
        facts = engine.facts
        try:
            await self._queue.registry.describe(scope, engine_id, engine.token, facts)
        except IndexUnavailable as error:
            if error.reason == "OOM":  # other replicas would continue to predict with the old description
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
        words: Words,
        codes: Codes,
    ) -> Iterator[Batch]:
        """Yield one script call per partition and ``script_blocks`` blocks."""
        queue, settings = self._queue, self._queue.settings
        ttls = int(settings.block_ttl_s * 1000), int(settings.control_ttl_s * 1000)
        partitions = partition_of(words, scope.partitions)
        for partition in range(scope.partitions):
            mine = np.flatnonzero(partitions == partition)
            fence = queue.registry.keys.fence(partition, scope.partitions)
            prefix = queue.registry.keys.prefix(scope.epoch, partition, scope.partitions)
            for start in range(0, len(mine), settings.script_blocks):
                part = mine[start : start + settings.script_blocks]
                records = pack_records(words[part], codes[part], slot.generation, scope.code_bytes)
                place = (prefix, slot.number, scope.code_bytes + 1)
                who = (engine_id, engine.token, next(queue.numbers))
                call = ScriptCall(scripts.WRITE, [fence], (*who, *place, *ttls, records))
                hashes = [BlockHash(value) for value in words[part].tolist()]
                yield Batch(engine_id, engine, hashes, call, queue.codes.provisional)

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
