"""The queue's rules: bounded, nothing lost, in order, and every tenant gets its share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.admission.fair_queue import FairQueue, Lane, Priority, Waiting
from tests.support.examples import examples

TENANTS = ("acme", "beta", "gamma")
POOLS = ("tiny", "large")


def anywhere(lane: Lane) -> bool:
    return True


def waiting(item: int, at_s: float = 0.0, **more: object) -> Waiting[int]:
    return Waiting(item, arrived_s=at_s, **more)  # type: ignore[arg-type]


def drained(queue: FairQueue[int], fits: Callable[[Lane], bool] = anywhere) -> list[Waiting[int]]:
    found = []
    while (one := queue.take(fits)) is not None:
        found.append(one)
    return found


arrivals = st.lists(
    st.builds(
        dict,
        tenant=st.sampled_from(TENANTS),
        pool=st.sampled_from(POOLS),
        lane=st.integers(0, 1),
        priority=st.sampled_from(Priority),
        weight=st.sampled_from((0.5, 1.0, 4.0)),
        work_s=st.floats(0, 10),
    ),
    max_size=40,
)


@settings(max_examples=examples(300))
@given(arrivals, st.integers(1, 12), st.data())
def test_never_more_than_allowed_wait_and_each_request_leaves_once(
    asked: list[dict[str, object]], most: int, data: st.DataObject
) -> None:
    queue: FairQueue[int] = FairQueue(most)
    inside: dict[int, Waiting[int]] = {}
    left: list[int] = []
    for number, how in enumerate(asked):
        one = waiting(number, float(number), **how)
        gone = queue.add(one)
        inside[number] = one
        if gone is not None:
            left.append(gone.item)
            del inside[gone.item]
        if inside and data.draw(st.booleans()):
            away = data.draw(st.sampled_from(sorted(inside)))
            assert queue.remove(inside[away])
            assert not queue.remove(inside.pop(away))
            left.append(away)
        assert len(queue) == len(inside) <= most
        assert {one.item for one in queue} == set(inside)
    left += [one.item for one in drained(queue)]
    assert sorted(left) == list(range(len(asked)))
    assert len(queue) == 0
    assert not queue.lanes()


@settings(max_examples=examples(300))
@given(arrivals)
def test_a_tenants_requests_of_one_class_and_lane_come_in_the_order_they_came(
    asked: list[dict[str, object]],
) -> None:
    queue: FairQueue[int] = FairQueue(100)
    for number, how in enumerate(asked):
        queue.add(waiting(number, float(number), **how))
    last: dict[object, int] = {}
    highest: dict[str, Priority] = {}
    for one in drained(queue):
        line = one.tenant, one.pool, one.lane, one.priority
        assert last.get(line, -1) < one.item
        last[line] = one.item
        assert highest.get(one.pool, Priority.HIGH) <= one.priority  # classes are strict
        highest[one.pool] = one.priority


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 1000)), min_size=1, max_size=60),
    st.fixed_dictionaries({tenant: st.sampled_from((0.5, 1.0, 3.0)) for tenant in TENANTS}),
    st.sampled_from((0.0, 500.0, 1e6)),
)
def test_no_tenant_that_waits_is_below_its_share_by_more_than_one_requests_work(
    asked: list[tuple[str, int]], weights: dict[str, float], credit: float
) -> None:
    """At any time, two tenants that always waited differ by at most one request of the heavier one."""
    queue: FairQueue[int] = FairQueue(100)
    for number, (tenant, tokens) in enumerate(asked):
        more = {"tenant": tenant, "weight": weights[tenant], "credit_tokens": credit}
        queue.add(waiting(tokens, float(number), **more))
    largest = {t: max([n for who, n in asked if who == t], default=0) / weights[t] for t in TENANTS}
    served = dict.fromkeys({tenant for tenant, _ in asked}, 0.0)
    while True:
        still = {one.tenant for one in queue}
        for behind in still:
            for other in served:
                assert served[other] - served[behind] <= largest[other] + 1e-6
        one = queue.take(anywhere)
        if one is None:
            break
        queue.charge(one.tenant, one.priority, one.pool, one.item, one.weight)
        served[one.tenant] += one.item / one.weight


def turns(queue: FairQueue[int], count: int, tokens: int = 100) -> list[str]:
    """Tenants in order of their turns, for requests of this many tokens each."""
    order = []
    for _ in range(count):
        one = queue.take(anywhere)
        assert one is not None
        queue.charge(one.tenant, one.priority, one.pool, tokens)
        order.append(one.tenant)
    return order


def test_a_flood_does_not_keep_a_newcomer_waiting() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for number in range(50):
        queue.add(waiting(number, tenant="acme"))
    turns(queue, 10, 1000)
    queue.add(waiting(50, tenant="beta"))
    assert sorted(turns(queue, 3, 1000)[:2]) == ["acme", "beta"]


def test_without_credit_one_that_was_away_saved_nothing_up() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for number in range(20):
        queue.add(waiting(number, tenant="acme"))
        queue.add(waiting(number, tenant="beta"))
    turns(queue, 20)
    for number in range(20):
        queue.add(waiting(number, tenant="gamma"))
    order = turns(queue, 9)
    assert {tenant: order.count(tenant) for tenant in TENANTS} == {"acme": 3, "beta": 3, "gamma": 3}


def flooded(credit: float, had: int = 0) -> list[str]:
    """Order of service after a guest comes with six requests of 100 tokens, when acme's flood alone has had a
    hundred; ``had`` of the guest's are served among them."""
    queue: FairQueue[int] = FairQueue(1000)
    for number in range(200):
        queue.add(waiting(number, tenant="acme", credit_tokens=credit))
    for number in range(100):
        if number < had:
            queue.add(waiting(number, tenant="beta", credit_tokens=credit))
            turns(queue, 1)
        turns(queue, 1)
    for number in range(6):
        queue.add(waiting(number, tenant="beta", credit_tokens=credit))
    return turns(queue, 8)


