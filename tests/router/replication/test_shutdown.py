"""A replica that ends releases its engines immediately and without a fault."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.replication.keys import ScopeKeys, limits_key
from kvatlas.router.replication.leases import Leases
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.replication.shared_blocks import SharedIndex
from tests.router.replication.backend import make_settings
from tests.support.redis_servers import AnyServer
from tests.support.waiting import WAIT_S, run, until
from tests.support.whole_router import MODEL, configure, routing, running, tenants

AS_ADA = {"authorization": "Bearer key-of-ada"}


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
                await _all_followed(rig.router.peers.blocks, engines)
                rig.server.drain()  # by a signal; the end of the lifespan comes while the leases are released
            client = Client(settings)
            assert await client.start(WAIT_S)
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
        index = rig.router.peers.blocks
        await _all_followed(index, engines)
        assert index is not None
        first = asyncio.create_task(index.release_leases())
        await asyncio.sleep(0)
        first.cancel()  # its caller ends first
        await index.release_leases()
        assert not index.lease_manager.held
        client = Client(settings)
        assert await client.start(WAIT_S)
        holders = await Leases(client, MODEL, "observer").holders()
        await client.close()
        assert [lease.held for lease in holders.values()] == [False, False]


async def test_a_replica_that_joins_gets_its_share_and_leaves_nothing_behind(
    server: AnyServer, tmp_path: Path
) -> None:
    keys = tenants(tmp_path, {"ada": "requests_per_minute = 1000"})
    shared = _settings(server)
    scope = ScopeKeys(shared.namespace, MODEL)

    def names(key: bytes) -> set[bytes]:
        return set(server.command("HKEYS", key))

    async with running({}, {}, {}, {}) as engines:
        index = msgspec.structs.replace(shared, replica="r0")
        async with routing(configure(*engines, index=index, keys=keys)) as rig:
            one = rig.router.peers.blocks
            await _all_followed(one, engines)
            assert one is not None
            index = msgspec.structs.replace(shared, replica="r1")
            async with routing(configure(*engines, index=index, keys=keys)) as late:
                other = late.router.peers.blocks
                assert other is not None
                leases = one.lease_manager, other.lease_manager
                await until(lambda: [len(its.held) for its in leases] == [2, 2], "each has its half")
                assert [(its.stats.taken, its.stats.given, its.stats.replicas) for its in leases] == [
                    (4, 2, 2),
                    (2, 0, 2),
                ]
                both = {b"r0", b"r1"}
                await until(lambda: names(limits_key(shared.namespace)) == both, "both tell what tenants use")
            for key in (limits_key(shared.namespace), scope.replicas, scope.load):
                assert b"r1" not in names(key)
            await _all_followed(one, engines)
            server.kill()
            await rig.chat("new blocks, which cannot be written", extra_headers=AS_ADA)
            errors = one.mirror_stats[MODEL].errors
            await until(lambda: errors.get("connection"), "counted")


async def _all_followed(index: SharedIndex | None, engines: list[SimulatedEngine]) -> None:
    assert index is not None
    held = index.lease_manager.held
    await until(lambda: len(held) == len(engines), "every engine is followed here")
