"""The router's hit rules against vLLM's own scheduler: thousands of random prompts, every hit must be equal.

The driver records what the real KV cache manager answers, for many group mixes; ``kvatlas verify`` then
feeds the recorded events to the code that serves and predicts each hit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.vllm.forked import driven

pytestmark = pytest.mark.vllm

RECORD_DEADLINE_S = 600
SEEDS = (0, 1)
PROBES_MIN = 10_000
FAMILIES_MIN = 45


def verify(path: Path) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Exit status of ``kvatlas verify --json``, its line per trace, and its total."""
    done = subprocess.run(
        [sys.executable, "-m", "kvatlas", "verify", "--json", str(path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, f"verify said nothing (status {done.returncode}):\n{done.stderr[-4000:]}"
    return done.returncode, lines[:-1], lines[-1]["total"]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_predicted_hit_equals_the_schedulers(
    vllm_python: str, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    words = ("tests.vllm.record_traces", "--model", str(tiny_model), "--out", str(tmp_path))
    driven(vllm_python, *words, "--seed", str(seed), timeout=RECORD_DEADLINE_S)
    status, traces, total = verify(tmp_path)
    wrong = [trace for trace in traces if trace["exact"] != trace["probes"]]
    assert not wrong, f"seed {seed}: " + "\n".join(json.dumps(trace) for trace in wrong)
    assert status == 0
    assert len(traces) >= FAMILIES_MIN, "the driver left families out"
    assert total["probes"] >= PROBES_MIN / len(SEEDS), "too few probes to say anything"
    hits = [trace for trace in traces if trace["truth_tokens"] > 0]
    assert len(hits) == len(traces), "a family without any hit shows nothing"
