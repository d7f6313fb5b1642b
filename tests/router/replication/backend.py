"""The shared index behind the plain ``Index`` face, so that the contract of all backends can be run over it.

Writer and reader are different objects with different connections; every look-up goes through the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import Any, TypeVar

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import IndexStats, Plane, Rows, Slot
from kvatlas.router.replication.leases import Leases
from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.reader import SharedReader, SharedRows
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.settings import SharedSettings
from tests.support.waiting import WAIT_S

MODEL = "org/model-{7b} instruct"
_NAMESPACES = count()

T = TypeVar("T")


def make_settings(url: str, **changes: Any) -> SharedSettings:
    """Patient settings, in a namespace of their own."""
    patient = dict.fromkeys(("lookup_timeout_s", "write_timeout_s", "connect_timeout_s"), WAIT_S)
    return SharedSettings(url=url, **({"namespace": f"t{next(_NAMESPACES)}"} | patient | changes))


class SharedIndex:
    """One writer and one reader. An engine is taken over at its first store, and retired when forgotten."""

    def __init__(self, settings: SharedSettings) -> None:
        self.settings = settings
        self.loop = asyncio.new_event_loop()
        self.seen: set[int] = set()
        self.run(self._open())

    async def _open(self) -> None:
        self.writing, self.reading = Client(self.settings), Client(self.settings)
        assert await self.writing.start(WAIT_S)
        assert await self.reading.start(WAIT_S)
        self.mirror = MirroredIndex(self.writing, MODEL)
        self.leases = Leases(self.writing, MODEL, "replica-1")
        self.reader = SharedReader(self.reading)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.writing.close())
        self.run(self.reading.close())
        self.loop.close()

    async def _take(self, engine_id: str) -> None:
        if engine_id not in self.mirror.mirrored():
            token = await self.leases.acquire(engine_id)
            assert token is not None
            await self.mirror.take_over(engine_id, token)

    def store(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> None:
        self.seen.update(hashes)
        self.run(self._take(engine_id))
        self.mirror.store(engine_id, plane, hashes)

    def remove(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return self.mirror.remove(engine_id, plane, hashes)

    def set_copies(self, engine_id: str, plane: Plane, block: BlockHash, copies: int) -> None:
        self.seen.add(block)
        self.run(self._take(engine_id))
        self.mirror.set_copies(engine_id, plane, block, copies)

    def clear(self, engine_id: str, medium: str) -> None:
        self.mirror.clear(engine_id, medium)

    def forget(self, engine_id: str) -> None:
        self.mirror.forget(engine_id)
        self.run(self.mirror.retire(engine_id))

    def adopt(self, staged_id: str, engine_id: str) -> None:
        self.run(self._take(engine_id))
        self.mirror.adopt(staged_id, engine_id)
        self.run(self.mirror.retire(staged_id))

    def look(self, hashes: Sequence[BlockHash]) -> SharedRows:
        self.run(self.mirror.flush())
        return self.run(self.reader.lookup(hashes, MODEL))

    def lookup(self, hashes: Sequence[BlockHash]) -> Rows:
        return self.look(hashes).rows

    def slot(self, engine_id: str) -> Slot | None:
        if self.mirror.slot(engine_id) is None:
            return None
        return self.look([]).engines[engine_id].slot

    def holds(self, engine_id: str, medium: str, block: BlockHash) -> bool:
        return self.mirror.holds(engine_id, medium, block)

    def copies(self, engine_id: str, plane: Plane) -> int:
        return self.mirror.copies(engine_id, plane)

    def physical(self, engine_id: str, medium: str) -> int:
        return self.mirror.physical(engine_id, medium)

    def stats(self) -> IndexStats:
        return self.mirror.stats()

    def check_integrity(self) -> list[str]:
        return self.mirror.check_integrity() + self.differences()

    def differences(self) -> list[str]:
        """Where the reader's rows differ from the writer's memory, over all hashes ever seen."""
        hashes = [BlockHash(value) for value in sorted(self.seen)]
        shared, memory = self.look(hashes), self.mirror.lookup(hashes)
        planes = {plane for plane, _ in [*shared.rows.columns, *memory.columns]}
        return [
            f"{engine_id} {plane}: the reader sees something else"
            for engine_id in sorted(shared.engines.keys() | self.mirror.mirrored().keys())
            for plane in sorted(planes)
            if bits(shared.rows, plane, shared.engines[engine_id].slot)
            != bits(memory, plane, self.mirror.slot(engine_id))
        ]


def bits(rows: Rows, plane: Plane, slot: Slot | None) -> list[bool]:
    """Which blocks one engine holds in a plane."""
    if slot is None:
        return [False] * rows.num_hashes
    return [bool(word >> slot.bit & 1) for word in rows.plane(plane, slot.word).tolist()]
