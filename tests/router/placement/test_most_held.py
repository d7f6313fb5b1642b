"""The longest hit of all engines, and the engine that alone has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.placement.cost import choose
from kvatlas.router.placement.placement import Decision
from tests.router.placement.candidates import make_candidate

TOKENS = 1000


@given(st.lists(st.integers(0, 4).map(lambda count: 100 * count), min_size=1, max_size=5))
def test_the_longest_hit_is_worth_what_it_is_longer_than_the_next(hits: list[int]) -> None:
    found = [make_candidate(f"e{i}", hit_tokens=hit, shared_prefix_tokens=hit) for i, hit in enumerate(hits)]
    engines: Any = [SimpleNamespace(engine_id=one.engine_id) for one in found]
    choice = choose(found, TOKENS, PolicySettings(), prompt_key=7)
    held = Decision(None, TOKENS, engines, found, choice, "").most_held()
    most, second = sorted([0, *hits])[:-3:-1]
    assert held.tokens == most
    assert (held.sole is not None) == (most > second)
    if held.sole is not None:
        assert held.sole is engines[hits.index(most)]
        assert held.sole_s == pytest.approx((most - second) * found[0].prefill_s_per_token)
    assert (held.missed == "") == (hits[choice.index] == most)
