"""The policy on a tiny fleet of true block pools: what it must gain, and what it must not do to queues."""

from __future__ import annotations

import pytest

from router.policy.base import PolicySettings
from router.policy.choose import within_bound
from tests.policy.fleet import RATE, Fleet, Outcome, Request, agents

KNOBS = PolicySettings()
SEED = 2


@pytest.fixture(scope="module")
def trace() -> list[Request]:
    return agents(SEED, count=400)


def run(arm: str, trace: list[Request]) -> Outcome:
    return Fleet(arm, engines=4, num_blocks=1600, knobs=KNOBS).run(trace)


@pytest.fixture(scope="module")
def outcomes(trace: list[Request]) -> dict[str, Outcome]:
    return {arm: run(arm, trace) for arm in ("kvatlas", "exact", "least-load", "round-robin")}


def test_every_request_is_served_once(outcomes: dict[str, Outcome], trace: list[Request]) -> None:
    for outcome in outcomes.values():
        assert outcome.requests == len(outcome.waits_s) == len(trace)
        assert outcome.prompt_tokens == sum(len(request.prompt) for request in trace)


def test_the_default_hits_at_least_as_much_as_exact_and_more_than_load_alone(
    outcomes: dict[str, Outcome],
) -> None:
    best = outcomes["kvatlas"].hit_tokens
    assert best >= outcomes["exact"].hit_tokens
    assert best > 1.15 * outcomes["least-load"].hit_tokens
    assert best > 1.15 * outcomes["round-robin"].hit_tokens


def test_no_request_waits_for_a_cache_longer_than_it_saves(outcomes: dict[str, Outcome]) -> None:
    choices = outcomes["kvatlas"].choices
    for choice in choices:
        least = min(choice.costs, key=lambda c: (c.queue_s, c.total_s))
        assert within_bound(choice.cost, least, KNOBS)
    assert {choice.engine_id for choice in choices} == {f"engine-{i}" for i in range(4)}


def test_queues_stay_together_within_the_bound(outcomes: dict[str, Outcome], trace: list[Request]) -> None:
    """The bound for one prompt's saving plus one prompt's prefill; 10 % for the error of learned rates."""
    longest = max(len(request.prompt) for request in trace) * RATE
    bound = max(KNOBS.queue_gap_s, KNOBS.saving_factor * longest) + longest
    assert all(max(queues) - min(queues) <= 1.1 * bound for queues in outcomes["kvatlas"].queues)


def test_a_run_repeats_itself(trace: list[Request], outcomes: dict[str, Outcome]) -> None:
    again = run("kvatlas", trace)
    assert [c.engine_id for c in again.choices] == [c.engine_id for c in outcomes["kvatlas"].choices]
