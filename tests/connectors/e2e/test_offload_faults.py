"""The offload connector inside a real vLLM server, with transfers that fail or lie.

A lie in any one group shows in the log-probabilities; a failure never does: the request is computed instead,
after one try, and the engine goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")
pytest.importorskip("tokenizers", reason="needs tokenizers")

from tests.connectors.e2e.offload_servers import forget, prompt, server
from tests.connectors.e2e.shared_servers import complete, metric, same
from tests.support.waiting import wait_until as until
from tests.vllm.tiny_model import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

GROUPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def faulty(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Callable[..., None]]]:
    """The server, and what sets the fault: ``control()`` for none."""
    folder = tmp_path_factory.mktemp("faulty")
    file = folder / "control.json"

    def control(**wanted: Any) -> None:
        draft = folder / "control.new"
        draft.write_text(json.dumps(wanted))
        draft.replace(file)

    control()
    module = "tests.connectors.e2e.faulty_connector"
    with server(model, folder, "FaultyOffloadConnector", module, control=str(file)) as engine:
        complete(engine.base_url, prompt(99, 40))
        yield engine.base_url, control


@pytest.fixture(autouse=True)
def _no_fault_left(faulty: tuple[str, Callable[..., None]]) -> Iterator[None]:
    yield
    faulty[1]()
    forget(faulty[0], connector=True)


@pytest.mark.parametrize("group", range(GROUPS))
def test_one_spoilt_group_shows(faulty: tuple[str, Callable[..., None]], group: int) -> None:
    """The control of all tests above: if a group were not loaded at all, they would notice."""
    url, control = faulty
    asked = prompt(20 + group, 513)
    cold = complete(url, asked)
    forget(url)
    control(direction="load", mode="zero", group=group)
    spoilt = complete(url, asked)
    assert spoilt["cached"] == 512
    assert spoilt["top"] != cold["top"]


def test_failed_loads_end_in_computing(faulty: tuple[str, Callable[..., None]]) -> None:
    url, control = faulty
    asked = [prompt(40 + i, 400 + 30 * i) for i in range(6)]
    cold = [complete(url, one) for one in asked]
    forget(url)
    control(direction="load", mode="fail")
    failed = metric(url, "jobs", direction="load", result="failed")
    with ThreadPoolExecutor(max_workers=len(asked)) as pool:
        answers = list(pool.map(lambda one: complete(url, one), asked))
    assert all(same(one, other) for one, other in zip(cold, answers, strict=True))
    # One failed load for each, then it computes: a retry that loaded again would fail again.
    assert metric(url, "jobs", direction="load", result="failed") - failed == len(asked)


def test_loads_work_again_after_they_failed(faulty: tuple[str, Callable[..., None]]) -> None:
    url, control = faulty
    asked = prompt(50, 700)
    cold = complete(url, asked)
    forget(url)
    control(direction="load", mode="fail")
    assert same(cold, complete(url, asked))
    control()
    forget(url)
    again = complete(url, asked)
    assert again["cached"] > 0
    assert same(cold, again)


def test_failed_stores_are_only_misses(faulty: tuple[str, Callable[..., None]]) -> None:
    url, control = faulty
    asked = prompt(60, 700)
    control(direction="store", mode="fail")
    cold = complete(url, asked)
    until(lambda: metric(url, "jobs", direction="store", result="failed") > 0, "a store failed")
    forget(url)
    again = complete(url, asked)
    assert again["cached"] == 0
    assert same(cold, again)
