"""The ``top`` subcommand's arguments. Light to import: the work is loaded when it runs."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def top(
    *,
    router: Annotated[str, Parameter(help="URL of the router's ops port.")] = "http://127.0.0.1:9001",
    interval: Annotated[float, Parameter(help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, Parameter(help="Print one picture and stop.", negative="")] = False,
    json: Annotated[
        bool, Parameter(help="Print one JSON object per refresh, one per line.", negative="")
    ] = False,
) -> int:
    """Watch a running router, engine by engine; q or Ctrl-C ends. Not on a terminal: one picture."""
    from router.tools.top.command import run_top

    return run_top(router, interval_s=interval, once=once, as_json=json)
