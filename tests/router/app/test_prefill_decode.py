"""A router before simulated prefill and decode engines: which prompts are split, and how they are placed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.kv_protocols import MooncakeLink
from kvatlas.publisher.simulator.model import WRONG_MARK
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.fleet.engines import EngineAddress, Role
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.reloads import apply
from tests.support.examples import some
from tests.support.pairs import CONNECTORS, busy
from tests.support.ports import free_port
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, configure, routing, running

SPLITS = PdSettings(min_remote_tokens=64, leg_overhead_s=0.0, transfer_s_per_token=0.0)
P: dict[str, Any] = {"role": "prefill"}
D: dict[str, Any] = {"role": "decode"}


def prompt(number: int, tokens: int = 700) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 250) for _ in range(tokens)]


def completion(number: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt(number), "max_tokens": 6, "ignore_eos": True, **fields}


def of(engine: SimulatedEngine) -> EngineAddress:
    role: Role | None = engine.settings.role
    return EngineAddress(engine.base_url, role=role)


@asynccontextmanager
async def apart(
    *engines: dict[str, Any], connector: str = "nixl", pd: PdSettings = SPLITS, **changes: Any
) -> AsyncIterator[tuple[Rig, list[SimulatedEngine]]]:
    """Engines with this connector, prompts computed by the first one; in the end nothing is left open."""
    given, own = CONNECTORS[connector]
    ports: dict[str, Any] = {}
    if given.connector != "auto":
        ports["connector"] = given.connector
    if connector == "offloading":
        ports["offloading_port"] = free_port()
        own = {**own, "side_channel_port": ports["offloading_port"]}
    first, *others = engines
    plain = {"kv_connector": own["kv_connector"]} if own else {}
    async with running({**own, **first}, *({**plain, **one} for one in others)) as started:
        if isinstance(started[0].link, MooncakeLink) and connector != "offloading":
            ports["mooncake_bootstrap_port"] = started[0].link.bootstrap_port
        config = configure(*map(of, started), pd=msgspec.structs.replace(pd, **ports), **changes)
        async with routing(config) as rig:
            yield rig, started
            await rig.over()


async def receipts(rig: Rig) -> list[Any]:
    # A client has its answer before the router has made the receipt.
    await until(lambda: rig.idle, "every request has ended")
    _, found = await rig.ask("GET", "/kvatlas/receipts")
    return list(found)


async def told_alone(path: str, body: dict[str, Any]) -> Any:
    """Answer of one engine alone."""
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        return await rig.ok("POST", path, body)


TEXT = "Once upon a time there was a router that asked two engines for one answer. " * 20
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": completion(1),
    "/v1/chat/completions": {
        "model": MODEL,
        "max_tokens": 6,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": TEXT}],
    },
    "/v1/responses": {"model": MODEL, "input": TEXT, "max_output_tokens": 6, "ignore_eos": True},
    "/v1/messages": {"model": MODEL, "max_tokens": 6, "messages": [{"role": "user", "content": TEXT}]},
    "/inference/v1/generate": {
        "model": MODEL,
        "token_ids": prompt(2),
        "sampling_params": {"max_tokens": 6, "ignore_eos": True},
    },
}


def words(answer: dict[str, Any]) -> Any:
    """Generated text."""
    return answer.get("choices") or answer.get("output") or answer.get("content")


def plain(value: Any) -> Any:
    """Without ids, which differ."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != "id"}
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2, "temperature": 1.0}, "n"),
        ({"prompt": [prompt(1), prompt(2)]}, "prompts"),
        ({"prompt": [TEXT, TEXT[::-1]]}, "prompts"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": prompt(1, 60)}, "short"),
    ],
)
async def test_an_unsplit_request_goes_to_the_decode_engine_alone(fields: dict[str, Any], why: str) -> None:
    async with apart(P, D) as (rig, _):
        with busy(rig):
            _, answer = await rig.ask("POST", "/v1/completions", completion(1, **fields))
        assert WRONG_MARK not in str(answer)
        stats = rig.router.proxy.pd_stats
        assert (stats.split, stats.aggregated) == (0, {why: 1})


