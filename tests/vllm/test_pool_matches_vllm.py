"""Our block pool against vLLM's own scheduler and KV cache manager: same requests, equal in every step.

The driver runs under vLLM's interpreter and compares schedules, hits, event payloads byte for byte and the
order of free blocks, over every group mix, retention and pool size it knows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.vllm.forked import driven

pytestmark = pytest.mark.vllm

DRIVE_DEADLINE_S = 900
REQUESTS = 20
FAMILIES_MIN = 190


@pytest.mark.timeout(DRIVE_DEADLINE_S + 60)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_step_equals_the_real_schedulers(vllm_python: str, tiny_model: Path, seed: int) -> None:
    words = ("tests.vllm.drive_scheduler", "--model", str(tiny_model), "--requests", str(REQUESTS))
    lines = driven(vllm_python, *words, "--seed", str(seed), timeout=DRIVE_DEADLINE_S)
    families = [json.loads(line) for line in lines if line.startswith("{")]
    assert not [family for family in families if family["difference"] is not None]
    assert len(families) >= FAMILIES_MIN, "the driver left families out"
    total = {
        name: sum(family[name] for family in families) for name in ("probes", "hit_tokens", "preemptions")
    }
    assert total["probes"] > 5_000
    assert total["hit_tokens"] > 100_000, "hits too few to say anything"
    assert total["preemptions"] > 50, "no pool was tight enough to preempt"
