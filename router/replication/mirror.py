"""The writer's side: a ``MemoryIndex`` whose content is mirrored to the shared index.

Copies are counted in memory only. A change marks its blocks as *touched*; ``flush`` reads their state at that
time and writes absolute values, so that ten changes of a block are one write and any write may be repeated.
Forgetting an engine is a new generation in the registry, independent of the number of its blocks. Invariant:
a change is written as soon as the server accepts it; while it cannot be written, readers trust the engine no
longer than its lease is valid. ``write_queue.py`` keeps the writes in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import IndexStats, Plane, Rows, Slot
from kvatlas.router.index.learn.learned_keys import LearnedKeys
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.places import is_shared
from kvatlas.router.replication.pending import MirrorStats
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.registry import EngineFacts, EpochChanged, IndexRefused, Registry
from kvatlas.router.replication.write_queue import IDLE_S, Flush, WriteQueue

_LOG = structlog.get_logger()

# Pause before the next flush, so that the batches of one scheduler step go out together.
_COALESCE_S = 0.002
_BACKOFF_S, _BACKOFF_S_MAX = 0.05, 1.0
# Attempts while the registry is replaced (``EpochChanged``); each reads the new epoch first.
_ATTEMPTS = 3


class MirroredIndex:
    """An ``Index`` that answers from memory and mirrors engines taken over by this writer.

    ``on_lost`` is called with the id of an engine that another writer has taken over.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        on_lost: Callable[[str], None] = lambda engine_id: None,
    ) -> None:
        self.memory = MemoryIndex()
        self.registry = Registry(client, model)
        self._dirty = asyncio.Event()
        self._queue = WriteQueue(client, self.registry, self.memory, on_lost, self._dirty.set)
        self._lock: asyncio.Lock | None = None

    @property
    def counters(self) -> MirrorStats:
        return self._queue.counters

    def store(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> None:
        self.memory.store(engine_id, plane, hashes)
        self._queue.touch(engine_id, hashes)

    def remove(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        left = self.memory.remove(engine_id, plane, hashes)
        self._queue.touch(engine_id, hashes)
        return left

    def set_copies(self, engine_id: str, plane: Plane, block: BlockHash, copies: int) -> None:
        self.memory.set_copies(engine_id, plane, block, copies)
        self._queue.touch(engine_id, (block,))

    def clear(self, engine_id: str, medium: str) -> None:
        # Expired entries: the engine's other blocks must stay readable.
        if is_shared(medium):
            gone = self.memory.blocks_of(engine_id, medium).tolist()
            self.memory.clear(engine_id, medium)
            self._queue.touch(engine_id, gone)
            return
        self.memory.clear(engine_id, medium)
        self._queue.invalidate(engine_id)

    def forget(self, engine_id: str) -> None:
        self.memory.forget(engine_id)
        self._queue.invalidate(engine_id)

    def adopt(self, staged_id: str, engine_id: str) -> None:
        self.memory.adopt(staged_id, engine_id)
        self._queue.invalidate(engine_id)

    def slot(self, engine_id: str) -> Slot | None:
        return self.memory.slot(engine_id)

    def lookup(self, hashes: Sequence[BlockHash]) -> Rows:
        return self.memory.lookup(hashes)

    def holds(self, engine_id: str, medium: str, block: BlockHash) -> bool:
        return self.memory.holds(engine_id, medium, block)

    def copies(self, engine_id: str, plane: Plane) -> int:
        return self.memory.copies(engine_id, plane)

    def physical(self, engine_id: str, medium: str) -> int:
        return self.memory.physical(engine_id, medium)

    def stats(self) -> IndexStats:
        return self.memory.stats()

    def check_integrity(self) -> list[str]:
        return self.memory.check_integrity()

    async def take_over(self, engine_id: str, token: int) -> None:
        """Become the writer of an engine whose lease was acquired with ``token``.

        On return older writers are fenced, and the shared index holds what the memory index has of the engine
        (nothing before its feed is started). Raises ``LeaseLost``, ``IndexUnavailable`` or ``IndexRefused``.
        """
        async with self._writing():
            for _ in range(_ATTEMPTS):
                with suppress(EpochChanged):
                    await self._queue.take_over(engine_id, token)
                    return
            raise EpochChanged

    def drop(self, engine_id: str) -> None:
        """Stop writing and forget the engine here: the lease is lost or released.

        Written blocks stay until the next writer claims the engine; ``flush`` before releasing a lease.
        """
        self._queue.engines.pop(engine_id, None)
        self.memory.forget(engine_id)

    async def retire(self, engine_id: str) -> None:
        """Drop an engine that left the fleet and free its slot. The lease must still be held."""
        engine = self._queue.engines.get(engine_id)
        self.drop(engine_id)
        if engine is not None:
            async with self._writing():
                await self.registry.retire(await self._queue.current_scope(), engine_id, engine.token)

    def describe(self, engine_id: str, facts: EngineFacts, learned: LearnedKeys | None = None) -> None:
        """Set an engine's description for other replicas; written with the next flush if it changed.

        ``learned``: its prefixes, if its hashes cannot be computed: blocks are written under own keys, which
        every replica can compute. All are written again when that changes.
        """
        engine = self._queue.engines.get(engine_id)
        if engine is not None and engine.learned is not learned:
            engine.learned = learned
            self._queue.invalidate(engine_id)
        if engine is not None and engine.facts != facts:
            engine.facts, engine.facts_due = facts, True
            self._dirty.set()

    def mirrored(self) -> dict[str, int]:
        """Return the engines of this writer, with their tokens."""
        return {engine_id: engine.token for engine_id, engine in self._queue.engines.items()}

    def written(self, engine_id: str) -> bool:
        """Whether the server has everything that the memory index holds of an engine."""
        engine = self._queue.engines.get(engine_id)
        return engine is not None and engine.written

    async def run(self) -> None:
        """Flush on every change, until cancelled; retries while the server is unreachable."""
        pause = _BACKOFF_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._dirty.wait()
            try:
                self._queue.refresh()
                await self.flush()
                async with self._writing():
                    await self._queue.audit()
                pause = _BACKOFF_S
                await asyncio.sleep(_COALESCE_S)
            except IndexUnavailable as error:
                self.counters.error(error.reason)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _BACKOFF_S_MAX)
            except IndexRefused as error:
                self.counters.error("refused")
                _LOG.warning("shared index refuses this replica", why=str(error))
                await asyncio.sleep(_BACKOFF_S_MAX)

    async def flush(self) -> None:
        """Write everything pending. Raises ``IndexUnavailable``; unwritten blocks stay pending."""
        async with self._writing():
            self._dirty.clear()
            self.counters.flushes += 1
            try:
                await self._write()
            except IndexUnavailable as error:
                self._dirty.set()
                await self._queue.failed(error)
                raise

    async def _write(self) -> None:
        for _ in range(_ATTEMPTS):
            with suppress(EpochChanged):
                await Flush(self._queue).run()
                return
        raise EpochChanged

    def _writing(self) -> asyncio.Lock:
        """Allow one flush or take-over at a time; the lock is created in the event loop that uses it."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock
