"""A router before simulated engines whose offloading tiers fetch from each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from publisher.simulator.model import WRONG_MARK
from publisher.simulator.server import SimulatedEngine
from tests.router.app.test_prefill_decode import (
    BODIES,
    SPLITS,
    busy,
    completion,
    of,
    plain,
    receipts,
    told_alone,
    words,
)
from tests.support.ports import free_port
from tests.support.waiting import until
from tests.support.whole_router import Rig, configure, routing, running

P: dict[str, Any] = {"role": "prefill", "kv_connector": "offloading"}
D: dict[str, Any] = {"role": "decode", "kv_connector": "offloading"}
PATH = "/v1/completions"


@asynccontextmanager
async def apart(
    *decode: dict[str, Any], prefill: dict[str, Any] = P, **changes: Any
) -> AsyncIterator[tuple[Rig, SimulatedEngine]]:
    port = free_port()
    async with running({**prefill, "side_channel_port": port}, *(decode or (D,))) as started:
        pd = msgspec.structs.replace(SPLITS, connector="offloading", offloading_port=port, **changes)
        async with routing(configure(*(of(engine) for engine in started), pd=pd)) as rig:
            yield rig, started[0]
            await until(lambda: rig.idle, "every request has ended")
            rig.check_books()


def kept(engine: SimulatedEngine) -> int:
    assert engine.connector is not None
    return engine.connector.num_kept


@pytest.mark.parametrize("path", BODIES)
async def test_the_answer_is_that_of_one_engine(path: str) -> None:
    alone = await told_alone(path, BODIES[path])
    async with apart() as (rig, p):
        with busy(rig):
            status, answer = await rig.ask("POST", path, BODIES[path])
        assert status == 200, answer
        assert plain(words(answer)) == plain(words(alone))
        assert (rig.router.proxy.pd_stats.handoffs, rig.router.proxy.pd_stats.aggregated) == (1, {})
        assert [one["leg"] for one in await receipts(rig)] == ["prefill", "decode"]
        await until(lambda: kept(p) == 0, "the fetched blocks are released")


@pytest.mark.parametrize("point", ["before_answer", "after_first_byte", "after_answer"])
async def test_a_prefill_engine_that_dies_costs_no_answer(point: str) -> None:
    alone = await told_alone(PATH, completion(1))
    async with apart(prefill={**P, "dies_at": point}) as (rig, _):
        with busy(rig):
            status, answer = await rig.ask("POST", PATH, completion(1))
        assert (status, words(answer)) == (200, words(alone))


async def test_a_decode_engine_that_dies_is_replaced() -> None:
    alone = await told_alone(PATH, completion(1))
    async with apart({**D, "dies_at": "before_answer"}, D) as (rig, _):
        with busy(rig):
            for _ in range(2):  # one of them meets it
                status, answer = await rig.ask("POST", PATH, completion(1))
                assert (status, words(answer)) == (200, words(alone))


async def test_a_prefill_engine_that_dropped_the_blocks_costs_no_answer() -> None:
    """The tier's time is shorter than the router was told."""

    alone = await told_alone(PATH, completion(1))
    async with apart(prefill={**P, "kv_lease_s": 1e-6}) as (rig, _):
        with busy(rig):
            status, answer = await rig.ask("POST", PATH, completion(1))
        assert (status, words(answer)) == (200, words(alone))
        assert rig.router.proxy.pd_stats.handoffs_lost == 1


async def test_blocks_whose_time_is_nearly_over_are_not_asked_for() -> None:
    async with apart(lease_s=1e-6, lease_margin_s=0.0) as (rig, _):
        with busy(rig):
            status, _ = await rig.ask("POST", PATH, completion(1))
        stats = rig.router.proxy.pd_stats
        assert (status, stats.leases_late, stats.handoffs) == (200, 2, 0)


async def test_many_at_once_get_right_answers_and_leave_nothing_behind() -> None:
    numbers = list(range(40))
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        asked = [rig.ask("POST", PATH, completion(number)) for number in numbers]
        alone = [words(answer) for _, answer in await asyncio.gather(*asked)]
    async with apart(D, D) as (rig, p):
        asked = [rig.ask("POST", PATH, completion(number)) for number in numbers]
        with busy(rig):
            answers = await asyncio.gather(*asked)
        assert [words(answer) for _, answer in answers] == alone
        assert WRONG_MARK not in str(answers)
        assert rig.router.proxy.pd_stats.handoffs > 0
        await until(lambda: kept(p) == 0, "the fetched blocks are released")
