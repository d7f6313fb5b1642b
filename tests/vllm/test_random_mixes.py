"""Random engines under random traffic: index, block pool and connectors' resolver against vLLM's scheduler.

``make test-random`` draws as many new mixes as wanted (``MIXES=2000``), ``SEED=...`` the same ones again; a
failure names the seed and how to run one mix again. ``make test-vllm`` has those of one seed. Of vLLM 0.33,
which has no CPU build, it is the Python of its release that runs (``scripts/vllm_overlay_env.sh``).
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.forked import driven

pytestmark = pytest.mark.vllm

MIXES = int(os.environ.get("KVATLAS_RANDOM_MIXES") or 24)
SEED = os.environ.get("KVATLAS_RANDOM_SEED") or secrets.token_hex(3)
NEXT = os.environ.get("KVATLAS_VLLM_NEXT") or "0.33"
"""Release that ``KVATLAS_VLLM_033_PYTHON`` has; ``make canary`` tries later ones."""
START_S, MIX_S = 900, 20
"""Deadlines: of vLLM's import, and of one mix on a busy machine."""


def drive(python: str, model: Path, out: Path) -> list[dict[str, Any]]:
    """One line per mix and the total."""
    print(f"seed {SEED}")  # shown if the driver fails
    words = ("tests.vllm.drive_random", "--model", str(model), "--out", str(out), "--seed", SEED)
    timeout_s = START_S + MIX_S * MIXES
    lines = driven(python, *words, "--mixes", str(MIXES), timeout=timeout_s, VLLM_TARGET_DEVICE="cpu")
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.timeout(START_S + MIX_S * MIXES + 60)
@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_every_mix_is_exact(vllm_python: str, tiny_model: Path, tmp_path: Path, version: str) -> None:
    python = vllm_python if version == "0.32" else os.environ.get("KVATLAS_VLLM_033_PYTHON", "")
    if not python:
        pytest.skip("KVATLAS_VLLM_033_PYTHON names no interpreter with vLLM 0.33; make test-vllm sets it")
    *mixes, last = drive(python, tiny_model, tmp_path)
    print(f"seed {SEED}: {last}")
    assert last["vllm"].startswith(version if version == "0.32" else NEXT)
    wrong = [mix for mix in mixes if mix["difference"] is not None]
    again = f"python -m tests.vllm.drive_random --model {tiny_model} --mix NAME; traces are in {tmp_path}"
    assert not wrong, f"seed {SEED} ({again}):\n" + "\n".join(json.dumps(mix) for mix in wrong)
    assert len(mixes) == MIXES, "the driver left mixes out"
    assert last["total"]["probes"] > 20 * MIXES
    assert last["total"]["hit_tokens"] > 500 * MIXES, "hits too few to say anything"
    live = last["total"]["live_exact"] / last["total"]["probes"]
    assert live > 0.9, "predictions come late: groups and schemes are learned from the first requests"
