"""Requests that wait: released one at a time, refused, timed out or cancelled, with nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvatlas.router.admission.admission_queue import AdmissionQueue, QueueSettings, Ticket
from kvatlas.router.admission.fair_queue import Lane
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import QueueTicketRequest, Usage
from kvatlas.router.openai.work import Work
from tests.support.waiting import until

FOREVER = 3600.0
TINY: dict[str, Any] = {"pool": "tiny", "lane": "tiny", "engines": 2, "tokens_per_s": 1000.0}


class Engines:
    """Room as the test says."""

    def __init__(self) -> None:
        self.gap_s = 10.0
        self.now_s = 0.0

    def gap(self, lane: Lane) -> float:
        return self.gap_s


def room_of(engines: Engines, **settings: float) -> AdmissionQueue:
    given = {"wait_s_max": FOREVER, **settings}
    return AdmissionQueue(
        QueueSettings(saturation_s=1.0, **given),  # type: ignore[arg-type]
        clock=lambda: engines.now_s,
        look=lambda: engines.gap,
    )


def comes(room: AdmissionQueue, tenant: str = "", **claim: object) -> asyncio.Task[Ticket]:
    asked = QueueTicketRequest(tenant=tenant, **claim)  # type: ignore[arg-type]
    return asyncio.ensure_future(room.wait(asked, work_s=2.0, **TINY))


async def test_the_next_one_goes_when_the_one_before_has_been_placed() -> None:
    engines = Engines()
    room = room_of(engines)
    first, second = comes(room), comes(room)
    await until(lambda: len(room) == 2, "both wait")
    engines.gap_s = 0.0
    room.changed()
    ticket = await first
    room.changed()
    assert not second.done()
    assert (len(room), room.stats.waiting) == (2, 1)
    room.leave(ticket)
    room.leave(await second)
    assert (len(room), room.stats.waited, room.stats.refused) == (0, 2, {})


async def test_room_that_comes_with_time_alone_is_noticed() -> None:
    engines = Engines()
    engines.gap_s = 0.01
    room = room_of(engines)
    waits = comes(room)
    await until(lambda: len(room) == 1, "it waits")
    engines.gap_s = 0.0  # without a notice
    room.leave(await waits)


async def test_too_many_are_refused_with_the_seconds_of_work_ahead() -> None:
    engines = Engines()
    room = room_of(engines, requests_max=3)
    waits = [comes(room) for _ in range(3)]
    await until(lambda: len(room) == 3, "three wait")
    with pytest.raises(ApiError, match="requests_max = 3") as refused:
        await comes(room)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    # Three requests of 2 s over two engines, behind 10 s: 13 s.
    assert dict(refused.value.headers)[b"retry-after"] == b"13"
    assert room.stats.refused == {"full": 1}
    room.configure(QueueSettings(requests_max=4))
    waits.append(comes(room))
    await until(lambda: len(room) == 4, "it waits too: another one may")
    for one in waits:
        one.cancel()
    await asyncio.wait(waits)


async def test_a_flood_is_shed_for_another_tenant() -> None:
    room = room_of(Engines(), requests_max=2)
    flood = [comes(room, "acme"), comes(room, "acme")]
    await until(lambda: len(room) == 2, "two wait")
    guest = comes(room, "beta")
    with pytest.raises(ApiError) as shed:
        await flood[1]
    assert shed.value.status == 429
    assert room.stats.refused == {"shed": 1}
    assert room.stats.waiting == 2
    for one in (flood[0], guest):
        one.cancel()
    await asyncio.wait([flood[0], guest])


@pytest.mark.parametrize(
    ("wait_s_max", "until_s", "reason"), [(0.01, None, "wait_s_max"), (FOREVER, 0.01, "x-request-timeout")]
)
async def test_a_request_that_waited_too_long_gets_an_error(
    wait_s_max: float, until_s: float | None, reason: str
) -> None:
    room = room_of(Engines(), wait_s_max=wait_s_max)
    with pytest.raises(ApiError, match=reason) as refused:
        await comes(room, until_s=until_s)
    assert (refused.value.status, refused.value.code) == (503, "queue_timeout")
    assert b"retry-after" in dict(refused.value.headers)
    assert (len(room), room.stats.waiting, room.stats.refused) == (0, 0, {reason: 1})


async def test_a_client_that_goes_leaves_its_place_to_others() -> None:
    engines = Engines()
    room = room_of(engines)
    first, second = comes(room), comes(room)
    await until(lambda: len(room) == 2, "both wait")
    first.cancel()
    await asyncio.wait([first])
    assert (len(room), room.stats.left) == (1, 1)
    engines.gap_s = 0.0
    room.changed()
    second.cancel()  # it has left the queue, and has not run since
    await asyncio.wait([second])
    assert (len(room), room.stats.left) == (0, 2)
    room.leave(await comes(room))


async def test_the_engines_report_corrects_the_charge() -> None:
    engines = Engines()
    room = room_of(engines)
    waits = {name: comes(room, name) for name in ("acme", "beta")}
    more = [comes(room, "acme"), comes(room, "beta")]
    await until(lambda: len(room) == 4, "all wait")
    acme, beta = QueueTicketRequest("acme"), QueueTicketRequest("beta")
    charge = room.charge(acme, "tiny", 1000)
    room.charge(beta, "tiny", 500)
    room.settle(acme, "tiny", charge, Work(1000, 1000), Usage(1000, 10, 900))  # 100 and twice 10
    order = []
    engines.gap_s = 0.0
    room.changed()
    for _ in range(2):
        await until(lambda: any(one.done() for one in waits.values()), "one leaves the queue")
        name = next(name for name, one in waits.items() if one.done())
        order.append(name)
        room.charge(QueueTicketRequest(name), "tiny", 1000)
        room.leave(waits.pop(name).result())
    assert order == ["acme", "beta"]
    for one in more:
        room.leave(await one)


async def test_a_tenants_credit_is_what_the_engines_compute_in_credit_s() -> None:
    engines = Engines()
    engines.gap_s = 0.0
    room = room_of(engines, credit_s=3.0)
    ticket = await comes(room)
    assert ticket.credit_tokens == 3000.0
    room.leave(ticket)


async def test_a_client_that_leaves_as_another_arrives_or_room_appears_harms_no_other() -> None:
    engines = Engines()
    room = room_of(engines, requests_max=2)
    flood = [comes(room, "acme"), comes(room, "acme")]
    await until(lambda: len(room) == 2, "both wait")
    other = comes(room, "beta")
    flood[1].cancel()  # it leaves in its next turn, after the one who comes instead of it
    await until(flood[1].cancelled, "it is gone")
    await until(lambda: len(room) == 2, "the other one waits")
    assert room.stats.refused == {}

    engines.gap_s = 0.0
    flood[0].cancel()
    room.changed()
    room.leave(await other)
    assert (len(room), room.stats.left) == (0, 2)
