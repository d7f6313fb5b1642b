"""A real engine ended by ``kill -9`` under load and started again: the router credits it with what it has,
and with nothing it had. With vLLM's own publisher, and with ours in it.
"""

from __future__ import annotations

import asyncio
import http.client
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvatlas.publisher.block_hash import NO_EXTRAS
from kvatlas.publisher.events import BlockHash, BlockStored, DecodedBatch, to_block_hash
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.feeds.base import FeedSettings, FeedState
from kvatlas.router.feeds.subscriber import Feed
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.tools.trace_verification import ProbePrompt
from tests.support.feed_world import credited
from tests.support.waiting import until
from tests.vllm.plugin_engine import (
    ENGINE_ARGUMENTS,
    complete,
    plugin_path,
    ready,
    settled,
)
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

SETTINGS = FeedSettings(replay_timeout_s=10.0)
GROUPS = tuple(GroupSpec(number, "full_attention", 32) for number in range(6))
"""As many as the tiny model has; only the numbers matter here."""
END_SEQ = b"\xff" * 8


class Fleet(FleetResidency):
    """The index, and every block that was ever stored in it."""

    def __init__(self) -> None:
        super().__init__(ModelFacts())
        self.blocks: dict[BlockHash, None] = {}

    def apply(self, engine_id: str, batch: DecodedBatch) -> None:
        super().apply(engine_id, batch)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.blocks.update((to_block_hash(wire), None) for wire in event.block_hashes)


@pytest.fixture(params=["stock", "plugin"])
def engine(
    request: pytest.FixtureRequest, vllm_python: str, tiny_model: Path, tmp_path: Path
) -> Iterator[VllmEngine]:
    environment = {}
    if request.param == "plugin":
        environment = {"PYTHONPATH": str(plugin_path(tmp_path / "site")), "KVATLAS_PUBLISHER": "1"}
    with VllmEngine(
        vllm_python,
        tiny_model,
        num_gpu_blocks=400,
        log=tmp_path / "engine.log",
        extra_args=ENGINE_ARGUMENTS,
        environment=environment,
    ) as running:
        yield running


@asynccontextmanager
async def following(engine: VllmEngine, fleet: Fleet) -> AsyncIterator[Feed]:
    feed = Feed("e", engine.events, engine.replay, "kv", fleet, settings=SETTINGS)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(feed.run())
        try:
            await ready(feed)
            yield feed
        finally:
            feed.close()


async def last_seq(engine: VllmEngine) -> int:
    """Of the batches that the engine has published, by its replay socket; -1: none."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.connect(engine.replay)
        await dealer.send_multipart([b"", bytes(8)])
        last = b"\xff" * 8
        while (seq := (await dealer.recv_multipart())[2]) != END_SEQ:
            last = seq
    return int.from_bytes(last, "big", signed=True)


async def caught_up(feed: Feed, engine: VllmEngine) -> None:
    """The feed has applied what the engine has published by now."""
    last = await last_seq(engine)
    await until(lambda: feed.state is FeedState.READY and (feed.stats.last_seq or 0) >= last)


async def predicted_and_reported(
    feed: Feed, engine: VllmEngine, fleet: Fleet, token_ids: list[int]
) -> tuple[int, int]:
    await settled(engine, fleet)
    assert feed.state is FeedState.READY
    predicted = fleet.predict(ProbePrompt(token_ids, NO_EXTRAS), ["e"])["e"].hit_tokens
    return predicted, await asyncio.to_thread(complete, engine, token_ids)


def interrupted(engine: VllmEngine, token_ids: list[int]) -> None:
    """A long request, which the engine does not live to answer."""
    with suppress(OSError, http.client.HTTPException):
        complete(engine, token_ids, max_tokens=1500)


async def test_after_kill_9_it_is_credited_with_what_it_has(engine: VllmEngine) -> None:
    rng = random.Random(9)

    def fresh() -> list[int]:
        return [rng.randrange(10, 1000) for _ in range(rng.choice((100, 150, 200)))]

    before = [fresh() for _ in range(6)]

    fleet = Fleet()
    async with following(engine, fleet) as feed:
        for token_ids in before:
            await asyncio.to_thread(complete, engine, token_ids)
        predicted, reported = await predicted_and_reported(feed, engine, fleet, before[-1])
        assert predicted == reported > 0

        heard = feed.stats.batches
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(asyncio.to_thread(interrupted, engine, fresh()))
            await until(lambda: feed.stats.batches > heard + 3)
            await asyncio.to_thread(engine.kill)
        await until(lambda: feed.state is not FeedState.READY)
        await asyncio.to_thread(engine.start)
        await asyncio.to_thread(engine.wait_until_healthy)

        await until(lambda: feed.stats.restarts == 1)
        await caught_up(feed, engine)
        assert credited(fleet, GROUPS, list(fleet.blocks)) == {}
        assert fleet.index.stats().residencies == 0
        asked = [*before[:3], *before[:3], fresh(), before[1]]
        after = [await predicted_and_reported(feed, engine, fleet, token_ids) for token_ids in asked]
        assert [predicted for predicted, _ in after] == [reported for _, reported in after]
        assert [reported > 0 for _, reported in after] == [False] * 3 + [True] * 3 + [False, True]

        late = Fleet()
        async with following(engine, late) as second:
            await settled(engine, fleet)
            await caught_up(second, engine)
            blocks = list(fleet.blocks)
            assert credited(fleet, GROUPS, blocks) == credited(late, GROUPS, blocks) != {}
            assert fleet.index.stats().residencies == late.index.stats().residencies
        assert (feed.stats.restarts, feed.stats.sink_errors) == (1, 0)
