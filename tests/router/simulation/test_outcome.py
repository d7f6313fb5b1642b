"""The numbers of a run, worked out by hand."""

from __future__ import annotations

import pytest

from kvatlas.router.simulation.outcome import FleetRun, NothingServedError, Row, compare, result_of
from kvatlas.router.simulation.study import over_seeds


def row(index: int, ttft_s: float, *, hit: int = 0, predicted: int = 0, tokens: int = 100) -> Row:
    return Row(index, 10.0 + index, 0, tokens, predicted, hit, ttft_s, 0.0, 0)


def run_of(rows: list[Row], busy_s: tuple[float, ...] = (1.0, 3.0)) -> FleetRun:
    return FleetRun(rows=rows, busy_s=list(busy_s), computed_tokens=[0, 0], preemptions=4, ended_s=20.0)


def test_numbers_leave_out_the_first_fifth() -> None:
    rows = [row(0, 99.0, hit=99), *[row(i, float(i), hit=10 * i, predicted=20) for i in range(1, 5)]]
    outcome = result_of(run_of(rows)).outcome
    assert (outcome.requests, outcome.refused) == (4, 0)
    assert outcome.hit_share == pytest.approx(100 / 400)
    assert outcome.ttft_mean_s == pytest.approx(2.5)
    assert outcome.ttft_p50_s == pytest.approx(2.5)
    assert outcome.ttft_p90_s == pytest.approx(3.7)
    assert outcome.ttft_p99_s == pytest.approx(3.97)
    assert (outcome.within_1_s_share, outcome.within_3_s_share) == (0.25, 0.75)
    assert outcome.error_mean_tokens == pytest.approx((10 + 0 + 10 + 20) / 4)
    assert outcome.exact_share == pytest.approx(0.25)
    assert outcome.imbalance == pytest.approx(1.5)
    assert outcome.busy_share == pytest.approx(0.2), "2 s on average of the 10 s since the first arrival"
    assert outcome.preemptions == 4


def test_regret_is_against_the_best_of_all_request_by_request() -> None:
    a = result_of(run_of([row(0, 9.0), row(1, 1.0), row(2, 5.0), row(3, 2.0), row(4, 2.0)]))
    b = result_of(run_of([row(0, 1.0), row(1, 3.0), row(2, 1.0), row(3, 2.0), row(4, 4.0)]))
    compared = compare({"a": a, "b": b})
    assert compared["a"].regret_s == pytest.approx((0 + 4 + 0 + 0) / 4)
    assert compared["b"].regret_s == pytest.approx((2 + 0 + 0 + 2) / 4)
    assert compare({"a": a})["a"].regret_s == 0


def test_refused_requests_count_nowhere_else() -> None:
    some = result_of(run_of([row(0, 1.0), row(1, -1.0), row(2, 2.0), row(3, -1.0), row(4, 4.0)]))
    everyone = result_of(run_of([row(0, 1.0), row(1, 1.0), row(2, 1.0), row(3, 1.0), row(4, 1.0)]))
    compared = compare({"some": some, "all": everyone})
    assert (compared["some"].requests, compared["some"].refused) == (2, 2)
    assert compared["some"].ttft_mean_s == 3.0
    assert (compared["some"].within_1_s_share, compared["some"].within_3_s_share) == (0.0, 0.25)
    assert compared["all"].within_1_s_share == 1.0
    assert compared["some"].regret_s == pytest.approx((1 + 3) / 2)
    assert compared["all"].regret_s == 0
    with pytest.raises(NothingServedError, match="more blocks"):
        result_of(run_of([row(0, 1.0), *[row(i, -1.0) for i in range(1, 5)]]))


def test_curves_cover_the_whole_run() -> None:
    curves = result_of(run_of([row(i, 1.0, hit=i) for i in range(40)])).curves
    assert len(curves.hit_shares) == 20
    assert curves.hit_shares[0] == pytest.approx(0.005)
    assert curves.hit_shares[-1] == pytest.approx(0.385)
    assert [busy_s / curves.lasted_s for busy_s in curves.busy_s] == [0.1, pytest.approx(0.3)]
    served = [row(0, 0.0, hit=50), row(1, 1.0), row(2, 1.0), row(3, -1.0)]
    assert result_of(run_of(served)).curves.hit_shares == [0.5, 0.0, 0.0]


def test_intervals_over_seeds() -> None:
    outcomes = [result_of(run_of([row(i, wait) for i in range(5)])).outcome for wait in (1.0, 2.0, 3.0)]
    interval = over_seeds(outcomes, "ttft_mean_s")
    assert interval.mean == pytest.approx(2.0)
    assert interval.half == pytest.approx(4.30 * 1.0 / 3**0.5)
    assert over_seeds(outcomes[:1], "ttft_mean_s").half is None
