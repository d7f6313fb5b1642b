"""A fleet behind a variant: the same seed the same rows, and variants that do what their name says."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from benchmarks.peers import COMPARED
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.requests import continued
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.variants import VARIANTS
from kvatlas.router.simulation.workload import agents, chat
from tests.router.simulation.support import FAST, HYBRID, fleet_run, request
from tests.support.examples import some

REQUESTS = continued(agents(120, 120.0, 3))
SETUP = {"num_blocks": 900, "timing": FAST}


@pytest.mark.parametrize("variant", some(COMPARED, 3))
def test_the_same_seed_gives_the_same_rows_and_every_request_one(variant: str) -> None:
    run = fleet_run(REQUESTS, variant, **SETUP)
    again = fleet_run(REQUESTS, variant, **SETUP)
    assert run.rows == again.rows
    assert run.busy_s == again.busy_s
    assert [row.index for row in run.rows] == list(range(len(REQUESTS)))
    for row, one in zip(run.rows, REQUESTS, strict=True):
        assert row.prompt_tokens == one.input_tokens
        assert 0 <= row.hit < row.prompt_tokens
        assert row.ttft_s > 0 or row.ttft_s == -1
        assert 0 <= row.engine < 3
    if COMPARED[variant].view == "blind" and COMPARED[variant].other is None:
        assert {row.predicted for row in run.rows} == {0}


def test_another_seed_gives_other_choices_where_chance_decides() -> None:
    runs = [fleet_run(REQUESTS, "dynamo", seed=seed, **SETUP) for seed in (1, 2)]
    assert [row.engine for row in runs[0].rows] != [row.engine for row in runs[1].rows]


def test_round_robin_goes_in_turn() -> None:
    run = fleet_run([request(index, 100, 1, 10 * index) for index in range(9)], "round-robin")
    assert [row.engine for row in run.rows] == [0, 1, 2] * 3


def test_sessions_stay_together_when_hashed() -> None:
    requests = [request(10.0 * index, 600, 1, 100 * (index % 4), session=index % 4) for index in range(20)]
    run = fleet_run(requests, "session-hash")
    homes = Counter((one.session, row.engine) for one, row in zip(requests, run.rows, strict=True))
    assert len(homes) == 4


def test_an_exact_variant_predicts_the_hits_of_an_idle_fleet() -> None:
    requests = [request(30.0 * index, 1500, 3, 100 * (index % 3)) for index in range(12)]
    run = fleet_run(requests, "exact")
    assert all(row.predicted == row.hit for row in run.rows)
    assert sum(row.hit > 0 for row in run.rows) == 9, "every repeat hits"


FULL, STATES = GroupSpec(0, "full_attention", 64), GroupSpec(1, "mamba", 128, mamba_cache_mode="align")


@pytest.mark.parametrize("behind", [1000, 1536, 1537, 1600])
@pytest.mark.parametrize(
    "groups",
    [
        (FULL,),
        HYBRID,
        (FULL, GroupSpec(1, "sliding_window", 64, sliding_window=2000)),
        tuple(msgspec.structs.replace(group, is_eagle=True) for group in HYBRID),
        (FULL, STATES),
        (msgspec.structs.replace(FULL, is_eagle=True), msgspec.structs.replace(STATES, block_size=64)),
    ],
)
def test_a_prompt_behind_one_in_flight_hits_what_the_router_predicts(
    groups: tuple[GroupSpec, ...], behind: int
) -> None:
    requests = [request(0.0, 1536, 1, 0), request(0.01, behind, 1, 0)]
    # A state is stored at the end of its step: a prompt in the same step as the one in flight misses it.
    alone = groups[-1].mamba_cache_mode is not None
    timing = msgspec.structs.replace(FAST, seqs_max=1 if alone else FAST.seqs_max)
    run = fleet_run(requests, engines=1, groups=groups, timing=timing)
    assert [row.predicted for row in run.rows] == [row.hit for row in run.rows]


def test_arrivals_come_faster_at_a_higher_speed() -> None:
    requests = [request(float(index), 100, 1, 10 * index) for index in range(5)]
    assert [row.arrived_s for row in fleet_run(requests, speed=4.0).rows] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_prompts_that_fit_nowhere_are_reported_and_the_rest_continues() -> None:
    run = fleet_run([request(0, 9000, 1, 1), request(1, 300, 1, 100)], num_blocks=64)
    assert [row.ttft_s < 0 for row in run.rows] == [True, False]


def test_progress_adds_up_to_the_requests() -> None:
    told: list[int] = []
    requests = continued(chat(600, 60.0, 1))
    setup = FleetSetup(groups=HYBRID, num_blocks=900, engines=3)
    FleetSim(setup, VARIANTS["least-load"]).run(requests, told.append)
    assert sum(told) == 600
    assert len(told) > 1


def test_short_prompts_pass_long_ones_where_engines_are_given_an_order() -> None:
    long = [request(0.01 * index, 3000, 1, 100 * index) for index in range(3)]
    short = [request(0.1 + 0.01 * index, 200, 1, 1000 + 100 * index) for index in range(3)]
    plain, ordered = (
        fleet_run(long + short, variant, engines=1).rows for variant in ("kvatlas", "kvatlas:priority=2")
    )
    assert [row.ttft_s > 9 for row in plain] == [False, False, True, True, True, True]
    assert max(row.ttft_s for row in ordered[3:]) < 4
    assert ordered[0].ttft_s == plain[0].ttft_s


def test_a_target_for_the_wait_refuses_by_the_wait_and_not_by_the_prompt() -> None:
    long = [request(0.0, 3000, 1, 0)]
    later = [request(0.1, 100, 1, 100), request(2.5, 2900, 1, 200)]
    rows = fleet_run(long + later, "kvatlas:admit=1", engines=1).rows
    assert [row.ttft_s >= 0 for row in rows] == [True, False, True]


def test_a_target_for_the_first_token_skips_engines_that_would_miss_it() -> None:
    prompt = request(0.0, 2000, 1, 0)
    queued = request(0.01, 1900, 1, 5000)
    again = request(0.05, 2000, 1, 0)
    plain, aimed = (
        fleet_run([prompt, queued, again], variant, engines=2).rows
        for variant in ("kvatlas", "kvatlas:slo=3")
    )
    assert plain[2].engine == plain[0].engine, "its prefix is in flight there"
    assert aimed[2].engine == plain[2].engine, "no engine makes it, so the cost decides"


def test_a_target_refuses_only_by_the_wait_and_only_where_that_is_set() -> None:
    long = [request(0.0, 3000, 1, 0)]
    later = [request(0.1, 100, 1, 100), request(2.5, 2900, 1, 200)]
    served = {
        variant: [row.ttft_s >= 0 for row in fleet_run(long + later, variant, engines=1).rows]
        for variant in ("kvatlas:slo=1", "kvatlas:slo=1+refuse=1", "kvatlas:slo=1+refuse=2")
    }
    assert served == {
        "kvatlas:slo=1": [True, True, True],
        "kvatlas:slo=1+refuse=1": [True, False, True],
        "kvatlas:slo=1+refuse=2": [True, False, False],  # the last one waits, and is too long for its target
    }


@pytest.mark.parametrize("pool", [60, 70])
def test_a_crowded_fleet_forecasts_evictions_as_the_router_does(pool: int) -> None:
    # Prompts of 33 blocks share 16 of them with earlier ones, and wait for pages.
    requests = [
        msgspec.structs.replace(
            request(0.3 * index, 2000, 80, 0),
            ids=(7 * (index % 5), 7 * (index % 5) + 1, *range(1000 + 9 * index, 1003 + 9 * index)),
        )
        for index in range(60)
    ]
    setup = FleetSetup(groups=(FULL,), num_blocks=pool, engines=2, timing=FAST)
    over = {}
    for evictions in (False, True):
        variant = msgspec.structs.replace(VARIANTS["kvatlas"], evictions=evictions)
        sim = FleetSim(setup, variant)
        rows = sim.run(requests).rows
        over[evictions] = sum(row.predicted > row.hit for row in rows)
        for engine in sim._fleet:
            assert not engine.evictions.check_integrity()
            assert not engine.evictions._prompts, "every one has ended"
    assert over[False] >= 5
    assert over[True] < over[False] / 3
