"""Runs that vLLM's real scheduler once made, step for step, made again by our pool: every digest is equal.

``recorded_runs.json`` was written by the driver of the vLLM tests (``drive_scheduler.py --record``), which
compares the two sides as they run. A difference here says only that one exists; the driver says where.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.publisher.pool.layouts import FAMILIES
from tests.publisher.pool.pool_load import Alone, load_rng, run_load
from tests.support.examples import some

RECORD = json.loads((Path(__file__).parent / "recorded_runs.json").read_text())


def test_every_family_is_recorded() -> None:
    assert set(RECORD["digests"]) == set(FAMILIES)


@pytest.mark.parametrize("family", some(FAMILIES, 4))
def test_run_equals_vllms(family: str) -> None:
    side = Alone(FAMILIES[family], load_rng(family, RECORD["seed"]))
    run_load(side, RECORD["requests"])
    assert side.digest == RECORD["digests"][family]
