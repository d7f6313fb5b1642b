"""Medians over a fleet: those of going over all engines, without going over them."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.placement.fleet_medians import FleetMedians
from kvatlas.router.placement.rates import EngineRates, FleetRates, PrefillSample
from kvatlas.router.placement.seconds import FirstTokenModel, FirstTokenWork
from tests.support.examples import examples

Values = tuple[float | None, float | None]
Row = tuple[str | None, Values] | None
VALUES = st.none() | st.sampled_from([0.0, 1.0, 1.5]) | st.floats(-1e9, 1e9)
ROWS = st.none() | st.tuples(st.sampled_from([None, "a", "b"]), st.tuples(VALUES, VALUES))
CHANGES = st.lists(st.tuples(st.sampled_from(["set", "set", "leave", "ask"]), st.integers(0, 6), ROWS))


def plain(rows: Iterable[Row]) -> dict[str | None, list[float | None]]:
    """From all rows."""
    groups: dict[str | None, list[Values]] = {}
    for group, values in filter(None, rows):
        groups.setdefault(group, []).append(values)
    columns = {
        group: [[value for value in column if value is not None] for column in zip(*found, strict=True)]
        for group, found in groups.items()
    }
    return {
        group: [median(column) if column else None for column in found]
        for group, found in columns.items()
        if any(found)
    }


@settings(max_examples=examples(200))
@given(CHANGES)
def test_medians_are_those_of_a_plain_loop(changes: list[tuple[str, int, Row]]) -> None:
    rows: dict[int, Row] = {}
    kept = FleetMedians[int, dict[str | None, list[float | None]]](2, rows.get, dict)
    for what, key, row in changes:
        before = plain(rows.values())
        if what == "set":
            rows[key] = row
            kept.changed(key)
        elif what == "leave":
            rows.pop(key, None)
            kept.left(key)
        else:
            assert kept.fit() == before
        assert kept.kept is None or kept.kept == plain(rows.values())
    assert kept.fit() == plain(rows.values())


@pytest.mark.parametrize("count", [4, 200])
def test_a_sample_has_one_engine_read_whatever_the_fleet(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without samples is asked after each first token of another one."""
    fleet = FleetRates()
    engines = [fleet.engine(lambda: "m") for _ in range(count)]
    new = fleet.engine(lambda: "m")
    reads = {"model": 0, "rates": 0}
    for name, kind in (("model", FirstTokenModel), ("rates", EngineRates)):
        real = kind.learned.fget  # type: ignore[attr-defined]

        def read(engine: object, name: str = name, real: object = real) -> object:
            reads[name] += 1
            return real(engine)  # type: ignore[operator]

        monkeypatch.setattr(kind, "learned", property(read))

    def first_token(engine: EngineRates, service_s: float, now: float) -> None:
        engine.learn(PrefillSample(4000, service_s, 0), FirstTokenWork(4000), service_s, now)

    for number, engine in enumerate(engines):
        for sample in range(6):
            first_token(engine, 0.5 + number / count, 10.0 * sample)
    work = FirstTokenWork(4000)
    assert sum(new.model.seconds(work)) == pytest.approx(1.0, rel=0.2)
    assert fleet.prefill_s_per_token == pytest.approx(1.0 / 4000, rel=0.2)
    assert reads["model"] == count
    reads |= {"model": 0, "rates": 0}
    for number in range(10):
        first_token(engines[number % count], 1.0, 100.0 + number)
        new.model.seconds(work)
        fleet.borrowed  # noqa: B018  # computes them
    assert reads == {"model": 10, "rates": 10}
