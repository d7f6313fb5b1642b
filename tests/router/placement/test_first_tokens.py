"""Predicted against measured times to first token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.placement.first_token import (
    HOLDS_S,
    HOLDS_SHARE,
    MARGIN_QUANTILE,
    MODELS_MAX,
    OTHER,
    WINDOW,
    FirstTokenErrors,
)
from tests.support.examples import examples

SECONDS = st.floats(0, 1000, allow_nan=False)


@pytest.mark.parametrize(
    ("predicted_s", "measured_s", "outcome"),
    [
        (0.0, 0.04, "accurate"),
        (0.0, 0.06, "late"),
        (10.0, 10.9, "accurate"),
        (10.0, 11.1, "late"),
        (10.0, 9.1, "accurate"),
        (10.0, 8.9, "early"),
        (0.2, 0.16, "accurate"),
        (0.2, 0.14, "early"),
    ],
)
def test_a_prediction_holds_within_50_ms_or_a_tenth(
    predicted_s: float, measured_s: float, outcome: str
) -> None:
    errors = FirstTokenErrors()
    errors.add("m", predicted_s, measured_s)
    assert errors.outcomes == dict.fromkeys(errors.outcomes, 0) | {outcome: 1}
    assert errors.summary().accurate == (outcome == "accurate")


def test_the_margin_covers_nineteen_of_twenty() -> None:
    errors = FirstTokenErrors()
    assert errors.margin_s is None
    for late_ms in range(WINDOW):
        errors.add("m", 1.0, 1.0 + late_ms / 1000)
    assert errors.margin_s == pytest.approx(0.097)


def test_early_tokens_need_no_margin() -> None:
    errors = FirstTokenErrors()
    errors.add("m", 1.0, 0.5)
    assert errors.margin_s == 0.0


def test_the_margin_of_a_long_wait_is_that_of_long_waits() -> None:
    errors = FirstTokenErrors()
    for at in range(WINDOW):
        late_s = at / 100 if at % 10 == 0 else 0.0
        errors.add("m", 4.0 if late_s else 0.1, 4.0 + late_s if late_s else 0.1)
    assert errors.margin_s == pytest.approx(0.7)
    for predicted_s, margin_s in (0.2, 0.4), (4.0, 0.8), (8.0, 0.8), (9.0, 0.7):
        assert errors.margin_of(predicted_s) == pytest.approx(margin_s), predicted_s


def test_the_margin_follows_the_present_errors() -> None:
    errors = FirstTokenErrors()
    for measured_s in [6.0] * WINDOW + [1.0] * 40:
        errors.add("m", 1.0, measured_s)
    assert errors.margin_s == 0.0
    for _ in range(WINDOW):
        errors.add("m", 1.0, 1.0)
    assert errors.summary().measured_s == 1.0


def test_models_of_an_engine_beyond_the_bound_share_a_histogram() -> None:
    errors = FirstTokenErrors()
    for number in range(3 * MODELS_MAX):
        errors.add(f"adapter-{number}", 1.0, 1.0)
    assert len(errors.by_model) == MODELS_MAX + 1
    assert sum(errors.by_model[OTHER].counts) == 2 * MODELS_MAX


@pytest.mark.parametrize("asked_from", [0, 250])
def test_the_margin_is_that_of_the_alike_errors_sorted(asked_from: int) -> None:
    draw, errors, pairs = random.Random(7), FirstTokenErrors(), []
    for at in range(300):
        told_s = draw.expovariate(1.0)
        pairs.append((told_s, told_s + draw.gauss(0.0, 0.3)))
        errors.add("m", *pairs[-1])
        if at >= asked_from:
            alike = sorted(real - told for told, real in pairs[-WINDOW:] if 2 * told >= told_s)
            expected = max(0.0, alike[int(MARGIN_QUANTILE * (len(alike) - 1))])
            assert errors.margin_of(told_s) == (expected if len(alike) >= 8 else errors.margin_s)


@settings(max_examples=examples(200))
@given(pairs=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=150))
def test_sums_are_those_of_the_pairs(pairs: list[tuple[float, float]]) -> None:
    errors = FirstTokenErrors()
    for predicted_s, measured_s in pairs:
        errors.add("m", predicted_s, measured_s)
    latest = pairs[-WINDOW:]
    held = sum(abs(real - told) <= max(HOLDS_S, HOLDS_SHARE * told) for told, real in latest)
    summary = errors.summary()
    assert (summary.accurate, summary.compared) == (held, len(latest))
    histogram = errors.by_model["m"]
    assert sum(histogram.counts) == sum(errors.outcomes.values()) == len(pairs)
    assert histogram.total == pytest.approx(sum(real - told for told, real in pairs))