def test_several_requests_of_who_had_less_than_its_share_go_before_a_flood() -> None:
    assert flooded(credit=1000).index("acme") == 6
    assert flooded(credit=0).index("acme") < 2


def test_no_more_is_saved_up_than_the_credit() -> None:
    order = flooded(credit=300)
    assert order[:3] == ["beta"] * 3
    assert "acme" in order[3:5]


def test_a_tenant_that_had_its_share_has_no_credit() -> None:
    assert flooded(credit=1000, had=100).index("acme") < 2


def test_corrected_charges_count_at_the_next_turn() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for number in range(4):
        queue.add(waiting(number, tenant="acme"))
        queue.add(waiting(number, tenant="beta"))
    first = queue.take(anywhere)
    assert first is not None
    assert first.tenant == "acme"
    charge = queue.charge("acme", Priority.NORMAL, "", 1000)
    assert charge is not None
    second = queue.take(anywhere)
    assert second is not None
    assert second.tenant == "beta"
    queue.charge("beta", Priority.NORMAL, "", 900)
    charge.correct(500)
    third = queue.take(anywhere)
    assert third is not None
    assert third.tenant == "acme"


def test_full_the_tenant_with_the_most_waiting_gives_way_newest_first() -> None:
    queue: FairQueue[int] = FairQueue(4)
    for number in range(4):
        assert queue.add(waiting(number, tenant="acme")) is None
    extra = waiting(4, tenant="acme")
    assert queue.add(extra) is extra
    gone = queue.add(waiting(5, tenant="beta"))
    assert gone is not None
    assert gone.item == 3


