"""Look-ups: what is remembered, for how long, and what makes it be forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("numpy", reason="needs numpy")

from kvatlas.connectors.scheduler.hit_cache import REST, Lookups
from kvatlas.connectors.tier.base import block_key
from kvatlas.connectors.transfer.base import Counts
from tests.connectors.offload.model_engine import BLOCK, ModelRequest, ModelResolver

COST_S = 0.5


class CountingTier:
    """Holds ``keys``; each question takes ``COST_S`` on the clock. ``keys`` None: it does not know."""

    def __init__(self) -> None:
        self.keys: frozenset[bytes] | None = frozenset()
        self.asked = 0
        self.now = 100.0

    def held(self, request_id: str, keys: Sequence[bytes]) -> frozenset[bytes] | None:
        self.asked += 1
        self.now += COST_S
        return None if self.keys is None else self.keys & frozenset(keys)


class Fixture:
    def __init__(self) -> None:
        self.tier = CountingTier()
        self.counters = Counts()
        self.lookups = Lookups(
            ModelResolver(),  # type: ignore[arg-type]
            self.tier,  # type: ignore[arg-type]
            self.counters,
            deadline_s=10,
            clock=lambda: self.tier.now,
        )
        tokens = list(range(4 * BLOCK + 1))
        self.request = ModelRequest("r", tokens, len(tokens), 1)
        self.keys = [block_key(h, g) for h in self.request.block_hashes for g in (0, 1)]

    def hit(self) -> int | None:
        return self.lookups.hit(self.request, 0)


@pytest.fixture
def fixture() -> Any:
    return Fixture()


def test_an_answer_is_used_for_a_while_and_then_grows(fixture: Fixture) -> None:
    tier = fixture.tier
    assert fixture.hit() == 0
    tier.keys = frozenset(fixture.keys)
    assert fixture.hit() == 0
    assert tier.asked == 1
    tier.now += REST * COST_S
    assert fixture.hit() == 4 * BLOCK
    assert tier.asked == 2


def test_an_answer_is_forgotten_when_one_of_its_blocks_is_removed(fixture: Fixture) -> None:
    tier = fixture.tier
    tier.keys = frozenset(fixture.keys)
    assert fixture.hit() == 4 * BLOCK
    tier.now += REST * COST_S
    assert fixture.hit() == 4 * BLOCK
    asked = tier.asked
    fixture.lookups.removed(frozenset([b"another", fixture.keys[1]]))  # a window block far below the hit
    assert fixture.hit() == 4 * BLOCK
    assert tier.asked == asked
    last = fixture.keys[-2]
    tier.keys -= {last}
    fixture.lookups.removed(frozenset([last]))
    assert fixture.hit() == 3 * BLOCK
    assert tier.asked == asked + 1


def test_before_an_answer_was_asked_for_twice_any_removal_ends_it(fixture: Fixture) -> None:
    fixture.tier.keys = frozenset(fixture.keys)
    assert fixture.hit() == 4 * BLOCK
    fixture.lookups.removed(frozenset([b"another"]))
    fixture.tier.keys = frozenset()
    assert fixture.hit() == 0


def test_another_length_or_local_hit_is_another_question(fixture: Fixture) -> None:
    assert fixture.hit() == 0
    assert fixture.lookups.hit(fixture.request, BLOCK) == 0
    fixture.request.all_token_ids.append(1)
    assert fixture.lookups.hit(fixture.request, BLOCK) == 0
    assert fixture.tier.asked == 3


def test_an_admitted_request_is_looked_up_again(fixture: Fixture) -> None:
    fixture.hit()
    fixture.lookups.forget("r")
    fixture.hit()
    assert fixture.tier.asked == 2
    fixture.lookups.forget("unknown")


def test_the_deadline_counts_from_the_first_question(fixture: Fixture) -> None:
    tier = fixture.tier
    tier.keys = None
    assert fixture.hit() is None
    tier.now += 9
    assert fixture.hit() is None
    tier.now += 1
    assert fixture.hit() == 0
    assert fixture.counters.take() == {"lookups/late": 1}
    tier.keys = frozenset(fixture.keys)
    assert fixture.hit() == 4 * BLOCK
    tier.now += REST * COST_S
    tier.keys = None
    assert fixture.hit() is None, "a new question has its own deadline"


def test_the_deadline_of_a_request_that_ended_is_not_that_of_its_successor(fixture: Fixture) -> None:
    fixture.tier.keys = None
    assert fixture.hit() is None
    fixture.tier.now += 8
    fixture.lookups.forget("r")
    assert fixture.hit() is None
    fixture.tier.now += 8
    assert fixture.hit() is None
    assert fixture.counters.take() == {}
    fixture.tier.now += 8
    assert fixture.hit() == 0
