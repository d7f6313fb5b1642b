"""The arguments of ``kvatlas sidecar``. Light to import: the work is loaded when it runs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from cyclopts import Parameter

from router.config.flags import CheckFlag, ConfigFlag, HostFlag, PortFlag, PrintFlag, SetFlags, given, start
from router.config.load import load
from router.config.schema import OPS_PORT
from router.pd.settings import SidecarSettings


def sidecar(
    *,
    engine: Annotated[
        str | None,
        Parameter(help=f"Base URL of the decode engine (default {SidecarSettings().engine})."),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        Parameter(
            name="--prefill",
            help="A prefill engine that requests may name: HOST:PORT or NETWORK:PORT; repeat for more.",
            negative="",
        ),
    ] = None,
    host: HostFlag = None,
    port: PortFlag = None,
    ops_port: Annotated[
        str | None,
        Parameter(help=f"Port of /health, /ready and /metrics: 0 takes a free one (default {OPS_PORT})."),
    ] = None,
    config: ConfigFlag = None,
    set_: SetFlags = None,
    print_config: PrintFlag = False,
    check_config: CheckFlag = False,
) -> int:
    """Run beside a decode engine behind a gateway: ask the prefill engine that kvatlas epp has chosen."""
    from router.sidecar.run import check, tend

    flags = {
        "sidecar.engine": engine,
        "sidecar.prefills": prefill,
        "server.host": host,
        "server.port": port,
        "server.ops_port": ops_port,
    }
    read = partial(load, config, flags=given(flags, set_))
    return start(read, check, tend, print_config=print_config, check_config=check_config)
