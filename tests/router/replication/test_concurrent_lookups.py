"""Lookups of one reader that run at the same time, from the first one on."""

from __future__ import annotations

import asyncio

import pytest

from router.replication.reader import SharedRows
from tests.router.replication.backend import bits, make_settings
from tests.router.replication.replicas import FULL, Replicas, blocks
from tests.support.redis_servers import Server

pytestmark = pytest.mark.real  # a Redis or Valkey server


async def test_concurrent_lookups_read_each_prompt_in_flight_once(plain_server: Server) -> None:
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


async def test_a_lookup_beside_the_first_one_sees_what_engines_hold(plain_server: Server) -> None:
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
