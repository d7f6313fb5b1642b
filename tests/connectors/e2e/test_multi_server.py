"""Host memory and a shared store side by side in a real server: both hold what was computed, the better one
loads it, and what is loaded gives the same tokens and log-probabilities to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")
pytest.importorskip("tokenizers", reason="needs tokenizers")

from tests.connectors.e2e.served_connectors import serve, stored_blocks
from tests.connectors.e2e.shared_servers import complete, forget_gpu, metric, same
from tests.support.waiting import wait_until as until
from tests.vllm.tiny_model import write_tiny_model
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HOST, STORE = "HybridOffloadConnector", "SharedStoreConnector"
LENGTHS = (70, 200, 513)
FILLER_TOKENS = 1200
FILLERS = 12
"""Number of prompts that fills the host's memory several times."""


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(tokens)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("multi")
    store = {"kind": "file", "path": str(folder / "blocks"), "max_bytes": "1GiB"}
    children = [
        {
            "kv_connector": HOST,
            "kv_connector_module_path": "kvatlas.connectors.offload",
            # 200 rows of 8 KiB: the prompts of LENGTHS take about 60, one of FILLER_TOKENS 47.
            "kv_connector_extra_config": {"host_bytes": "1600KiB", "policy": "lru"},
        },
        {
            "kv_connector": STORE,
            "kv_connector_module_path": "kvatlas.connectors.shared_store",
            "kv_connector_extra_config": {"host_bytes": "64MiB", "lookup_deadline_s": 20, "store": store},
        },
    ]
    transfer = {
        "kv_connector": "HybridMultiConnector",
        "kv_connector_module_path": "kvatlas.connectors.multi",
        "kv_connector_extra_config": {"connectors": children},
    }
    with serve(write_tiny_model(folder / "model"), folder, transfer) as running:
        complete(running.base_url, prompt(99, 40))
        yield running


def stored(url: str, connector: str) -> float:
    return metric(url, "blocks_stored", connector=connector)


def loaded(url: str, connector: str) -> float:
    return metric(url, "hit_tokens", connector=connector)


def both_have_stored(url: str, blocks: int) -> None:
    """Stores go on after the answer; every step that follows reports some."""

    def done() -> bool:
        complete(url, prompt(999, 40), max_tokens=2)
        return min(stored(url, HOST), stored(url, STORE)) >= blocks

    until(done, f"{blocks} blocks stored by both")


def test_metrics_of_two_tiers(engine: VllmEngine) -> None:
    """One test, in order: each part builds on the state that the one before left behind."""
    url = engine.base_url
    cold = {n: complete(url, prompt(n, n)) for n in LENGTHS}
    assert all(answer["cached"] == 0 for answer in cold.values())
    # Every full block, and two of each window group for each prompt.
    both_have_stored(url, sum((n - 1) // 32 for n in LENGTHS) + len(LENGTHS) * 5 * 2)

    # Equal offers: the first child loads.
    forget_gpu(url)
    answers: dict[int, dict[str, Any]] = {n: complete(url, prompt(n, n)) for n in LENGTHS}
    for n in LENGTHS:
        assert same(answers[n], cold[n]), n
        assert answers[n]["cached"] == (n - 1) // 32 * 32
    assert loaded(url, HOST) == sum(answer["cached"] for answer in answers.values())
    assert loaded(url, STORE) == 0

    # The host's memory forgets, the store does not: the second child loads.
    for seed in range(FILLERS):
        complete(url, prompt(5000 + seed, FILLER_TOKENS))
    until(lambda: metric(url, "blocks_removed", connector=HOST) > 0, "the host's memory is full")
    forget_gpu(url)
    for n in LENGTHS:
        again = complete(url, prompt(n, n))
        assert same(again, cold[n]), n
        assert again["cached"] == (n - 1) // 32 * 32
    assert loaded(url, STORE) > 0
    assert metric(url, "jobs", direction="load", result="failed") == 0

    # Both announced what they hold, each under its own name.
    held = stored_blocks(engine)
    assert {medium for medium, _ in held} == {"CPU", "STORAGE"}
    assert len(held) == 2
    on_host, in_store = (next(held[place] for place in held if place[0] == m) for m in ("CPU", "STORAGE"))
    assert {group for group, _ in on_host} == {group for group, _ in in_store} == set(range(6))
    assert len(on_host & in_store) > len(on_host) // 2


def test_a_child_without_hma_stops_the_server_at_start(tmp_path: Path) -> None:
    """With an error that says which and what to do, also where assertions are off."""
    transfer = {
        "kv_connector": "HybridMultiConnector",
        "kv_connector_module_path": "kvatlas.connectors.multi",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": HOST,
                    "kv_connector_module_path": "kvatlas.connectors.offload",
                    "kv_connector_extra_config": {"host_bytes": "8MiB"},
                },
                {"kv_connector": "ExampleConnector"},
            ]
        },
    }
    server = serve(write_tiny_model(tmp_path / "model"), tmp_path, transfer, PYTHONOPTIMIZE="1")
    with pytest.raises(RuntimeError, match="vLLM ended with status"), server:
        raise AssertionError("the server started")
    said = server.log.read_text()
    assert "connectors[1].kv_connector = 'ExampleConnector'" in said
    assert "--disable-hybrid-kv-cache-manager" in said