async def test_tools_that_the_engine_runs_keep_a_response_whole() -> None:
    async with apart(P, D) as (rig, _):
        for number, kind in enumerate(("code_interpreter", "mcp", "function"), 1):
            body = {**BODIES["/v1/responses"], "tools": [{"type": kind, "name": "f"}]}
            with busy(rig):
                status, answer = await rig.ask("POST", "/v1/responses", {**body, "input": TEXT + kind})
            assert (status, WRONG_MARK in str(answer)) == (200, False)
            stats = rig.router.proxy.pd_stats
            assert stats.aggregated == {"tools": min(number, 2)}
        assert stats.split == 1


async def test_no_more_prefills_than_allowed_also_where_no_engine_can_fetch_what_one_holds() -> None:
    """The only decode engine of its version dies while the prompt is computed; the others are of another."""
    pd = msgspec.structs.replace(SPLITS, prefills_max=1, decode_delay_weight=100.0)
    old = {"version": "0.31.0"}
    slow = {**P, "prefill_s_per_token": 5e-4}
    async with apart(slow, D, {**P, **old}, {**D, **old}, pd=pd) as (rig, (p, d, *_)):
        other = rig.router.fleet.get(d.base_url)
        busiest = [e for e in rig.router.fleet if e.engine.decodes and e is not other]
        with busy(rig):
            tickets = [e.load.reserve(time.monotonic()) for e in busiest for _ in range(3)]
            asked = asyncio.ensure_future(rig.ask("POST", "/v1/completions", completion(1)))
            await until(lambda: p.scheduler.gauges().num_running == 1, "the prompt is being computed")
            d.die()
            status, answer = await asked
            for ticket in tickets:
                busiest[0].load.finish(ticket, time.monotonic())
        assert (status, WRONG_MARK in str(answer)) == (200, False)
        stats = rig.router.proxy.pd_stats
        assert (stats.split, stats.handoffs, stats.handoffs_redirected) == (1, 0, 1)
        assert stats.aggregated == {"retried": 1}


async def test_of_a_mamba_model_the_full_attention_prefix_is_not_transferred_again() -> None:
    """The state of the last token is always, so that an engine without it lacks no more than the rest."""
    groups = {"groups": "mamba-hybrid"}
    async with apart({**P, **groups}, {**D, **groups}) as (rig, (p, d)):
        await rig.ask("POST", "/v1/completions", completion(1))
        await rig.caught_up(p, d)
        more = {**completion(1), "prompt": prompt(1)[:400] + prompt(5, 400)}
        with busy(rig):
            _, told = await rig.ask("POST", "/kvatlas/explain", more)
            (found,) = [one for one in told["engines"] if one["engine"] == d.base_url]
            await rig.ask("POST", "/v1/completions", more)
        assert found["hit_tokens"]["GPU"] < found["shared_prefix_tokens"] == 400
        fetched = d.scheduler.stats.external_prefix_cache_hits
        assert (told["split"]["transfer_tokens"], fetched) == (400, 399)


async def test_a_prefix_at_the_decode_engine_makes_the_prefill_engine_superfluous() -> None:
    async with apart(P, D) as (rig, (p, d)):
        with busy(rig):
            await rig.ask("POST", "/v1/completions", completion(1))
            await rig.caught_up(p, d)
            await rig.ask("POST", "/v1/completions", completion(1))
        stats = rig.router.proxy.pd_stats
        assert (stats.split, stats.aggregated) == (1, {"short": 1})


