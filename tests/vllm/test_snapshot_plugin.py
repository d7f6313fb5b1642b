"""A stock vLLM with our publisher in it: a router that comes late knows exactly what the engine holds."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from vllm_engine import VllmEngine

from publisher.block_hash import HashScheme, block_hashes
from publisher.events import BlockHash
from router.feeds.base import FeedSettings, FeedState
from router.feeds.subscriber import Feed
from router.index.layout import ModelFacts
from router.index.predict import FleetResidency

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]
WAIT_S = 60.0


def plugin_path(directory: Path) -> Path:
    """What installing the package puts on the path: the package, and its entry points."""
    directory.mkdir()
    (directory / "publisher").symlink_to(REPOSITORY / "publisher")
    info = directory / "kvatlas-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvatlas\nVersion: 0.1.0\n")
    entry = "[vllm.general_plugins]\nkvatlas = publisher.vllm_plugin:register\n"
    assert 'kvatlas = "publisher.vllm_plugin:register"' in (REPOSITORY / "pyproject.toml").read_text()
    (info / "entry_points.txt").write_text(entry)
    return directory


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
        extra_args=("--block-size", "32", "--max-model-len", "2048", "--max-num-batched-tokens", "256"),
        buffer_steps=3,
        environment=environment,
    ) as running:
        yield running


class TokenPrompt:
    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def hashes(self, scheme: HashScheme) -> Sequence[BlockHash]:
        return block_hashes(self.token_ids, scheme)


def complete(engine: VllmEngine, token_ids: list[int]) -> int:
    """Send a prompt; the tokens the engine took from its cache."""
    body = {"model": "tiny", "prompt": token_ids, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{engine.base_url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        usage = json.load(answer)["usage"]
    details = usage["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


async def ready(feed: Feed) -> None:
    async with asyncio.timeout(WAIT_S):
        while feed.state is not FeedState.READY:
            await asyncio.sleep(0.02)


async def quiet(feed: Feed) -> None:
    """Until a heartbeat: it is behind all that was published before."""
    async with asyncio.timeout(WAIT_S):
        while True:
            batches, events = feed.stats.batches, feed.stats.events
            while feed.stats.batches == batches:
                await asyncio.sleep(0.02)
            if feed.stats.batches == batches + 1 and feed.stats.events == events:
                return


def test_a_late_router_predicts_exactly(engine: VllmEngine) -> None:
    assert "kvatlas publishes" in engine.log.read_text(errors="replace")
    rng = random.Random(5)
    trunks = [[rng.randrange(10, 1000) for _ in range(300)] for _ in range(3)]

    def prompt() -> list[int]:
        trunk = rng.choice(trunks)
        return trunk[: rng.choice((90, 200, 300))] + [
            rng.randrange(10, 1000) for _ in range(rng.randrange(90))
        ]

    sent = [prompt() for _ in range(40)]
    for token_ids in sent:
        complete(engine, token_ids)

    async def scenario() -> list[tuple[int, int]]:
        fleet = FleetResidency(ModelFacts())
        feed = Feed(
            "e", engine.events, engine.replay, "kv", fleet, settings=FeedSettings(replay_timeout_s=10.0)
        )
        pairs = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed.run())
            try:
                await ready(feed)
                assert feed.stats.snapshots == 1
                for _ in range(12):
                    await quiet(feed)
                    token_ids = rng.choice([prompt(), rng.choice(sent)])
                    predicted = fleet.predict(TokenPrompt(token_ids), ["e"])["e"]
                    assert predicted.mode == "native", predicted.why_unknown
                    actual = await asyncio.to_thread(complete, engine, token_ids)
                    pairs.append((predicted.hit_tokens, actual))
                assert fleet.index.stats().unknown_removals == 0
            finally:
                feed.close()
        return pairs

    pairs = asyncio.run(scenario())
    assert [predicted for predicted, _ in pairs] == [actual for _, actual in pairs]
    assert sum(actual > 0 for _, actual in pairs) >= 3


def test_a_killed_and_restarted_engine_is_credited_with_nothing_it_lost(engine: VllmEngine) -> None:
    token_ids = [7 + n % 900 for n in range(300)]

    async def scenario() -> None:
        fleet = FleetResidency(ModelFacts())
        settings = FeedSettings(replay_timeout_s=10.0)
        feed = Feed("e", engine.events, engine.replay, "kv", fleet, settings=settings)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed.run())
            try:
                await ready(feed)
                await asyncio.to_thread(complete, engine, token_ids)
                await quiet(feed)
                assert fleet.predict(TokenPrompt(token_ids), ["e"])["e"].hit_tokens > 0
                await asyncio.to_thread(engine.stop)
                assert feed.state is not FeedState.READY
                await asyncio.to_thread(engine.start)
                await asyncio.to_thread(engine.wait_until_healthy)
                await ready(feed)
                await quiet(feed)
                assert feed.stats.restarts == 1
                assert fleet.predict(TokenPrompt(token_ids), ["e"])["e"].hit_tokens == 0
                assert await asyncio.to_thread(complete, engine, token_ids) == 0
                await quiet(feed)
                predicted = fleet.predict(TokenPrompt(token_ids), ["e"])["e"]
                assert predicted.hit_tokens == await asyncio.to_thread(complete, engine, token_ids) > 0
            finally:
                feed.close()

    asyncio.run(scenario())
