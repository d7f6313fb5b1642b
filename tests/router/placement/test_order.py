"""The order inside engines: class, then arrival, then work; and what the load account makes of it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvatlas.router.placement.engine import Accounts
from kvatlas.router.placement.engine_order import BAND_MS, EngineOrder, order_of
from kvatlas.router.placement.load import LoadAccount, Ticket
from kvatlas.router.placement.rates import FleetRates, RateSettings
from tests.support.examples import examples

RATE = 0.001
HIGH, NORMAL, LOW = 0, 1, 2
WALL_S = 1_800_000_000.0
works = st.floats(0, 1e6)
times = st.floats(0, 4e9)
"""Seconds of either clock: 127 years."""
days = st.floats(0, 1e5)


def account() -> LoadAccount:
    return LoadAccount(FleetRates(RateSettings(prefill_s_per_token=RATE)).engine())


def given_order(one: int, now: float = 0.0, weight: float = 2.0) -> EngineOrder:
    order = order_of(one, now, weight)
    assert order is not None
    return order


def test_without_a_weight_there_is_no_order() -> None:
    assert order_of(NORMAL, 5.0, 0.0) is None


def test_a_priority_is_milliseconds_of_arrival_and_twice_the_work() -> None:
    order = given_order(NORMAL, WALL_S)
    assert order.priority(1.5) - order.priority(0.0) == 3000
    assert given_order(NORMAL, WALL_S + 3).priority(0.0) == order.priority(1.5)


@settings(max_examples=examples(200))
@given(times, works, times, works)
def test_no_request_passes_one_of_a_class_above(
    first: float, work: float, second: float, other: float
) -> None:
    high, normal, low = given_order(HIGH, first), given_order(NORMAL, second), given_order(LOW, first)
    assert high.priority(work) < 0 <= normal.priority(other) < BAND_MS <= low.priority(work) < 1 << 53
    assert given_order(HIGH, first).rank_s(work) < given_order(NORMAL, second).rank_s(other)


@settings(max_examples=examples(200))
@given(works, works)
def test_nothing_waits_for_what_comes_later_than_twice_its_work(work: float, other: float) -> None:
    mine = given_order(NORMAL, 0.0).rank_s(work)
    assert given_order(NORMAL, 2.0 * work + 1e-3).rank_s(other) > mine


@settings(max_examples=examples(200))
@given(days, works, days, works)
def test_a_prompt_stays_behind_the_one_of_its_class_whose_blocks_it_hits(
    first: float, work: float, second: float, other: float
) -> None:
    ahead, behind = given_order(NORMAL, WALL_S + first), given_order(NORMAL, WALL_S + second)
    raised = behind.work_behind(other, ahead.rank_s(work))
    assert raised >= other
    assert behind.rank_s(raised) > ahead.rank_s(work)
    assert behind.priority(raised) > ahead.priority(work)
    assert given_order(HIGH, second).work_behind(other, ahead.rank_s(work)) == other


def admit(load: LoadAccount, tokens: int, now: float, weight: float = 2.0) -> Ticket:
    rank_s = given_order(NORMAL, now, weight).rank_s(tokens * RATE)
    return load.admit(uncached_tokens=tokens, now=now, rank_s=rank_s)


def ahead_s(load: LoadAccount, tokens: int, now: float) -> float:
    behind_s, _ = load.behind(given_order(NORMAL, now).rank_s(tokens * RATE), RATE)
    # As decisions take it off: a prompt that is passed may be computed in part, and counts whole.
    return max(0.0, load.queue_ahead_s(now) - behind_s)


def test_a_newcomer_with_little_work_has_less_ahead() -> None:
    load = account()
    admit(load, 4000, 0.0)
    admit(load, 9000, 0.0)
    assert ahead_s(load, 100, 1.0) == pytest.approx(3.0)  # what is left of the one being computed
    assert ahead_s(load, 20_000, 1.0) == pytest.approx(12.0)
    assert ahead_s(load, 100, 8.5) == 0  # the head is late, and it passes the other


def test_the_next_head_is_the_first_in_the_engines_order() -> None:
    load = account()
    first = admit(load, 1000, 0.0)
    long = admit(load, 5000, 0.1)
    short = admit(load, 500, 0.2)
    load.first_token(first, 1.0)
    assert load.queue_ahead_s(1.25) == pytest.approx(5.25)  # the short one is under way
    sample = load.first_token(short, 1.5)
    assert sample is not None
    assert sample.tokens == 500
    assert ahead_s(load, 100, 1.5) == pytest.approx(5.0)  # the long one has begun: nothing passes it
    assert load.first_token(long, 6.5) is not None


def test_a_first_token_out_of_order_says_that_the_head_has_not_begun() -> None:
    load = account()
    load.first_token(admit(load, 1000, 0.0), 1.0)
    believed = admit(load, 4000, 1.0)
    other = admit(load, 9000, 1.0)
    load.first_token(other, 3.0)
    assert load.queue_ahead_s(3.0) == pytest.approx(4.0)
    assert load.first_token(believed, 7.0) is None, "no sample: it is not known when it began"


def test_where_all_prompts_wait_a_newcomer_passes_the_head_too() -> None:
    load = account()
    admit(load, 4000, 0.0)
    load.report(running=0, waiting=1, now=1.0)
    assert ahead_s(load, 100, 1.0) == 0
    admit(load, 100, 1.0)
    assert ahead_s(load, 10, 1.0) == 0
    assert ahead_s(load, 5000, 1.0) == pytest.approx(4.1)


@example([(0, 1, 0.0), (3, 1, 0.0), (0, 1, 0.0), (0, 636, 1.0), (2, 135, 1.0)])
@example([(0, 3, 0.0), (0, 2, 0.0), (4, 2, 0.0), (0, 1, 0.0)])  # seed 1001: the head waits, and is passed
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3000), st.floats(0, 2)), max_size=40))
def test_the_order_holds_whatever_happens(steps: list[tuple[int, int, float]]) -> None:
    load, now = account(), 0.0
    tickets: list[Ticket] = []
    for kind, tokens, pause_s in steps:
        now += pause_s
        if kind <= 1 or not tickets:
            tickets.append(admit(load, tokens, now))
        elif kind == 2:
            load.first_token(tickets[tokens % len(tickets)], now)
        elif kind == 3:
            load.finish(tickets[tokens % len(tickets)], now)
        else:
            open_ = sum(not one.ended for one in tickets)
            load.report(running=0, waiting=min(open_, tokens), now=now)
        assert load.check_integrity() == []
        ranks = [one.rank_s for one in load._awaited]
        assert ranks[1:] == sorted(ranks[1:]), "behind the head"
        assert ranks == sorted(ranks) or not load._stuck, "nothing has begun"
        assert ahead_s(load, tokens, now) <= load.queue_ahead_s(now) + 1e-9


@pytest.mark.parametrize("slow_s", [0.0, 0.003, 0.5])
@pytest.mark.parametrize("step_s", [0.0, -3600.0, 3600.0])
def test_the_engine_is_given_the_order_of_the_routers_accounts(slow_s: float, step_s: float) -> None:
    """However long the router takes to send a prompt on, and whatever happens to its wall clock."""
    wall = [WALL_S]
    accounts = Accounts(lambda: 5.0, lambda: wall[0])
    ahead = order_of(NORMAL, accounts.wall(), 2.0)
    wall[0] += slow_s
    first = ahead.priority(1.0) if ahead is not None else 0
    wall[0] += step_s
    behind = order_of(NORMAL, accounts.wall(), 2.0)
    assert ahead is not None
    assert behind is not None
    raised = behind.work_behind(0.0, ahead.rank_s(1.0))
    wall[0] += slow_s
    assert behind.rank_s(raised) > ahead.rank_s(1.0)
    assert behind.priority(raised) > first
