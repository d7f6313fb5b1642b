"""What the demo's engines do where prefill and decode are apart, and how their blocks get across.

The router knows one port for all bootstrap servers of Mooncake, and one for all side channels of offloading,
as pods have them. So prefill engines of these have addresses of their own on this machine: 127.0.0.1,
127.0.0.2 and so on, which Linux answers to.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from publisher.engine import EngineSettings
from router.demo.gateway import free_port
from router.fleet.identity import Role
from router.pd.settings import PdSettings

KvConnector = Literal["nixl", "mooncake", "offloading"]
_PORTS = {
    "mooncake": ("bootstrap_port", "mooncake_bootstrap_port"),
    "offloading": ("side_channel_port", "offloading_port"),
}
"""The setting of a prefill engine, and that of the router."""


def apart(
    engine: EngineSettings, count: int, connector: KvConnector | None
) -> tuple[list[EngineSettings], PdSettings]:
    """Settings of so many engines like this one, and what the router is told of their connector; None: each
    does both."""
    if connector is None:
        return [engine] * count, PdSettings()
    prefills = max(1, count // 3)
    roles: list[Role] = ["prefill" if number < prefills else "decode" for number in range(count)]
    engines = [msgspec.structs.replace(engine, role=role, kv_connector=connector) for role in roles]
    if connector == "nixl":
        return engines, PdSettings()
    port = free_port()
    theirs, ours = _PORTS[connector]
    for number in range(prefills):
        own = {"host": f"127.0.0.{number + 1}", theirs: port}
        engines[number] = msgspec.structs.replace(engines[number], **own)
    return engines, msgspec.structs.replace(PdSettings(connector=connector), **{ours: port})
