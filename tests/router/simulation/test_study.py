"""Studies: plans, speeds, and the same numbers however many processes run them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvatlas.router.simulation.cache_layouts import ModelError, check_units, groups_of, pool_blocks
from kvatlas.router.simulation.outcome import result_of
from kvatlas.router.simulation.report import _title
from kvatlas.router.simulation.requests import Request, WorkloadError
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.study import (
    Job,
    Plan,
    check_layout,
    round_robin,
    run_all,
    run_one,
    run_plan,
    speed_for,
)
from kvatlas.router.simulation.variants import variants_of
from kvatlas.router.simulation.workload import WorkloadSource
from tests.router.simulation.support import FAST, HYBRID, line, request, write_lines

WORKLOADS = WorkloadSource(name="tenants", requests_max=60).draws(range(2))
SETUP = FleetSetup(groups=HYBRID, num_blocks=700, engines=3, timing=FAST)
PLAN = Plan(setup=SETUP, variants=variants_of(["kvatlas", "least-load"]), retentions=(0, 1024), load=0.7)


def numbers(processes: int) -> tuple[list[object], list[float], int]:
    placed: list[int] = []
    study = run_plan(PLAN, WORKLOADS, processes=processes, placed=placed.append)
    return [(r.variant, r.retention, r.outcomes) for r in study.reports], study.speeds, sum(placed)


@pytest.mark.long
def test_two_processes_find_what_one_finds() -> None:
    one, speeds, placed = numbers(1)
    assert placed == PLAN.num_runs(2) * 60
    two, same_speeds, placed_by_two = numbers(2)
    assert one == two
    assert speeds == same_speeds
    assert placed_by_two <= placed


def test_reports_come_per_retention_and_variant_with_a_number_per_seed() -> None:
    study = run_plan(msgspec.structs.replace(PLAN, load=None), WORKLOADS, processes=1)
    assert [(r.variant, r.retention) for r in study.reports] == [
        ("kvatlas", 0),
        ("least-load", 0),
        ("kvatlas", 1024),
        ("least-load", 1024),
    ]
    assert all(len(report.outcomes) == 2 for report in study.reports)
    assert study.speeds == [1.0, 1.0]


def test_all_variants_get_the_requested_load() -> None:
    variants = variants_of(["round-robin"])
    requests = {0: [request(float(index), 500, 1, 10 * index) for index in range(100)]}
    plan = msgspec.structs.replace(PLAN, variants=variants, retentions=(0,), load=0.6)
    report = run_plan(plan, requests, processes=1).reports[0]
    assert report.outcomes[0].busy_share == pytest.approx(0.6, rel=0.05)


def test_slower_engines_meet_the_same_arrivals() -> None:
    plan = msgspec.structs.replace(PLAN, retentions=(0,), rate_factors=(0.5, 1.0), load=None)
    slow, _, fast, _ = run_plan(plan, {0: WORKLOADS[0]}, processes=1).reports
    assert (slow.rate_factor, fast.rate_factor) == (0.5, 1.0)
    assert slow.outcomes[0].ttft_mean_s > 1.8 * fast.outcomes[0].ttft_mean_s
    assert [_title(plan, 0, factor) for factor in (0.5, 1.0)] == ["prefill rate x 0.5", "prefill rate x 1"]


def test_the_speed_makes_round_robin_as_busy_as_asked() -> None:
    requests = [request(float(index), 500, 1, 10 * index) for index in range(100)]
    even = result_of(run_one(round_robin(SETUP), requests))
    speed = speed_for(0.6, requests, even)
    assert speed == pytest.approx(0.6 * 99 / (100 * 0.5 / 3))
    job = round_robin(SETUP)
    fast = msgspec.structs.replace(job, setup=msgspec.structs.replace(SETUP, speed=speed))
    assert result_of(run_one(fast, requests)).outcome.busy_share == pytest.approx(0.6, rel=0.05)
    together = [request(0.0, 500, 1, 10 * index) for index in range(5)]
    with pytest.raises(WorkloadError, match="--speed"):
        speed_for(0.6, together, result_of(run_one(job, together)))


def test_a_fault_in_a_worker_comes_out() -> None:
    huge = [request(float(index), 90_000, 1, 1000 * index) for index in range(2)]
    jobs = [Job(name=name, variant=variant, setup=SETUP) for name, variant in PLAN.variants.items()]
    with pytest.raises(ValueError, match="more blocks"):
        run_all(jobs, {0: huge}, processes=2)


def test_a_pool_is_a_share_of_what_the_workload_fills_once() -> None:
    requests = [request(0, 1000, 24, 0), request(1, 1000, 24, 0), request(2, 2048, 0, 100)]
    assert pool_blocks(requests, groups_of("gpt-oss-like", 16), 1, 1.0) == (2 + 4) * 512 // 16
    assert pool_blocks(requests, groups_of("gpt-oss-like", 16), 2, 1.0) == (2 + 4) * 512 // 16 // 2


def test_models_by_name_and_from_a_file(tmp_path: Path) -> None:
    assert [len(groups_of(name)) for name in ("full", "gpt-oss-like", "gemma3-like", "mamba-hybrid")] == [
        1,
        2,
        6,
        4,
    ]
    for bad, said in (
        ('{"groups": []}', "at least one"),
        ('{"groups": [{"group_idx": 0, "kind": "full_attention", "block_size": 48}]}', "block_size = 48"),
        ('{"groups": [{"group_idx": 0, "kind": "full_attention", "block_size": 0}]}', "block_size = 0"),
        ('{"group": []}', "unknown field"),
        ("{", "truncated"),
    ):
        path = tmp_path / "model.json"
        path.write_text(bad)
        with pytest.raises(ModelError, match=said):
            check_units(groups_of(str(path)), 512)
    with pytest.raises(ModelError, match="neither a file nor one of full, gpt-oss-like"):
        groups_of("gpt5")


def test_a_retention_must_suit_the_model() -> None:
    with pytest.raises(ValueError, match="no multiple of 64"):
        check_layout(HYBRID, 100)
    with pytest.raises(ValueError, match="no multiple of 64"):
        msgspec.structs.replace(PLAN, retentions=(0, 100)).check()
    PLAN.check()


def test_seeds_move_arrivals_and_nothing_else(tmp_path: Path) -> None:
    lines = [
        line(timestamp=1000 * index + 7 * (index % 3), hash_ids=[index, 100 + index]) for index in range(30)
    ]
    path = write_lines(tmp_path / "w.jsonl", *lines)
    draws = WorkloadSource(name=str(path)).draws(range(3))
    assert draws == WorkloadSource(name=str(path)).draws(range(3))

    def bodies(requests: list[Request]) -> set[object]:
        return {(one.input_tokens, one.output_tokens, one.ids) for one in requests}

    assert bodies(draws[0]) == bodies(draws[1]) == bodies(draws[2])
    assert [one.at_s for one in draws[1]] != [one.at_s for one in draws[2]]
    for requests in draws.values():
        times = [one.at_s for one in requests]
        assert times == sorted(times)


def test_seconds_are_for_generators_alone(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "w.jsonl", line())
    with pytest.raises(WorkloadError, match="--seconds is for chat"):
        WorkloadSource(name=str(path), seconds=5.0).draws([0])
    short, long = (
        WorkloadSource(name="chat", requests_max=50, seconds=s).draws([0])[0] for s in (10.0, 1000.0)
    )
    assert short[-1].at_s < long[-1].at_s
