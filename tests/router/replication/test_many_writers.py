"""Random histories of many writers over the same blocks: the reader sees what they hold, no more."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Plane
from kvatlas.router.replication import write_queue
from kvatlas.router.replication.settings import SharedSettings
from tests.router.replication.backend import make_settings
from tests.router.replication.replicas import CPU, FULL, WINDOW, Replicas, Writer, blocks, until
from tests.support.examples import some
from tests.support.redis_servers import AnyServer, Cluster, Server
from tests.support.waiting import run

SHARED = Plane("STORAGE*0@store", 1)
PLANES = [FULL, WINDOW, CPU, SHARED]
HASHES = [BlockHash((n * 0x9E3779B97F4A7C15) % (1 << 64)) for n in range(40)]


def change(rng: random.Random, writer: Writer, engine_id: str) -> None:
    """One random change of one engine."""
    plane, hashes = rng.choice(PLANES), rng.choices(HASHES, k=rng.randrange(1, 12))
    mirror = writer.mirror
    match rng.choices(["store", "remove", "set", "clear", "adopt", "forget"], [50, 40, 5, 2, 2, 3])[0]:
        case "store":
            mirror.store(engine_id, plane, hashes)
        case "remove":
            mirror.remove(engine_id, plane, hashes)
        case "set":
            mirror.set_copies(engine_id, plane, hashes[0], rng.randrange(3))
        case "clear":
            mirror.clear(engine_id, plane.medium)
        case "adopt":
            mirror.store("staged", plane, hashes)
            mirror.adopt("staged", engine_id)
        case _:
            mirror.forget(engine_id)


async def history(settings: SharedSettings, seed: int, engines: int, steps: int) -> None:
    """Changes, hand-overs and retirements among three writers; compared after every flush of all."""
    rng = random.Random(seed)
    async with Replicas(settings, "a", "b", "c") as replicas:
        writers = list(replicas.writers.values())
        for number in range(engines):
            await writers[number % 3].take(f"e{number}")
        for step in range(steps):
            for _ in range(20):
                writer = rng.choice(writers)
                change(rng, writer, rng.choice(list(writer.mirror.mirrored())))
                if rng.random() < 0.1:
                    await rng.choice(writers).mirror.flush()
            if step % 5 == 4:
                await hand_over(rng, writers)
            await asyncio.gather(*(writer.mirror.flush() for writer in writers))
            assert await replicas.differences(HASHES) == ([], []), f"after step {step}"
        assert all(not writer.lost for writer in writers)


async def hand_over(rng: random.Random, writers: Sequence[Writer]) -> None:
    """One engine goes to another writer, with nothing in its memory yet; or leaves and comes back."""
    old, new = rng.sample(writers, 2)
    engine_id = rng.choice(list(old.mirror.mirrored()))
    if rng.random() < 0.5:
        token = old.mirror.mirrored()[engine_id]
        await old.mirror.retire(engine_id)
        assert await old.leases.release(engine_id, token)
    else:
        await old.give_back(engine_id)
    await new.take(engine_id)


@pytest.mark.real  # every kind of server
@pytest.mark.parametrize("seed", some(range(4), 4))
def test_the_reader_sees_what_the_writers_hold(servers: Server | Cluster, seed: int) -> None:
    asyncio.run(history(make_settings(servers.url), seed, engines=9, steps=25))


@pytest.mark.parametrize(
    "changes", [{"code_bytes": 2}, {"partitions": 8}], ids=lambda changes: next(iter(changes))
)
def test_it_does_so_with_any_settings(plain_server: AnyServer, changes: dict[str, Any]) -> None:
    run(history(make_settings(plain_server.url, **changes), 7, engines=9, steps=25))


@pytest.mark.parametrize(("name", "value"), [("TOUCHED_MAX", 3), ("SCRIPT_BLOCKS", 2)])
def test_it_does_so_within_any_bounds(
    plain_server: AnyServer, name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, name, value)
    run(history(make_settings(plain_server.url), 7, engines=9, steps=25))


@pytest.mark.parametrize("code_bytes", [1, 2])
def test_more_engines_than_bits_in_a_word(plain_server: AnyServer, code_bytes: int) -> None:
    run(history(make_settings(plain_server.url, code_bytes=code_bytes), 3, engines=140, steps=10))


@pytest.mark.parametrize("seed", some(range(6), 6))
async def test_changes_while_a_flush_is_under_way(
    plain_server: AnyServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change while batches are on their way is written by the same or the next flush."""
    monkeypatch.setattr(write_queue, "SCRIPT_BLOCKS", 2)

    rng = random.Random(seed)
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        writer = replicas["a"]
        await writer.take("e0", "e1")
        for _ in range(60):
            for _ in range(10):
                change(rng, writer, rng.choice(["e0", "e1"]))
            flush = asyncio.create_task(writer.mirror.flush())
            while not flush.done():
                change(rng, writer, rng.choice(["e0", "e1"]))
                await asyncio.sleep(rng.random() * 5e-4)
            await flush
            await writer.mirror.flush()
            assert await replicas.exact(HASHES)


