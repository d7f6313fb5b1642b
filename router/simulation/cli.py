"""Arguments of ``kvatlas simulate`` and ``advise``. Light to import: the implementation is loaded later."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from kvatlas.router.config.flags import JsonFlag
from kvatlas.router.simulation.options import AdviseOptions, SimulateOptions

_SIMULATE, _ADVISE = SimulateOptions(), AdviseOptions()


def simulate(
    workload: Annotated[
        str,
        Parameter(
            help="A trace in Mooncake's or AIPerf's format or a router's usage record (.jsonl, .jsonl.gz), "
            "session files (.json, .json.gz; a folder, or several separated by commas), or `chat`, "
            "`tenants`, `agents`, `documents`, `pauses`, `shared`."
        ),
    ],
    *,
    options: Annotated[SimulateOptions, Parameter(name="*")] = _SIMULATE,
    json: JsonFlag = False,
) -> int:
    """Compare policies, memory and engine flags on a workload: engines on a virtual clock, no GPU."""
    from kvatlas.router.simulation.command import run_simulate

    return run_simulate(workload, options, as_json=json)


def advise(
    workload: Annotated[
        str | None,
        Parameter(
            help="The traffic: a usage record of the router, a trace in Mooncake's format, or `chat`, "
            "`tenants`, `agents`. Without it --router tells its own."
        ),
    ] = None,
    *,
    options: Annotated[AdviseOptions, Parameter(name="*")] = _ADVISE,
    json: JsonFlag = False,
) -> int:
    """Advise from your traffic: retention, memory, connectors, engines, and if prefix routing pays."""
    from kvatlas.router.simulation.advise import run_advise

    return run_advise(workload, options, as_json=json)
