"""An engine that restarts is not credited with its old blocks by a replica that another one tells of it."""

from __future__ import annotations

import msgspec

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.replication.settings import IndexSettings
from tests.router.replication.backend import make_settings
from tests.support.ports import free_ports
from tests.support.redis_servers import AnyServer
from tests.support.waiting import until
from tests.support.whole_router import QUICK, TEXT, Rig, configure, routing

ONCE = FleetSettings(poll_interval_s=1000.0, gauge_interval_s=1000.0)
PORTS = "port", "events_port", "replay_port"


async def _predicted(rig: Rig) -> tuple[int, int]:
    raw = await rig.chat(TEXT * 20)
    cached: int = raw.parse().usage.prompt_tokens_details.cached_tokens
    return int(raw.headers.get("x-kvatlas-hit-tokens", -1)), cached


async def test_a_replica_that_looks_up_counts_on_nothing_of_a_process_that_may_have_ended(
    plain_server: AnyServer,
) -> None:
    shared = msgspec.structs.asdict(make_settings(plain_server.url))

    ports = dict(zip(PORTS, free_ports(3), strict=True))
    engine = SimulatedEngine(EngineSettings(**QUICK, **ports))
    await engine.start()
    config = configure(engine, index=IndexSettings(**shared), fleet=ONCE)
    async with routing(config) as follower:
        held = follower.router.peers.blocks.lease_manager.held
        await until(lambda: held, "the first one follows the engine")
        async with routing(config) as other:
            (known,) = other.router.fleet
            await _predicted(follower)
            await follower.caught_up(engine)
            await until(lambda: known.feed_state == FeedState.READY, "the second one learns it")

            async def sees() -> bool:
                predicted, cached = await _predicted(other)
                return predicted == cached > 0

            await until(sees, "the second one sees its blocks")
            await engine.stop()
            await until(lambda: known.feed_state == FeedState.STALE, "the connection is lost")
            elsewhere = dict(zip(PORTS, (ports["port"], *free_ports(2)), strict=True))
            again = SimulatedEngine(EngineSettings(**QUICK, **elsewhere))
            await again.start()
            assert await _predicted(other) == (-1, 0)
            await again.stop()
