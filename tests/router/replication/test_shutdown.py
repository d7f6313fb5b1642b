"""A replica that ends releases its engines immediately and without a fault."""

from __future__ import annotations

import asyncio

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.replication.leases import Leases
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.service import SharedIndex
from kvatlas.router.replication.settings import IndexSettings
from tests.router.replication.backend import make_settings
from tests.support.redis_servers import AnyServer
from tests.support.waiting import run, until
from tests.support.whole_router import MODEL, configure, routing, running


def _settings(server: AnyServer) -> IndexSettings:
    shared = make_settings(server.url)
    return IndexSettings(url=shared.url, namespace=shared.namespace)


def test_a_router_with_several_leases_ends_without_a_fault_and_releases_each(
    plain_server: AnyServer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = _settings(plain_server)

    async def main() -> None:
        async with running({}, {}, {}) as engines:
            async with routing(configure(*engines, index=settings)) as rig:
                await _all_followed(rig.router.peers.index, engines)
                rig.server.drain()  # by a signal; the end of the lifespan comes while the leases are released
            client = Client(settings)
            assert await client.start(10)
            holders = await Leases(client, MODEL, "observer").holders()
            await client.close()
            assert len(holders) == 3
            assert not [lease for lease in holders.values() if lease.held]

    run(main())
    assert not caplog.records
    assert "Traceback" not in capsys.readouterr().out


async def test_every_caller_of_the_release_waits_for_the_same_one(plain_server: AnyServer) -> None:
    settings = _settings(plain_server)

    async with running({}, {}) as engines, routing(configure(*engines, index=settings)) as rig:
        index = rig.router.peers.index
        await _all_followed(index, engines)
        assert index is not None
        first = asyncio.create_task(index.release_leases())
        await asyncio.sleep(0)
        first.cancel()  # its caller ends first
        await index.release_leases()
        assert not index.lease_manager.held
        client = Client(settings)
        assert await client.start(10)
        holders = await Leases(client, MODEL, "observer").holders()
        await client.close()
        assert [lease.held for lease in holders.values()] == [False, False]


async def _all_followed(index: SharedIndex | None, engines: list[SimulatedEngine]) -> None:
    assert index is not None
    held = index.lease_manager.held
    await until(lambda: len(held) == len(engines), "every engine is followed here")