async def test_a_window_group_that_was_not_transferred_is_no_hit() -> None:
    """As measured, with a window shorter than a block: a router that looks at full attention alone would send
    the prompt to the decode engine, which cannot use what it has."""
    groups = (GroupSpec(0, "sliding_window", 128, sliding_window=64), GroupSpec(1, "full_attention", 128))

    pd = msgspec.structs.replace(SPLITS, min_remote_tokens=128)
    async with apart({**P, "groups": groups}, {**D, "groups": groups}, pd=pd) as (rig, (p, d)):
        with busy(rig):
            for _ in range(2):
                body = completion(1, prompt=prompt(1, 324), max_tokens=2)
                await rig.ask("POST", "/v1/completions", body)
                await rig.caught_up(p, d)
        assert rig.router.proxy.pd_stats.split == 2
        prefills = [one for one in await receipts(rig) if one["leg"] == "prefill"]
        assert [one["outcome"] for one in prefills] == ["exact", "exact"]


async def test_blocks_in_transfer_are_not_counted_on() -> None:
    """vLLM computes the next prompt while they come: the decode engine alone would find nothing of it."""
    full = {"groups": (GroupSpec(0, "full_attention", 16),)}
    async with apart({**P, **full}, {**D, **full, "transfer_s_per_block": 0.05}) as (rig, (p, d)):
        with busy(rig):
            learns = completion(9, prompt=prompt(9, 70))  # its events tell of the groups
            await rig.ask("POST", "/v1/completions", learns)
            await rig.caught_up(p, d)
            first = asyncio.ensure_future(rig.ask("POST", "/v1/completions", completion(1)))
            await until(lambda: rig.router.proxy.pd_stats.handoffs == 2, "its blocks are on their way")
            more = {**completion(1), "prompt": prompt(1) + prompt(5, 40)}
            _, told = await rig.ask("POST", "/kvatlas/explain", more)
            assert (told["choice"]["hit_tokens"], told["engines"][0]["inflight_tokens"]) == (0, 688)
            await rig.ask("POST", "/v1/completions", more)
            await first
        assert rig.router.proxy.pd_stats.aggregated == {}
        assert {one["outcome"] for one in await receipts(rig)} == {"exact", "unpredicted"}


async def test_a_prefill_engine_without_connector_is_left_alone_for_a_while() -> None:
    async with running({}, D) as (p, d):
        addresses = EngineAddress(p.base_url, role="prefill"), of(d)
        async with routing(configure(*addresses, pd=SPLITS)) as rig:
            for number in (1, 2):
                with busy(rig):
                    await rig.ok("POST", "/v1/completions", completion(number))
            stats = rig.router.proxy.pd_stats
            assert stats.prefill_failures == {"no_connector": 1}
            assert (stats.split, stats.aggregated) == (1, {"retried": 1, "no_prefill_engine": 1})
            rig.check_books()


async def test_explain_names_both_engines_and_what_they_would_cost() -> None:
    async with apart(P, D) as (rig, (p, d)):
        with busy(rig):
            _, told = await rig.ask("POST", "/kvatlas/explain", completion(1))
        split = told["split"]
        assert told["choice"]["engine"] == d.base_url
        assert split["prefill"]["engine"] == p.base_url
        assert split["remote_s"] < split["local_s"]
        assert split["transfer_tokens"] == 700
        assert split["why"] == ""
        _, told = await rig.ask("POST", "/kvatlas/explain", completion(1, n=2))
        assert (told["split"]["why"], told["split"]["prefill"]) == ("n", None)
        assert rig.router.proxy.pd_stats.split == 0


async def test_other_settings_and_roles_hold_from_the_next_request_on() -> None:
    """As after SIGHUP. A prompt that the old lease let wait is guarded by the new one."""
    async with apart(P, D) as (rig, (p, d)):
        router = rig.router
        pd = msgspec.structs.replace(SPLITS, min_remote_tokens=2000)
        await apply(router, msgspec.structs.replace(router.config, pd=pd))
        with busy(rig):
            await rig.ask("POST", "/v1/completions", completion(1))
        assert (router.proxy.pd_stats.split, router.proxy.pd_stats.aggregated) == (0, {"short": 1})
        pd = msgspec.structs.replace(SPLITS, lease_s=1e-6, lease_margin_s=0.0)
        await apply(router, msgspec.structs.replace(router.config, pd=pd))
        with busy(rig):
            await rig.ask("POST", "/v1/completions", completion(2))
        assert router.proxy.pd_stats.leases_late == pd.prefills_max
        assert router.proxy.pd_stats.handoffs == 0
        roles = tuple(EngineAddress(one.base_url) for one in (p, d))
        await apply(router, msgspec.structs.replace(router.config, engines=roles, pd=SPLITS))
        await until(lambda: all(engine.up for engine in router.fleet), "both are up")
        assert {engine.engine.role for engine in router.fleet} == {None}
        split = router.proxy.pd_stats.split
        await rig.ask("POST", "/v1/completions", completion(3))
        assert router.proxy.pd_stats.split == split


