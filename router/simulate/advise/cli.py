"""The ``advise`` subcommand's arguments. Light to import: the work is loaded when it runs."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def advise(
    workload: Annotated[
        str | None,
        Parameter(
            help="The traffic: a usage record of the router, a trace in Mooncake's format, or `chat`, "
            "`tenants`, `agents`. Without it --router tells its own."
        ),
    ] = None,
    *,
    router: Annotated[
        str | None,
        Parameter(
            help="URL of a running router's ops port: takes the number of engines, groups and blocks from "
            "it, and where no workload is named its usage record."
        ),
    ] = None,
    engines: Annotated[
        int | None, Parameter(help="Number of engines (default: the router's, else 8).")
    ] = None,
    model: Annotated[
        str | None,
        Parameter(help="gpt-oss-like, gemma3-like, mamba-hybrid, full, or a JSON file with the groups."),
    ] = None,
    block_tokens: Annotated[int, Parameter(help="Tokens per block of the models known by name.")] = 64,
    pool: Annotated[
        str | None,
        Parameter(
            help="Current KV cache: blocks per engine (vLLM's num_gpu_blocks), or the share of what these "
            "requests fill that the fleet holds (default: the router's, else 25%)."
        ),
    ] = None,
    retention: Annotated[
        str, Parameter(help="The engines' current prefix_cache_retention_interval: tokens or dense.")
    ] = "0",
    host_memory: Annotated[
        str | None, Parameter(help="Host memory that each engine has behind its GPU now, as for simulate.")
    ] = None,
    store: Annotated[str | None, Parameter(help="Store that the engines share now, as for simulate.")] = None,
    kv_kib_per_token: Annotated[
        float, Parameter(help="KiB of KV cache that one token takes in full attention.")
    ] = 100.0,
    load: Annotated[
        float | None,
        Parameter(
            help="Speed arrivals up until prompts take this share of the engines' time under round robin "
            "(default 0.85; usage records keep their times)."
        ),
    ] = None,
    speed: Annotated[
        float | None,
        Parameter(
            help="Instead of --load: arrival speed, as a multiple of the recorded one (usage records: 1)."
        ),
    ] = None,
    ttft_target: Annotated[
        float | None, Parameter(help="Target for the p90 time to first token, in seconds.")
    ] = None,
    requests: Annotated[int, Parameter(help="Use the first N requests; bounds the run time.")] = 2000,
    seeds: Annotated[
        int, Parameter(help="Runs with different arrivals; a change is advised only if it helps in each.")
    ] = 2,
    served_model: Annotated[
        str | None, Parameter(help="Only requests of this model, where a usage record has several.")
    ] = None,
    processes: Annotated[int | None, Parameter(help="Worker processes (default: one per core).")] = None,
    json: Annotated[bool, Parameter(help="Print one JSON object instead of a table.", negative="")] = False,
) -> int:
    """Advise from your traffic: retention, memory, connectors, engines, and if prefix routing pays."""
    from router.simulate.advise.command import AdviseOptions, run_advise

    options = AdviseOptions(
        workload=workload,
        router=router,
        engines=engines,
        model=model,
        pool=pool,
        block_tokens=block_tokens,
        retention=retention,
        host_memory=host_memory,
        store=store,
        kv_kib_per_token=kv_kib_per_token,
        load=load,
        speed=speed,
        ttft_target=ttft_target,
        requests=requests,
        seeds=seeds,
        served_model=served_model,
        processes=processes,
    )
    return run_advise(options, as_json=json)
