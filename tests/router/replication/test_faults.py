"""Faults in real processes: whatever dies, stops or forgets, no client sees it, and all is exact again.

More of them, and several together, in worlds on virtual time: a network that is cut, a server that is slow or
restarts empty, replicas that are drained (``tests/world/faults.py``).
"""

from __future__ import annotations

import pytest

from tests.support.process_fleet import Fleet, fleet
from tests.support.redis_servers import PERSISTENT, AnyServer, Server, any_program
from tests.support.waiting import until


async def recovered(made: Fleet, among: set[str] | None = None) -> None:
    """Exact again while requests go on."""
    await made.settled(among)
    await made.clients.more()
    await made.check_exact()


@pytest.mark.long
@pytest.mark.real  # processes
async def test_two_replicas_share_the_feeds_and_are_exact(server: AnyServer) -> None:
    async with fleet(server.url, engines=4) as made:

        async def even() -> bool:
            held = list((await made.holders()).values())
            return {held.count(member.name) for member in made.members} == {2}

        await until(even, "two engines for each replica")
        await made.clients.more(60)
        await made.check_exact()
        for member in made.members:
            assert await made.metric(member, "kvatlas_shared_index_lookups_total") > 10
        over = [pair for pair in made.clients.compared if pair[0] > pair[1]]
        exact = [pair for pair in made.clients.compared if pair[0] == pair[1]]
        assert len(over) <= len(made.clients.compared) // 20, over  # blocks evicted between look and step
        assert len(exact) >= 0.9 * len(made.clients.compared), made.clients.compared


@pytest.mark.process
@pytest.mark.parametrize("keep_data", [False, True], ids=["empty", "with-data"])
async def test_the_server_killed_and_restarted(keep_data: bool) -> None:
    with Server(any_program(), *(PERSISTENT if keep_data else ())) as server:
        async with fleet(server.url) as made:
            server.kill()
            await made.clients.more(20)  # placed without the index

            async def fell_back() -> bool:
                return all(
                    [await made.metric(m, "kvatlas_shared_index_fallbacks_total") for m in made.members]
                )

            await until(fell_back, "fallbacks counted")
            receipts = await made.get(made.members[0], "/kvatlas/receipts")
            assert any(receipt["index_problem"] for receipt in receipts)
            server.start()
            await recovered(made)


@pytest.mark.process
async def test_a_server_turned_read_only_costs_no_request(server: AnyServer) -> None:
    async with fleet(server.url) as made:
        server.command("REPLICAOF", "127.0.0.1", "1")
        await made.clients.more(20)
        server.command("REPLICAOF", "NO", "ONE")
        await recovered(made)
