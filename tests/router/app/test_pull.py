"""A router before engines that fetch prefixes from each other: the holder is busy, another one pulls."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import msgspec
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.placement.candidate import PolicySettings, PullSettings
from kvatlas.router.placement.engine import Engine
from kvatlas.router.proxy.settings import ProxySettings
from tests.router.app.test_prefill_decode import BODIES, plain, receipts, told_alone, words
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, configure, routing, running

PULLS: dict[str, Any] = {"kv_connector": "offloading", "host_blocks": 8000, "handshake_timeout_s": 0.05}
PROXY = ProxySettings()
PULL = PullSettings(enabled=True)
ALIKE = PolicySettings(spread=0.0, probe_interval_s=3600.0)
PATH = "/v1/completions"
TOKENS = 1600


def completion(number: int = 0, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    prompt = [3 + (number * 7 + at * at) % 240 for at in range(tokens)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": 6, "ignore_eos": True, **fields}


class Fleet(NamedTuple):
    rig: Rig
    engines: list[SimulatedEngine]

    def named(self, engine: SimulatedEngine) -> Engine:
        found = self.rig.router.fleet.get(engine.base_url)
        assert found is not None
        return found

    @property
    def pulls(self) -> dict[str, int]:
        return self.rig.router.planner.pulls.stats.pulls

    @contextmanager
    def busy(self, engine: SimulatedEngine, tokens: int = 80_000) -> Iterator[None]:
        """Let the router assume that this many prompt tokens wait there."""
        load = self.named(engine).load
        ticket = load.admit(uncached_tokens=tokens, now=time.monotonic(), streams=True)
        yield
        load.finish(ticket, time.monotonic())

    async def ask(self, body: dict[str, Any], path: str = PATH) -> Any:
        answer = await self.rig.ok("POST", path, body)
        await self.rig.caught_up(*self.engines)
        return answer

    async def last(self) -> dict[str, Any]:
        return dict((await receipts(self.rig))[-1])


@asynccontextmanager
async def fleet(
    *engines: dict[str, Any], pull: PullSettings = PULL, proxy: ProxySettings = PROXY, **each: Any
) -> AsyncIterator[Fleet]:
    settings = engines or ({}, {})
    async with running(*({**PULLS, **each, **one} for one in settings)) as started:
        listed = []
        for one in started:
            host, port = one.connector.address
            listed.append(EngineAddress(one.base_url, kv_source=f"{host}:{port}"))
        config = configure(*listed, pull=pull, policy=ALIKE, proxy=proxy)
        async with routing(config) as rig:
            await until(lambda: all(engine.version for engine in rig.router.fleet), "versions are known")
            world = Fleet(rig, started)
            for number, one in enumerate(started):  # groups are known from stored blocks
                url, warm = f"{one.base_url}{PATH}", completion(90 + number, 700)
                async with rig.session.post(url, json=warm) as answer:
                    assert answer.status == 200
            await rig.caught_up(*started)
            yield world
            await rig.over()


async def holder_of(world: Fleet, body: dict[str, Any], path: str = PATH) -> tuple[SimulatedEngine, Any]:
    """The engine that has computed this, and its answer."""
    answer = await world.ask(body, path)
    last = await world.last()
    return next(one for one in world.engines if one.base_url == last["engine_id"]), answer


@pytest.mark.parametrize("groups", ["gemma3-like", "gptoss-like", "full", "mamba-hybrid"])
async def test_a_busy_engine_s_prefix_is_pulled_and_the_answer_is_right(groups: str) -> None:
    async with fleet(groups=groups) as world:
        holder, answer = await holder_of(world, completion())
        with world.busy(holder):
            again = await world.ask(completion())
        assert plain(words(again)) == plain(words(answer))
        last = await world.last()
        assert last["engine_id"] != holder.base_url
        assert (last["reason"], last["pulled_from"]) == ("pull", holder.base_url)
        assert last["predicted_tokens"] == last["actual_tokens"] == TOKENS - 16
        assert last["pulled_tokens"] == last["came_tokens"] == TOKENS - 16
        assert 0 < last["pull_s"] <= last["load_s"]
        assert world.pulls == {"complete": 1}
        _, page = await world.rig.ask("GET", "/metrics")
        assert 'kvatlas_pulls_total{outcome="complete"} 1.0' in page
        assert f"kvatlas_pull_tokens_total {float(TOKENS - 16)}" in page


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_can_pull(path: str) -> None:
    alone = await told_alone(path, BODIES[path])
    async with fleet() as world:
        holder, _ = await holder_of(world, BODIES[path], path)
        with world.busy(holder):
            answer = await world.ask(BODIES[path], path)
        assert plain(words(answer)) == plain(words(alone))
        assert world.pulls == {"complete": 1}


async def test_explain_names_the_source_and_changes_nothing() -> None:
    async with fleet() as world:
        holder, _ = await holder_of(world, completion())
        with world.busy(holder):
            _, told = await world.rig.ask("POST", "/kvatlas/explain?api=completions", completion())
        assert told["choice"]["reason"] == "pull"
        assert told["choice"]["hit_tokens"] == TOKENS - 16
        assert told["pull"]["source"] == holder.base_url
        assert told["pull"]["tokens"] == TOKENS - 16
        assert world.pulls == {}
        assert world.named(holder).load.link_free_s == 0.0


async def test_blocks_that_were_evicted_meanwhile_are_computed_and_the_pair_rests() -> None:
    async with fleet() as world:
        holder, answer = await holder_of(world, completion())
        tier: Any = holder.tier
        tier._held.clear()  # without events, as if they were under way
        for held in tier._by_group:
            held.clear()
        with world.busy(holder):
            again = await world.ask(completion())
            assert plain(words(again)) == plain(words(answer))
            last = await world.last()
            assert (last["pulled_tokens"], last["came_tokens"], last["actual_tokens"]) == (TOKENS - 16, 0, 0)
            assert world.pulls == {"missed": 1}
            await world.ask(completion(1))
            assert world.pulls == {"missed": 1}
        target = next(one for one in world.engines if one is not holder)
        pairs = world.rig.router.planner.pulls.pairs
        assert not pairs.allows(target.base_url, holder.base_url, now=time.monotonic())
        assert not any(world.named(one).receipts.drifting for one in world.engines)


async def test_a_client_s_own_source_reaches_no_engine() -> None:
    async with fleet() as world:
        holder, _ = await holder_of(world, completion())
        target = next(one for one in world.engines if one is not holder)
        host, port = holder.connector.address  # type: ignore[union-attr]
        named = {"kv_request_id": "c1", "remote_host": host, "remote_port": port}
        body = completion(1, kv_transfer_params={"remote_kv_source": named})
        await world.ask(body)
        assert target.scheduler.stats.external_prefix_cache_queries == 0
        assert world.rig.router.proxy.stats.kv_transfer_params_removed == 1
        with world.busy(holder):
            params = {"remote_kv_source": {**named, "remote_port": 1}}
            await world.ask({**completion(), "kv_transfer_params": params})
        assert world.pulls == {"complete": 1}, "the router's own"


async def test_streams_tell_the_time_and_a_late_pull_rests() -> None:
    async with fleet(transfer_s_per_block=0.02) as world:
        holder, _ = await holder_of(world, completion())
        with world.busy(holder):
            await world.ask(completion(stream=True, stream_options={"include_usage": True}))
        await until(lambda: world.rig.idle, "it has ended")
        assert world.pulls == {"late": 1}
        assert not any(world.named(one).first_tokens.compared for one in world.engines), "not their own work"


async def test_reloading_the_configuration_switches_pulls_on_and_off() -> None:
    from kvatlas.router.reloads import apply  # noqa: PLC0415

    async with fleet() as world:
        router = world.rig.router
        holder, _ = await holder_of(world, completion())
        await apply(router, msgspec.structs.replace(router.config, pull=PullSettings()))
        with world.busy(holder):
            await world.ask(completion())
            assert world.pulls == {}
        await apply(router, msgspec.structs.replace(router.config, pull=PULL))
        holder, _ = await holder_of(world, completion(2))
        with world.busy(holder):
            await world.ask(completion(2))
        assert world.pulls == {"complete": 1}