def test_full_the_lowest_class_goes_first_and_never_for_a_lower_one() -> None:
    queue: FairQueue[int] = FairQueue(2)
    queue.add(waiting(0, tenant="acme", priority=Priority.LOW))
    queue.add(waiting(1, tenant="acme"))
    gone = queue.add(waiting(2, tenant="acme"))
    assert gone is not None
    assert gone.item == 0
    low = waiting(3, tenant="beta", priority=Priority.LOW)
    assert queue.add(low) is low


def test_weight_counts_for_room_too() -> None:
    queue: FairQueue[int] = FairQueue(4)
    for number in range(3):
        queue.add(waiting(number, tenant="acme", weight=4.0))
    queue.add(waiting(3, tenant="beta"))
    other = waiting(4, tenant="beta")
    assert queue.add(other) is other


def test_a_request_that_fits_nowhere_lets_others_pass() -> None:
    queue: FairQueue[int] = FairQueue(10)
    queue.add(waiting(0, lane="tiny"))
    queue.add(waiting(1, lane="large"))
    queue.add(waiting(2, lane="tiny"))
    assert [one.item for one in drained(queue, lambda lane: lane == "large")] == [1]
    assert [one.item for one in drained(queue)] == [0, 2]


def test_with_ageing_short_work_goes_first_but_long_work_not_last_for_ever() -> None:
    queue: FairQueue[int] = FairQueue(10, ageing=10.0)
    queue.add(waiting(0, 0.0, work_s=2.0))
    queue.add(waiting(1, 1.0, work_s=0.1))
    queue.add(waiting(2, 30.0, work_s=0.1))
    assert [one.item for one in drained(queue)] == [1, 0, 2]


@pytest.mark.parametrize(
    ("priority", "expected_s"), [(Priority.HIGH, 1.0), (Priority.NORMAL, 3.0), (Priority.LOW, 7.0)]
)
def test_work_ahead_is_that_of_the_same_class_and_above(priority: Priority, expected_s: float) -> None:
    queue: FairQueue[int] = FairQueue(10)
    for number, one in enumerate(Priority):
        queue.add(waiting(number, priority=one, pool="tiny", work_s=float(1 << one)))
        queue.add(waiting(number, priority=one, pool="large", work_s=100.0))
    assert queue.ahead_s(priority, "tiny") == pytest.approx(expected_s)


@pytest.mark.parametrize("credit", [0.0, 300.0])
def test_requests_that_were_charged_nowhere_give_nothing_back(credit: float) -> None:
    """Twenty requests placed while none waits and cancelled while others do: no turn is won by it."""
    queue: FairQueue[int] = FairQueue(1000)
    placed = [queue.charge("acme", Priority.NORMAL, "", 300) for _ in range(20)]
    for number in range(100):
        queue.add(waiting(number, tenant="acme", credit_tokens=credit))
        queue.add(waiting(number, tenant="beta", credit_tokens=credit))
    for charge in placed:
        if charge is not None:
            charge.correct(0)
    order = turns(queue, 40)
    assert abs(order.count("acme") - order.count("beta")) <= 1 + credit / 100


def test_a_charge_of_tenants_that_wait_no_longer_gives_nothing_back_to_those_that_do() -> None:
    queue: FairQueue[int] = FairQueue(1000)
    queue.add(waiting(0, tenant="beta"))
    charge = queue.charge("acme", Priority.NORMAL, "", 6000)
    assert charge is not None
    turns(queue, 1)  # none waits: the counters are gone
    for number in range(100):
        queue.add(waiting(number, tenant="acme"))
        queue.add(waiting(number, tenant="beta"))
    charge.correct(0)
    order = turns(queue, 40)
    assert order.count("acme") == order.count("beta")


