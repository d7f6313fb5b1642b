"""The offload connector inside a real vLLM server on the CPU: a tiny Gemma 3 with six groups.

What is loaded gives the same tokens and the same top five log-probabilities, to the last bit, as what was
computed. ``test_offload_faults`` shows that these comparisons can fail.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")
pytest.importorskip("tokenizers", reason="needs tokenizers")

from tests.connectors.e2e.offload_servers import forget, preemptions, prompt, server
from tests.connectors.e2e.shared_servers import complete, metric, same, same_but_for_rounding
from tests.support.waiting import wait_until as until
from tests.vllm.tiny_model import write_tiny_model
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTHS = (70, 200, 513, 1200)
ROUNDS_MAX = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("offload")
    with server(model, folder, "HybridOffloadConnector", "kvatlas.connectors.offload") as engine:
        complete(engine.base_url, prompt(99, 40))
        yield engine


@pytest.fixture
def url(engine: VllmEngine) -> str:
    return engine.base_url


@pytest.mark.parametrize("tokens", LENGTHS)
def test_after_the_gpu_forgot(url: str, tokens: int) -> None:
    """Prompts beyond 256 tokens are computed in chunks."""
    asked = prompt(10_000 + tokens, tokens)  # of no other test of this server
    cold = complete(url, asked)
    warm = complete(url, asked)
    forget(url)
    hits = metric(url, "hit_tokens")
    loaded = complete(url, asked)
    assert cold["cached"] == 0
    assert same(cold, warm)
    assert same(cold, loaded)
    assert metric(url, "hit_tokens") - hits == loaded["cached"] == (tokens - 1) // 32 * 32


def test_the_next_turn_loads_the_one_before(url: str) -> None:
    """A longer prompt ends its hit inside what another stored: windows are loaded at that boundary."""
    turn = prompt(7, 640)
    following = [*turn, *prompt(8, 200)]
    reference = complete(url, following)
    forget(url, connector=True)
    complete(url, turn)
    forget(url)
    loaded = complete(url, following)
    assert 600 <= loaded["cached"] <= 640
    assert same(reference, loaded)


def test_after_other_prompts_took_the_gpu_blocks(url: str) -> None:
    asked = prompt(11, 900)
    cold = complete(url, asked)
    for seed in range(8):
        complete(url, prompt(4000 + seed, 1000), max_tokens=1)
    hits = metric(url, "hit_tokens")
    again = complete(url, asked)
    assert same(cold, again)
    assert metric(url, "hit_tokens") > hits


def test_a_reset_that_names_the_connector_empties_the_host_too(url: str) -> None:
    asked = prompt(12, 300)
    cold = complete(url, asked)
    forget(url, connector=True)
    hits = metric(url, "hit_tokens")
    assert same(cold, complete(url, asked))
    assert metric(url, "hit_tokens") == hits


def together(engine: VllmEngine, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Answers to prompts that all wait before the first one is scheduled."""
    with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
        with engine.paused():
            arrived = engine.added + len(prompts)
            answering = pool.map(lambda one: complete(engine.base_url, one, max_tokens=12), prompts)
            until(lambda: engine.added == arrived, "all requests wait", wait_s=300)
        return list(answering)


def test_a_hundred_and_twenty_together_in_a_pool_for_three(engine: VllmEngine) -> None:
    """Five beginnings, every request asked three times in random order: preemptions, evictions, loads. All
    are there before the first one is scheduled; in which order they came is the threads' choice, and decides
    whether one is preempted, so that they come again until one was."""
    url = engine.base_url
    rng = random.Random(5)
    shared_prefixes = [prompt(2000 + seed, 640) for seed in range(5)]
    asked = [
        shared_prefix[: rng.randint(200, 640)] + prompt(3000 + i, 40)
        for i, shared_prefix in enumerate(shared_prefixes * 8)
    ]
    reference = [complete(url, one, max_tokens=12) for one in asked]
    preempted = preemptions(url)
    order = [i for i in range(len(asked)) for _ in range(3)]
    assert len(order) == 120
    for _ in range(ROUNDS_MAX):
        forget(url)
        hits = metric(url, "hit_tokens")
        rng.shuffle(order)
        answers = together(engine, [asked[i] for i in order])
        wrong = [
            i
            for i, answer in zip(order, answers, strict=True)
            if not same_but_for_rounding(reference[i], answer)
        ]
        assert wrong == []
        assert metric(url, "hit_tokens") > hits
        if preemptions(url) > preempted:
            break
    else:
        raise AssertionError("none was preempted")
    assert metric(url, "jobs", direction="load", result="failed") == 0
