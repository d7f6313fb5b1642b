"""The policy on a tiny fleet of true block pools: what it must gain, and what it must not do to queues."""

from __future__ import annotations

import pytest

from router.placement.candidate import PolicySettings
from router.placement.cost import within_bound
from tests.router.placement.fleet import RATE, Fleet, Outcome, Request, agents, tenants

KNOBS = PolicySettings()
ARMS = ("kvatlas", "exact", "least-load")
Runs = dict[str, list[Outcome]]


def run(arm: str, trace: list[Request]) -> Outcome:
    return Fleet(arm, engines=4, num_blocks=1600, knobs=KNOBS).run(trace)


def hits(outcomes: list[Outcome]) -> int:
    return sum(outcome.hit_tokens for outcome in outcomes)


@pytest.fixture(scope="module")
def traces() -> list[list[Request]]:
    return [agents(seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def runs(traces: list[list[Request]]) -> Runs:
    return {arm: [run(arm, trace) for trace in traces] for arm in ARMS}


def test_every_request_is_served_once(runs: Runs, traces: list[list[Request]]) -> None:
    for outcomes in runs.values():
        for outcome, trace in zip(outcomes, traces, strict=True):
            assert outcome.requests == len(outcome.waits_s) == len(trace)
            assert outcome.prompt_tokens == sum(len(request.prompt) for request in trace)


def test_the_default_hits_at_least_as_much_as_exact_and_more_than_load_alone(runs: Runs) -> None:
    """Over three seeds: one alone is decided by a few large prompts."""
    assert hits(runs["kvatlas"]) >= hits(runs["exact"])
    assert hits(runs["kvatlas"]) > 1.15 * hits(runs["least-load"])


def test_unpinned_junctions_are_what_the_credit_is_for() -> None:
    """Shared system prompts and nothing else to hit: exact sprays them, and no engine pins the junction."""
    shared = [tenants(seed) for seed in (1, 2)]
    by_arm = {arm: hits([run(arm, trace) for trace in shared]) for arm in ("kvatlas", "exact")}
    assert by_arm["kvatlas"] > 1.05 * by_arm["exact"]


def test_no_request_waits_for_a_cache_longer_than_it_saves(runs: Runs) -> None:
    for outcome in runs["kvatlas"]:
        for choice in outcome.choices:
            least = min(choice.costs, key=lambda c: (c.queue_s, c.total_s))
            assert within_bound(choice.cost, least, KNOBS)
        assert {choice.engine_id for choice in outcome.choices} == {f"engine-{i}" for i in range(4)}


def test_queues_stay_together_within_the_bound(runs: Runs, traces: list[list[Request]]) -> None:
    """One prompt's saving plus one prompt's prefill; 10 % for the error of learned rates."""
    for outcome, trace in zip(runs["kvatlas"], traces, strict=True):
        longest = max(len(request.prompt) for request in trace) * RATE
        bound = max(KNOBS.queue_gap_s, KNOBS.saving_factor * longest) + longest
        assert all(max(queues) - min(queues) <= 1.1 * bound for queues in outcome.queues)


def test_a_run_repeats_itself(runs: Runs, traces: list[list[Request]]) -> None:
    again = run("kvatlas", traces[0])
    assert [c.engine_id for c in again.choices] == [c.engine_id for c in runs["kvatlas"][0].choices]
