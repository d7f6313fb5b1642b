"""Seconds per token of loads, from receipts."""

from __future__ import annotations

from kvatlas.router.observe.load_rate import SAMPLES_MIN, LoadRate


def test_a_rate_is_the_median_of_the_latest_samples() -> None:
    rate = LoadRate()
    for seconds in (0.1, 0.1, 9.0, -5.0):
        rate.add(seconds, 1000)
    assert rate.s_per_token == 0.0, "not known yet"
    rate.add(0.1, 1000)
    assert SAMPLES_MIN == 5
    assert rate.s_per_token == 1e-4
    for _ in range(40):
        rate.add(0.3, 1000)
    assert rate.s_per_token == 3e-4, "it follows a store that became slower"


def test_a_rate_stays_within_what_can_be() -> None:
    for seconds, bound in ((-1.0, 1e-7), (1e9, 1e-2)):
        rate = LoadRate()
        for _ in range(SAMPLES_MIN):
            rate.add(seconds, 10)
        assert rate.s_per_token == bound
