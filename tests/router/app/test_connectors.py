"""Simulated prefill and decode engines of each connector before a router: right answers, empty books."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.simulator.kv_protocols import MooncakeLink
from kvatlas.publisher.simulator.model import Continuation
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.proxy.settings import ProxySettings
from tests.router.app.test_prefill_decode import (
    BODIES,
    SPLITS,
    D,
    P,
    apart,
    completion,
    plain,
    prompt,
    receipts,
    told_alone,
    words,
)
from tests.support.pairs import CONNECTORS, busy
from tests.support.waiting import until
from tests.support.whole_router import Rig

PATH = "/v1/completions"
FOUND_OUT = "mooncake, found out"


async def released(engine: SimulatedEngine) -> None:
    """The engine keeps no blocks for others any more."""
    connector = engine.connector
    assert connector is not None
    await until(lambda: connector.num_kept == 0, "the blocks that were read are released")


async def asked(rig: Rig, number: int = 1, **fields: Any) -> Any:
    """Generated words of a prompt that is better computed elsewhere."""
    with busy(rig):
        status, answer = await rig.ask("POST", PATH, completion(number, **fields))
    assert status == 200, answer
    return words(answer)


async def alone(number: int = 1) -> Any:
    return words(await told_alone(PATH, completion(number)))


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("path", BODIES)
async def test_the_answer_is_that_of_one_engine(path: str, connector: str) -> None:
    one = await told_alone(path, BODIES[path])
    async with apart(P, D, connector=connector) as (rig, (p, d)):
        with busy(rig):
            status, answer = await rig.ask("POST", path, BODIES[path])
        assert status == 200, answer
        assert plain(words(answer)) == plain(words(one))
        stats = rig.router.proxy.pd_stats
        assert (stats.split, stats.handoffs, stats.aggregated) == (1, 1, {})
        found = [(receipt["leg"], receipt["engine_id"]) for receipt in await receipts(rig)]
        assert found == [("prefill", p.base_url), ("decode", d.base_url)]
        await released(p)


@pytest.mark.parametrize("connector", ["nixl", FOUND_OUT])
async def test_predictions_are_exact_where_they_were_made(connector: str) -> None:
    """A prefix that the prefill engine has: its receipt says so, and the client's usage too."""
    async with apart(P, D, connector=connector) as (rig, (p, d)):
        with busy(rig):
            await rig.ask("POST", PATH, completion(1))
            await rig.caught_up(p, d)
            more = {**completion(1), "prompt": prompt(1) + prompt(5, 500)}
            _, answer = await rig.ask("POST", PATH, more)
        await rig.caught_up(p, d)
        before, _, first, second = await receipts(rig)
        hit = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert hit > 600
        assert (before["leg"], before["outcome"]) == ("prefill", "exact")
        assert (first["leg"], first["outcome"], first["predicted_tokens"]) == ("prefill", "exact", hit)
        assert (second["leg"], second["outcome"]) == ("decode", "unpredicted")
        assert 0 <= second["gap_s"] < 10


@pytest.mark.parametrize("point", ["before_answer", "after_first_byte", "after_answer"])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_prefill_engine_that_dies_costs_no_answer(point: str, connector: str) -> None:
    """Where no request is a suspect. With Mooncake, after its answer, only the router's time-out shows that
    it is gone."""
    decoders, proxy = [D], ProxySettings(suspect_s=0.0)
    if connector.startswith("mooncake"):
        decoders, proxy = [D, D], ProxySettings(suspect_s=0.0, first_byte_timeout_s=1.0)
    one = await alone()
    async with apart({**P, "dies_at": point}, *decoders, connector=connector, proxy=proxy) as (rig, _):
        assert await asked(rig) == one


@pytest.mark.parametrize("connector", ["nixl", FOUND_OUT, "offloading"])
async def test_a_decode_engine_that_dies_is_replaced(connector: str) -> None:
    one = await alone()
    proxy = ProxySettings(suspect_s=0.0)
    async with apart(P, {**D, "dies_at": "before_answer"}, D, connector=connector, proxy=proxy) as (rig, _):
        for _ in range(2):  # one of them meets it
            assert await asked(rig) == one


async def test_a_prompt_whose_first_token_ends_it_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has released its blocks: a decode engine that asked for them would wait for minutes."""
    async with apart(P, D, connector=FOUND_OUT) as (rig, _):
        stats = rig.router.proxy.pd_stats
        with monkeypatch.context() as patch:
            patch.setattr(Continuation, "token", lambda self, index, *, ignore_eos: self.source.eos_id)
            await asked(rig, ignore_eos=False)
        assert (stats.prefill_failures, stats.handoffs) == ({"stopped": 1}, 0)
        await asked(rig, 2)
        assert stats.handoffs == 1, "the engine is asked again"


async def test_an_engine_without_bootstrap_server_is_left_alone_for_a_while() -> None:
    async with apart(P, D, connector=FOUND_OUT) as (rig, (p, _)):
        assert isinstance(p.link, MooncakeLink)
        p.link.close()
        for number in (1, 2):
            await asked(rig, number)
        stats = rig.router.proxy.pd_stats
        assert (stats.prefill_failures, stats.split) == ({"no_connector": 1}, 1)


async def test_a_prefill_engine_that_has_mooncake_hands_nothing_over_to_nixl() -> None:
    pd = msgspec.structs.replace(SPLITS, connector="nixl")
    async with apart(P, D, connector=FOUND_OUT, pd=pd) as (rig, _):
        await asked(rig)
        assert rig.router.proxy.pd_stats.prefill_failures == {"no_connector": 1}


async def test_a_client_that_leaves_keeps_nothing_anywhere() -> None:
    slow = {**D, "transfer_s_per_block": 0.01}
    async with apart(P, slow, connector=FOUND_OUT) as (rig, (p, d)):
        with busy(rig):
            leaves = asyncio.ensure_future(rig.ask("POST", PATH, completion(1)))
            await until(lambda: d.scheduler.gauges().num_waiting == 1, "the blocks are being read")
            leaves.cancel()
            await until(lambda: rig.idle, "the client is known to be gone")
        await released(p)


async def test_a_prefill_engine_that_dropped_the_blocks_costs_no_answer() -> None:
    """The tier keeps them for a shorter time than is configured here."""
    one = await alone()
    async with apart({**P, "kv_lease_s": 1e-6}, D, connector="offloading") as (rig, _):
        assert await asked(rig) == one
        assert rig.router.proxy.pd_stats.handoffs_lost == 1
