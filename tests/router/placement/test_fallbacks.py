"""The engines that a gateway may try behind the chosen one come in the order of their cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.placement.placement import Placement


def _placement(costs_s: list[float], servers: list[int], chosen: int) -> Any:
    engines = [SimpleNamespace(engine=SimpleNamespace(base_url=f"http://e:{server}")) for server in servers]
    choice = SimpleNamespace(scored=SimpleNamespace(totals=costs_s))
    decision = SimpleNamespace(choice=choice, engines=engines)
    return cast("Any", SimpleNamespace(decision=decision, base_url=f"http://e:{chosen}", _steps=()))


def test_the_cheapest_come_first_and_the_chosen_one_not_at_all() -> None:
    placement = _placement([3.0, 1.0, 2.0, 4.0], [0, 1, 2, 3], chosen=1)
    assert Placement.next_best(placement, 2) == ("http://e:2", "http://e:0")
    assert Placement.next_best(placement, 9) == ("http://e:2", "http://e:0", "http://e:3")
    assert Placement.next_best(placement, 0) == ()


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5)), min_size=1, max_size=12), st.integers(1, 6))
def test_each_server_stands_where_its_cheapest_rank_does(rated: list[tuple[float, int]], count: int) -> None:
    costs_s, servers = [cost_s for cost_s, _ in rated], [server for _, server in rated]
    found = Placement.next_best(_placement(costs_s, servers, servers[0]), count)
    cheapest = {server: min(cost_s for cost_s, its in rated if its == server) for server in servers}
    order = [cheapest[int(url.rpartition(":")[2])] for url in found]
    assert order == sorted(order)
    others = sorted(cost_s for server, cost_s in cheapest.items() if server != servers[0])
    assert order == others[:count]
