"""Lookups of one reader that run at the same time, from the first one on."""

from __future__ import annotations

import asyncio

import pytest

from kvatlas.router.replication.reader import SharedRows
from kvatlas.router.replication.redis_connection import IndexUnavailable
from tests.router.replication.backend import bits, make_settings
from tests.router.replication.replicas import FULL, Replicas, blocks
from tests.support.redis_servers import AnyServer


async def test_concurrent_lookups_read_each_prompt_in_flight_once(plain_server: AnyServer) -> None:
    """From the first one on, which asks for the stream's end in another form."""
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        client = replicas.clients[0]
        stream = replicas["a"].mirror.registry.keys.inflight
        await replicas["a"].take("e0")
        added = 0
        read: list[bytes] = []
        for _ in range(20):
            found = await asyncio.gather(
                *(replicas.look(blocks(1)) for _ in range(5)),
                client.command("XADD", stream, "*", "f", b"%d" % added),
                *(replicas.look(blocks(1)) for _ in range(5)),
            )
            added += 1
            read += [entry for one in found if isinstance(one, SharedRows) for entry in one.inflight]
        read += (await replicas.look(blocks(1))).inflight
    assert read == [b"%d" % number for number in range(added)][-len(read) :]
    assert len(read) >= added - 1, "only what was there before the first look-up is left out"


async def test_a_lookup_beside_the_first_one_sees_what_engines_hold(plain_server: AnyServer) -> None:
    """It asks before the registry is known, and again although the first one has fetched the registry."""
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        await replicas["a"].take("e0")
        replicas["a"].mirror.store("e0", FULL, blocks(1))
        await replicas["a"].mirror.flush()
        first = asyncio.create_task(replicas.look(blocks(1)))
        while not replicas.reader.counters.fetches:
            await asyncio.sleep(0)
        found = await asyncio.gather(replicas.look(blocks(1)), first)
        seen = [bits(one.rows, FULL, one.engines["e0"].slot) for one in found]
    assert seen == [[True], [True]]


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_lookup_that_fails_loses_no_prompt_in_flight_that_it_read(
    plain_server: AnyServer, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """It reads them beside the blocks, and may then need the registry too."""
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        client, reader = replicas.clients[0], replicas.reader
        stream = replicas["a"].mirror.registry.keys.inflight
        await replicas["a"].take("e0")
        await replicas.look(blocks(1))
        (cache,) = reader._caches.values()

        async def fails(*_: object) -> None:
            raise IndexUnavailable("timeout", "the registry did not come in time")

        with monkeypatch.context() as patched:
            patched.setattr(reader, "_fetch", fails)
            for number in range(failures):
                await client.command("XADD", stream, "*", "f", b"%d" % number)
                cache.identity = "of another server"
                with pytest.raises(IndexUnavailable):
                    await replicas.look(blocks(1))
        found = await replicas.look(blocks(1))
        assert list(found.inflight) == [b"%d" % number for number in range(failures)]
        assert not (await replicas.look(blocks(1))).inflight


async def test_no_more_prompts_in_flight_are_kept_than_the_bound_and_none_is_lost(
    plain_server: AnyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.replication.reader._INFLIGHT_MAX", 4)
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        client, reader = replicas.clients[0], replicas.reader
        stream = replicas["a"].mirror.registry.keys.inflight
        await replicas["a"].take("e0")
        await replicas.look(blocks(1))
        (cache,) = reader._caches.values()
        for number in range(20):
            await client.command("XADD", stream, "*", "f", b"%d" % number)

        async def fails(*_: object) -> None:
            raise IndexUnavailable("timeout", "the registry did not come in time")

        with monkeypatch.context() as patched:
            patched.setattr(reader, "_fetch", fails)
            for _ in range(5):
                cache.identity = "of another server"
                with pytest.raises(IndexUnavailable):
                    await replicas.look(blocks(1))
                assert len(cache.unread) <= 8
        read: list[bytes] = []
        while found := (await replicas.look(blocks(1))).inflight:
            read += found
        assert read == [b"%d" % number for number in range(20)]
