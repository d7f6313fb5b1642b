"""A simulated prefill and a decode engine with each of the connectors, behind a router."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import msgspec

from kvatlas.publisher.simulator.kv_protocols import MooncakeLink
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.pd.settings import PdSettings, PdStats
from tests.support.ports import free_port
from tests.support.whole_router import Rig, configure, routing, running

CONNECTORS: dict[str, tuple[PdSettings, dict[str, Any]]] = {
    "nixl": (PdSettings(), {}),
    "mooncake": (PdSettings(connector="mooncake"), {"kv_connector": "mooncake", "bootstrap_port": 0}),
    "mooncake, found out": (PdSettings(), {"kv_connector": "mooncake", "bootstrap_port": 0}),
    "offloading": (PdSettings(connector="offloading"), {"kv_connector": "offloading"}),
}
_CHEAP = {"min_remote_tokens": 64, "leg_overhead_s": 0.0, "transfer_s_per_token": 0.0}
PlacementRequest = Callable[..., Awaitable[tuple[int, Any]]]


@contextmanager
def busy(rig: Rig) -> Iterator[None]:
    """A sequence runs on every decode engine, so that prompts are better computed elsewhere."""
    loads = [engine.load for engine in rig.router.fleet if engine.engine.decodes]
    tickets = [load.reserve(time.monotonic()) for load in loads]
    yield
    for load, ticket in zip(loads, tickets, strict=True):
        load.finish(ticket, time.monotonic())


class Pair(NamedTuple):
    """Both engines and what is before them; ``ask``: body and path to status and answer."""

    prefill: SimulatedEngine
    decode: SimulatedEngine
    ask: PlacementRequest
    stats: PdStats
    rig: Rig


@asynccontextmanager
async def connected(
    connector: str,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[SimulatedEngine, SimulatedEngine, PdSettings]]:
    """The engines, and their settings for a router."""
    pd, own = CONNECTORS[connector]
    port = free_port()
    at = {"side_channel_port": port} if connector == "offloading" else {}
    first, second = {"role": "prefill", **own, **at}, {"role": "decode", **own}
    async with running({**first, **(prefill or {})}, {**second, **(decode or {})}) as (p, d):
        if isinstance(p.link, MooncakeLink) and connector != "offloading":
            changes["mooncake_bootstrap_port"] = p.link.bootstrap_port
        yield p, d, msgspec.structs.replace(pd, offloading_port=port, **{**_CHEAP, **changes})


@asynccontextmanager
async def routed_pair(connector: str = "nixl", **changes: Any) -> AsyncIterator[Pair]:
    """Both engines behind a router."""
    async with connected(connector, **changes) as (p, d, pd):
        addresses = (EngineAddress(one.base_url, role=one.settings.role) for one in (p, d))
        async with routing(configure(*addresses, pd=pd)) as rig:

            async def asks(body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
                with busy(rig):
                    return await rig.ask("POST", path, body)

            yield Pair(p, d, asks, rig.router.proxy.pd_stats, rig)
