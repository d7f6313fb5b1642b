"""Plans: a seed is always the same plan, a plan survives its file, and what fails is cut down to what it
needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvatlas.publisher.simulator.api_protocol import EngineError
from kvatlas.publisher.simulator.model import EngineModel
from tests.world import command, kinds
from tests.world.plan import ClientRequest, Fault, Plan, read, write
from tests.world.shrink import shrink
from tests.world.test_oracles import around, failing


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_a_plan_is_that_of_its_seed_and_its_file_is_the_same_plan(kind: str) -> None:
    for seed in range(5):
        plan = kinds.draw(seed, kind)
        assert plan == kinds.draw(seed, kind)
        assert plan.kind == kind
        again = read(write(plan))
        assert write(again) == write(plan)
        assert again.requests == plan.requests
        assert again.faults == plan.faults


def test_a_rollout_is_in_plans_of_its_own_only() -> None:
    """It stops and begins each engine, which other faults may have stopped."""
    drawn = {fault.kind for seed in range(300) for fault in kinds.draw(seed).faults}
    assert {"die", "drain", "redis_stop"} <= drawn
    assert "rollout" not in drawn


def test_seeds_take_turns_through_all_kinds() -> None:
    count = len(kinds.KINDS)
    assert {kinds.draw(seed).kind for seed in range(count)} == set(kinds.KINDS)
    counted = (kinds.draw(command._COUNTED_EVERY * number).kind for number in range(count))
    assert set(counted) == set(kinds.KINDS), "calls of a turn are counted in all of them"


def test_the_page_has_all_kinds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "worlds.md").read_text()
    table = page.partition("| kind | what |\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == set(kinds.KINDS)


def test_shrinking_leaves_what_the_failure_needs() -> None:
    plan = Plan(
        seed=1,
        requests=tuple(ClientRequest(at_s=float(n)) for n in range(40)),
        faults=tuple(Fault(at_s=float(n), kind="die") for n in range(8)),
    )

    def fails(trial: Plan) -> bool:
        times = {one.at_s for one in trial.requests}
        return {7.0, 31.0} <= times and any(one.at_s == 5.0 for one in trial.faults)

    least = shrink(plan, fails)
    assert [one.at_s for one in least.requests] == [7.0, 31.0]
    assert [one.at_s for one in least.faults] == [5.0]


def test_shrinking_ends_after_its_bound() -> None:
    runs = 0

    def fails(_: Plan) -> bool:
        nonlocal runs
        runs += 1
        return False

    shrink(kinds.draw(3), fails, runs_max=10)
    assert runs == 10


@pytest.mark.long
def test_a_violation_is_printed_with_its_plan_and_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--seed", "4", "--seeds", "1", "--kind", "plain", "--requests", "2", "--no-faults"]
    with monkeypatch.context() as broken:
        around(EngineModel, "_prepared", failing)(broken)
        assert command.main(options) == 1
        told = capsys.readouterr().out
        assert "seed 4 (plain)" in told
        assert "ends: " in told
        assert EngineError.__name__ not in told
        (path,) = tmp_path.glob("*.json")
        assert f"--plan {path.name} --log" in told
        assert len(read(path.read_bytes()).requests) == 1
        assert command.main(["--plan", str(path), "--no-shrink", "--log"]) == 1
    assert "  log 1" in capsys.readouterr().out
