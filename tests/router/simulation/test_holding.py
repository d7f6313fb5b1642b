"""Arms whose router holds requests while the fleet is saturated."""

from __future__ import annotations

import re

import pytest

from kvatlas.router.simulation.holding import Holding
from kvatlas.router.simulation.outcome import FleetRun
from kvatlas.router.simulation.requests import Request
from kvatlas.router.simulation.variants import VARIANTS, HoldSetup, variants_of
from tests.router.simulation.support import fleet_run, request


def burst(count: int, tokens: int = 1000) -> list[Request]:
    """Nearly together, nothing shared."""
    return [request(0.001 * i, tokens, 20, 100 * i, session=i) for i in range(count)]


def seconds(run: FleetRun) -> list[float]:
    return [row.ttft_s for row in run.rows]


def test_holding_changes_nothing_below_saturation() -> None:
    requests = [request(float(i), 1000, 5, 100 * (i % 5)) for i in range(30)]
    assert fleet_run(requests, "kvatlas:hold=10") == fleet_run(requests)


@pytest.mark.parametrize("variant", ["hold=0", "hold=0.5", "hold=1+ageing=10", "hold=0.5+siblings=0.5"])
def test_every_request_is_answered_once_and_its_time_counts_from_its_arrival(variant: str) -> None:
    requests = burst(40)
    run = fleet_run(requests, f"kvatlas:{variant}")
    assert [row.index for row in run.rows] == list(range(40))
    assert [row.arrived_s for row in run.rows] == [one.at_s for one in requests]
    assert all(row.ttft_s > 0.999 for row in run.rows)  # 1,000 tokens at 1 ms each
    assert sum(run.computed_tokens) >= 40 * 1000


def test_there_is_room_from_the_moment_an_engine_is_not_saturated(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Holding(HoldSetup(hold_s=0.0), [], 8)
    for gap_s, room in ((0.5, False), (0.0, True), (-1.0, True)):
        monkeypatch.setattr(holding, "_gap_s", lambda now, gap_s=gap_s: gap_s)
        assert holding.room(0.0) is room


def test_held_requests_keep_their_order_and_ageing_changes_it() -> None:
    requests = [*burst(12), request(0.02, 64, 1, 9000)]
    whole = fleet_run(requests, "kvatlas:hold=0.5").rows
    short_first = fleet_run(requests, "kvatlas:hold=0.5+ageing=10").rows
    assert whole[-1].ttft_s > 2.0
    assert short_first[-1].ttft_s < whole[-1].ttft_s


def test_a_tenant_that_floods_does_not_hold_up_another() -> None:
    flood = [
        Request(at_s=one.at_s, input_tokens=1000, output_tokens=20, ids=one.ids, tenant="acme")
        for one in burst(60)
    ]
    guest = Request(at_s=0.1, input_tokens=500, output_tokens=5, ids=(90_001, 90_002), tenant="beta")
    requests = sorted([*flood, guest], key=lambda one: one.at_s)
    where = requests.index(guest)
    assert fleet_run(requests, "kvatlas:hold=0.5").rows[where].ttft_s < 5.0
    assert fleet_run(requests).rows[where].ttft_s > 5.0


def test_with_credit_several_requests_of_a_guest_go_before_a_flood() -> None:
    flood = [
        Request(at_s=one.at_s, input_tokens=1000, output_tokens=20, ids=one.ids, tenant="acme")
        for one in burst(60)
    ]
    guests = [
        Request(at_s=10.0, input_tokens=500, output_tokens=5, ids=(first, first + 1), tenant="beta")
        for first in range(90_000, 90_040, 5)
    ]
    requests = [*flood, *guests]
    alike, ahead = (
        max(row.ttft_s for row in fleet_run(requests, f"kvatlas:hold=0.5{credit}").rows[-len(guests) :])
        for credit in ("", "+credit=10")
    )
    assert ahead < alike


def test_a_sibling_of_a_prompt_in_flight_is_not_held() -> None:
    requests = [*burst(12), request(0.02, 1000, 20, 0)]
    waits = fleet_run(requests, "kvatlas:hold=0.5").rows[-1]
    goes = fleet_run(requests, "kvatlas:hold=0.5+siblings=0.5").rows[-1]
    assert goes.ttft_s < waits.ttft_s


def test_knobs_are_read_and_bad_ones_named() -> None:
    name = "kvatlas:hold=1+ageing=2+siblings=0.5+credit=3+beta=1"
    variant = variants_of([name])[name]
    assert variant.hold == HoldSetup(hold_s=1.0, ageing=2.0, siblings=0.5, credit=3.0)
    assert variant.settings == (("beta", 1.0),)
    assert VARIANTS["kvatlas"].hold is None
    for bad in ("kvatlas:hold=-1", "kvatlas:hold=61", "kvatlas:ageing=1", "kvatlas:siblings=2+hold=1"):
        with pytest.raises(ValueError, match=re.escape(bad)):
            variants_of([bad])
