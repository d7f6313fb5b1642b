"""Predicted times to first token before vLLM's Scheduler, in virtual time; real engines' first guess.

The table is that of ``benchmarks/known_steps.py``, by ``drive_known_steps.py``: its figures are exact and the
targets hold. ``benchmarks/known_steps_engines.py`` has those before real engines, in real time.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.known_steps import HEAD, OVERLOAD, Levels, Row, Shares, line, rows
from benchmarks.known_steps_engines import engines_of_known_steps
from tests.router.placement.test_known_steps import TARGETS
from tests.support.waiting import wait_until
from tests.vllm.forked import driven

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

DEADLINE_S = 600
LAWS = ("default", "ahead")
STATES = (
    "first 10 s",
    "light",
    "medium",
    "saturated",
    "short answers",
    "chats",
    "twice slower",
    "twice faster",
)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_virtual_time_of_vllms_scheduler_has_the_targets(vllm_python: str, tiny_model: Path) -> None:
    """And the figures of the rig's own engines, so that those of other laws and seeds are vLLM's too."""
    tables = (LAWS, STATES), (LAWS[:1], (OVERLOAD,))
    found, words = list[Row](), ("tests.vllm.drive_known_steps", "--model", str(tiny_model), "--laws")
    for laws, states in tables:
        told = (*words, *laws, "--states", *states)
        lines = driven(vllm_python, *told, timeout=DEADLINE_S, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
        found += [_row(*json.loads(line)) for line in lines if line.startswith("[")]
    print("", HEAD, *map(line, found), sep="\n")
    own = chain.from_iterable(rows(laws, states, seeds=1) for laws, states in tables)
    for mine, theirs in zip(own, found, strict=True):
        assert mine[:2] == theirs[:2]
        assert tuple(theirs.found) == pytest.approx(tuple(mine.found)), theirs
        if isinstance(theirs.found, Levels):
            assert theirs.found.met >= 0.94, theirs  # an exact twin's predictions have 0.94
            assert theirs.found.missed >= 0.8, theirs
        else:
            least = TARGETS[theirs.state]
            assert theirs.found.within_10 >= least[0], theirs
            assert theirs.found.within_25 >= least[1], theirs


def _row(law: str, state: str, found: list[float]) -> Row:
    values = Levels(*found) if state == OVERLOAD else Shares(*found)  # type: ignore[arg-type]
    return Row(law, state, values)


def test_the_probe_of_real_engines_is_the_first_guess(
    vllm_python: str, tiny_model: Path, tmp_path: Path
) -> None:
    with engines_of_known_steps(vllm_python, tiny_model, tmp_path) as rig:
        wait_until(lambda: all(one["probe"] for one in rig.router.engines()), "the probes")
        assert all(one["first_tokens"]["guessed"] for one in rig.router.engines())
        answers = rig.drive("first", clients=2, each=2, tokens=(100, 480), pause_s=0.0)
    assert len(answers) == 4
    assert all(one.predicted_s > 0 for one in answers)
