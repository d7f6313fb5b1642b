"""Each request of a recorded-like load goes where it went before, with the hit that was predicted there.

A change that moves a choice on purpose names the moved ones, and writes the digests again:
``python -m benchmarks.choices --tree CHECKOUT`` shows what differs from another checkout, ``--write`` writes.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.choices import COMPARED, DIGESTS, LOADS, SCENES, choices, digest
from benchmarks.layouts import LAYOUTS
from tests.support.examples import some

KNOWN = json.loads(DIGESTS.read_text())


def test_every_run_has_a_digest() -> None:
    assert sorted(KNOWN) == sorted(COMPARED)


def test_each_two_of_load_layout_and_scene_meet() -> None:
    runs = [run.split() for run in COMPARED]
    assert len({(load, layout) for load, layout, _ in runs}) == len(LOADS) * len(LAYOUTS)
    assert len({(load, scene) for load, _, scene in runs}) == len(LOADS) * len(SCENES)
    assert len({(layout, scene) for _, layout, scene in runs}) == len(LAYOUTS) * len(SCENES)


@pytest.mark.parametrize("run", some(COMPARED, 5))
def test_choices_are_those_of_the_revision_before(run: str) -> None:
    load, layout, scene = run.split()
    assert digest(choices(load, layout, SCENES[scene])) == KNOWN[run]
