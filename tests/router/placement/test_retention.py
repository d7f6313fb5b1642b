"""Retention hints: what is expected of a session's pace, of a prefix that many prompts share, of a client."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.connectors.scheduler.plans import HINT, retention_hint
from kvatlas.publisher.events import BlockHash
from kvatlas.router.placement.hot_prefixes import EVERY, HotPrefixes
from kvatlas.router.placement.retention import (
    GAP_S_MAX,
    SESSIONS_MAX,
    VALUE_MIN,
    RetentionHints,
    Reuse,
    SessionPaces,
    hint_json,
)


def sessions(paces: SessionPaces, turns: int, number: int, gap_s: float, start_s: float = 0.0) -> float:
    """Sessions of this many turns, side by side; returns when the last one is known to have ended."""
    now = start_s
    for _ in range(turns):
        for name in range(number):
            paces.turn((start_s, name), now)
        now += gap_s
    return now + GAP_S_MAX


def test_a_session_goes_on_as_others_did_after_as_many_turns() -> None:
    paces = SessionPaces()
    now = sessions(paces, turns=3, number=60, gap_s=10.0)
    now = sessions(paces, turns=1, number=60, gap_s=10.0, start_s=now)
    assert paces.turn("new", now).value == pytest.approx(0.5, abs=0.05)  # 60 of 120 first turns had a second
    assert paces.turn("new", now + 10).value > 0.9
    assert paces.turn("new", now + 20).value < 0.1


def test_the_next_turn_is_expected_within_the_gap_of_nine_of_ten_and_twice_the_own_longest() -> None:
    paces = SessionPaces()
    for number in range(10):
        paces.turn(number, 0.0)
    for number in range(9):
        paces.turn(number, 6.0)
    paces.turn(9, 200.0)
    assert paces.turn("new", 201.0).ttl_s == 8.0  # the bin of gaps from 4 to 8 s
    assert paces.turn(9, 210.0).ttl_s == pytest.approx(2 * 0.9 * 200.0)  # older gaps count for less


def test_a_longer_gap_than_any_ends_a_session() -> None:
    paces = SessionPaces()
    paces.turn("a", 0.0)
    again = paces.turn("a", GAP_S_MAX + 1)
    assert again.value < 0.5
    assert len(paces) == 1


def test_requests_at_the_same_moment_are_one_turn() -> None:
    paces = SessionPaces()
    first = [paces.turn("a", at_s) for at_s in (0.0, 0.01, 0.1, 0.49)]
    assert len(set(first)) == 1


def test_sessions_are_bounded_and_the_oldest_is_forgotten() -> None:
    paces = SessionPaces()
    for number in range(SESSIONS_MAX + 3):
        paces.turn(number, number / 1e6)
    assert len(paces) == SESSIONS_MAX
    assert paces.evicted == 3


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 2 * GAP_S_MAX)), max_size=60))
def test_predictions_stay_in_their_range(arrivals: list[tuple[int, float]]) -> None:
    paces, now = SessionPaces(), 0.0
    for session, gap_s in arrivals:
        now += gap_s
        found = paces.turn(session, now)
        assert 0 < found.value < 1
        assert 0 < found.ttl_s <= GAP_S_MAX
        assert found.tokens is None


def test_old_traffic_counts_for_less() -> None:
    paces, rng, now = SessionPaces(), random.Random(1), 0.0
    for at in range(9000):
        now += 1.0
        paces.turn("agent", now)
        if rng.random() < 0.01:
            paces.turn(("single", at), now)
    assert paces.turn("agent", now + 1).value > 0.9


# Prefixes.


def hashes(first: int, number: int = 64) -> list[BlockHash]:
    return [BlockHash(first + at) for at in range(number)]


def hot(rate_s: float, prompts: int) -> tuple[HotPrefixes, list[BlockHash], float]:
    """A tree after a steady stream of prompts that share 64 blocks of 16 tokens."""
    tree, now = HotPrefixes(), 0.0
    shared = hashes(0)
    for number in range(prompts):
        now = number / rate_s
        tree.add("m", shared + hashes(100 + 64 * number), 16, now)
    return tree, shared, now


def test_the_longest_prefix_that_many_prompts_share_is_expected_again() -> None:
    tree, shared, now = hot(rate_s=0.5, prompts=2000)
    found = tree.reuse(shared + hashes(-64), 16, now)
    assert found is not None
    assert found.tokens == 1024
    assert found.ttl_s == pytest.approx(3 / 0.5, rel=0.1)


def test_a_prefix_that_was_seen_once_is_not() -> None:
    tree, shared, now = hot(rate_s=0.5, prompts=EVERY)
    assert tree.reuse(shared, 16, now) is None
    assert HotPrefixes().reuse(shared, 16, now) is None


# Hints.

PREFIX = Reuse(6.0, 0.95, 1024)


def test_a_session_comes_before_a_prefix_unless_it_is_likely_to_end() -> None:
    hints = RetentionHints()
    first = hints.predict(0.0, session="a", prefix=PREFIX)
    assert first is not None
    assert first[0] == "session"
    for number in range(50):
        hints.predict(1.0, session=number)
    later = hints.predict(2 + GAP_S_MAX, session="b", prefix=PREFIX)
    assert later == ("prefix", PREFIX)


def test_nothing_is_expected_of_sessions_that_end_immediately() -> None:
    hints = RetentionHints()
    for number in range(50):
        hints.predict(0.0, session=number)
    assert hints.predict(2 + GAP_S_MAX, session="b") is None
    assert hints.predict(0.0, session=None) is None


def test_a_client_prolongs_its_hint_and_does_not_raise_its_value() -> None:
    hints = RetentionHints()
    assert hints.predict(0.0, session=None, cache_s=300.0) == ("cache_control", Reuse(300.0, 0.5))
    plain = hints.predict(0.0, session="a")
    longer = hints.predict(0.0, session="a", cache_s=3600.0)
    assert plain is not None
    assert longer is not None
    assert longer == ("session", plain[1]._replace(ttl_s=3600.0))
    for number in range(50):
        hints.predict(0.0, session=number)
    assert hints.predict(2 + GAP_S_MAX, session="b", cache_s=3600.0) is None


@given(
    st.floats(0.001, 1e5),
    st.floats(VALUE_MIN, 1.0),
    st.none() | st.integers(1, 1 << 30),
    st.text(max_size=300),
)
def test_connectors_read_every_hint_and_no_tenant_is_named(
    ttl_s: float, value: float, tokens: int | None, tenant: str
) -> None:
    text = hint_json(Reuse(ttl_s, value, tokens), tenant)
    request: Any = SimpleNamespace(kv_transfer_params={HINT: json.loads(text)})
    read = retention_hint(request)
    assert read is not None
    assert read.ttl_s == pytest.approx(min(ttl_s, 86_400.0), abs=0.001)
    assert read.value == pytest.approx(value, abs=0.001)
    assert (read.owner == "", read.tokens) == (tenant == "", tokens)
    assert tenant not in read.owner or len(tenant) <= 16
