"""A router before simulated engines with Mooncake: what holds with NIXL holds with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from publisher.simulator.kv_protocols import MooncakeLink
from publisher.simulator.model import WRONG_MARK, Continuation
from publisher.simulator.server import SimulatedEngine
from router.proxy.settings import ProxySettings
from tests.router.app.test_prefill_decode import (
    BODIES,
    SPLITS,
    busy,
    completion,
    of,
    plain,
    prompt,
    receipts,
    told_alone,
    words,
)
from tests.support.waiting import until
from tests.support.whole_router import Rig, configure, routing, running

P: dict[str, Any] = {"role": "prefill", "kv_connector": "mooncake", "bootstrap_port": 0}
D: dict[str, Any] = {"role": "decode", "kv_connector": "mooncake"}
PATH = "/v1/completions"


@asynccontextmanager
async def apart(
    first: dict[str, Any] = P, *others: dict[str, Any], **changes: Any
) -> AsyncIterator[tuple[Rig, SimulatedEngine, list[SimulatedEngine]]]:
    """One prefill engine and others; the router knows its bootstrap port."""
    async with running(first, *(others or (D,))) as started:
        link = started[0].link
        assert isinstance(link, MooncakeLink)
        pd = msgspec.structs.replace(changes.pop("pd", SPLITS), mooncake_bootstrap_port=link.bootstrap_port)
        config = configure(*(of(engine) for engine in started), **{"pd": pd, **changes})
        async with routing(config) as rig:
            yield rig, started[0], started[1:]
            await until(lambda: rig.idle, "every request has ended")
            rig.check_books()


def kept(engine: SimulatedEngine) -> int:
    assert engine.connector is not None
    return engine.connector.num_kept


@pytest.mark.parametrize("connector", ["auto", "mooncake"])
@pytest.mark.parametrize("path", BODIES)
async def test_the_answer_is_that_of_one_engine(path: str, connector: Any) -> None:
    alone = await told_alone(path, BODIES[path])
    async with apart(pd=msgspec.structs.replace(SPLITS, connector=connector)) as (rig, p, (d,)):
        with busy(rig):
            status, answer = await rig.ask("POST", path, BODIES[path])
        assert status == 200, answer
        assert plain(words(answer)) == plain(words(alone))
        stats = rig.router.proxy.pd_stats
        assert (stats.split, stats.handoffs, stats.aggregated) == (1, 1, {})
        found = [(one["leg"], one["engine_id"]) for one in await receipts(rig)]
        assert found == [("prefill", p.base_url), ("decode", d.base_url)]
        await until(lambda: kept(p) == 0, "the blocks that were read are released")


@pytest.mark.parametrize("point", ["before_answer", "after_first_byte", "after_answer"])
async def test_a_prefill_engine_that_dies_while_others_wait_for_it_costs_no_answer(point: str) -> None:
    alone = await told_alone(PATH, completion(1))
    pd = msgspec.structs.replace(SPLITS, connector="mooncake")
    proxy = ProxySettings(first_byte_timeout_s=1.0)
    async with apart({**P, "dies_at": point}, D, D, proxy=proxy, pd=pd) as (rig, _, _):
        with busy(rig):
            status, answer = await rig.ask("POST", PATH, completion(1))
        assert status == 200, answer
        assert words(answer) == words(alone)


async def test_predictions_are_exact_where_they_were_made() -> None:
    async with apart() as (rig, p, (d,)):
        with busy(rig):
            await rig.ask("POST", PATH, completion(1))
            await rig.caught_up(p, d)
            await rig.ask("POST", PATH, {**completion(1), "prompt": prompt(1) + prompt(5, 500)})
        await rig.caught_up(p, d)
        prefills = [one for one in await receipts(rig) if one["leg"] == "prefill"]
        assert [one["outcome"] for one in prefills] == ["exact", "exact"]
        assert prefills[1]["predicted_tokens"] > 600


async def test_a_prompt_whose_first_token_ends_it_is_computed_whole_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine has let go of its blocks: a decode engine that asked for them would wait for minutes."""

    async with apart() as (rig, _, _):
        stats = rig.router.proxy.pd_stats
        with monkeypatch.context() as patch:
            patch.setattr(Continuation, "token", lambda self, index, *, ignore_eos: self._source.eos_id)
            with busy(rig):
                status, _ = await rig.ask("POST", PATH, completion(1, ignore_eos=False))
        assert (status, stats.prefill_failures, stats.handoffs) == (200, {"stopped": 1}, 0)
        with busy(rig):  # and the engine is asked again
            await rig.ask("POST", PATH, completion(2))
        assert stats.handoffs == 1


