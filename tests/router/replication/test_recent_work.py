"""Work and pulls that one replica gave to engines count where another one places a prompt."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import pytest

from kvatlas.router.placement.candidate import PullSettings
from kvatlas.router.placement.others import OthersLoad, others_at
from kvatlas.router.placement.pull import link_busy_s, occupy_links
from kvatlas.router.replication.settings import IndexSettings
from tests.support.redis_servers import AnyServer, Cluster
from tests.support.waiting import until
from tests.support.whole_router import Rig, configure, routing, running

Share = Literal["blocks", "load"]
both_shares = pytest.mark.parametrize("share", ["blocks", "load"])


def index_of(server: AnyServer | Cluster, name: str, share: Share = "blocks") -> IndexSettings:
    """Settings of a replica, patient with look-ups."""
    patience = {"lookup_timeout_s": 5.0} if share == "blocks" else {}
    return IndexSettings(url=server.url, replica=name, share=share, **patience)


@asynccontextmanager
async def replicas(
    server: AnyServer | Cluster, *engines: dict[str, Any], share: Share = "blocks", **changes: Any
) -> AsyncIterator[tuple[Rig, Rig]]:
    """Two routers before the same engines."""
    async with AsyncExitStack() as stack:
        started = await stack.enter_async_context(running(*engines))
        rigs = []
        for name in ("r0", "r1"):
            index = index_of(server, name, share)
            config = configure(*started, index=index, **changes)
            rigs.append(await stack.enter_async_context(routing(config)))
        yield rigs[0], rigs[1]
        for rig in rigs:
            rig.check_books()


@both_shares
async def test_recent_work_is_a_total_of_all_replicas(server: AnyServer, share: Share) -> None:
    async with replicas(server, {}, share=share) as (one, other):
        (engine,), (there,) = one.router.fleet, other.router.fleet
        now = time.monotonic()
        work = round(30.0 / engine.rates.prefill_s_per_token(now))
        engine.load.finish(engine.load.admit(uncached_tokens=work, now=now), now)

        found: list[OthersLoad] = []

        async def placed() -> bool:
            await other.chat("a prompt, so that the index is asked")
            load = (other.router.peers.others() or {}).get(there.engine_id, OthersLoad())
            found.append(load)
            return load.recent_ms > 1000

        await until(placed, "the other replica knows")
        assert found[-1].recent_ms <= 30_100
        recent_s = there.load.current(time.monotonic(), found[-1]).recent_s
        own = there.load.own(time.monotonic()) or OthersLoad()
        assert recent_s == pytest.approx((found[-1].recent_ms + own.recent_ms) / 1000, abs=0.2)
        assert own.recent_ms < 1000, "that of the first one is not reported back"


@both_shares
async def test_a_link_that_another_replica_s_pull_uses_is_waited_for(server: AnyServer, share: Share) -> None:
    async with replicas(server, {}, {}, share=share, pull=PullSettings(enabled=True)) as (one, other):
        target, source = one.router.fleet
        occupy_links(target.load, source.load, 80.0, time.monotonic())
        pulls, ends = other.router.planner.pulls, list(other.router.fleet)

        def busy_s() -> float:
            now = time.monotonic()
            return min(link_busy_s(end.load, others_at(end.engine_id, pulls.others), now) for end in ends)

        assert busy_s() < 1.0

        async def told() -> bool:
            await other.chat("a prompt, so that the index is asked")
            return busy_s() > 60.0

        await until(told, "a pull of the other replica would wait")


@both_shares
async def test_one_replica_acts_for_all(server: AnyServer, share: Share) -> None:
    async with replicas(server, {}, share=share) as rigs:
        await until(lambda: sum(rig.router.leads_fleet for rig in rigs) == 1, "one leads")
