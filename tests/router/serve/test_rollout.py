"""Engines and routers are replaced one by one under load: no request fails, no stream is cut, none tried
twice."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from tests.router.serve.cluster import Cluster, cluster
from tests.support.process_fleet import SETTINGS
from tests.support.redis_servers import Server, any_program
from tests.support.waiting import run_real, until


def check(c: Cluster) -> None:
    assert c.load.failed == []
    assert c.load.cut == []


@pytest.mark.process
@pytest.mark.timeout(180)
def test_engines_and_routers_roll_under_load_without_a_lost_stream() -> None:
    async def main() -> None:
        async with cluster() as c:
            await asyncio.gather(*(c.add_engine() for _ in range(3)))
            await asyncio.gather(*(c.add_router() for _ in range(2)))
            c.load.start(users=6)
            await c.load.more(20)
            for old in list(c.pods):  # engines: a surge of one, as a Deployment does it
                new = await c.add_engine()
                for router in c.routers:

                    async def warm(r: Any = router, url: str = new.url) -> bool:
                        engine = (await c.knows(r)).get(url, {})
                        return (engine.get("feed_state"), engine.get("on_hold")) == ("ready", "")

                    await until(warm, f"{new.name} is known to {router.name}")
                await c.end_engine(old)
                await c.load.more(10)
                check(c)
            for old_router in list(c.routers):
                await c.add_router()
                await c.end_router(old_router)
                await c.load.more(10)
                check(c)
            await c.load.stop()
            check(c)
            urls = {one.url for one in c.pods}
            for router in c.routers:
                assert set(await c.knows(router)) == urls  # those that left are forgotten
            assert urls & set(c.load.by_engine)

    run_real(main(), 170)


@pytest.mark.process
@pytest.mark.timeout(180)
def test_leases_are_handed_over_when_routers_roll() -> None:
    """With a shared index the new routers follow every engine, and no lease has to run out for it."""

    async def main(index: str) -> None:
        async with cluster(index, *SETTINGS, "index.lease_s=60", "listen.drain_delay_s=60") as c:
            await asyncio.gather(*(c.add_engine() for _ in range(2)))
            first = await c.add_router()
            c.load.start(users=3)
            await c.load.more(10)
            second = await c.add_router()
            first.signal(signal.SIGTERM)  # its leases, and it itself, would last for another minute

            async def followed() -> bool:
                engines = await c.knows(second)
                return {e["followed_by"] for e in engines.values()} == {second.name} and all(
                    e["feed_state"] == "ready" for e in engines.values()
                )

            await until(followed, "the second router follows every engine")
            await until(lambda: first not in c.balancer.ready, "no requests go to the first")
            assert first.process is not None
            assert first.process.poll() is None
            await c.load.more(10)
            await c.load.stop()
            check(c)

    with Server(any_program()) as server:
        run_real(main(server.url), 170)
