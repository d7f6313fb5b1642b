"""The rate limit is what it says, whatever the clock and the names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.api.admin.rate_limit import RateLimit


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