def test_late_refunds_put_a_tenant_no_further_ahead_than_its_credit() -> None:
    queue: FairQueue[int] = FairQueue(1000)
    for number in range(200):
        queue.add(waiting(number, tenant="beta"))
    charge = queue.charge("acme", Priority.NORMAL, "", 3000)
    assert charge is not None
    turns(queue, 60)  # beta has had twice as much meanwhile
    for number in range(100):
        queue.add(waiting(number, tenant="acme"))
    charge.correct(0)
    order = turns(queue, 20)
    assert order.count("acme") <= 11


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from(TENANTS[:2]), st.integers(0, 1000)), max_size=20))
def test_charging_and_giving_back_wins_no_turn(charges: list[tuple[str, int]]) -> None:
    queue: FairQueue[int] = FairQueue(1000)
    for number in range(20):
        queue.add(waiting(number, tenant="acme"))
        queue.add(waiting(number, tenant="beta"))
    given_back = [queue.charge(tenant, Priority.NORMAL, "", tokens) for tenant, tokens in charges]
    for charge in given_back:
        assert charge is not None
        charge.correct(0)
    order = turns(queue, 20)
    assert order.count("acme") == order.count("beta")


def test_a_tenant_that_comes_back_begins_at_its_credit_and_not_where_it_left() -> None:
    """Its counter stood still while others were served; it is ahead of them by its credit alone."""
    queue: FairQueue[int] = FairQueue(1000)
    queue.add(waiting(0, tenant="beta", credit_tokens=300))
    for number in range(200):
        queue.add(waiting(number, tenant="acme", credit_tokens=300))
    turns(queue, 101)
    for number in range(10):
        queue.add(waiting(number, tenant="beta", credit_tokens=300))
    order = turns(queue, 8)
    assert order[:3] == ["beta"] * 3
    assert order.count("acme") >= 2


def test_a_session_with_many_requests_delays_another_one_by_one_of_them() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for item in range(50):
        queue.add(waiting(item, float(item), session="many"))
    first = queue.take(anywhere)
    assert first is not None
    assert first.item == 0
    queue.add(waiting(100, 60.0, session="one"))
    queue.add(waiting(101, 61.0))
    assert [one.item for one in drained(queue)[:4]] == [100, 101, 1, 2]


def test_sessions_take_turns_and_each_keeps_its_order() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for item in range(6):
        queue.add(waiting(item, float(item), session="ab"[item // 3]))
    assert [one.item for one in drained(queue)] == [0, 3, 1, 4, 2, 5]


def test_cancelled_requests_do_not_count_against_their_session() -> None:
    queue: FairQueue[int] = FairQueue(100)
    gone = [waiting(item, float(item), session="a") for item in range(20)]
    for one in gone:
        queue.add(one)
    queue.add(waiting(20, 20.0, session="b"))
    queue.add(waiting(21, 21.0, session="b"))
    for one in gone:
        queue.remove(one)
    queue.add(waiting(30, 30.0, session="a"))
    assert [one.item for one in drained(queue)] == [20, 30, 21]


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_no_session_waits_for_two_requests_of_another(steps: list[tuple[str, bool]]) -> None:
    queue: FairQueue[int] = FairQueue(1000)
    inside: dict[int, str] = {}
    since: dict[str, dict[str, int]] = {}
    for number, (session, takes) in enumerate(steps):
        if takes:
            one = queue.take(anywhere)
            if one is None:
                continue
            served = inside.pop(one.item)
            since.pop(served, None)
            for waits in {*inside.values()} - {served}:
                counts = since.setdefault(waits, {})
                counts[served] = counts.get(served, 0) + 1
                assert counts[served] <= 2, "one of them, and one that was in its turn already"
        else:
            queue.add(waiting(number, float(number), session=session))
            inside[number] = session


def test_sessions_remembered_are_bounded() -> None:
    queue: FairQueue[int] = FairQueue(1000)
    queue.add(waiting(0, 0.0, session="stays", lane="full"))
    for item in range(1, 500):
        queue.add(waiting(item, float(item), session=f"s{item}", lane="free"))
        assert queue.take(lambda lane: lane == "free") is not None
    (band,) = queue._bands.values()
    assert len(band.lines[""].turns) < 100
