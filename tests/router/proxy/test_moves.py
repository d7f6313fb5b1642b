"""Streams of an engine that ends leave it in time, and short answers end where they are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.proxy.moves import AT_ONCE_MAX, LAST_S, is_last, leaving
from tests.support.examples import examples

RESTS = [1.0, 20.0, 40.0, math.inf]


@pytest.mark.parametrize(
    ("left_s", "expected"),
    [
        (60.0, [3]),
        (30.0, [2, 3]),
        (21.5, [1, 2, 3]),
        (2.5, [0, 1, 2, 3]),
        (0.0, [0, 1, 2, 3]),
        (-9.0, [0, 1, 2, 3]),
    ],
)
def test_long_answers_leave_before_the_deadline(left_s: float, expected: list[int]) -> None:
    assert leaving(RESTS, left_s) == expected


def test_nothing_leaves_an_engine_without_streams() -> None:
    assert leaving([], 1.0) == []


@given(st.lists(st.floats(0, 300), max_size=60), st.floats(0, 120))
@settings(max_examples=examples(60))
def test_all_have_left_or_ended_by_the_deadline(rests_s: list[float], left_s: float) -> None:
    """With looks of a second, of which each takes a bounded number; predictions are right."""
    streams = dict(enumerate(rests_s))
    late = is_last(len(streams), left_s)
    while left_s > 0 and streams:
        names = list(streams)
        for at in leaving(list(streams.values()), left_s)[:AT_ONCE_MAX]:
            del streams[names[at]]
        left_s -= 1.0
        streams = {name: rest - 1.0 for name, rest in streams.items() if rest > 1.0}
    assert late or not streams


def test_the_last_seconds_are_for_what_one_stream_needs() -> None:
    assert is_last(0, LAST_S)
    assert not is_last(AT_ONCE_MAX, LAST_S + 1.1)
    assert is_last(AT_ONCE_MAX, LAST_S + 1.0)
