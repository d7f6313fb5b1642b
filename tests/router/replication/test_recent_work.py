"""Recent work that one replica sent to an engine counts where another one places a prompt."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import pytest

from router.placement.others import OthersLoad
from router.replication.settings import IndexSettings
from tests.support.redis_servers import Server
from tests.support.waiting import until
from tests.support.whole_router import configure, routing, running


async def test_recent_work_is_a_total_of_all_replicas(server: Server) -> None:
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(running({}))
        rigs = []
        for name in ("r0", "r1"):
            index = IndexSettings(url=server.url, replica=name, lookup_timeout_s=5.0)
            config = configure(*engines, index=index)
            rigs.append(await stack.enter_async_context(routing(config)))
        one, other = rigs
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
        for rig in rigs:
            rig.check_books()
