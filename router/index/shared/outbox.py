"""What a writer has still to write, and writing it in order.

Never believed by readers what is not so, because:
- batches of an engine carry the lease's token and a rising number, and the server refuses a batch that was
  overtaken, be it by another writer or by a later batch of this one on another connection;
- after ``take_over``, ``unseat``, an overflow, lost books or other servers nothing counts before a new
  generation is claimed, and the first thing after the claim is what memory holds then;
- where the server is full, a removal deletes the whole block (other engines' writers write theirs again in
  their turn), and an engine that cannot be given a new generation is disowned.
Everything held is written again within two thirds of its time to live, which also heals what eviction took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np
import structlog

from publisher.events import BlockHash
from router.index.base import Words
from router.index.memory import MemoryIndex
from router.index.shared import write_scripts
from router.index.shared.codec import pack_records
from router.index.shared.connect import Client
from router.index.shared.handshake import ServerError
from router.index.shared.keys import partition_of
from router.index.shared.link import IndexUnavailable
from router.index.shared.patterns import Codes, PatternCodes
from router.index.shared.pending import Batch, MirrorStats, Pending
from router.index.shared.registry import EpochChanged, LeaseLost, Registry, Scope, Seat
from router.index.shared.sweep import Sweep

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
        self._client = client
        self._settings = client.settings
        self._registry = registry
        self._memory = memory
        self._on_lost = on_lost
        self._on_change = on_change
        self._scope: Scope | None = None
        self._checked = 0.0
        self._codes = PatternCodes(registry)
        self._numbers = count(1)
        self._audit_at = 0.0
        self._sweep = Sweep(registry)

    def touch(self, engine_id: str, hashes: Sequence[BlockHash]) -> None:
        """These blocks of an engine changed."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            self._touch(engine, hashes)
            self._on_change()

    def unseat(self, engine_id: str) -> None:
        """The engine lost more than can be told block by block: nothing written counts any more."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            engine.unseat(whole=not self._memory.planes(engine_id))
            self._on_change()

    def refresh(self) -> None:
        """Put the blocks whose turn it is to be written again on the waiting list."""
        period_s, now = self._settings.block_ttl_s / 3, _now()
        for engine_id, engine in self.engines.items():
            engine.refresh(partial(self._memory.blocks_of, engine_id), now, period_s)

    async def audit(self) -> None:
        """Once a minute: every engine has the seat it believes to have, or claims another; what nobody writes
        any more goes from the books."""
        now = _now()
        if now < self._audit_at:
            return
        view = await self._sweep.run(self._settings.block_ttl_s)
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
        await self._registry.fence(scope, engine_id, token)
        await self._claim(scope, engine_id, engine)
        self.engines[engine_id] = engine

    async def settle(self) -> Scope:
        """The scope as it stands on the servers as they are; everything is claimed anew if either changed."""
        identity, now = self._client.identity, _now()
        if self._scope is not None and self._scope.home == identity and now - self._checked < IDLE_S:
            return self._scope
        scope = await self._registry.open()
        if scope.home != identity:
            await self._registry.rehome(scope)
            scope = await self._registry.open()
        if scope != self._scope:
            self.counters.scope_changes += self._scope is not None
            self._codes.clear()
            for engine in self.engines.values():
                engine.unseat(whole=False)
            self._scope = scope
        self._checked = now
        return scope

    async def write_all(self) -> None:
        """Write all that waits now. Raises ``IndexUnavailable``; ``EpochChanged`` to be called again.

        Changes that come meanwhile are written too, first of all, but not waited for.
        """
        await self.settle()
        batches: list[Batch] = []
        drained: set[Pending] = set()
        failure: IndexUnavailable | None = None
        while True:
            sent: list[Batch] = []
            if failure is None and not drained.issuperset(self.engines.values()):
                sent, failure = await self._send_round(drained)
            for batch in batches:
                failure = await self._settle_batch(batch, drained) or failure
            batches = sent
            if not batches and (failure is not None or drained.issuperset(self.engines.values())):
                break
        if isinstance(failure, EpochChanged):
            self._scope = None
        if failure is not None:
            self._on_change()
            raise failure

    async def _send_round(self, drained: set[Pending]) -> tuple[list[Batch], IndexUnavailable | None]:
        """A slice of every engine on its way; ``drained`` gets those of which nothing waits any more."""
        sent: list[Batch] = []
        for engine_id, engine in list(self.engines.items()):
            try:
                if not engine.idle:
                    sent += await self._send_some(await self.settle(), engine_id, engine)
            except LeaseLost:
                self._lose(engine_id, engine)
            except IndexUnavailable as error:
                return sent, error
            if engine.idle:
                drained.add(engine)
        return sent, None

    async def _send_some(self, scope: Scope, engine_id: str, engine: Pending) -> list[Batch]:
        """Claim and describe where due, then put one slice of blocks on its way."""
        if engine.seat is None:
            await self._claim(scope, engine_id, engine)
        if engine.facts_due:
            engine.facts_due = False
            try:
                await self._registry.describe(scope, engine_id, engine.token, engine.facts)
            except IndexUnavailable:
                engine.facts_due = True
                raise
        seat, hashes = engine.seat, engine.take(_SLICE)
        if not hashes:
            return []
        try:
            codes = await self._codes.of(scope, self._memory, engine_id, hashes)
        except IndexUnavailable:
            self._touch(engine, hashes)
            raise
        if seat is None or engine.seat is not seat or self.engines.get(engine_id) is not engine:
            self._touch(engine, hashes)  # forgotten, or lost, while the server was asked: look again
            return []
        try:
            return self._send(scope, engine_id, engine, seat, np.array(hashes, np.uint64), codes)
        except IndexUnavailable:
            self._touch(engine, hashes)
            raise

    def _send(
        self, scope: Scope, engine_id: str, engine: Pending, seat: Seat, words: Words, codes: Codes
    ) -> list[Batch]:
        """One script per partition and ``script_blocks`` blocks, all on their way at once, in order."""
        batches = []
        keys, size, unit = self._registry.keys, self._settings.script_blocks, scope.code_bytes + 1
        ttls = int(self._settings.block_ttl_s * 1000), int(self._settings.control_ttl_s * 1000)
        partitions = partition_of(words, scope.partitions)
        for partition in range(scope.partitions):
            mine = np.flatnonzero(partitions == partition)
            fence = keys.fence(partition, scope.partitions)
            prefix = keys.prefix(scope.epoch, partition, scope.partitions)
            for start in range(0, len(mine), size):
                part = mine[start : start + size]
                records = pack_records(words[part], codes[part], seat.generation, scope.code_bytes)
                head = (engine_id, engine.token, next(self._numbers), prefix, seat.number, unit)
                reply = self._client.submit(write_scripts.WRITE, [fence], *head, *ttls, records)
                hashes = [BlockHash(value) for value in words[part].tolist()]
                batches.append(Batch(engine_id, engine, hashes, reply))
                engine.in_flight += 1
        return batches

    async def _settle_batch(self, batch: Batch, drained: set[Pending]) -> IndexUnavailable | None:
        """Wait for one batch; what was not written waits again."""
        engine_id, engine = batch.engine_id, batch.engine
        engine.in_flight -= 1
        try:
            word, changed, refused = await self._client.outcome(write_scripts.WRITE, batch.reply)
        except IndexUnavailable as error:
            self._touch(engine, batch.hashes)
            drained.discard(engine)
            return None if error.reason == "NOSCRIPT" else error
        match word:
            case b"OK":
                self.counters.blocks_written += int(changed)
                if refused:
                    self.counters.blocks_refused += int(refused)
                    self._touch(engine, batch.hashes)
                    return IndexUnavailable("OOM", "the server has no room")
            case b"LATE":
                self.counters.late_batches += 1
                self._touch(engine, batch.hashes)
                drained.discard(engine)
            case b"NOFENCE":
                self.counters.lost_fences += 1
                engine.unseat(whole=False)
                drained.discard(engine)
                return await self._fence_again(engine_id, engine)
            case _:
                self._lose(engine_id, engine)
        return None

    async def _fence_again(self, engine_id: str, engine: Pending) -> IndexUnavailable | None:
        """The server lost the fence: raise it again; the claim that follows asks for the lease."""
        try:
            await self._registry.fence(await self.settle(), engine_id, engine.token)
        except LeaseLost:
            self._lose(engine_id, engine)
        except IndexUnavailable as error:
            return error
        return None

    async def _claim(self, scope: Scope, engine_id: str, engine: Pending) -> None:
        """A new generation, and everything memory holds of the engine waiting to be written under it."""
        try:
            seat = await self._registry.claim(scope, engine_id, engine.token)
        except ServerError as error:
            if error.reason == "OOM":
                await self._registry.disown(engine_id)
            raise
        except EpochChanged:
            self._scope = None
            raise
        self.counters.claims += 1
        engine.seated(seat, _now())
        if not engine.whole:
            held = self._memory.blocks_of(engine_id)
            self.counters.remirrors += len(held) > 0
            engine.touched, engine.backlog = set(), [held]

    def _touch(self, engine: Pending, hashes: Sequence[BlockHash]) -> None:
        if not engine.touch(hashes, self._settings.touched_max):
            self.counters.overflows += 1

    def _lose(self, engine_id: str, engine: Pending) -> None:
        """Another writer holds the engine: what is known of it here is worth nothing any more."""
        if self.engines.get(engine_id) is engine:
            self.counters.fenced += 1
            _LOG.warning("another replica writes this engine now", engine=engine_id)
            del self.engines[engine_id]
            self._memory.forget(engine_id)
            self._on_lost(engine_id)


def _now() -> float:
    return asyncio.get_running_loop().time()
