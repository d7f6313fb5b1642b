"""Leases as stored, and an engine that the replica it is assigned to does not take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.replication.assignment import Member
from kvatlas.router.replication.leases import Lease, LeaseCandidate, LeaseManager, ModelLeases, parse_leases
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.registry import IndexRefused

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

    async def renew(self, tokens: Mapping[str, int]) -> set[str]:
        return set()

    async def report(self, engines: Collection[EngineAddress], held: int) -> dict[str, Member]:
        return {"me": Member([E], 5), "other": Member([E], 0)}

    async def release(self, engine_id: str, token: int) -> None:
        pass


def keeping(
    acquired: Callable[[LeaseCandidate, int, bool], Awaitable[None]], ended: Callable[[str, str], None]
) -> LeaseManager:
    """A manager whose leases last 3 s and that looks at them each second, with one engine to follow."""
    free = cast("Any", Free())
    manager = LeaseManager(
        "me",
        lambda model: ModelLeases(free, free),
        on_acquired=acquired,
        on_ended=ended,
        lease_s=3.0,
        renew_s=1.0,
        clock=asyncio.get_running_loop().time,
    )
    manager.add_candidate(EngineAddress(E), "m")
    return manager


async def test_an_engine_that_its_replica_does_not_take_is_taken_after_a_lease() -> None:
    clock, taken = asyncio.get_running_loop().time, list[float]()

    async def acquired(candidate: LeaseCandidate, token: int, again: bool) -> None:
        taken.append(clock() - began_s)

    manager, began_s = keeping(acquired, lambda model, engine_id: None), clock()
    await run_for(manager, 3.5)
    assert taken == [pytest.approx(3.0, abs=0.1)]


@pytest.mark.parametrize(
    "error", [IndexUnavailable("timeout"), IndexRefused("schema 2"), ZeroDivisionError()], ids=repr
)
async def test_an_engine_that_cannot_be_taken_over_is_given_up_and_tried_again(error: Exception) -> None:
    log = list[str]()

    async def acquired(candidate: LeaseCandidate, token: int, again: bool) -> None:
        log.append("taken over")
        if len(log) == 1:
            raise error

    manager = keeping(acquired, lambda model, engine_id: log.append(f"ended {model} {engine_id}"))
    with capture_logs():
        await run_for(manager, 5.5)
    assert log == ["taken over", f"ended m {E}", "taken over"]
    assert (manager.stats.failed_ticks, manager.stats.taken, manager.stats.held) == (1, 1, 1)


async def run_for(manager: LeaseManager, seconds: float) -> None:
    running = asyncio.create_task(manager.run())
    await asyncio.sleep(seconds)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
