"""Engines that come and go: which cache is worth least, and who says so."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.observe.cache_worth import WORTH_HALF_LIFE_S
from tests.router.replication.test_recent_work import Share, both_shares, index_of
from tests.support.redis_servers import AnyServer
from tests.support.waiting import until
from tests.support.whole_router import Rig, configure, routing, running


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


@both_shares
async def test_one_of_several_replicas_writes_the_costs(server: AnyServer, share: Share) -> None:
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(running({}, {}))
        rigs = []
        for name in ("r0", "r1"):
            index = index_of(server, name, share)
            rigs.append(aged(await stack.enter_async_context(routing(configure(*engines, index=index)))))
        one, other = rigs

        def writers() -> list[Rig]:
            return [rig for rig in rigs if rig.router.deletion_costs()]

        await until(lambda: len(writers()) == 1, "one of them has the lease")
        assert set(writers()[0].router.deletion_costs()) == {engine.base_url for engine in engines}
        writers()[0].router.retire()  # it is about to stop
        await until(lambda: writers() in ([one], [other]) and len(writers()) == 1, "the other one")
