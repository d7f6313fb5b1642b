"""Events of a simulated engine, taken from its sockets: they describe its pool exactly."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import AllBlocksCleared, BlockRemoved, BlockStored, to_block_hash
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.zmq_publisher import END_SEQ
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.subscriber import Feed
from kvatlas.router.index.base import Plane
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from tests.publisher.simulator.support import LONG_TEXT, client, engine, request
from tests.support.waiting import until

Residency = list[Counter[int | bytes]]


async def replayed(running: SimulatedEngine) -> list[tuple[int, bytes]]:
    """Every batch the engine still knows, through its replay socket."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    batches = []
    try:
        socket.connect(running.replay_endpoint)
        await socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            _, _, seq, payload = await socket.recv_multipart()
            if seq == END_SEQ:
                return batches
            batches.append((int.from_bytes(seq, "big"), payload))
    finally:
        socket.close()
        context.term()


def counted(batches: list[tuple[int, bytes]], num_groups: int) -> Residency:
    """Copies per group and hash after applying every event in order."""
    counts: Residency = [Counter() for _ in range(num_groups)]
    for _, payload in batches:
        batch = decode_batch(payload)
        assert batch.rejected == []
        for event in batch.events:
            match event:
                case BlockStored():
                    assert event.group_idx is not None
                    counts[event.group_idx].update(event.block_hashes)
                case BlockRemoved():
                    assert event.group_idx is not None
                    counts[event.group_idx].subtract(event.block_hashes)
                case AllBlocksCleared():
                    counts = [Counter() for _ in range(num_groups)]
    return [+count for count in counts]


async def load(running: SimulatedEngine) -> None:
    """Chats that share prefixes and overflow a small pool."""
    async with client(running) as api:
        for number in range(6):
            first, second = LONG_TEXT[: 200 * (number % 3 + 1)], f"{number} {LONG_TEXT}"
            messages: list[Any] = [{"role": "user", "content": first}, {"role": "user", "content": second}]
            await asyncio.gather(
                *(
                    api.chat.completions.create(model="kvatlas-demo", messages=messages, max_tokens=5)
                    for messages in (messages[:1], messages)
                )
            )


@pytest.mark.parametrize("int_hashes", [True, False])
@pytest.mark.parametrize("groups", ["gemma3-like", "gptoss-like", "full", "mamba-hybrid"])
async def test_replayed_events_count_up_to_what_the_pool_holds(groups: str, int_hashes: bool) -> None:
    async with engine(groups=groups, num_blocks=420, int_hashes=int_hashes) as running:
        await load(running)
        batches = await replayed(running)
        assert [seq for seq, _ in batches] == list(range(len(batches)))
        counts = counted(batches, len(running.groups))
        held = [running.pool.resident(group.group_idx) for group in running.groups]
        assert counts == held
        assert all(held)
        hashes = {type(block_hash) for group in held for block_hash in group}
        assert hashes == ({int} if int_hashes else {bytes})


async def test_a_small_pool_says_what_it_evicts() -> None:
    async with engine(groups="full", num_blocks=40) as running:
        await load(running)
        events = [e for _, payload in await replayed(running) for e in decode_batch(payload).events]
        assert any(isinstance(event, BlockRemoved) for event in events)


@pytest.mark.real  # ZMQ's library
async def test_live_batches_carry_the_rank_and_arrive_in_order() -> None:
    async with engine(dp_rank=3) as running:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.XSUB)
        socket.linger = 0
        try:
            socket.connect(running.events_endpoint)
            await socket.send(b"\x01")
            payloads: list[bytes] = []
            while not payloads:  # the subscription takes effect some time after it was sent
                await load(running)
                while await socket.poll(20):
                    topic, _, payload = await socket.recv_multipart()
                    assert topic == b""
                    payloads.append(payload)
        finally:
            socket.close()
            context.term()
        assert {decode_batch(payload).data_parallel_rank for payload in payloads} == {3}
        _, sources = await request(running, "GET", "/kv_event_sources")
        assert list(sources) == ["3"]
        assert sources["3"]["endpoint"] == running.events_endpoint
        assert sources["3"]["replay_endpoint"] == running.replay_endpoint


async def test_a_reset_is_published_with_the_next_steps_batch() -> None:
    async with engine() as running:
        await load(running)
        before = len(await replayed(running))
        assert await request(running, "POST", "/reset_prefix_cache") == (200, {"success": True})
        assert len(await replayed(running)) == before
        await load(running)
        first_after = decode_batch((await replayed(running))[before][1])
        assert isinstance(first_after.events[0], AllBlocksCleared)


async def test_an_engine_can_keep_its_events_to_itself() -> None:
    async with engine(publish_events=False) as running:
        await load(running)
        assert running.events_endpoint is None
        assert running.replay_endpoint is None
        assert await request(running, "GET", "/kv_event_sources") == (200, {})


@pytest.mark.parametrize("int_hashes", [True, False])
async def test_a_late_router_recovers_by_snapshot(int_hashes: bool) -> None:
    async with engine(groups="gemma3-like", num_blocks=420, int_hashes=int_hashes) as running:
        await load(running)
        assert running.events_endpoint is not None
        fleet = FleetResidency(ModelFacts())
        feed = Feed("e", running.events_endpoint, running.replay_endpoint, "", fleet)
        task = asyncio.create_task(feed.run())
        try:
            await until(lambda: feed.state is FeedState.READY)
            assert (feed.stats.snapshots, feed.stats.replays) == (1, 0)
            for group in range(len(running.groups)):
                held = {to_block_hash(wire) for wire in running.pool.resident(group)}
                assert held
                assert fleet.index.copies("e", Plane("GPU", group)) == len(held)
        finally:
            feed.close()
            await task
