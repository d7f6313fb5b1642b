"""Defects that worlds found do not come back, and a world is the same run each time."""

from __future__ import annotations

import pytest

from tests.support.examples import some
from tests.world import kinds
from tests.world.plan import found
from tests.world.world import play

_FOUND = found()


@pytest.mark.parametrize("name", some(_FOUND, 7))  # `make world` plays them all
def test_a_found_defect_stays_mended(name: str) -> None:
    plan = _FOUND[name]
    assert plan.why
    assert play(plan).violations == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 200 + len(kinds.KINDS)))
def test_two_runs_of_a_plan_are_the_same_byte_for_byte(seed: int) -> None:
    plan = kinds.draw(seed, requests=8)
    first, second = play(plan), play(plan)
    assert first.digest == second.digest
    assert first.violations == second.violations
    assert (first.virtual_s, first.turns) == (second.virtual_s, second.turns)
