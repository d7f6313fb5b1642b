"""Losses, refusals and old data of the server: no wrong view, and a recovery without help."""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import partial

import pytest

from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.registry import EngineFacts, IndexRefused
from kvatlas.router.replication.service import check_index
from kvatlas.router.replication.settings import IndexSettings
from tests.router.replication.backend import MODEL, make_settings
from tests.router.replication.replicas import CPU, FULL, Replicas, Writer, blocks, until
from tests.support.redis_servers import AnyServer, Cluster, any_program

MANY = blocks(*(n * 7_919_000_000_000_003 % (1 << 64) for n in range(3000)))


async def flushed(writer: Writer) -> bool:
    """Flush with the lease kept, as a replica does; an index that is away raises."""
    await writer.leases.renew(writer.mirror.mirrored())
    await writer.mirror.flush()
    return True


async def never_wrong_until_exact(replicas: Replicas, hashes: list[int]) -> None:
    """Ask until the reader sees everything; what counts must be true at every look on the way."""

    async def exact() -> bool:
        for writer in replicas.writers.values():
            await flushed(writer)
        found = await replicas.look([])
        wrong, missing = await replicas.differences(blocks(*hashes))
        live = [name for name, engine in found.engines.items() if not engine.stale]
        assert not [entry for entry in wrong if entry.split()[0] in live]
        return not wrong and not missing and bool(live)

    await until(exact)


@pytest.mark.real  # a server's memory limit
async def test_eviction_hides_and_refresh_heals(server: AnyServer) -> None:
    settings = make_settings(server.url, block_ttl_s=6.0)
    async with Replicas(settings, "a", "b") as replicas:
        one, two = replicas["a"], replicas["b"]
        await one.take("e")
        await two.take("f")
        one.mirror.store("e", FULL, MANY)
        two.mirror.store("f", FULL, MANY[::2])
        await asyncio.gather(one.mirror.flush(), two.mirror.flush())
        assert await replicas.exact(MANY)
        used = int(server.command("INFO", "memory").split(b"used_memory:")[1].split()[0])
        server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        before = len(server.all_keys())
        for number in range(40):  # random victims, the books among them sooner or later
            server.command("CONFIG", "SET", "maxmemory", used - 4096 * number)
            wrong, missing = await replicas.differences(MANY)
            assert wrong == []
        assert len(server.all_keys()) < before
        assert missing
        server.command("CONFIG", "SET", "maxmemory", 0)
        tasks = [asyncio.create_task(writer.mirror.run()) for writer in replicas.writers.values()]

        async def healed() -> bool:
            for writer in replicas.writers.values():
                assert not await writer.leases.renew(writer.mirror.mirrored())
            return await replicas.exact(MANY)

        await until(healed)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not one.lost + two.lost


@pytest.mark.parametrize("lost", ["scope", "leases", "fence", "everything"])
async def test_lost_books_are_written_again(server: AnyServer, lost: str) -> None:
    async with Replicas(make_settings(server.url), "a", "b") as replicas:
        one, two = replicas["a"], replicas["b"]
        await one.take("e")
        await two.take("f", "g")
        one.mirror.store("e", FULL, MANY[:500])
        two.mirror.store("f", CPU, MANY[200:700])
        two.mirror.store("g", FULL, MANY[:10])
        two.mirror.describe("g", EngineFacts(mode="native", feed_state="ready"))
        for writer in (one, two):
            await writer.mirror.flush()
        assert await replicas.exact(MANY[:700])
        keys = one.mirror.registry.keys
        if lost == "everything":
            server.command("FLUSHALL")
        else:
            key = {"scope": keys.scope, "leases": keys.leases, "fence": keys.fence(0, 1)}[lost]
            assert server.command("DEL", key) == 1
        one.mirror.remove("e", FULL, MANY[:100])
        two.mirror.forget("f")
        two.mirror.store("f", FULL, MANY[5:6])
        await never_wrong_until_exact(replicas, list(MANY[:700]))
        assert not one.lost + two.lost
        assert (await replicas.look([])).engines["g"].feed_state == "ready"


@pytest.mark.real  # a server's saved data
@pytest.mark.parametrize("data", ["empty", "old"])
async def test_a_restarted_server_is_believed_only_when_written_again(data: str, server: AnyServer) -> None:
    """With old data: what was saved before the last removals and forgets comes back with the server."""
    async with Replicas(make_settings(server.url), "a") as replicas:
        writer = replicas["a"]
        await writer.take("e", "f")
        writer.mirror.store("e", FULL, MANY[:300])
        writer.mirror.store("f", FULL, MANY[:300])
        await writer.mirror.flush()
        if data == "old":
            assert server.command("SAVE") == b"OK"
        writer.mirror.remove("e", FULL, MANY[:200])
        writer.mirror.forget("f")
        writer.mirror.store("f", FULL, MANY[7:8])
        await writer.mirror.flush()
        assert await replicas.exact(MANY[:300])
        server.kill()
        with pytest.raises(IndexUnavailable):
            await replicas.look(MANY[:10])
        writer.mirror.store("e", FULL, MANY[300:301])
        with pytest.raises(IndexUnavailable):
            await writer.mirror.flush()
        server.start()

        async def answers() -> bool:
            return await replicas.look(MANY[:300]) is not None

        await until(answers)
        found = await replicas.look(MANY[:300])
        assert all(engine.stale for engine in found.engines.values())
        assert bool(found.engines) == (data == "old")
        await never_wrong_until_exact(replicas, list(MANY[:301]))
        assert not writer.lost


