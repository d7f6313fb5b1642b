"""One flush: the changes of all engines, in batches, in order.

Batches of an engine carry the lease's token and a rising number, and the server refuses a batch that was
overtaken, be it by another writer or by a later batch of this one on another connection. Always true: blocks
taken from an engine's waiting list are either written by the server's own word or waiting again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np

from publisher.events import BlockHash
from router.index.base import Words
from router.replication.redis.client import ScriptCall
from router.replication.redis.connection import Reply
from router.replication.redis.errors import IndexUnavailable
from router.replication.schema import write_scripts
from router.replication.schema.codec import pack_records
from router.replication.schema.keys import partition_of
from router.replication.schema.pattern_codes import Codes
from router.replication.schema.registry import EngineSlot, EpochChanged, LeaseLost, Scope
from router.replication.writer.dirty import Batch, Pending
from router.replication.writer.queue import Outbox

_SLICE = 2048
"""Blocks of one engine written before the next engine gets its turn."""


class Flush:
    """Run it once; it may be cancelled."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._drained: set[Pending] = set()
        """Engines of which nothing waited any more at some moment since the start."""
        self._ready: list[Batch] = []
        """The next round: made, not sent."""

    async def run(self) -> None:
        """Write all that waits now. Raises ``IndexUnavailable``; ``EpochChanged`` to be called again.

        Changes that come meanwhile are written too, first of all, but not waited for.
        """
        await self._outbox.settle()
        failure: IndexUnavailable | None = None
        while failure is None and (self._ready or not self._done):
            sending, self._ready = self._ready, []
            try:  # the next round is made while the server works on this one
                made, written = await asyncio.gather(self._make_round(), self._write(sending))
            except BaseException:
                self._again(*sending, *self._ready)
                raise
            failure = made or written
        if failure is None:
            self._outbox.succeeded()
            return
        self._again(*self._ready)
        if isinstance(failure, EpochChanged):
            self._outbox.begin_anew()
        raise failure

    @property
    def _done(self) -> bool:
        return self._drained.issuperset(self._outbox.engines.values())

    def _again(self, *batches: Batch) -> None:
        """What these batches were to write waits again."""
        for batch in batches:
            if batch.settle():
                self._outbox.touch_engine(batch.engine, batch.hashes)
                self._drained.discard(batch.engine)

    async def _make_round(self) -> IndexUnavailable | None:
        """A slice of every engine, ready to be sent."""
        for engine_id, engine in [] if self._done else list(self._outbox.engines.items()):
            try:
                if not engine.idle:
                    await self._make_some(await self._outbox.settle(), engine_id, engine)
            except LeaseLost:
                self._outbox.lose(engine_id, engine)
            except IndexUnavailable as error:
                return error
            if engine.idle:
                self._drained.add(engine)
        return None

    async def _make_some(self, scope: Scope, engine_id: str, engine: Pending) -> None:
        """Claim and describe where due, then make batches of one slice of blocks."""
        if engine.seat is None:
            await self._outbox.claim(scope, engine_id, engine)
        if engine.facts_due:
            await self._describe(scope, engine_id, engine)
        seat, hashes = engine.seat, engine.take(_SLICE)
        if not hashes:
            return
        try:
            codes = await self._outbox.codes.of(scope, self._outbox.memory, engine_id, hashes)
            if seat is not None and engine.seat is seat and self._outbox.engines.get(engine_id) is engine:
                words = np.array(hashes, np.uint64)
                self._ready += self._batches(scope, engine_id, engine, seat, words, codes)
                return
        except BaseException:
            self._outbox.touch_engine(engine, hashes)
            raise
        self._outbox.touch_engine(engine, hashes)  # forgotten or lost while the server was asked: look again

    async def _describe(self, scope: Scope, engine_id: str, engine: Pending) -> None:
        facts = engine.facts
        try:
            await self._outbox.registry.describe(scope, engine_id, engine.token, facts)
        except IndexUnavailable as error:
            if error.reason == "OOM":  # others would go on predicting by what no longer holds
                engine.unseat(whole=False)
                await self._outbox.registry.disown(engine_id, engine.token)
            raise
        engine.facts_due = engine.facts is not facts

    def _batches(
        self, scope: Scope, engine_id: str, engine: Pending, seat: EngineSlot, words: Words, codes: Codes
    ) -> Iterator[Batch]:
        """One script call per partition and ``script_blocks`` blocks."""
        outbox, settings = self._outbox, self._outbox.settings
        ttls = int(settings.block_ttl_s * 1000), int(settings.control_ttl_s * 1000)
        partitions = partition_of(words, scope.partitions)
        for partition in range(scope.partitions):
            mine = np.flatnonzero(partitions == partition)
            fence = outbox.registry.keys.fence(partition, scope.partitions)
            prefix = outbox.registry.keys.prefix(scope.epoch, partition, scope.partitions)
            for start in range(0, len(mine), settings.script_blocks):
                part = mine[start : start + settings.script_blocks]
                records = pack_records(words[part], codes[part], seat.generation, scope.code_bytes)
                place = (prefix, seat.number, scope.code_bytes + 1)
                who = (engine_id, engine.token, next(outbox.numbers))
                call = ScriptCall(write_scripts.WRITE, [fence], (*who, *place, *ttls, records))
                hashes = [BlockHash(value) for value in words[part].tolist()]
                yield Batch(engine_id, engine, hashes, call, outbox.codes.provisional)

    async def _write(self, batches: list[Batch]) -> IndexUnavailable | None:
        """Send batches in order; what was not written waits again. The last failure, if any."""
        failure: IndexUnavailable | None = None
        replies = await self._outbox.client.batch([batch.call for batch in batches])
        for batch, reply in zip(batches, replies, strict=True):
            failure = await self._answered(batch, reply) or failure
        return failure

    async def _answered(self, batch: Batch, reply: Reply) -> IndexUnavailable | None:
        outbox, engine_id, engine = self._outbox, batch.engine_id, batch.engine
        if isinstance(reply, IndexUnavailable):
            self._again(batch)
            return None if reply.reason == "NOSCRIPT" else reply
        word, changed, refused = reply
        match word:
            case b"OK":
                outbox.counters.blocks_written += int(changed)
                if refused or batch.provisional:
                    outbox.counters.blocks_refused += int(refused)
                    self._again(batch)
                    return IndexUnavailable("OOM", "the server has no room")
            case b"LATE":
                outbox.counters.late_batches += 1
                self._again(batch)
            case b"NOFENCE":
                outbox.counters.lost_fences += 1
                engine.unseat(whole=False)
                self._drained.discard(engine)
                batch.settle()
                return await self._fence_again(engine_id, engine)
            case _:
                outbox.lose(engine_id, engine)
        batch.settle()
        return None

    async def _fence_again(self, engine_id: str, engine: Pending) -> IndexUnavailable | None:
        """The server lost the fence: raise it again; the claim that follows asks for the lease."""
        try:
            await self._outbox.registry.fence(await self._outbox.settle(), engine_id, engine.token)
        except LeaseLost:
            self._outbox.lose(engine_id, engine)
        except IndexUnavailable as error:
            return error
        return None
