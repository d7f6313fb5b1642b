"""Predictions before real engines whose pools hold two or three prompts, with many concurrent requests.

Prompts that this router has sent and that wait in an engine evict, until it looks a later prompt up, blocks
that the index still shows (docs/decisions/016-evictions-ahead.md).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.chats import Chats, shares
from tests.vllm.observed_fleet import running
from tests.vllm.vllm_engine import two_engines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

BLOCK = 32
REQUESTS = 400
ENGINE_ARGS = (
    "--block-size", str(BLOCK), "--max-model-len", "2048", "--max-num-batched-tokens", "2048",
    # One group, as the forecast needs: all six layers become full attention.
    "--hf-overrides", json.dumps({"layer_types": ["full_attention"] * 6}),
)  # fmt: skip


class Clients:
    """Chats that go on from each other; each client sends its next prompt when its last answer is whole."""

    def __init__(self, base_url: str, clients: int, seed: int) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=600
        )
        self._rng = random.Random(seed)
        # The lengths, in blocks, are those of the simulated engine in crowded_engine.py.
        self._chats, self._clients = Chats(self._rng, clients, vocabulary=1000, scale=BLOCK // 16), clients
        self.outcomes: list[tuple[int, int]] = []
        self.served: Counter[str] = Counter()

    async def run(self, requests: int) -> list[tuple[int, int]]:
        """Serve this number of requests; returns cached tokens as predicted and as the engine reported."""
        left = iter(range(requests))
        async with self._client, asyncio.TaskGroup() as group:
            for client in range(self._clients):
                group.create_task(self._chat(client, left))
        return self.outcomes

    async def _chat(self, client: int, left: Iterator[int]) -> None:
        for _ in left:
            raw = await self._client.completions.with_raw_response.create(
                model="tiny", prompt=self._chats.prompt(client), max_tokens=self._rng.randint(2, 48),
                temperature=0, extra_body={"ignore_eos": True},
                stream=True, stream_options={"include_usage": True},
            )  # fmt: skip
            async for part in raw.parse():
                if part.usage is not None and part.usage.prompt_tokens_details is not None:
                    actual = part.usage.prompt_tokens_details.cached_tokens or 0
                    predicted = int(raw.headers["x-kvatlas-hit-tokens"])
                    self.outcomes.append((predicted, actual))
                    self.served[raw.headers["x-kvatlas-engine"]] += 1


@pytest.mark.parametrize(
    ("pool_blocks", "clients", "exact_min"),
    [
        # Measured: 90 to 96 % (decision 016), and 28 % by the index alone. The later a machine brings tokens
        # and events to the router, the lower the share, and a test must pass on slow machines too.
        pytest.param(110, 24, 0.5, id="110 blocks, 24 clients"),
        pytest.param(80, 8, 0.5, id="80 blocks, 8 clients"),
        pytest.param(4000, 8, 0.9, id="quiet"),
    ],
)
def test_predictions_hold_when_prompts_evict_each_other(
    vllm_python: str, tiny_model: Path, tmp_path: Path, pool_blocks: int, clients: int, exact_min: float
) -> None:
    options = {"num_gpu_blocks": pool_blocks, "extra_args": ENGINE_ARGS}
    engines = two_engines(vllm_python, tiny_model, tmp_path, **options)
    with running(engines, tiny_model, log=tmp_path / "router.log") as fleet:
        load = Clients(fleet.router.base_url, clients, seed=7)
        outcomes = asyncio.run(load.run(REQUESTS))
    assert len(outcomes) == REQUESTS
    measured = shares(outcomes)
    print(f"{pool_blocks} blocks, {clients} clients: {measured}, {load.served}")
    assert measured["exact"] >= exact_min, [pair for pair in outcomes if pair[0] != pair[1]]
