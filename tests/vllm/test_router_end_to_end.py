"""The whole router before two real vLLM engines: every predicted hit must be what the engine then reports.

How the test waits for the events between two requests: ``observed_fleet``.
"""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from kvatlas.router.fleet.engine_metrics import (
    METRICS,
    METRICS_BY_NAME,
    names_read,
    read_pool_blocks,
    read_sleep,
    read_started,
    read_statement,
)
from tests.vllm.chat_load import ChatLoad
from tests.vllm.observed_fleet import BLOCK_TOKENS, Fleet, Outcome, running, send
from tests.vllm.vllm_engine import two_engines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

REQUESTS = 240
NUM_GPU_BLOCKS = 220
"""Six groups share them: a handful of conversations fills the pool, and eviction is constant."""

ENGINE_ARGS = (
    "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--max-num-batched-tokens", "256",
)  # fmt: skip


@pytest.fixture(scope="module")
def fleet(vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("logs")
    options = {"num_gpu_blocks": NUM_GPU_BLOCKS, "extra_args": ENGINE_ARGS}
    engines = two_engines(vllm_python, tiny_model, logs, **options)
    with running(engines, tiny_model, log=logs / "router.log") as fleet:
        yield fleet


def test_engines_give_the_samples_that_are_read_by_name(fleet: Fleet) -> None:
    for base_url in fleet.taps:
        whole, named = (read(base_url + path) for path in (METRICS, METRICS_BY_NAME))
        assert names_read(named) >= names_read(whole)
        assert {b"\nvllm:num_requests_running", b"\nprocess_start_time_seconds"} <= names_read(whole)
        assert len(named) < len(whole) / 5
        for fact in (read_pool_blocks, read_statement, read_sleep):
            assert fact(named, None) == fact(whole, None)
        assert read_started(named) == read_started(whole)


def read(url: str) -> bytes:
    with urllib.request.urlopen(url) as page:
        return bytes(page.read())


def test_every_predicted_hit_is_what_the_engine_reports(fleet: Fleet) -> None:
    outcomes: list[Outcome] = []
    with openai.OpenAI(base_url=f"{fleet.router.base_url}/v1", api_key="none", max_retries=0) as client:
        for request in ChatLoad(seed=11).requests(REQUESTS):
            outcome = send(client, request)
            request.answered(outcome.text)
            outcomes.append(outcome)
            fleet.settle(outcome.engine_id)

    told = [outcome for outcome in outcomes if outcome.cached_tokens is not None]
    wrong = [
        f"request {index}: predicted {outcome.predicted}, engine reported {outcome.cached_tokens}"
        f" of {outcome.prompt_tokens} on {outcome.engine_id}"
        for index, outcome in enumerate(outcomes)
        if outcome.cached_tokens is not None and outcome.predicted != outcome.cached_tokens
    ]
    assert not wrong, f"{len(wrong)} of {len(told)} wrong:\n" + "\n".join(wrong[:20])

    hits = [outcome for outcome in told if outcome.predicted]
    served = Counter(outcome.engine_id for outcome in outcomes)
    removed = {engine_id: tap.removed["GPU"] for engine_id, tap in fleet.taps.items()}
    print(f"{len(told)} told, {len(hits)} hits, served {served}, blocks removed {removed}")
    assert len(told) >= 200, "too few requests said what was cached"
    assert len(hits) >= len(told) // 4, "too few hits to say anything"
    assert set(served) == set(fleet.taps), "one engine served everything"
    assert min(removed.values()) > 100, "hardly anything was evicted"
