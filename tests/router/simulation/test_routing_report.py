"""The command that compares routers: halves of sessions, and what its reports say of seeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import ablations
from benchmarks.peers import PEERS
from benchmarks.routing import ARMS, Cell, Options, half_of, run_cell
from benchmarks.routing_report import Run, against, report
from kvatlas.router.simulation.requests import Follows, Request, continued
from kvatlas.router.simulation.workload import agents, chat

REQUESTS = {name: continued(draw(90, 60.0, 3)) for name, draw in (("chat", chat), ("agents", agents))}


def run(arm: str, seed: int, mean_s: float, p99_s: float = 5.0, **fields: float) -> Run:
    return Run(
        workload="chat",
        model="full",
        pool=0.25,
        load=0.85,
        seed=seed,
        arm=arm,
        requests=100,
        settings="as now",
        hit_share=0.5,
        mean_s=mean_s,
        p99_s=p99_s,
        error_tokens=0.0,
        revision="1234567",
        **fields,
    )


@pytest.mark.parametrize("name", REQUESTS)
@given(st.integers(0, 1000))
def test_halves_have_every_session_once_and_whole(name: str, split_seed: int) -> None:
    requests = REQUESTS[name]
    halves = [half_of(requests, split_seed, shown=shown) for shown in (True, False)]
    assert sum(map(len, halves)) == len(requests)
    shown, hidden = ({one.session for one in half} for half in halves)
    assert not shown & hidden
    assert 0 <= len(shown) - len(hidden) <= 1
    for half in halves:
        assert [one.at_s for one in half] == sorted(one.at_s for one in half)
        for at, one in enumerate(half):
            if one.follows is not None:
                before = half[one.follows.request]
                assert one.follows.request < at
                assert before.session == one.session


def test_another_split_seed_draws_another_half_and_the_same_one_the_same() -> None:
    requests = REQUESTS["chat"]
    first = half_of(requests, 7, shown=False)
    assert first == half_of(requests, 7, shown=False)
    assert first != half_of(requests, 8, shown=False)


def test_a_turn_after_one_of_the_other_half_begins_a_session() -> None:
    fields = {"input_tokens": 600, "output_tokens": 5, "ids": (1, 2)}
    parent = Request(at_s=0.0, session=1, **fields)
    child = Request(at_s=1.0, session=2, follows=Follows(request=0, gap_s=1.0), **fields)
    halves = [half_of([parent, child], 1, shown=shown) for shown in (True, False)]
    assert sorted((one.session, one.follows) for half in halves for one in half) == [(1, None), (2, None)]


def test_runs_of_one_half_are_not_those_of_another() -> None:
    kinds = [
        Options(9, {}),
        Options(9, {}, half="shown"),
        Options(9, {}, half="hidden"),
        Options(9, {}, half="shown", split_seed=1),
    ]
    assert (
        len({one.settings for one in [*kinds, Options(9, {}, store="400%"), Options(9, {}, gauge_s=1.0)]})
        == 6
    )


def test_p99_and_the_worst_seed_stand_beside_the_mean() -> None:
    mine = [run("kvatlas", 1, 1.0, 4.0), run("kvatlas", 2, 5.0, 9.0)]
    other = [run("llm-d", 1, 2.0, 8.0), run("llm-d", 2, 2.5, 9.0)]
    page = report([*mine, *other, run("smg", 1, 9.0), run("smg", 2, 9.0)], "as now", 100)
    assert "| full, 25% | 3.00 ±25.42 (50, 6.5, 5.00) | **2.25 ±3.18** (50, 8.5, 2.50) |" in page
    assert "| llm-d | 1.25 ±9.53, 0.75, 2.00 |" in page, "ratios of mean, p99, and worst seeds"
    assert "Worst seed above 1.5 times that router's worst: 1." in page
    assert "revision 1234567" in page
    arms = {"kvatlas": {1: mine[0]}, "llm-d": {1: other[0]}}
    found = against(arms, lambda one: one.mean_s)
    assert found is not None
    assert (found.arm, found.ratio, found.half, found.tail, found.worst) == ("llm-d", 0.5, None, 0.5, 0.5)


def test_a_part_gains_where_first_tokens_come_later_without_it_in_most_seeds() -> None:
    whole = [run("kvatlas", seed, 1.0, 2.0) for seed in (1, 2, 3)]
    spread = [run("spread", seed, mean_s, 2.0) for seed, mean_s in ((1, 1.1), (2, 1.1), (3, 0.9))]
    beta = [run("shared prefix", seed, mean_s) for seed, mean_s in ((1, 2.0), (2, 0.9), (3, 0.9))]
    page = ablations.report([*whole, *spread, *beta])
    assert "1.03, 1.00 (2 of 3)" in page
    assert "1.17, 2.50 (1 of 3)" in page
    assert "- spread: gains at least 2% in most seeds in chat, full, pool 25%, load 85%." in page
    assert "- shared prefix: gains at least 2% in most seeds in **no cell**." in page


def test_each_part_is_off_in_turn_and_every_router_is_compared() -> None:
    assert set(ARMS) == {"kvatlas", *PEERS}
    assert {*ablations.arms_of(""), *ablations.arms_of("400%")} == {"kvatlas", *ablations.ABLATIONS}
    for part, variant in ablations.ABLATIONS.items():
        whole = ablations.ABLATIONS["gauges"]
        assert variant != whole or ablations.gauge_s(part, 2.0) > 1e9, part
    assert ablations.gauge_s("spread", 2.0) == 2.0


def test_a_cell_runs_the_arms_asked_for_on_the_half_asked_for() -> None:
    asked = ["kvatlas", "gauges", "ties", "llm-d"]
    for options in (Options(20, {}, half="hidden", split_seed=5), Options(20, {}, store="400%:gbit_s=100")):
        runs = run_cell(Cell("chat", "full", 1.0, 0.85, 1), asked, options)
        assert [one.arm for one in runs] == asked
        assert {one.settings for one in runs} == {options.settings}
        assert all(one.mean_s > 0 for one in runs)