@pytest.mark.real  # a server's memory limit
async def test_a_full_server_shows_nothing_that_is_gone(server: AnyServer) -> None:
    settings = make_settings(server.url)
    async with Replicas(settings, "a", "b") as replicas:
        one, two = replicas["a"], replicas["b"]
        await one.take("e", "f")
        await two.take("g")
        one.mirror.store("e", FULL, MANY[:400])
        one.mirror.store("f", FULL, MANY[:400])
        two.mirror.store("g", FULL, MANY[:400])
        for writer in (one, two):
            await writer.mirror.flush()
        server.command("CONFIG", "SET", "maxmemory", 1)
        one.mirror.remove("e", FULL, MANY[:100])
        one.mirror.store("e", FULL, MANY[400:500])
        with pytest.raises(IndexUnavailable, match="OOM"):
            await one.mirror.flush()
        wrong, missing = await replicas.differences(MANY[:500])
        assert wrong == []
        assert {entry.split()[0] for entry in missing} == {"e"}, "others' presence stays"
        one.mirror.remove("e", FULL, MANY[100:200])
        one.mirror.store("e", FULL, MANY[:50])
        with pytest.raises(IndexUnavailable, match="OOM"):
            await one.mirror.flush()
        wrong, missing = await replicas.differences(MANY[:400])
        assert wrong == []
        one.mirror.forget("f")
        with pytest.raises(IndexUnavailable, match="OOM"):
            await one.mirror.flush()
        assert "f" not in (await replicas.look([])).engines
        assert await replicas.held("f", FULL, *MANY[:3]) == [False] * 3
        server.command("CONFIG", "SET", "maxmemory", 0)
        await one.mirror.flush()
        assert await replicas.exact(MANY[:500])


@pytest.mark.real  # a server's memory limit
async def test_a_full_server_and_news_it_has_no_room_for(server: AnyServer) -> None:
    """New patterns and new descriptions cannot be written; removals in the same breath must be."""

    async with Replicas(make_settings(server.url), "a") as replicas:
        mirror = replicas["a"].mirror
        await replicas["a"].take("e", "f")
        mirror.describe("f", EngineFacts(mode="native"))
        for engine_id in ("e", "f"):
            mirror.store(engine_id, FULL, MANY[:100])
        await mirror.flush()
        server.command("CONFIG", "SET", "maxmemory", 1)
        mirror.remove("e", FULL, MANY[:50])
        mirror.store("e", CPU, MANY[:100])
        for _ in range(2):
            with pytest.raises(IndexUnavailable, match="OOM"):
                await mirror.flush()
        wrong, missing = await replicas.differences(MANY[:100])
        assert wrong == []
        assert missing
        mirror.describe("f", EngineFacts(mode="unknown", why_unknown="another group was seen"))
        with pytest.raises(IndexUnavailable, match="OOM"):
            await mirror.flush()
        assert (await replicas.look([])).engines.keys() == {"e"}
        server.command("CONFIG", "SET", "maxmemory", 0)
        await mirror.flush()
        assert await replicas.exact(MANY[:100])
        assert (await replicas.look([])).engines["f"].mode == "unknown"


@pytest.mark.real  # a server's rights
async def test_engines_whose_changes_cannot_be_written_are_not_believed(server: AnyServer) -> None:
    """The lease is renewed, only the writes fail: for ever, without a remedy."""

    settings = make_settings(server.url, lease_s=0.5, renew_s=0.1)
    async with Replicas(settings, "a") as replicas:
        writer = replicas["a"]
        await writer.take("e", "f")
        for engine_id in ("e", "f"):
            writer.mirror.store(engine_id, FULL, MANY[:100])
        await writer.mirror.flush()
        assert server.command("ACL", "SETUSER", "default", "-mget") == b"OK"
        writer.mirror.remove("e", FULL, MANY[:50])

        async def disowned() -> bool:
            assert not await writer.leases.renew(writer.mirror.mirrored())
            with pytest.raises(IndexUnavailable, match="script"):
                await writer.mirror.flush()
            view = await writer.mirror.registry.fetch()
            return view is not None and view.slots.keys() == {"f"}

        await until(disowned)
        assert server.command("ACL", "SETUSER", "default", "+mget") == b"OK"
        await writer.mirror.flush()
        assert await replicas.exact(MANY[:100])