async def test_a_flush_may_be_cancelled_at_any_moment(
    plain_server: AnyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its updates wait again."""
    monkeypatch.setattr(write_queue, "SCRIPT_BLOCKS", 2)

    rng = random.Random(9)
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        writer = replicas["a"]
        await writer.take("e0", "e1")
        for turns in range(40):
            for _ in range(10):
                change(rng, writer, rng.choice(["e0", "e1"]))
            flush = asyncio.create_task(writer.mirror.flush())
            await asyncio.sleep(turns * 2e-5)  # a message takes up to ten of these
            flush.cancel()
            await asyncio.gather(flush, return_exceptions=True)
            await writer.mirror.flush()
            assert await replicas.exact(HASHES)
            assert writer.mirror.written("e0")
            assert writer.mirror.written("e1")


async def test_changes_while_an_engine_is_taken_over(plain_server: AnyServer) -> None:
    """A feed may run on while its engine is taken over again under a new token."""

    rng = random.Random(8)
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        writer = replicas["a"]
        for turn in range(20):
            token = await writer.leases.acquire("e0")
            assert token is not None
            taking = asyncio.create_task(writer.mirror.take_over("e0", token))
            while not taking.done():
                if turn % 4:
                    change(rng, writer, "e0")
                elif rng.random() < 0.2:
                    writer.mirror.store("e0", FULL, rng.choices(HASHES, k=2))
                await asyncio.sleep(0)
            await taking
            await writer.mirror.flush()
            assert await replicas.exact(HASHES)
            if turn % 4 == 3:
                writer.mirror.drop("e0")


async def test_two_hundred_and_fifty_five_generations(plain_server: AnyServer) -> None:
    """A slot whose generations are used up is left for another one, and for good."""

    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        writer = replicas["a"]
        await writer.take("e0", "e1")
        writer.mirror.store("e1", FULL, blocks(1))
        slots = set()
        for turn in range(300):
            writer.mirror.store("e0", FULL, blocks(turn, turn + 1))
            await writer.mirror.flush()
            if turn % 10 == 0:
                assert await replicas.exact(blocks(*range(turn + 2)))
                slots.add((await replicas.look([])).engines["e0"].slot)
            writer.mirror.forget("e0")
            await writer.mirror.flush()
        assert await replicas.exact(blocks(*range(301)))
        assert await replicas.held("e1", FULL, 0, 1) == [False, True]
        assert len(slots) == 2


async def test_a_scope_without_free_slots_is_replaced(
    plain_server: AnyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.replication.registry.SLOTS_MAX", 3)

    async with Replicas(make_settings(plain_server.url), "a", "b") as replicas:
        one, two = replicas["a"], replicas["b"]
        await one.take("e0")
        await two.take("e1")
        two.mirror.store("e1", FULL, blocks(5))
        await two.mirror.flush()
        for turn in range(600):
            one.mirror.forget("e0")
            one.mirror.store("e0", FULL, blocks(turn))
            await one.mirror.flush()
        wrong, _ = await replicas.differences(blocks(*range(600)))
        assert wrong == []

        async def whole() -> bool:
            await two.mirror.flush()
            return await replicas.exact(blocks(*range(600)))

        await until(whole)
        assert two.mirror.counters.scope_changes >= 1


def allow_codes(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    for module in ("registry", "pattern_codes"):
        monkeypatch.setattr(f"kvatlas.router.replication.{module}.codes_max", lambda code_bytes: most)


async def test_patterns_without_a_code_are_shown_in_part(
    plain_server: AnyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_codes(monkeypatch, 2)

    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        mirror = replicas["a"].mirror
        await replicas["a"].take("e0")
        mirror.store("e0", FULL, blocks(1, 2, 3))
        await mirror.flush()
        mirror.store("e0", WINDOW, blocks(2, 3))
        await mirror.flush()
        mirror.store("e0", CPU, blocks(3, 4))
        await mirror.flush()
        wrong, missing = await replicas.differences(blocks(1, 2, 3, 4))
        assert wrong == []
        assert len(missing) == 2, "block 3 and 4 in CPU"
        assert await replicas.held("e0", WINDOW, 1, 2, 3) == [False, True, True]


async def test_where_codes_run_short_the_gpu_is_still_shown(
    plain_server: AnyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_codes(monkeypatch, 8)

    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        mirror = replicas["a"].mirror
        await replicas["a"].take("e0")
        offload = [Plane(f"CPU@{owner}", 0) for owner in "abcd"]
        for number in range(16):  # as many sets of places outside the GPU
            for position, plane in enumerate(offload):
                if number >> position & 1:
                    mirror.store("e0", plane, blocks(number))
                    await mirror.flush()
        mirror.store("e0", FULL, blocks(*range(12)))
        await mirror.flush()
        mirror.store("e0", WINDOW, blocks(*range(6, 18)))
        await mirror.flush()
        everything = blocks(*range(20))
        wrong, missing = await replicas.differences(everything)
        assert wrong == []
        assert missing
        assert not any("GPU" in text for text in missing), missing
        assert replicas["a"].mirror._queue.codes.without_code > 0


async def test_a_shared_store_that_grew_old_leaves_the_rest_in_sight(plain_server: AnyServer) -> None:
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        mirror = replicas["a"].mirror
        await replicas["a"].take("e0")
        mirror.store("e0", FULL, blocks(*range(50)))
        mirror.store("e0", SHARED, blocks(*range(30, 80)))
        await mirror.flush()
        seats = mirror.counters.claims
        mirror.clear("e0", SHARED.medium)
        assert await replicas.held("e0", FULL, 0, 49) == [True, True], "before the change is written, too"
        await mirror.flush()
        assert await replicas.exact(blocks(*range(80)))
        assert mirror.counters.claims == seats, "no new generation"


async def test_more_planes_than_fit_are_left_out(plain_server: AnyServer) -> None:
    async with Replicas(make_settings(plain_server.url), "a") as replicas:
        mirror = replicas["a"].mirror
        await replicas["a"].take("e0")
        for group in range(70):
            mirror.store("e0", Plane("GPU", group), blocks(1, group + 2))
        await mirror.flush()
        wrong, missing = await replicas.differences(blocks(*range(1, 80)))
        assert wrong == []
        assert len(missing) == 2 * 6


@pytest.mark.real  # every kind of server
def test_every_key_expires(servers: Server | Cluster) -> None:
    """Nothing is written without a time to live, whatever happened to it."""
    settings = make_settings(servers.url)
    asyncio.run(history(settings, 11, engines=6, steps=15))
    nodes = servers.nodes if isinstance(servers, Cluster) else [servers]
    prefix = f"{settings.namespace}:".encode()
    seen = 0
    for node in nodes:
        for key in node.all_keys():
            if key.startswith(prefix):
                seen += 1
                left_ms = node.command("PTTL", key)
                assert 0 < left_ms <= settings.control_ttl_s * 1000, key
                if len(key) == len(prefix) + 14:
                    assert left_ms <= settings.block_ttl_s * 1000, key
    assert seen > 20
