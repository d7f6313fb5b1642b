"""The third way of ``recovery.py``: a replica that starts empty while another one follows the engine.

The follower is a process of its own that mirrors the engine's blocks to a server (``redis-server`` or
``valkey-server`` on PATH, on loopback, without persistence) as a router does. The new replica connects, and
asks for a prompt until its prediction is exact. Then the server is killed and started empty: the follower
mirrors everything again by itself, and until it has, no prediction is made (the engine is stale).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.redis_index import Servers
from kvatlas.publisher.block_hash import NO_EXTRAS, HashScheme, block_hashes
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockStored, encode_batch, encode_tokens
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.replication.descriptions import engine_facts
from kvatlas.router.replication.leases import Leases
from kvatlas.router.replication.load_gossip import LoadGossip
from kvatlas.router.replication.lookup_fallback import IndexLookup
from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.reader import SharedReader
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.settings import SharedSettings
from kvatlas.router.tools.trace_verification import ProbePrompt

ENGINE, MODEL = "e", "bench/model"
SCHEME = HashScheme(hash_block_size=16)
PROMPT_BLOCKS = 100
CONNECT_S, GIVE_UP_S, LOOK_PAUSE_S = 20.0, 120.0, 0.005


class Took(NamedTuple):
    """Seconds."""

    first_exact: float
    """From the replica's start, connecting included, until a prediction is exact."""
    again: float
    """From the moment the empty server answers until one is exact again."""
    looks: int
    """Asked meanwhile without success; none of them predicted a hit."""


class Watcher:
    """Follows no engine itself (``kvatlas.router.replication.lookup_fallback.Ownership``)."""

    others_alive = True

    def follows(self, engine_id: str) -> bool:
        return False

    def holds_exclusively(self, engine_id: str) -> bool:
        return False


def tokens(number: int) -> list[int]:
    """One prompt of its own; the last token is beyond its last full block."""
    size = SCHEME.hash_block_size * PROMPT_BLOCKS
    return [number, *((number * 31 + n) % 50_000 for n in range(size))]


def settings(url: str) -> SharedSettings:
    """Those of a router."""
    return SharedSettings(url=url, namespace="recovery")


async def renew(leases: Leases, mirror: MirroredIndex, every_s: float) -> None:
    """Keep the lease, as a router does; a server that is away is asked again."""
    while True:
        with suppress(IndexUnavailable):
            await leases.renew(mirror.mirrored())
        await asyncio.sleep(every_s)


def follower(pipe: Connection, url: str, blocks: int) -> None:
    """The process of the replica that follows the engine, until told to stop."""

    async def follow() -> None:
        client = Client(settings(url))
        if not await client.start(CONNECT_S):
            raise RuntimeError(client.last_error)
        mirror, leases = MirroredIndex(client, MODEL), Leases(client, MODEL, "follower")
        fleet = FleetResidency(ModelFacts(), mirror)
        fleet.engine(ENGINE)
        await mirror.take_over(ENGINE, await leases.acquire(ENGINE) or 0)
        for number in range(blocks // PROMPT_BLOCKS):
            ids = tokens(number)[:-1]
            hashes = block_hashes(ids, SCHEME, NO_EXTRAS)
            event = BlockStored(
                list(hashes), None, encode_tokens(ids), 16, None, "GPU", None, None, 0, "full_attention"
            )
            fleet.apply(ENGINE, decode_batch(encode_batch(0.0, [event], 0, None)))
        engine, worker = fleet.engine(ENGINE), fleet.residency(ENGINE).query()
        mirror.describe(ENGINE, engine_facts(engine, worker, FeedState.READY, 0))
        await mirror.flush()
        pipe.send("mirrored")
        tasks = [
            asyncio.create_task(mirror.run()),
            asyncio.create_task(renew(leases, mirror, client.settings.renewal_s)),
        ]
        while not pipe.poll():  # noqa: ASYNC110  # a pipe to another process: nothing to wait on
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()

    asyncio.run(follow())


async def until_exact(sight: IndexLookup, numbers: range) -> int:
    """Ask for the last of these prompts until its hit is exact; the number of attempts before."""
    expected = PROMPT_BLOCKS * SCHEME.hash_block_size
    for vain in range(int(GIVE_UP_S / LOOK_PAUSE_S)):
        look = await sight.look(ProbePrompt(tokens(numbers[-1]), NO_EXTRAS), {ENGINE: MODEL})
        hit = look.hits.get(ENGINE)
        if hit is not None and hit.hit_tokens == expected and not hit.stale:
            return vain
        if hit is not None and hit.hit_tokens and not hit.stale:
            raise RuntimeError(f"a hit of {hit.hit_tokens} tokens, not of {expected}")
        await asyncio.sleep(LOOK_PAUSE_S)
    raise RuntimeError(f"no exact prediction in {GIVE_UP_S} s; the last look: {look.problem or look.hits}")


async def check(sight: IndexLookup, numbers: range) -> None:
    """A hundred more are exact too; a look that missed its deadline on a busy machine is done again."""
    for number in numbers[:: max(1, len(numbers) // 100)]:
        if await until_exact(sight, range(number, number + 1)) and not sight.stats.fallbacks:
            raise RuntimeError(f"prompt {number} was not exact immediately")


async def measure(binary: str, blocks: int, port: int) -> Took:
    """Both times, with servers of its own on ``port``."""
    numbers = range(blocks // PROMPT_BLOCKS)
    server = Servers(binary, 1, port)
    await server.form()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=follower, args=(theirs, server.url, blocks))
    process.start()
    try:
        await asyncio.to_thread(ours.recv)
        began = time.perf_counter()
        client = Client(settings(server.url))
        if not await client.start(CONNECT_S):
            raise RuntimeError(client.last_error)
        reader = SharedReader(client)
        sight = IndexLookup(
            lambda: reader,
            Watcher(),
            LoadGossip("new", lambda _: {}, started=0),
            clock=time.monotonic,
        )
        await until_exact(sight, numbers)
        first = time.perf_counter() - began
        await check(sight, numbers)
        server.close()
        server = Servers(binary, 1, port)
        await server.form()
        began = time.perf_counter()
        looks = await until_exact(sight, numbers)
        again = time.perf_counter() - began
        await check(sight, numbers)
        await client.close()
    finally:
        ours.send("stop")
        await asyncio.to_thread(process.join)
        server.close()
    return Took(first, again, looks)
