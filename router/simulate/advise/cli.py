"""The ``advise`` subcommand's arguments. Light to import: the work is loaded when it runs."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def advise(
    workload: Annotated[
        str | None,
        Parameter(
            help="The traffic: an access log of the router, a trace in Mooncake's format, or `chat`, "
            "`tenants`, `agents`. Without it --router tells its own."
        ),
    ] = None,
    *,
    router: Annotated[
        str | None,
        Parameter(
            help="URL of a running router's ops port: takes the number of engines, groups and blocks from "
            "it, and where no workload is named its access log."
        ),
    ] = None,
    engines: Annotated[int | None, Parameter(help="How many engines there are (8).")] = None,
    model: Annotated[
        str | None,
        Parameter(help="gpt-oss-like, gemma3-like, mamba-hybrid, full, or a JSON file with the groups."),
    ] = None,
    block_tokens: Annotated[int, Parameter(help="Tokens per block of the models known by name.")] = 64,
    pool: Annotated[
        str | None,
        Parameter(help="KV cache as it is: blocks per engine, or the fleet's share of the workload."),
    ] = None,
    retention: Annotated[
        str, Parameter(help="The engines' prefix_cache_retention_interval as it is: tokens or dense.")
    ] = "0",
    load: Annotated[
        float | None,
        Parameter(help="Arrivals so fast that round robin is busy with prompts for this share (0.85)."),
    ] = None,
    speed: Annotated[
        float | None, Parameter(help="Instead: so many times as fast as recorded (access logs: 1).")
    ] = None,
    ttft_target: Annotated[
        float | None, Parameter(help="Seconds to the first token that nine of ten requests shall keep.")
    ] = None,
    requests: Annotated[int, Parameter(help="Only the first so many: bounds the run time.")] = 2000,
    seeds: Annotated[int, Parameter(help="Draws of the arrivals; a change must help in each.")] = 2,
    served_model: Annotated[
        str | None, Parameter(help="Only requests of this model, where an access log has several.")
    ] = None,
    processes: Annotated[int | None, Parameter(help="Default: one per core.")] = None,
    json: Annotated[bool, Parameter(help="One JSON object instead of a table.", negative="")] = False,
) -> int:
    """What to set, by your own traffic: retention, memory, engines, knobs; if prefix routing pays at all."""
    from router.simulate.advise.command import AdviseOptions, run_advise  # noqa: PLC0415  # loaded when run

    options = AdviseOptions(
        workload=workload,
        router=router,
        engines=engines,
        model=model,
        pool=pool,
        block_tokens=block_tokens,
        retention=retention,
        load=load,
        speed=speed,
        ttft_target=ttft_target,
        requests=requests,
        seeds=seeds,
        served_model=served_model,
        processes=processes,
    )
    return run_advise(options, as_json=json)
