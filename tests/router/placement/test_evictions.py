"""The eviction forecast: a hit is what is left when the engine gets to the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.settings import EngineSettings, resolve_groups
from kvatlas.router.placement.evictions import POOL_BLOCKS_MAX, EvictionForecast
from tests.router.placement.crowded_engine import BLOCK, CrowdedEngine
from tests.support.chats import shares
from tests.support.examples import examples

FULL = resolve_groups(EngineSettings(groups="full", block_size=BLOCK))


def forecast(pool_blocks: int) -> EvictionForecast:
    made = EvictionForecast()
    made.configure(pool_blocks, FULL)
    return made


def chain(start: int, blocks: int) -> list[BlockHash]:
    return [BlockHash(start + i) for i in range(blocks)]


@pytest.mark.parametrize(
    ("pool_blocks", "clients", "think_s"),
    [
        (110, 24, 0.0),
        (80, 8, 0.1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((80, 8, 0.0), (110, 24, 0.3))),
    ],
)
def test_predictions_hold_where_two_or_three_prompts_fill_the_pool(
    pool_blocks: int, clients: int, think_s: float
) -> None:
    """The index alone is right about 28 to 68 % of these requests."""
    engines = [
        CrowdedEngine(pool_blocks=pool_blocks, clients=clients, seed=seed, think_s=think_s) for seed in (1, 2)
    ]
    outcomes = [outcome for engine in engines for outcome in engine.run(300)]
    found = shares([(outcome.predicted, outcome.actual) for outcome in outcomes])
    alone = shares([(outcome.indexed, outcome.actual) for outcome in outcomes])
    assert alone["over"] > 0.25
    assert found["exact"] >= 0.96, found
    assert found["over"] <= 0.02, found
    assert [problem for engine in engines for problem in engine.forecast.check_integrity()] == []


def test_nothing_is_taken_off_where_the_pool_is_large() -> None:
    engine = CrowdedEngine(pool_blocks=4000, clients=8, seed=3, think_s=0.3)
    outcomes = engine.run(400)
    assert all(outcome.predicted == outcome.indexed for outcome in outcomes)
    assert shares([(outcome.predicted, outcome.actual) for outcome in outcomes])["exact"] >= 0.995


def test_a_waiting_prompt_evicts_the_oldest_blocks_the_last_of_a_prompt_first() -> None:
    pool = forecast(21)
    old, new = chain(100, 10), chain(200, 10)
    for hashes in (old, new):
        prompt = pool.admit(hashes, 10 * BLOCK, 1)
        assert prompt is not None
        pool.stored(hashes, None)
        pool.start(prompt)
        pool.end(prompt)
    assert pool.at_lookup(old, 10 * BLOCK + 1, 10, 0) == 10
    assert pool.admit(chain(300, 4), 4 * BLOCK, 1) is not None
    assert pool.at_lookup(old, 10 * BLOCK + 1, 10, 0) == 6
    assert pool.at_lookup(new, 10 * BLOCK + 1, 10, 0) == 10


@pytest.mark.parametrize(("answer_tokens_max", "expected"), [(0, 64), (10, 10), (5000, 5000)])
def test_the_first_answers_are_expected_to_end_at_their_limit(answer_tokens_max: int, expected: int) -> None:
    """0: a client gave none."""
    prompt = forecast(100).admit(chain(1, 4), 4 * BLOCK, answer_tokens_max)
    assert prompt is not None
    assert prompt.answer_tokens == expected


def test_a_prompt_ahead_that_hits_the_blocks_keeps_them() -> None:
    pool = forecast(21)
    old, new = chain(100, 10), chain(200, 10)
    for hashes in (old, new):
        pool.stored(list(reversed(hashes)), None)
    pool.admit([*old, *chain(300, 1)], 11 * BLOCK, 1)
    pool.admit(chain(400, 6), 6 * BLOCK, 1)
    assert pool.at_lookup(old, 10 * BLOCK + 1, 10, 0) == 10
    assert pool.at_lookup(new, 10 * BLOCK + 1, 10, 0) == 3


def test_a_failed_prompt_evicts_nothing() -> None:
    pool = forecast(21)
    old = chain(100, 20)
    pool.stored(list(reversed(old)), None)
    prompt = pool.admit(chain(300, 5), 5 * BLOCK, 1)
    assert prompt is not None
    assert pool.at_lookup(old, 20 * BLOCK + 1, 20, 0) == 15
    pool.end(prompt, computed=False)
    assert pool.at_lookup(old, 20 * BLOCK + 1, 20, 0) == 20
    assert pool.check_integrity() == []


@pytest.mark.parametrize(
    ("pool_blocks", "groups"),
    [
        (POOL_BLOCKS_MAX + 1, FULL),
        (110, resolve_groups(EngineSettings(groups="gemma3-like"))),
        (0, FULL),
        (110, ()),
    ],
)
def test_without_a_model_of_the_pool_nothing_is_forecast(
    pool_blocks: int, groups: tuple[GroupSpec, ...]
) -> None:
    pool = EvictionForecast()
    pool.configure(pool_blocks, groups)
    assert pool.admit(chain(0, 100), 100 * BLOCK) is None
    pool.stored(chain(0, 5), None)
    assert not pool.crowded
    assert pool.at_lookup(chain(0, 5), 5 * BLOCK + 1, 5, 0) == 5


def test_a_block_of_unknown_age_is_not_doubted() -> None:
    """Of an engine that ran before the router followed it."""
    pool = forecast(21)
    pool.admit(chain(300, 15), 15 * BLOCK, 1)
    pool.admit(chain(400, 15), 15 * BLOCK, 1)
    assert pool.at_lookup(chain(100, 5), 5 * BLOCK + 1, 5, 0) == 5


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "start", "end", "fail", "stored", "removed", "lookup", "clear"]),
        st.integers(0, 5),
        st.integers(1, 12),
    ),
    max_size=60,
)


@settings(max_examples=examples(300))
@given(ACTIONS)
def test_any_evidence_in_any_order_lowers_hits_only_and_keeps_the_books(
    actions: list[tuple[str, int, int]],
) -> None:
    """Events may be lost, late or of other routers' requests."""
    pool = forecast(24)
    flying = []
    for action, kind, count in actions:
        hashes = chain(1000 * kind, count)
        if action == "admit":
            flying.append(pool.admit(hashes, count * BLOCK + kind, kind))
        elif action == "stored":
            pool.stored(hashes[count // 2 :], hashes[count // 2 - 1] if count > 1 else None)
        elif action == "removed":
            pool.removed(hashes[count // 2 :])
        elif action == "lookup":
            left = pool.at_lookup(hashes, count * BLOCK + 1, count // 2, count)
            assert 0 <= left <= count
        elif action == "clear":
            pool.clear()
        elif flying:
            prompt = flying[kind % len(flying)]
            assert prompt is not None
            if action == "start":
                pool.start(prompt)
            else:
                pool.end(prompt, count, computed=action == "end")
        assert pool.check_integrity() == []