@pytest.mark.parametrize("point", ["before_answer", "after_first_byte", "after_answer"])
async def test_a_prefill_engine_that_dies_costs_no_answer(point: str) -> None:
    """After its answer nobody tells the decode engine that it is gone: the router's own time-out does."""

    alone = await told_alone(PATH, completion(1))
    proxy = ProxySettings(first_byte_timeout_s=1.0)
    async with apart({**P, "dies_at": point}, D, D, proxy=proxy) as (rig, _, _):
        with busy(rig):
            status, answer = await rig.ask("POST", PATH, completion(1))
        assert status == 200, answer
        assert words(answer) == words(alone)


async def test_a_decode_engine_that_dies_is_replaced() -> None:
    alone = await told_alone(PATH, completion(1))
    async with apart(P, {**D, "dies_at": "before_answer"}, D) as (rig, _, _):
        with busy(rig):
            for _ in range(2):  # one of them meets it
                status, answer = await rig.ask("POST", PATH, completion(1))
                assert status == 200, answer
                assert words(answer) == words(alone)


async def test_blocks_whose_time_is_nearly_over_are_not_asked_for() -> None:
    pd = msgspec.structs.replace(SPLITS, lease_s=1e-6, lease_margin_s=0.0)
    async with apart(pd=pd) as (rig, _, _):
        with busy(rig):
            status, _ = await rig.ask("POST", PATH, completion(1))
        stats = rig.router.proxy.pd_stats
        assert (status, stats.leases_late, stats.handoffs) == (200, 2, 0)


async def test_an_engine_without_bootstrap_server_is_left_alone_for_a_while() -> None:
    async with apart() as (rig, p, _):
        assert isinstance(p.link, MooncakeLink)
        p.link.close()
        for number in (1, 2):
            with busy(rig):
                status, _ = await rig.ask("POST", PATH, completion(number))
                assert status == 200
        stats = rig.router.proxy.pd_stats
        assert (stats.prefill_failures, stats.split) == ({"no_connector": 1}, 1)


async def test_a_prefill_engine_that_has_mooncake_hands_nothing_over_to_nixl() -> None:
    async with apart(pd=msgspec.structs.replace(SPLITS, connector="nixl")) as (rig, _, _):
        with busy(rig):
            status, _ = await rig.ask("POST", PATH, completion(1))
        assert status == 200
        assert rig.router.proxy.pd_stats.prefill_failures == {"no_connector": 1}


async def test_a_client_that_leaves_keeps_nothing_anywhere() -> None:
    slow = {**D, "transfer_s_per_block": 0.01}
    async with apart(P, slow) as (rig, p, (d,)):
        with busy(rig):
            asked = asyncio.ensure_future(rig.ask("POST", PATH, completion(1)))
            await until(lambda: d.scheduler.gauges().num_waiting == 1, "the blocks are being read")
            asked.cancel()
            await until(lambda: rig.idle, "the client is known to be gone")
        await until(lambda: kept(p) == 0, "its blocks are released")


async def test_many_at_once_get_right_answers_and_leave_nothing_behind() -> None:
    numbers = list(range(40))
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        asked = [rig.ask("POST", PATH, completion(number)) for number in numbers]
        alone = [words(answer) for _, answer in await asyncio.gather(*asked)]
    async with apart(P, D, D) as (rig, p, _):
        asked = [rig.ask("POST", PATH, completion(number)) for number in numbers]
        with busy(rig):
            answers = await asyncio.gather(*asked)
        assert [words(answer) for _, answer in answers] == alone
        assert WRONG_MARK not in str(answers)
        assert rig.router.proxy.pd_stats.handoffs > 0
        await until(lambda: kept(p) == 0, "the blocks that were read are released")