async def test_blocks_are_written_again_before_they_expire(server: AnyServer) -> None:
    settings = make_settings(server.url, block_ttl_s=3.0, lease_s=1.2, renew_s=0.4)
    async with Replicas(settings, "a") as replicas:
        writer = replicas["a"]
        await writer.take("e", "f")
        writer.mirror.store("e", FULL, MANY[:200])
        writer.mirror.store("f", CPU, MANY[100:120])
        running = asyncio.create_task(writer.mirror.run())
        await until(lambda: replicas.exact(MANY[:200]))
        end = asyncio.get_running_loop().time() + 1.5 * settings.block_ttl_s
        while asyncio.get_running_loop().time() < end:
            assert not await writer.leases.renew(writer.mirror.mirrored())
            assert await replicas.exact(MANY[:200])
            await asyncio.sleep(0.5)
        blocks_there = [key for key in server.all_keys() if len(key) == len(settings.namespace) + 15]
        assert len(blocks_there) == 200
        assert server.command("DEL", *blocks_there[:50]) == 50
        await until(lambda: replicas.exact(MANY[:200]))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_scripts_may_be_flushed(server: AnyServer) -> None:
    async with Replicas(make_settings(server.url), "a") as replicas:
        writer = replicas["a"]
        await writer.take("e")
        for number in range(4):
            writer.mirror.store("e", FULL, MANY[number * 600 : number * 600 + 600])
            await writer.mirror.flush()
            server.command("SCRIPT", "FLUSH")
        assert await replicas.exact(MANY)
        assert not await writer.leases.renew(writer.mirror.mirrored())


async def test_a_silent_server_costs_no_more_than_the_deadline(server: AnyServer) -> None:
    settings = make_settings(server.url, lookup_timeout_s=0.02, write_timeout_s=0.1)
    async with Replicas(settings, "a") as replicas:
        writer = replicas["a"]
        await writer.take("e")
        writer.mirror.store("e", FULL, MANY[:100])
        await until(lambda: flushed(writer))
        server.freeze()
        for _ in range(3):
            with pytest.raises(IndexUnavailable, match="timeout"):
                await replicas.look(MANY[:100])
        writer.mirror.remove("e", FULL, MANY[:50])
        with pytest.raises(IndexUnavailable):
            await writer.mirror.flush()
        server.thaw()
        await until(lambda: flushed(writer))
        await until(lambda: replicas.exact(MANY[:100]))
        assert replicas.reader.counters.failures["timeout"] >= 3


async def test_another_schema_is_refused(server: AnyServer) -> None:
    settings = make_settings(server.url)
    server.command("SET", f"{settings.namespace}:schema", "2")
    async with Replicas(settings, "a") as replicas:
        writer = replicas["a"]
        at_start = partial(check_index, IndexSettings(url=settings.url, namespace=settings.namespace))
        for attempt in (writer.mirror.registry.check, writer.mirror.flush, at_start):
            with pytest.raises(IndexRefused, match=r"schema 2.*writes schema 1"):
                await attempt()
        server.command("DEL", f"{settings.namespace}:schema")
        assert await at_start() == ""
        await writer.take("e")
        server.command("HSET", writer.mirror.registry.keys.scope, "schema", "3", "v", "x")
        with pytest.raises(IndexRefused, match="schema 3"):
            await replicas.look(MANY[:1])
        with pytest.raises(IndexRefused, match="schema 3"):
            await writer.mirror.registry.check()
        server.kill()
        assert await at_start(), "says why it cannot be used, and refuses nothing"


@pytest.mark.long
@pytest.mark.real  # servers of a Cluster
async def test_a_cluster_node_that_comes_back_empty() -> None:
    with closing(Cluster(any_program())) as made:
        async with Replicas(make_settings(made.url, write_timeout_s=1.0), "a", "b") as replicas:
            one, two = replicas["a"], replicas["b"]
            await one.take("e")
            await two.take("f")
            one.mirror.store("e", FULL, MANY[:300])
            two.mirror.store("f", FULL, MANY[:200])
            for writer in (one, two):
                await writer.mirror.flush()
            assert await replicas.exact(MANY[:300])
            made.nodes[1].kill()
            with pytest.raises(IndexUnavailable):
                await replicas.look(MANY[:300])
            one.mirror.remove("e", FULL, MANY[:100])
            with pytest.raises(IndexUnavailable):
                await one.mirror.flush()
            made.nodes[1].start()
            await never_wrong_until_exact(replicas, list(MANY[:300]))
            found = await replicas.look([])
            assert found.engines.keys() == {"e", "f"}


async def test_the_model_is_part_of_every_key(server: AnyServer) -> None:
    """Another model in the same namespace shares nothing, though its hashes are the same."""

    async with Replicas(make_settings(server.url), "a") as replicas:
        await replicas["a"].take("e")
        replicas["a"].mirror.store("e", FULL, blocks(1))
        await replicas["a"].mirror.flush()
        other = await replicas.reader.lookup(blocks(1), "another/model")
        assert not other.engines
        assert not other.rows.columns
        assert (await replicas.reader.lookup(blocks(1), MODEL)).engines
