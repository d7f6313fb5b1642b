"""The arms that the default is compared with: each does what its name says, over the same candidates."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.peers import exact
from kvatlas.router.placement.candidate import Candidate, PlacementRequest, PolicySettings
from kvatlas.router.placement.policies import POLICIES, ArmState, policy
from tests.router.placement.candidates import make_candidate

DEFAULTS = PolicySettings()


def place(
    name: str, candidates: list[Candidate], ask: PlacementRequest, state: ArmState | None = None
) -> str:
    return policy(name)(candidates, ask, DEFAULTS, state or ArmState()).engine_id


def test_the_names_are_those_documented() -> None:
    assert set(POLICIES) == {"kvatlas", "least-load", "round-robin", "hash"}
    with pytest.raises(ValueError, match=r"unknown policy 'best'; known: kvatlas, "):
        policy("best")


@pytest.mark.parametrize("name", POLICIES)
def test_every_arm_needs_a_candidate_and_explains_itself(name: str) -> None:
    with pytest.raises(ValueError, match="no engine"):
        policy(name)([], PlacementRequest(10), DEFAULTS, ArmState())
    engines = [make_candidate(f"e{i}", hit_tokens=i) for i in range(3)]
    choice = policy(name)(engines, PlacementRequest(10), DEFAULTS, ArmState())
    assert [c.engine_id for c in choice.costs] == ["e0", "e1", "e2"]
    assert choice.costs[choice.index].engine_id == choice.engine_id
    assert 1 <= choice.uncached_tokens <= 10


def test_where_the_arms_differ() -> None:
    """One engine holds a shared prefix, one an exact hit, one nothing but the shortest queue."""
    engines = [
        make_candidate("shared_prefix", shared_prefix_tokens=7000, queue_s=0.2),
        make_candidate("hit", hit_tokens=1500, shared_prefix_tokens=1500, queue_s=0.2),
        make_candidate("free", queue_s=0.1),
    ]
    ask = PlacementRequest(8000)
    assert place("kvatlas", engines, ask) == "shared_prefix"
    assert exact(engines, ask, DEFAULTS, ArmState()).engine_id == "hit"
    assert place("least-load", engines, ask) == "free"


def test_the_exact_arm_of_benchmarks_does_not_see_prompts_in_flight() -> None:
    engines = [
        make_candidate("soon", coming_tokens=7000, shared_prefix_tokens=7000, queue_s=0.2),
        make_candidate("free", queue_s=0.0),
    ]
    ask = PlacementRequest(8000)
    assert place("kvatlas", engines, ask) == "soon"
    assert policy("kvatlas")(engines, ask, DEFAULTS, ArmState()).uncached_tokens == 1000
    assert exact(engines, ask, DEFAULTS, ArmState()).engine_id == "free"


def test_round_robin_takes_turns_and_keeps_them_in_its_state() -> None:
    engines, state = [make_candidate(f"e{i}") for i in range(3)], ArmState()
    assert [place("round-robin", engines, PlacementRequest(10), state) for _ in range(4)] == [
        "e0",
        "e1",
        "e2",
        "e0",
    ]
    assert place("round-robin", engines, PlacementRequest(10), ArmState()) == "e0"


def test_least_load_spreads_over_equals_by_the_prompt() -> None:
    engines = [make_candidate(f"e{i}") for i in range(4)]
    assert {place("least-load", engines, PlacementRequest(10, prompt_key=key)) for key in range(40)} == {
        "e0",
        "e1",
        "e2",
        "e3",
    }
    assert len({place("least-load", engines, PlacementRequest(10, prompt_key=7)) for _ in range(5)}) == 1


def test_hash_follows_the_prefix_until_its_engine_is_full() -> None:
    engines = [make_candidate(f"e{i}", running=2) for i in range(4)]
    homes = Counter(
        place("hash", engines, PlacementRequest(100, prompt_key=i, prefix_key=7)) for i in range(20)
    )
    assert len(homes) == 1
    (home,) = homes
    full = [make_candidate(e.engine_id, running=5 if e.engine_id == home else 2) for e in engines]
    assert place("hash", full, PlacementRequest(100, prefix_key=7)) != home
    spread = {place("hash", engines, PlacementRequest(100, prefix_key=key)) for key in range(40)}
    assert len(spread) == 4
