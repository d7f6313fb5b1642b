"""Leases as stored, and an engine that the replica it is assigned to does not take."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

import pytest

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.replication.assignment import Member
from kvatlas.router.replication.leases import Lease, LeaseCandidate, LeaseManager, ModelLeases, parse_leases

E = "http://e"


@pytest.mark.parametrize(("now_us", "left_s"), [(0, 0.5), (499_000, 0.001), (500_000, 0.0), (600_000, -0.1)])
def test_a_lease_is_held_to_its_last_millisecond(now_us: int, left_s: float) -> None:
    fields = {b"e": b"7|100500|a|b", b"f": b"nonsense"}
    leases = parse_leases(fields, [b"100", str(now_us).encode()])
    assert leases == {"e": Lease("a|b", 7, pytest.approx(left_s))}
    assert leases["e"].held == (left_s > 0)


class Free:
    """Leases and members of a model: another replica, which is to take the engine, never does."""

    async def holders(self) -> dict[str, Lease]:
        return {}

    async def acquire(self, engine_id: str) -> int:
        return 1

    async def report(self, engines: Collection[EngineAddress], held: int) -> dict[str, Member]:
        return {"me": Member([E], 5), "other": Member([E], 0)}


async def test_an_engine_that_its_replica_does_not_take_is_taken_after_a_lease() -> None:
    clock, taken = asyncio.get_running_loop().time, list[float]()

    async def acquired(candidate: LeaseCandidate, token: int, again: bool) -> None:
        taken.append(clock() - began_s)

    free = cast("Any", Free())
    manager = LeaseManager(
        "me",
        lambda model: ModelLeases(free, free),
        on_acquired=acquired,
        on_ended=lambda model, engine_id: None,
        lease_s=3.0,
        renew_s=1.0,
        clock=clock,
    )
    began_s = clock()
    manager.add_candidate(EngineAddress(E), "m")
    running = asyncio.create_task(manager.run())
    await asyncio.sleep(3.5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert taken == [pytest.approx(3.0, abs=0.1)]
