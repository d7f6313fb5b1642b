"""The policy on simulated fleets of block pools: what it must gain, and what it must not do to queues."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from benchmarks.peers import COMPARED
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.placement.candidate import Candidate, PlacementRequest, PolicySettings
from kvatlas.router.placement.cost import Choice
from kvatlas.router.placement.policies import ArmState, policy
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.outcome import FleetRun
from kvatlas.router.simulation.requests import Request, continued
from kvatlas.router.simulation.setup import FleetSetup, Timing
from kvatlas.router.simulation.workload import agents, tenants
from tests.support.examples import examples

KNOBS = PolicySettings()
SETUP = FleetSetup(
    groups=(GroupSpec(0, "full_attention", 64), GroupSpec(1, "sliding_window", 64, sliding_window=128)),
    num_blocks=3200,
    engines=4,
    timing=Timing(decode_s=0.002),
    learn_rates=True,
    policy=KNOBS,
)
COUNT, SECONDS = 300, 60.0
SEEDS = examples(3)


class Outcome(msgspec.Struct):
    """A run, and every choice that the policy made in it."""

    run: FleetRun
    choices: list[Choice]


def simulated(variant: str, requests: Sequence[Request]) -> Outcome:
    choices: list[Choice] = []

    known = COMPARED[variant]
    decide = policy(known.policy) if isinstance(known.policy, str) else known.policy

    def recorded(
        candidates: Sequence[Candidate], prompt: PlacementRequest, knobs: PolicySettings, state: ArmState
    ) -> Choice:
        choices.append(decide(candidates, prompt, knobs, state))
        return choices[-1]

    sim = FleetSim(SETUP, msgspec.structs.replace(known, policy=recorded))
    return Outcome(sim.run(requests), choices)


def hits(outcomes: list[Outcome]) -> int:
    return sum(row.hit for outcome in outcomes for row in outcome.run.rows)


@pytest.fixture(scope="module")
def workloads() -> list[list[Request]]:
    return [continued(agents(COUNT, SECONDS, seed)) for seed in range(1, 1 + SEEDS)]


@pytest.fixture(scope="module")
def runs(workloads: list[list[Request]]) -> dict[str, list[Outcome]]:
    return {
        variant: [simulated(variant, one) for one in workloads]
        for variant in ("kvatlas", "exact", "least-load")
    }


def test_every_request_is_served_once(runs: dict[str, list[Outcome]], workloads: list[list[Request]]) -> None:
    for outcomes in runs.values():
        for outcome, requests in zip(outcomes, workloads, strict=True):
            assert len(outcome.run.rows) == len(outcome.choices) == len(requests)
            assert all(row.ttft_s > 0 for row in outcome.run.rows)


@pytest.mark.long
def test_the_default_hits_at_least_as_much_as_exact_and_more_than_load_alone(
    runs: dict[str, list[Outcome]],
) -> None:
    """Over three seeds: one alone is decided by a few large prompts."""
    assert hits(runs["kvatlas"]) >= hits(runs["exact"])
    assert hits(runs["kvatlas"]) > 1.15 * hits(runs["least-load"])


def test_unpinned_junctions_are_what_the_credit_is_for() -> None:
    """Shared system prompts and little else to hit: exact sprays them, and no engine pins the junction."""
    shared = [continued(tenants(COUNT, SECONDS, seed, tenants_num=40)) for seed in (1, 2)]
    by_variant = {
        variant: hits([simulated(variant, one) for one in shared]) for variant in ("kvatlas", "exact")
    }
    assert by_variant["kvatlas"] > 1.05 * by_variant["exact"]


def test_every_engine_gets_requests(runs: dict[str, list[Outcome]]) -> None:
    for outcome in runs["kvatlas"]:
        assert {choice.index for choice in outcome.choices} == set(range(SETUP.engines))


def test_queues_stay_together(runs: dict[str, list[Outcome]], workloads: list[list[Request]]) -> None:
    """Within two prompts' prefill; 10 % for the error of learned rates."""
    rate = SETUP.timing.prefill_s_per_token
    for outcome, requests in zip(runs["kvatlas"], workloads, strict=True):
        longest = max(request.input_tokens for request in requests) * rate
        for choice in outcome.choices:
            queues = [cost.queue_s for cost in choice.costs]
            queues[choice.index] += choice.uncached_tokens * rate
            assert max(queues) - min(queues) <= 1.1 * 2 * longest


def test_a_run_repeats_itself(runs: dict[str, list[Outcome]], workloads: list[list[Request]]) -> None:
    assert simulated("kvatlas", workloads[0]).run.rows == runs["kvatlas"][0].run.rows
