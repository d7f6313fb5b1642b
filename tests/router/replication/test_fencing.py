"""One writer per engine: an overtaken writer cannot write, whatever it believes; the server ensures it."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.replication import block_scripts
from kvatlas.router.replication.codec import pack_records
from kvatlas.router.replication.keys import as_words
from kvatlas.router.replication.leases import LeaseCandidate, LeaseManager, ModelLeases
from kvatlas.router.replication.members import Membership
from kvatlas.router.replication.registry import EngineFacts, IndexRefused, LeaseLost, Registry
from kvatlas.router.replication.registry_gc import RegistryGc
from tests.router.replication.backend import MODEL, make_settings
from tests.router.replication.replicas import CPU, FULL, Replicas, blocks, until
from tests.support import waiting
from tests.support.redis_servers import AnyServer, Cluster, Server


@pytest.mark.real  # every kind of server
async def test_an_old_writer_is_fenced(servers: Server | Cluster) -> None:
    async with Replicas(make_settings(servers.url), "old", "new") as replicas:
        old, new = replicas["old"], replicas["new"]
        await old.take("e", "f")
        old.mirror.store("e", FULL, blocks(*range(100)))
        old.mirror.store("f", FULL, blocks(1))
        await old.mirror.flush()
        assert await new.leases.acquire("e") is None, "the lease is still held"
        await replicas.end_lease("e")
        await new.take("e")
        assert await replicas.held("e", FULL, 1, 2) == [False, False], "forgotten by the take-over"
        new.mirror.store("e", FULL, blocks(1))
        await new.mirror.flush()
        old.mirror.store("e", FULL, blocks(200))
        old.mirror.remove("e", FULL, blocks(1))
        old.mirror.describe("e", EngineFacts(mode="native", feed_state="ready"))
        await old.mirror.flush()
        assert old.lost == ["e"]
        assert list(old.mirror.mirrored()) == ["f"]
        assert await replicas.held("e", FULL, 1, 2, 200) == [True, False, False]
        assert await replicas.held("f", FULL, 1, 2) == [True, False], "its other engines are its own still"
        assert (await replicas.look([])).engines["e"].holder == "new"
        assert await old.leases.renew({"e": 1, **old.mirror.mirrored()}) == {"e"}


async def test_writes_alone_are_fenced_too(plain_server: AnyServer) -> None:
    """Not only the books: a batch that was on its way when another took over changes nothing."""

    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        writer = replicas["a"]
        await writer.take("e")
        writer.mirror.store("e", FULL, blocks(1))
        await writer.mirror.flush()
        counters = writer.mirror.counters
        assert (counters.claims, counters.blocks_written, counters.remirrors) == (1, 1, 0)
        registry = Registry(writer.client, MODEL)
        scope, token = await registry.open(), writer.mirror.mirrored()["e"]
        slot = (await registry.fetch()).slots["e"]  # type: ignore[union-attr]

        async def write(token: int, number: int, *hashes: int) -> bytes:
            words, _ = as_words(hashes)
            records = pack_records(words, words.astype(int) * 0 + 1, slot.generation, 1)
            prefix, fence = registry.keys.prefix(scope.epoch, 0, 1), registry.keys.fence(0, 1)
            args = ("e", token, number, prefix, slot.number, 2, 60_000, 60_000, records)
            word, *_ = await writer.client.run(block_scripts.WRITE, [fence], *args)
            return bytes(word)

        assert await write(token, 10, 7) == b"OK"
        assert await write(token, 10, 8) == b"LATE"
        assert await write(token, 9, 8) == b"LATE"
        assert await write(token - 1, 11, 8) == b"FENCED"
        assert await write(token + 1, 11, 8) == b"FENCED"
        await writer.client.command("DEL", registry.keys.fence(0, 1))
        assert await write(token, 12, 8) == b"NOFENCE"
        assert await replicas.held("e", FULL, 1, 7, 8) == [True, True, False]


async def test_tokens_only_rise(plain_server: AnyServer) -> None:
    async with Replicas(make_settings(plain_server.url), "a", "b") as replicas:
        one, two = replicas["a"].leases, replicas["b"].leases
        first = await one.acquire("e")
        assert first is not None
        assert await two.acquire("e") is None
        assert await two.release("e", first + 1) is False
        again = await one.acquire("e")
        assert again is not None
        assert again > first, "a replica that starts again fences its former self"
        assert await one.renew({"e": first}) == {"e"}
        assert await one.renew({"e": again}) == set()
        assert await one.release("e", again) is True
        second = await two.acquire("e")
        assert second is not None
        assert second > again
        holders = await one.holders()
        assert holders["e"].holder == "b"
        assert holders["e"].token == second
        assert holders["e"].held
        await replicas["a"].client.command("DEL", replicas["a"].mirror.registry.keys.leases)
        third = await one.acquire("e")
        assert third is not None
        assert third > second, "though the server forgot the last one"
        far = third + 10**9
        fourth = await one.acquire("e", above=far)
        assert fourth is not None
        assert fourth > far


@pytest.mark.parametrize("text", [b"", b"{}", b"\xf7\xff", b"12", b"1|", b"|1|a", b"x" * 100_000])
async def test_a_lease_that_no_replica_wrote_is_taken(plain_server: AnyServer, text: bytes) -> None:
    async with Replicas(make_settings(plain_server.url), "a", "b") as replicas:
        one, registry = replicas["a"], replicas["b"].mirror.registry
        await one.take("e", "gone")
        for engine_id in ("e", "gone"):
            await one.client.command("HSET", registry.keys.leases, engine_id, text)
        await one.client.command("HSET", registry.keys.leases, b"\xff", text)
        assert (await replicas.look([])).engines
        assert await replicas["b"].leases.holders() == {}
        token = await replicas["b"].leases.acquire("e")
        assert token is not None
        assert token > one.mirror.mirrored()["e"]
        gc = RegistryGc(registry)
        await gc.run(idle_s=0.05)

        async def swept() -> bool:
            await gc.run(idle_s=0.05)
            return set((await replicas.look([])).engines) == {"e"}

        await until(swept)


@pytest.mark.parametrize("field", [b"p", b"w", b"home", b"s:e", b"e:e", b"p:x", b"s:\xff"])
@pytest.mark.parametrize("value", [b"", b"\xf7", b"9" * 5000, b"1:\xff"])
async def test_a_registry_that_another_program_wrote_into_is_refused_by_name(
    plain_server: AnyServer, field: bytes, value: bytes
) -> None:
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        one = replicas["a"]
        await one.take("e")
        keys = one.mirror.registry.keys
        if field == b"home":
            value = b"\xff"  # any text is a name
        await one.client.command("HSET", keys.load, b"\xff", value)
        assert (await replicas.look([])).engines.keys() == {"e"}
        await one.client.command("HSET", keys.scope, field, value)
        with pytest.raises(IndexRefused, match="another program writes to this namespace"):
            await one.mirror.registry.fetch()


async def test_a_lower_token_cannot_take_over(plain_server: AnyServer) -> None:
    async with Replicas(make_settings(plain_server.url), "a", "b") as replicas:
        token = await replicas["a"].leases.acquire("e")
        assert token is not None
        await replicas["a"].mirror.take_over("e", token)
        with pytest.raises(LeaseLost):
            await replicas["b"].mirror.take_over("e", token - 1)
        replicas["a"].mirror.store("e", FULL, blocks(1))
        await replicas["a"].mirror.flush()
        assert await replicas.held("e", FULL, 1) == [True]
        with pytest.raises(LeaseLost):
            await replicas["b"].mirror.take_over("e", token + 5)
        assert not replicas["b"].mirror.mirrored()


async def test_an_engine_without_a_live_lease_is_stale(plain_server: AnyServer) -> None:
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        writer = replicas["a"]
        await writer.take("e", "f")
        writer.mirror.store("e", FULL, blocks(1))
        writer.mirror.describe("e", EngineFacts(mode="native", feed_state="ready"))
        await writer.mirror.flush()
        found = await replicas.look(blocks(1))
        assert not found.engines["e"].stale
        assert found.engines["e"].feed_state == "ready"

        async def stale() -> bool:
            engines = (await replicas.look([])).engines
            assert not engines["f"].stale
            return engines["e"].stale

        await replicas.end_lease("e")
        await until(stale)
        assert await replicas.held("e", FULL, 1, 2) == [True, False], "shown, for explanation"
        assert replicas.reader.engines(MODEL)["e"].holder == ""
        await writer.leases.renew(writer.mirror.mirrored())

        async def fresh() -> bool:
            return not (await replicas.look([])).engines["e"].stale

        await until(fresh)


@pytest.mark.real  # every kind of server
async def test_a_lost_fence_is_raised_again_by_its_owner_only(servers: Server | Cluster) -> None:
    async with Replicas(make_settings(servers.url), "a", "b") as replicas:
        one, two = replicas["a"], replicas["b"]
        await one.take("e", "f")
        one.mirror.store("e", FULL, blocks(*range(64)))
        await one.mirror.flush()
        registry = one.mirror.registry
        scope = await registry.open()
        for partition in range(scope.partitions):
            await one.client.command("DEL", registry.keys.fence(partition, scope.partitions))
        one.mirror.remove("e", FULL, blocks(3))
        one.mirror.store("e", CPU, blocks(3))
        await one.mirror.flush()
        assert one.mirror.counters.lost_fences >= 1
        assert await replicas.exact(blocks(*range(64)))
        assert await one.leases.release("f", one.mirror.mirrored()["f"])
        await two.take("f")
        one.mirror.store("f", FULL, blocks(*range(64)))
        await one.mirror.flush()
        assert one.lost == ["f"]
        assert await replicas.held("f", FULL, 1, 2) == [False, False]


async def test_retired_engines_leave_their_slot(plain_server: AnyServer) -> None:
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        writer = replicas["a"]
        await writer.take("e", "f")
        writer.mirror.store("e", FULL, blocks(1, 2))
        await writer.mirror.flush()
        slot = (await replicas.look([])).engines["e"].slot
        await writer.mirror.retire("e")
        assert "e" not in (await replicas.look([])).engines
        await writer.take("g")
        found = await replicas.look([])
        assert found.engines["g"].slot == slot
        writer.mirror.store("g", FULL, blocks(2))
        await writer.mirror.flush()
        assert await replicas.held("g", FULL, 1, 2) == [False, True]
        registry = writer.mirror.registry
        scope = await registry.open()
        assert not await registry.retire(scope, "f", None), "its lease is held"
        await replicas.end_lease("f")
        assert not await registry.retire(scope, "f", None, idle_s=60.0), "its lease ended just now"
        assert await registry.retire(scope, "f", None)
        assert "f" not in (await replicas.look([])).engines


async def test_engines_without_a_writer_are_swept(plain_server: AnyServer) -> None:
    async with Replicas(make_settings(plain_server.url), "a", "b") as replicas:
        writer, other = replicas["a"], replicas["b"]
        await writer.take("gone", "lost", "kept")
        for engine_id in ("gone", "lost", "kept"):
            writer.mirror.store(engine_id, FULL, blocks(1))
        await writer.mirror.flush()
        registry = other.mirror.registry
        keys = registry.keys
        await other.client.command("HDEL", keys.leases, "lost")
        await other.leases.release("gone", writer.mirror.mirrored()["gone"])
        gc = RegistryGc(registry)
        await gc.run(idle_s=60.0)
        assert set((await replicas.look([])).engines) == {"gone", "lost", "kept"}

        async def swept() -> bool:
            await gc.run(idle_s=0.05)
            return set((await replicas.look([])).engines) == {"kept"}

        await until(swept)
        assert set(await other.leases.holders()) == {"kept"}
        fence = keys.fence(0, 1)
        assert await other.client.command("HKEYS", fence) == [b"kept"]
        writer.mirror.store("lost", FULL, blocks(2))
        await writer.mirror.flush()
        assert await replicas.held("lost", FULL, 1, 2) == [True, True], "it was there after all"


async def test_an_engine_whose_seat_is_gone_claims_another(plain_server: AnyServer) -> None:
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        writer = replicas["a"]
        await writer.take("e", "f")
        writer.mirror.store("e", FULL, blocks(1))
        writer.mirror.store("f", FULL, blocks(2))
        await writer.mirror.flush()
        token = writer.mirror.mirrored()["e"]
        with pytest.raises(LeaseLost):
            await writer.mirror.registry.invalidate("e", token - 1)
        await writer.mirror.registry.invalidate("e", token)
        assert "e" not in (await replicas.look([])).engines
        running = asyncio.create_task(writer.mirror.run())
        await until(lambda: replicas.exact(blocks(1, 2)))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert writer.mirror.counters.lost_slots == 1


async def test_an_engine_removed_while_its_lease_is_acquired_is_not_followed(plain_server: AnyServer) -> None:
    """Its feed, which starts after the removal, is stopped, and its lease is free for another replica."""
    async with Replicas(make_settings(plain_server.url), "a", "b") as replicas:
        client, engine = replicas.clients[1], EngineAddress("http://e")
        followed, acquisitions = set[str](), list[int]()

        async def acquired(candidate: LeaseCandidate, token: int, again: bool) -> None:
            manager.remove_candidate(candidate.engine.engine_id)
            followed.add(candidate.engine.engine_id)
            acquisitions.append(token)

        key, clock = replicas["a"].mirror.registry.keys.replicas, time.monotonic
        membership = Membership(client.command, key, "a", started=1, lease_s=9.0, clock=clock)
        leases = ModelLeases(replicas["a"].leases, membership)
        manager = LeaseManager(
            "a",
            lambda model: leases,
            on_acquired=acquired,
            on_ended=lambda model, engine_id: followed.discard(engine_id),
            lease_s=9.0,
            renew_s=3.0,
            clock=clock,
        )
        manager.add_candidate(engine, MODEL)
        rounds = asyncio.create_task(manager.run())
        await waiting.until(lambda: acquisitions, "the lease is acquired")
        await waiting.until(lambda: replicas["b"].leases.acquire(engine.engine_id), "it is free again")
        rounds.cancel()
        assert (followed, manager.held, manager.stats.taken) == (set(), {}, 0)
