"""Closed sessions: a turn waits for the answer before it and for its client's pause."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.simulation.event_times import Arrivals
from kvatlas.router.simulation.requests import Follows, Request, by_time, continued
from kvatlas.router.simulation.setup import Timing
from kvatlas.router.simulation.workload import agents, tenants
from tests.router.simulation.support import fleet_run, request
from tests.support.examples import examples

INSTANT = Timing(prefill_s_per_token=1e-12, decode_s=1e-12, chunk_tokens=512, seqs_max=4)


def follow(
    one: Request, before: int, gap_s: float, think_s: float | None = None, *, answered: bool = True
) -> Request:
    follows = Follows(request=before, gap_s=gap_s, think_s=think_s, answered=answered)
    return msgspec.structs.replace(one, follows=follows)


def arrivals(requests: list[Request], **changes: object) -> list[float]:
    return [row.arrived_s for row in fleet_run(requests, closed=True, **changes).rows]


def test_a_turn_comes_after_the_answer_and_the_recorded_pause() -> None:
    first = request(0, 1000, 11, 1)  # 1 s of prefill, then ten tokens of 10 ms
    later = request(5, 600, 1, 100)
    assert arrivals([first, follow(later, 0, 5.0, 2.0)]) == [0.0, pytest.approx(1.1 + 2.0)]
    assert arrivals([first, follow(later, 0, 5.0)]) == [0.0, pytest.approx(5.0)]
    assert arrivals([first, follow(later, 0, 0.5)]) == [0.0, pytest.approx(1.1)], "not before the answer"
    assert arrivals([first, follow(later, 0, 0.5, answered=False)]) == [0.0, 0.5], "beside its parent"
    open_run = fleet_run([first, follow(request(0.5, 600, 1, 100), 0, 0.5)])
    assert [row.arrived_s for row in open_run.rows] == [0.0, 0.5]


def test_speed_divides_pauses_too() -> None:
    requests = [request(0, 1000, 11, 1), follow(request(5, 600, 1, 100), 0, 5.0, 2.0)]
    assert arrivals(requests, speed=4.0) == [0.0, pytest.approx(1.1 + 0.5)]


def test_the_turn_after_a_request_that_fits_nowhere_comes() -> None:
    requests = [request(0, 9000, 1, 1), follow(request(1, 300, 1, 100), 0, 1.0)]
    run = fleet_run(requests, num_blocks=64, closed=True)
    assert [row.ttft_s < 0 for row in run.rows] == [True, False]
    assert run.rows[1].arrived_s == 1.0


@settings(max_examples=examples(24))
@given(st.integers(0, 1000), st.sampled_from(["kvatlas", "llm-d", "smg"]), st.floats(0.5, 8.0))
def test_no_turn_comes_before_the_answer_it_follows(seed: int, variant: str, speed: float) -> None:
    requests = continued(tenants(25, 20.0, seed))
    run = fleet_run(requests, variant, closed=True, speed=speed, num_blocks=900)
    assert [row.index for row in run.rows] == list(range(len(requests)))
    for one, row in zip(requests, run.rows, strict=True):
        if one.follows is None:
            assert row.arrived_s == one.at_s / speed
        else:
            before = run.rows[one.follows.request]
            answered_s = before.arrived_s + max(0.0, before.answer_s)
            assert row.arrived_s >= answered_s - 1e-9
            assert row.arrived_s >= before.arrived_s + one.follows.gap_s / speed - 1e-9
    assert run.rows == fleet_run(requests, variant, closed=True, speed=speed, num_blocks=900).rows


def test_engines_without_delay_give_the_recorded_times() -> None:
    requests = continued(agents(60, 60.0, 5))
    assert any(one.follows for one in requests)
    times = arrivals(requests, timing=INSTANT, num_blocks=4000)
    assert times == [pytest.approx(one.at_s, abs=1e-6) for one in requests]


def test_another_order_of_time_keeps_who_follows_whom() -> None:
    a, b = request(5, 100, 1, 1), follow(request(2, 100, 1, 10), 0, 1.0)
    moved = by_time([a, b])
    assert [one.ids[0] for one in moved] == [10, 1]
    assert moved[0].follows is not None
    assert moved[0].follows.request == 1
    assert arrivals(moved)[0] == pytest.approx(6.0)


def test_requests_that_wait_for_others_are_not_known_to_come() -> None:
    requests = [request(0, 100, 1, 1), follow(request(2, 100, 1, 10), 0, 2.0)]
    coming = Arrivals(requests, speed=1.0, closed=True)
    assert coming.take() == 0
    assert coming.next_s() == float("inf")
    coming.ended(0, 0.5)
    assert coming.next_s() == 2.0
