"""Our block pool against vLLM's own scheduler and KV cache manager: same requests, equal in every step.

The driver runs under vLLM's interpreter and compares schedules, hits, event payloads byte for byte and the
order of free blocks, over every group mix, retention and pool size it knows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.vllm.forked import run

pytestmark = pytest.mark.vllm

DRIVE_DEADLINE_S = 900
REQUESTS = 20
FAMILIES_MIN = 190


def drive(python: str, model: Path, seed: int) -> list[dict[str, Any]]:
    """One line per family; the driver's own error is in the assertion if it fails."""
    words = [
        "tests.vllm.drive_scheduler",
        "--model", str(model), "--seed", str(seed), "--requests", str(REQUESTS),
    ]  # fmt: skip
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = run(python, words, cwd=ROOT, env=environment, timeout=DRIVE_DEADLINE_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.timeout(DRIVE_DEADLINE_S + 60)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_step_equals_the_real_schedulers(vllm_python: str, tiny_model: Path, seed: int) -> None:
    families = drive(vllm_python, tiny_model, seed)
    assert not [family for family in families if family["difference"] is not None]
    assert len(families) >= FAMILIES_MIN, "the driver left families out"
    total = {
        name: sum(family[name] for family in families) for name in ("probes", "hit_tokens", "preemptions")
    }
    assert total["probes"] > 5_000
    assert total["hit_tokens"] > 100_000, "hits too few to say anything"
    assert total["preemptions"] > 50, "no pool was tight enough to preempt"
