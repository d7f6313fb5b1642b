"""Each request of a recorded-like load goes where it went before, with the hit that was predicted there.

A change that moves a choice on purpose names the moved ones, and writes the digests again:
``python -m benchmarks.choices --tree CHECKOUT`` shows what differs from another checkout, ``--write`` writes.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.choices import DIGESTS, LOADS, SCENES, choices, digest
from benchmarks.layouts import LAYOUTS
from tests.support.examples import some

RUNS = [f"{load} {layout} {scene}" for load in LOADS for layout in LAYOUTS for scene in SCENES]
KNOWN = json.loads(DIGESTS.read_text())


def test_every_run_has_a_digest() -> None:
    assert sorted(KNOWN) == sorted(RUNS)


@pytest.mark.parametrize("run", some(RUNS, 11))
def test_choices_are_those_of_the_revision_before(run: str) -> None:
    load, layout, scene = run.split()
    assert digest(choices(load, layout, SCENES[scene])) == KNOWN[run]
