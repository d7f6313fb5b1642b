"""A stock vLLM with our publisher in it: a router that comes late knows exactly what the engine holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.publisher.block_hash import NO_EXTRAS
from kvatlas.router.feeds.base import FeedSettings
from kvatlas.router.feeds.subscriber import Feed
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.tools.trace_verification import ProbePrompt
from tests.vllm.plugin_engine import ENGINE_ARGUMENTS, complete, plugin_path, ready, settled
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine(
    vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    directory = tmp_path_factory.mktemp("plugin")
    environment = {"PYTHONPATH": str(plugin_path(directory / "site")), "KVATLAS_PUBLISHER": "1"}
    with VllmEngine(
        vllm_python,
        tiny_model,
        num_gpu_blocks=160,
        log=directory / "engine.log",
        extra_args=ENGINE_ARGUMENTS,
        buffer_steps=3,
        environment=environment,
        forked=False,  # vLLM loads plugins in each of its processes
    ) as running:
        yield running


async def test_a_late_router_predicts_exactly(engine: VllmEngine) -> None:
    assert "kvatlas publishes" in engine.log.read_text(errors="replace")
    rng = random.Random(5)
    shared_prefixes = [[rng.randrange(10, 1000) for _ in range(300)] for _ in range(3)]

    def prompt() -> list[int]:
        shared_prefix = rng.choice(shared_prefixes)
        return shared_prefix[: rng.choice((90, 200, 300))] + [
            rng.randrange(10, 1000) for _ in range(rng.randrange(90))
        ]

    sent = [prompt() for _ in range(40)]
    for token_ids in sent:
        complete(engine, token_ids)
    fleet = FleetResidency(ModelFacts())
    feed = Feed("e", engine.events, engine.replay, "kv", fleet, settings=FeedSettings(replay_timeout_s=10.0))
    pairs = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(feed.run())
        try:
            await ready(feed)
            assert feed.stats.snapshots == 1
            for _ in range(12):
                await settled(engine, fleet)
                token_ids = rng.choice([prompt(), rng.choice(sent)])
                predicted = fleet.predict(ProbePrompt(token_ids, NO_EXTRAS), ["e"])["e"]
                assert predicted.mode == "native", predicted.why_unknown
                actual = await asyncio.to_thread(complete, engine, token_ids)
                pairs.append((predicted.hit_tokens, actual))
            assert fleet.index.stats().unknown_removals == 0
        finally:
            feed.close()
    assert [predicted for predicted, _ in pairs] == [actual for _, actual in pairs]
    assert sum(actual > 0 for _, actual in pairs) >= 3
