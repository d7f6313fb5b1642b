"""Several writers and a reader in one event loop, each with connections of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Plane
from kvatlas.router.replication.leases import Leases
from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.reader import SharedReader, SharedRows
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.settings import SharedSettings
from tests.router.replication.backend import MODEL, bits
from tests.support import waiting

FULL, WINDOW, CPU = Plane("GPU", 0), Plane("GPU", 1), Plane("CPU", 0)


def blocks(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number) for number in numbers]


class Writer:
    """A replica that writes."""

    def __init__(self, name: str, client: Client) -> None:
        self.client = client
        self.lost: list[str] = []
        self.mirror = MirroredIndex(client, MODEL, on_lost=self.lost.append)
        self.leases = Leases(client, MODEL, name)

    async def take(self, *engine_ids: str) -> None:
        """Acquire and take over; somebody else's lease must have ended."""
        for engine_id in engine_ids:
            token = await self.leases.acquire(engine_id)
            assert token is not None, f"{engine_id} is leased to another"
            await self.mirror.take_over(engine_id, token)

    async def give_back(self, engine_id: str) -> None:
        token = self.mirror.mirrored()[engine_id]
        await self.mirror.flush()
        self.mirror.drop(engine_id)
        assert await self.leases.release(engine_id, token)


class Replicas:
    """``async with Replicas(settings, "a", "b") as replicas: replicas["a"].take(...)``."""

    def __init__(self, settings: SharedSettings, *names: str) -> None:
        self.settings = settings
        self._names = names

    async def __aenter__(self) -> Replicas:
        self.clients = [Client(self.settings) for _ in range(len(self._names) + 1)]
        for client in self.clients:
            assert await client.start(waiting.WAIT_S), client.last_error
        self.writers = {n: Writer(n, c) for n, c in zip(self._names, self.clients[1:], strict=True)}
        self.reader = SharedReader(self.clients[0])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for client in self.clients:
            await client.close()

    def __getitem__(self, name: str) -> Writer:
        return self.writers[name]

    async def end_lease(self, engine_id: str) -> None:
        """As if it had not been renewed: it is over by the server's clock from now on."""
        client = self.clients[0]
        key = next(iter(self.writers.values())).mirror.registry.keys.leases
        token, _, holder = (await client.command("HGET", key, engine_id)).split(b"|", 2)
        now_s, now_us = await client.command("TIME", key=key)
        ends_ms = int(now_s) * 1000 + int(now_us) // 1000
        await client.command("HSET", key, engine_id, b"%b|%d|%b" % (token, ends_ms, holder))

    async def look(self, hashes: Sequence[BlockHash]) -> SharedRows:
        return await self.reader.lookup(hashes, MODEL)

    async def held(self, engine_id: str, plane: Plane, *hashes: int) -> list[bool]:
        """The reader's view of an engine with a slot; nothing of one without."""
        found = await self.look(blocks(*hashes))
        engine = found.engines.get(engine_id)
        return [False] * len(hashes) if engine is None else bits(found.rows, plane, engine.slot)

    async def differences(self, hashes: Sequence[BlockHash]) -> tuple[list[str], list[str]]:
        """Over all writers' engines: (what the reader sees and is not so, what it does not see)."""
        found = await self.look(hashes)
        wrong, missing, known = [], [], set()
        for writer in self.writers.values():
            memory = writer.mirror.lookup(hashes)
            planes = {plane for plane, _ in [*memory.columns, *found.rows.columns]}
            for engine_id in writer.mirror.mirrored():
                known.add(engine_id)
                engine, own = found.engines.get(engine_id), writer.mirror.slot(engine_id)
                for plane in sorted(planes):
                    shown = bits(found.rows, plane, None if engine is None else engine.slot)
                    for block, sees, holds in zip(hashes, shown, bits(memory, plane, own), strict=True):
                        if sees and not holds:
                            wrong.append(f"{engine_id} {plane} {block}")
                        elif holds and not sees:
                            missing.append(f"{engine_id} {plane} {block}")
        seats = [engine.slot for engine in found.engines.values()]
        assert len(set(seats)) == len(seats), "two engines in one slot"
        bits_shown = sum(int(w).bit_count() for words in found.rows.columns.values() for w in words)
        seen = sum(
            sum(bits(found.rows, plane, engine.slot))
            for engine in found.engines.values()
            for plane in {plane for plane, _ in found.rows.columns}
        )
        assert bits_shown == seen, "bits of unknown engines"
        return wrong, missing

    async def exact(self, hashes: Sequence[BlockHash]) -> bool:
        return await self.differences(hashes) == ([], [])


async def until(condition: Callable[[], Awaitable[bool]], what: str = "as the writers hold it") -> None:
    """Ask until it holds; an index that does not answer yet counts as no."""
    await waiting.until(condition, what, ignoring=(IndexUnavailable,))
