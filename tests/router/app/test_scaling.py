"""Engines that come and go: which cache is worth least, and who says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import pytest

from publisher.simulator.server import SimulatedEngine
from router.fleet.engines import EngineAddress
from router.observe.receipts import WORTH_HALF_LIFE_S
from router.placement.candidate import PullSettings, WarmUpSettings
from router.placement.engine import BAND_MS
from router.placement.warm_up import WarmUpStats
from router.proxy.settings import ProxySettings
from router.replication.settings import IndexSettings
from tests.support.redis_servers import Server, any_program
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, configure, routing, running


def aged(rig: Rig) -> Rig:
    """The same router, after the time that its worths need."""
    clock = rig.router.clock
    rig.router.clock = lambda: clock() + WORTH_HALF_LIFE_S
    return rig


def worth(rig: Rig, engine: SimulatedEngine, seconds: float) -> None:
    status = rig.router.fleet.get(engine.base_url)
    status.receipts.worth.add(seconds, rig.router.clock())


def drain(rig: Rig, engine: SimulatedEngine) -> None:
    rig.router.desired.drain(engine.base_url, "a test")
    rig.router._assign()


async def test_the_cost_of_losing_an_engine_is_the_worth_of_its_cache() -> None:
    async with running({}, {}, {}) as engines, routing(configure(*engines)) as rig:
        a, b, c = engines
        worth(rig, a, 30.0)
        assert rig.router.deletion_costs() == {}, "one that has just started knows none"
        aged(rig)
        worth(rig, b, 300.0)
        drain(rig, c)
        costs = rig.router.deletion_costs()
        assert costs[c.base_url] == -1
        by_url = {one.engine.base_url: one for one in rig.router.fleet}
        for engine in (a, b):
            per_minute = by_url[engine.base_url].receipts.worth.per_minute(rig.router.clock())
            assert costs[engine.base_url] == pytest.approx(1000 * per_minute, abs=1)
        assert costs[b.base_url] > 10 * costs[a.base_url] > 0


async def test_one_of_several_replicas_writes_the_costs() -> None:
    server = Server(any_program())
    async with AsyncExitStack() as stack:
        stack.callback(server.close)
        engines = await stack.enter_async_context(running({}, {}))
        rigs = []
        for name in ("r0", "r1"):
            index = IndexSettings(url=server.url, replica=name, lookup_timeout_s=5.0)
            rigs.append(aged(await stack.enter_async_context(routing(configure(*engines, index=index)))))
        one, other = rigs

        def writers() -> list[Rig]:
            return [rig for rig in rigs if rig.router.deletion_costs()]

        await until(lambda: len(writers()) == 1, "one of them has the lease")
        assert set(writers()[0].router.deletion_costs()) == {engine.base_url for engine in engines}
        writers()[0].router.retire()  # it is about to stop
        await until(lambda: writers() in ([one], [other]) and len(writers()) == 1, "the other one")


WARM = WarmUpSettings(enabled=True, tokens_per_s=1e6)
PATH = "/v1/completions"


def completion(number: int, tokens: int = 1200, **fields: Any) -> dict[str, Any]:
    prompt = [3 + (number * 7 + at * at) % 240 for at in range(tokens)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}


class Scaled(NamedTuple):
    """A router, its engines, and one more that it does not know yet."""

    rig: Rig
    engines: list[SimulatedEngine]
    more: SimulatedEngine

    async def ask(self, body: dict[str, Any], engine: SimulatedEngine | None = None) -> None:
        pin = {} if engine is None else {"x-kvatlas-engine": engine.base_url}
        await self.rig.ok("POST", PATH, body, pin)
        await self.rig.caught_up(*self.engines)

    def address(self, engine: SimulatedEngine) -> EngineAddress:
        if engine.connector is None:
            return EngineAddress(engine.base_url)
        host, port = engine.connector.address
        return EngineAddress(engine.base_url, kv_source=f"{host}:{port}")

    async def join(self) -> None:
        self.rig.router.desired.add(self.address(self.more))
        self.rig.router._assign()

    @property
    def stats(self) -> WarmUpStats:
        return self.rig.router.warm_ups.stats

    async def until(self, **outcomes: int) -> None:
        await until(lambda: self.stats.prefixes == outcomes, lambda: f"{outcomes}, {self.stats}")

    async def held(self, body: dict[str, Any]) -> dict[str, int]:
        """Tokens of this prompt that each engine would hit now."""
        known = self.rig.router.fleet.get(self.more.base_url) is not None
        await self.rig.caught_up(*self.engines, *([self.more] if known else []))
        _, told = await self.rig.ask("POST", "/kvatlas/explain?api=completions", body)
        return {one["engine"]: one["hit_tokens"]["GPU"] for one in told["engines"]}


@asynccontextmanager
async def scaled(warm: WarmUpSettings = WARM, count: int = 2, **each: Any) -> AsyncIterator[Scaled]:
    settings: dict[str, Any] = {"num_blocks": 4000, **each}
    pull = PullSettings(enabled="kv_connector" in each)
    async with running(*[settings] * (count + 1)) as (more, *engines):
        config = configure(warm_up=warm, pull=pull, proxy=ProxySettings(pin_header=True))
        listed = [Scaled(None, engines, more).address(engine) for engine in engines]  # type: ignore[arg-type]
        async with routing(msgspec.structs.replace(config, engines=tuple(listed))) as rig:
            fleet = Scaled(rig, engines, more)
            if (ups := rig.router.warm_ups) is not None:
                await until(
                    lambda: len(ups._seen) == count and all(up for up, _ in ups._seen.values()), "seen"
                )
                ups._settled_s = 0.0
            yield fleet
            await rig.over()


async def test_an_engine_that_joins_gets_the_hottest_prefixes() -> None:
    async with scaled(WarmUpSettings(enabled=True, tokens_per_s=1e6, tokens_max=1400)) as fleet:
        for number in (1, 2, 3, 2, 2):
            await fleet.ask(completion(number))
        receipts = len(fleet.rig.router.accounts.receipts.latest)
        await fleet.join()
        await fleet.until(computed=1)
        assert fleet.stats.engines == {"joined": 1}
        assert (await fleet.held(completion(2)))[fleet.more.base_url] == 1200 - 16
        assert (await fleet.held(completion(1)))[fleet.more.base_url] == 0, "there was room for one"
        assert len(fleet.rig.router.accounts.receipts.latest) == receipts, "no client asked"
        assert fleet.rig.router.proxy.stats.requests == 5


async def test_what_only_a_drained_engine_holds_goes_to_the_others() -> None:
    async with scaled() as fleet:
        leaving, stays = fleet.engines
        await fleet.ask(completion(1), leaving)
        await fleet.ask(completion(2), leaving)
        await fleet.ask(completion(2), stays)
        await fleet.ask(completion(3), stays)
        drain(fleet.rig, leaving)
        await fleet.until(computed=1, held=2)
        assert fleet.stats.engines == {"drained": 1}
        assert (await fleet.held(completion(1)))[stays.base_url] == 1200 - 16
        assert fleet.stats.tokens == 1200 - 16


async def test_a_prefix_is_pulled_where_engines_can() -> None:
    pulls = {"kv_connector": "offloading", "host_blocks": 8000, "handshake_timeout_s": 0.05}
    async with scaled(**pulls) as fleet:
        leaving, stays = fleet.engines
        known = fleet.rig.router.fleet
        await until(lambda: all(engine.version for engine in known), "versions are known")
        await fleet.ask(completion(9, 700), stays)
        await fleet.ask(completion(1), leaving)
        drain(fleet.rig, leaving)
        await fleet.until(pulled=1, held=1)
        assert (await fleet.held(completion(1)))[stays.base_url] == 1200 - 16


async def test_a_prefix_is_replayed_for_its_own_salt_alone() -> None:
    async with scaled() as fleet:
        await fleet.ask(completion(1, cache_salt="a"))
        await fleet.join()
        await fleet.until(computed=1)
        at = fleet.more.base_url
        assert (await fleet.held(completion(1, cache_salt="a")))[at] == 1200 - 16
        for other in ({"cache_salt": "b"}, {}):
            assert (await fleet.held(completion(1, **other)))[at] == 0


async def test_long_prefixes_are_computed_piece_by_piece_and_in_the_low_class() -> None:
    warm = WarmUpSettings(enabled=True, tokens_per_s=1e6, piece_tokens=512)
    async with scaled(warm) as fleet:
        sent: list[tuple[int, str]] = []
        ups = fleet.rig.router.warm_ups
        ask, order = ups._ask, fleet.rig.router.config.policy
        fleet.rig.router.config = msgspec.structs.replace(
            fleet.rig.router.config, policy=msgspec.structs.replace(order, engine_priority=2.0)
        )

        async def noting(
            url: str, body: bytes, headers: dict[str, str], timeout_s: float
        ) -> tuple[int, bytes]:
            sent.append((len(msgspec.json.decode(body)["prompt"]), headers.pop("x-vllm-priority")))
            return await ask(url, body, headers, timeout_s)

        ups._ask = noting
        await fleet.ask(completion(1))
        await fleet.join()
        await fleet.until(computed=1)
        assert [tokens for tokens, _ in sent] == [513, 1025, 1200]
        assert all(int(priority) >= BAND_MS for _, priority in sent), "behind every client's request"
        assert fleet.stats.tokens == 1200


@pytest.mark.parametrize("waits", [True, False], ids=["prompts wait", "worked of late"])
async def test_nothing_is_computed_by_a_busy_engine_and_the_rest_is_dropped_in_the_end(waits: bool) -> None:
    async with scaled(WarmUpSettings(enabled=True, seconds_max=1.5)) as fleet:
        await fleet.ask(completion(1))
        await fleet.join()
        by_url = {one.engine.base_url: one for one in fleet.rig.router.fleet}
        joined = by_url[fleet.more.base_url]
        clock = fleet.rig.router.clock
        ticket = joined.load.admit(uncached_tokens=10**7, now=clock())
        if not waits:
            joined.load.finish(ticket, clock())
        await fleet.until(dropped=1)
        assert not fleet.stats.tokens
        if waits:
            joined.load.fail(ticket, clock())


async def test_an_engine_that_refuses_is_left_alone() -> None:
    async with scaled() as fleet:
        ups = fleet.rig.router.warm_ups
        asked: list[str] = []

        async def refusing(url: str, *_: Any) -> tuple[int, bytes]:
            asked.append(url)
            return 500, b""

        ups._ask = refusing
        for number in range(5):
            await fleet.ask(completion(number))
        await fleet.join()
        await fleet.until(failed=3, dropped=2)
        assert asked == [f"{fleet.more.base_url}{PATH}"] * 3


async def test_without_being_asked_for_no_prompt_is_remembered() -> None:
    async with scaled(WarmUpSettings()) as fleet:
        await fleet.ask(completion(1))
        assert fleet.rig.router.accounts.memory is None
        assert fleet.rig.router.warm_ups is None