async def test_with_prefill_engines_alone_the_router_is_not_ready_and_says_why() -> None:
    async with running(P) as (p,):
        away = EngineAddress("http://127.0.0.1:9", role="decode")
        async with routing(configure(of(p), away), wait=False) as rig:
            await until(lambda: any(engine.up for engine in rig.router.fleet), "one is up")
            status, told = await rig.ask("GET", "/ready")
            assert (status, "prefill" in told["reason"]) == (503, True)
            status, told = await rig.ask("POST", "/v1/completions", completion(1))
            assert (status, told["error"]["code"]) == (503, "no_ready_engine")
            assert "prefill" in told["error"]["message"]


async def test_a_request_waits_for_a_decode_engine_however_idle_the_others_are() -> None:
    queue = QueueSettings(saturation_s=60.0, engine_requests_max=1, wait_s_max=600.0)
    async with apart(P, D, queue=queue) as (rig, _):
        room = rig.router.accounts.room
        with busy(rig):
            asked = asyncio.ensure_future(rig.ask("POST", "/v1/completions", completion(1)))
            await until(lambda: room.stats.waiting == 1, "it waits")
            for _ in range(3):  # a second look for room finds none
                room.changed()
                await asyncio.sleep(0)
            assert room.stats.waiting == 1
        room.changed()
        status, _ = await asked
        assert status == 200


async def test_metrics_count_splits_only_where_engines_have_roles() -> None:
    async with apart(P, D) as (rig, _):
        with busy(rig):
            await rig.ask("POST", "/v1/completions", completion(1))
        assert "kvatlas_pd_handoffs_total 1.0" in await rig.page()
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        assert "kvatlas_pd_" not in await rig.page()


@pytest.mark.parametrize("connector", some(("nixl", "mooncake", "offloading"), 3))
async def test_an_engine_that_takes_over_a_stream_fetches_its_tokens_first(connector: str) -> None:
    """Another engine computes them, as it does for any prompt, while the stream goes on."""
    slow = {"decode_s_per_token": 0.05}
    body = completion(1, max_tokens=300)
    async with apart(P, {**D, **slow}, {**D, **slow}, connector=connector) as (rig, _):
        router = rig.router
        with busy(rig):
            asked = asyncio.ensure_future(rig.ask("POST", "/v1/completions", {**body, "stream": True}))
            await until(lambda: any(one.answering for one in router.fleet), "its answer has begun")
            await asyncio.sleep(2.0)
            (first,) = [one for one in router.fleet if one.answering]
            assert router.proxy.pd_stats.split == 1
            router.desired.drain(first.engine_id, "ops", router.accounts.wall() + 10.0)
            router._assign()
            status, stream = await asked
        stats = router.proxy.stats
        assert status == 200
        assert (stats.warmings, stats.moves) == ({"completed": 1}, {"warmed": 1})
        assert router.proxy.pd_stats.split == 2
        # The first prefill engine has the prompt, and the engine that takes over all but the latest tokens.
        assert 0 < stats.warmed_tokens < 200
        assert router.proxy.requests.ended[-1].recomputed_tokens < 50
        events = [msgspec.json.decode(one[6:]) for one in stream.split("\n\n") if one.startswith("data: {")]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == words(await told_alone("/v1/completions", body))[0]["text"]
    assert len(events) >= 300
