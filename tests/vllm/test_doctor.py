"""``kvatlas doctor --probe`` before a real vLLM engine, well and wrongly set up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PATIENT = ("--timeout", "60")
ENGINE_ARGS = ("--block-size", "32", "--max-model-len", "2048", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def engine(
    vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    with VllmEngine(vllm_python, tiny_model, num_gpu_blocks=400, log=log, extra_args=ENGINE_ARGS) as running:
        yield running


def doctor(*arguments: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Exit status, and findings by check."""
    ended = subprocess.run(
        [sys.executable, "-m", "kvatlas", "doctor", *arguments, "--seconds", "1", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode in {0, 1}, ended
    printed: dict[str, Any] = json.loads(ended.stdout)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in printed["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return ended.returncode, found


def test_a_stock_engine_is_found_exact(engine: VllmEngine, tiny_model: Path) -> None:
    status, found = doctor("--engine", engine.base_url, "--tokenizer", str(tiny_model), "--probe", *PATIENT)
    print(json.dumps(found, indent=1))
    bad = [f for told in found.values() for f in told if f["severity"] in {"warning", "error"}]
    assert bad == []
    assert status == 0
    assert "exact" in found["probe.exact"][0]["seen"]
    assert "predicted 0," not in found["probe.exact"][0]["seen"]
    assert "5 x sliding_window/32 w64" in found["cache.groups"][0]["seen"]
    assert found["cache.scheme"][0]["seen"].startswith("sha256")
    assert found["tokens.parity"][0]["severity"] == "ok"
    assert found["cache.prefix_caching"][0]["severity"] == "ok"
    assert "vLLM 0." in found["http.version"][0]["seen"]


def test_replay_and_http_given_for_one_another(engine: VllmEngine) -> None:
    http = engine.base_url.replace("http", "tcp")
    status, found = doctor("--engine", f"{engine.base_url},events={engine.replay},replay={http}")
    assert status == 1
    assert "swap events= and replay=" in found["events.reach"][0]["remedy"]
    assert found["events.replay"][0]["severity"] == "error"


def test_a_tokenizer_of_another_model(engine: VllmEngine) -> None:
    demo = ROOT / "publisher" / "assets" / "demo_tokenizer"
    status, found = doctor("--engine", engine.base_url, "--tokenizer", str(demo))
    assert status == 1
    assert any(f["severity"] == "error" for f in found["tokens.parity"])
