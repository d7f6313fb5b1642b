"""Options of ``kvatlas simulate`` and ``advise``, unparsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from kvatlas.router.config.flags import GROUPS, BlockTokensFlag, KvSizeFlag, ProcessesFlag, ServedModelFlag


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options of ``kvatlas simulate``, unparsed."""

    engines: Annotated[int | None, Parameter(help="Number of simulated engines (8).")] = None
    prefill: Annotated[
        int | None,
        Parameter(
            help="With --decode: number of engines that compute prompts for others, compared with the same "
            "engines all alike; kvatlas:prefill=2 under --policy tries other numbers beside."
        ),
    ] = None
    decode: Annotated[
        int | None,
        Parameter(
            help="Number of engines that fetch prompts computed by the --prefill engines, and generate."
        ),
    ] = None
    transfer_gbyte_s: Annotated[
        float, Parameter(help="GB/s at which a decode engine fetches a prompt's blocks.")
    ] = 10.0
    model: Annotated[str, GROUPS] = "gpt-oss-like"
    block_tokens: BlockTokensFlag = 64
    pool: Annotated[
        str,
        Parameter(
            help="KV cache: blocks per engine, or the share of what these requests fill that the fleet holds."
        ),
    ] = "25%"
    policy: Annotated[
        str,
        Parameter(
            help="Policies to compare, separated by commas: kvatlas, gpu-only, rules, session-hash, hash, "
            "least-load, round-robin; kvatlas:beta=0.5+premium=0 sets parameters, "
            "kvatlas:hold=1+ageing=10+siblings=0.5 holds requests in the router, "
            "kvatlas:prefill=2 has two engines prefill for the others, kvatlas:slo=1+refuse=1 skips engines "
            "predicted to miss a first token within 1 s and refuses requests for their wait, refuse=2 by "
            "their first token."
        ),
    ] = "kvatlas,rules,hash,least-load,round-robin"
    load: Annotated[
        float,
        Parameter(
            help="Speed arrivals up until prompts take round robin this share of the time in which requests "
            "come."
        ),
    ] = 0.85
    speed: Annotated[
        float | None, Parameter(help="Instead of --load: arrival speed, as a multiple of the recorded one.")
    ] = None
    closed: Annotated[
        bool,
        Parameter(
            help="Closed sessions: a turn waits for the answer before it, and for the client's pause.",
        ),
    ] = False
    retention: Annotated[
        str, Parameter(help="prefix_cache_retention_interval: tokens or dense; several separated by commas.")
    ] = "0"
    host_memory: Annotated[
        str | None,
        Parameter(
            help="Host memory behind each engine: 64GiB, 400% of its KV cache, or blocks; "
            "400%:gbyte_s=20+latency_ms=0.1+busy=0 sets its link (45 GB/s), and what share of a load's time "
            "computing loses."
        ),
    ] = None
    store: Annotated[
        str | None,
        Parameter(
            help="A store that all engines share: 2TiB, 400% of the fleet's KV cache, or blocks; "
            "400%:gbit_s=25+total_gbit_s=100+latency_ms=2+busy=0 sets each engine's link (100 Gbit/s) and "
            "the store's own (unlimited)."
        ),
    ] = None
    pull: Annotated[
        float | None,
        Parameter(
            help="With --host-memory: engines pull prefixes from each other's host memory, over links of N "
            "Gbit/s; kvatlas:pull=0 under --policy compares without."
        ),
    ] = None
    kv_kib_per_token: KvSizeFlag = 100.0
    seeds: Annotated[int, Parameter(help="Runs per policy; several give 95 % confidence intervals.")] = 1
    requests: Annotated[
        int | None, Parameter(help="Use the first N requests (default: all of a file, 4000 of a generator).")
    ] = None
    seconds: Annotated[
        float | None,
        Parameter(help="Time over which a generator starts its sessions (default: 0.3 per request)."),
    ] = None
    served_model: ServedModelFlag = None
    fit: Annotated[
        str | None,
        Parameter(help="Take the rates from an engine (URL), a saved metrics page, or a usage record."),
    ] = None
    prefill_tokens_per_s: Annotated[
        float | None, Parameter(help="Prompt tokens an engine computes per second (8000).")
    ] = None
    decode_tokens_per_s: Annotated[float | None, Parameter(help="Tokens per second of one answer (50).")] = (
        None
    )
    chunk_tokens: Annotated[int | None, Parameter(help="The engines' max_num_batched_tokens (8192).")] = None
    seqs_max: Annotated[int | None, Parameter(help="The engines' max_num_seqs (64).")] = None
    sensitivity: Annotated[
        bool,
        Parameter(
            help="Run at 0.8 and 1.25 times the prefill rate too.",
        ),
    ] = False
    processes: ProcessesFlag = None


@dataclass(frozen=True, kw_only=True)
class AdviseOptions:
    """Options of ``kvatlas advise``, unparsed; None: taken from ``router``, or the default."""

    router: Annotated[
        str | None,
        Parameter(
            help="URL of a running router's ops port: takes the number of engines, groups and blocks from "
            "it, and where no workload is named its usage record."
        ),
    ] = None
    engines: Annotated[int | None, Parameter(help="Number of engines (default: the router's, else 8).")] = (
        None
    )
    model: Annotated[str | None, GROUPS] = None
    block_tokens: BlockTokensFlag = 64
    pool: Annotated[
        str | None,
        Parameter(
            help="Current KV cache: blocks per engine (vLLM's num_gpu_blocks), or the share of what these "
            "requests fill that the fleet holds (default: the router's, else 25%)."
        ),
    ] = None
    retention: Annotated[
        str, Parameter(help="The engines' current prefix_cache_retention_interval: tokens or dense.")
    ] = "0"
    host_memory: Annotated[
        str | None, Parameter(help="Host memory that each engine has behind its GPU now, as for simulate.")
    ] = None
    store: Annotated[str | None, Parameter(help="Store that the engines share now, as for simulate.")] = None
    kv_kib_per_token: KvSizeFlag = 100.0
    load: Annotated[
        float | None,
        Parameter(
            help="Speed arrivals up until prompts take this share of the engines' time under round robin "
            "(default 0.85; usage records keep their times)."
        ),
    ] = None
    speed: Annotated[
        float | None,
        Parameter(
            help="Instead of --load: arrival speed, as a multiple of the recorded one (usage records: 1)."
        ),
    ] = None
    ttft_target: Annotated[
        float | None, Parameter(help="Target for the p90 time to first token, in seconds.")
    ] = None
    requests: Annotated[int, Parameter(help="Use the first N requests; bounds the run time.")] = 2000
    seeds: Annotated[
        int, Parameter(help="Runs with different arrivals; a change is advised only if it helps in each.")
    ] = 2
    served_model: ServedModelFlag = None
    processes: ProcessesFlag = None
