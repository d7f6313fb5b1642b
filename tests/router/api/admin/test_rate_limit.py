"""The rate limit is what it says, whatever the clock and the names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.api.admin_auth import TURN_S, WAITING_MAX, RateLimit, Turns
from router.observe.requests import LogThrottle


@given(
    st.floats(1, 600),
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 30)), min_size=1, max_size=60),
)
def test_never_more_than_the_burst_and_the_rate(per_minute: float, steps: list[tuple[str, float]]) -> None:
    limit = RateLimit(per_minute)
    now, taken = 0.0, {"a": 0, "b": 0}
    for name, pause in steps:
        now += pause
        wait = limit.take(name, now)
        taken[name] += not wait
        assert taken[name] <= max(1.0, per_minute / 4) + now * per_minute / 60 + 1e-6
        if wait:
            assert limit.take(name, now + wait) == 0
            taken[name] += 1
            now += wait


def test_only_so_many_names_are_remembered() -> None:
    limit = RateLimit(60)
    for number in range(1000):
        limit.take(str(number), 0.0)
    assert len(limit._buckets) == 256


def test_turns_come_one_after_the_other_and_few_may_wait() -> None:
    turns = Turns()
    waits = [turns.take("a", 100.0) for _ in range(WAITING_MAX)]
    assert waits == [number * TURN_S for number in range(WAITING_MAX)]
    assert turns.take("a", 100.0) is None
    assert turns.take("b", 100.0) == 0.0
    assert turns.take("a", 100.0 + TURN_S) == (WAITING_MAX - 1) * TURN_S
    assert turns.take("a", 200.0) == 0.0


def test_what_anybody_can_cause_is_said_once_an_interval_with_the_number_left_out() -> None:
    seldom = LogThrottle(1.0)
    assert [seldom.due("x", now) for now in (5.0, 5.1, 5.9, 6.0, 6.5, 9.0)] == [0, None, None, 2, None, 1]
    assert seldom.due("y", 9.0) == 0
