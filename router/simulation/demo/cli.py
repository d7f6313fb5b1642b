"""Arguments of ``kvatlas demo``. Light to import: the implementation is loaded when it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from kvatlas.router.config.flags import IndexFileFlag, IndexFlag, JsonFlag
from kvatlas.router.config.load import index_settings


def demo(
    *,
    seconds: Annotated[float, Parameter(help="Duration of the load.")] = 20.0,
    engines: Annotated[int, Parameter(help="Number of simulated engines.")] = 4,
    port: Annotated[int, Parameter(help="Port of the router; 0 takes a free one.")] = 0,
    json: JsonFlag = False,
    keep: Annotated[bool, Parameter(help="Keep serving after the load, for trying with curl.")] = False,
    replicas: Annotated[
        int,
        Parameter(help="Number of routers that share one index (--index, or a server started for the demo)."),
    ] = 1,
    pd: Annotated[
        bool | Literal["nixl", "mooncake", "offloading"],
        Parameter(
            help="A third of the engines compute prompts for the others, which decode. By NIXL, or the "
            "connector named."
        ),
    ] = False,
    gateway: Annotated[
        bool, Parameter(help="Use a real Envoy (on --port) that forwards requests and asks kvatlas.")
    ] = False,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
) -> int:
    """Run simulated engines, the router and a chat load on this machine, with a live table."""
    from kvatlas.router.simulation.demo.run import run_demo

    return run_demo(
        seconds=seconds,
        engines=engines,
        port=port,
        as_json=json,
        keep=keep,
        replicas=replicas,
        pd="nixl" if pd is True else pd or None,
        index=index_settings(index, index_file),
        gateway=gateway,
    )
