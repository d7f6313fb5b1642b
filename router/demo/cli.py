"""The arguments of ``kvatlas demo``. Light to import: the work is loaded when it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from router.config.flags import IndexFileFlag, IndexFlag, index_settings


def demo(
    *,
    seconds: Annotated[float, Parameter(help="How long the load runs.")] = 20.0,
    engines: Annotated[int, Parameter(help="How many simulated engines.")] = 4,
    port: Annotated[int, Parameter(help="Port of the router; 0 takes a free one.")] = 0,
    json: Annotated[
        bool, Parameter(help="Print only the final summary, as one JSON object.", negative="")
    ] = False,
    keep: Annotated[
        bool, Parameter(help="Keep serving after the load, for trying with curl.", negative="")
    ] = False,
    replicas: Annotated[
        int,
        Parameter(help="Number of routers that share one index (--index, or a server started for the demo)."),
    ] = 1,
    api: Annotated[
        Literal["chat", "messages", "responses"],
        Parameter(help="What the load asks by: messages and responses are agents that work with tools."),
    ] = "chat",
    pd: Annotated[
        bool | Literal["nixl", "mooncake", "offloading"],
        Parameter(
            help="A third of the engines compute prompts for the others, which decode. By NIXL, or the "
            "connector named.",
            negative="",
        ),
    ] = False,
    gateway: Annotated[
        bool,
        Parameter(help="A real Envoy carries the requests (port --port) and asks kvatlas.", negative=""),
    ] = False,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
) -> int:
    """Simulated engines, the router and a chat load on this machine, with a live table."""
    from router.demo.run import run_demo

    return run_demo(
        seconds=seconds,
        engines=engines,
        port=port,
        as_json=json,
        keep=keep,
        replicas=replicas,
        api=api,
        pd="nixl" if pd is True else pd or None,
        index=index_settings(index, index_file),
        gateway=gateway,
    )
