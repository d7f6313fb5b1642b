"""Reports of tenants' use: the named ones first, and all others in turn where one report is too small."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kvatlas.router.admission.others_use import Use
from kvatlas.router.admission.use_reports import UseReports


def reports(tenants: int, tenants_max: int) -> UseReports:
    every = {f"t{number}": Use(number) for number in range(tenants)}

    def uses(names: Collection[str] | None) -> dict[str, Use]:
        return {name: use for name, use in every.items() if names is None or name in names}

    return UseReports(7, uses, tenants_max)


@pytest.mark.parametrize(("tenants", "tenants_max"), [(0, 4), (1, 4), (4, 4), (5, 4), (11, 4), (9, 1)])
def test_every_tenant_appears_within_as_many_reports_as_it_takes(tenants: int, tenants_max: int) -> None:
    one = reports(tenants, tenants_max)
    needed = max(1, -(-tenants // tenants_max))
    told: set[str] = set()
    for number in range(needed):
        said = one.next(all_tenants=True)
        assert (said.life, said.beat) == (7, number + 1)
        assert said.whole == (tenants <= tenants_max)
        assert len(said.tenants) == min(tenants, tenants_max)
        told |= said.tenants.keys()
    assert told == {f"t{number}" for number in range(tenants)}
    assert one.omitted == needed * max(0, tenants - tenants_max)


def test_named_tenants_come_first_and_cost_none_of_the_others_its_turn() -> None:
    one = reports(6, 3)
    told = [one.next(("t5",), all_tenants=True) for _ in range(3)]
    assert all("t5" in said.tenants and len(said.tenants) <= 3 for said in told)
    assert {name for said in told for name in said.tenants} == {f"t{number}" for number in range(6)}
    alone = one.next(("t1", "t2"), all_tenants=False)
    assert (alone.whole, alone.beat, sorted(alone.tenants)) == (False, 4, ["t1", "t2"])
