"""``kvatlas advise``: runs trials of a workload and a fleet on all cores, and prints a table and advice."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.fleet.engine_metrics import read_pool_blocks
from kvatlas.router.simulation.advice import Advice, doubt, judge
from kvatlas.router.simulation.advise_trials import (
    ALIKE,
    NO_PULL,
    TrialResult,
    results_of,
    reusable_share,
    trials,
)
from kvatlas.router.simulation.cache_layouts import ModelError, check_units, pool_blocks
from kvatlas.router.simulation.command import (
    ENGINES,
    check_numbers,
    progress_bar,
    read_model,
    read_pool,
    read_retentions,
    read_tiers,
    refused,
    transfers,
)
from kvatlas.router.simulation.fetch import fetch, fetch_from_router, fetch_usage
from kvatlas.router.simulation.fit import FitError, fit_capture
from kvatlas.router.simulation.options import AdviseOptions
from kvatlas.router.simulation.outcome import NothingServedError
from kvatlas.router.simulation.report import retention_text
from kvatlas.router.simulation.requests import WorkloadError
from kvatlas.router.simulation.setup import FleetSetup, Timing
from kvatlas.router.simulation.study import Workloads, round_robin, run_all, speed_for
from kvatlas.router.simulation.tiers import TierSetup, block_bytes
from kvatlas.router.simulation.usage_record import cached_share, is_capture, read_capture
from kvatlas.router.simulation.workload import WorkloadSource
from kvatlas.router.tools.ops_client import output_console, router_url

LOAD = 0.85
_BOUNDS = {"engines": (1, 256), "requests": (50, 1_000_000), "seeds": (1, 20), "processes": (1, 1024)}
POOL = "25%"
MODEL = "gpt-oss-like"


class ObservedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Facts a running router reports about its fleet; None for unknown ones."""

    engines: int
    groups: tuple[GroupSpec, ...] | None
    blocks: int | None


class _Layout(msgspec.Struct, frozen=True):
    groups: tuple[GroupSpec, ...]


class _Engine(msgspec.Struct, frozen=True):
    engine: str
    layout: _Layout | None = None


def run_advise(workload: str | None, options: AdviseOptions, *, as_json: bool) -> int:
    """Run the trials; returns the exit status. Raises ``ConfigError`` for unusable options."""
    check_numbers(options, _BOUNDS, ("load", "speed", "ttft_target"))
    if options.router is not None:
        router_url(options.router)
    if workload is not None:
        return _advise(options, workload, workload, as_json=as_json)
    if options.router is None:
        raise ConfigError("workload: name one, or a running router with --router")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "access.jsonl"
        with refused(f"--router {options.router}", OSError):
            fetch_usage(options.router, path)
        name = f"the usage record of {options.router}"
        return _advise(options, str(path), name, as_json=as_json)


def _advise(options: AdviseOptions, workload: str, name: str, *, as_json: bool) -> int:
    seen = None if options.router is None else see(options.router)
    seeds = range(options.seeds)
    source = WorkloadSource(name=workload, requests_max=options.requests, model=options.served_model)
    with refused("workload", WorkloadError):
        workloads = source.draws(seeds)
    timing, notes, recorded = _timing(options, workload)
    setup, more = _setup(options, seen, workloads, timing)
    with refused("--model", ModelError):
        check_units(setup.groups, workloads[0][0].unit_tokens)
    notes += more
    processes = options.processes or len(os.sched_getaffinity(0))
    with (
        refused("workload", WorkloadError),
        refused(f"--pool {options.pool or ''}".rstrip(), NothingServedError),
    ):
        setup = _at_speed(options, workload, setup, workloads, notes)
        tried = trials(setup, ttft_target_s=options.ttft_target)
        jobs = [trial.job(seed) for trial in tried for seed in seeds]
        total = len(jobs) * len(workloads[0])
        with progress_bar(total, quiet=as_json) as placed:
            ran = run_all(jobs, workloads, processes=processes, placed=placed)
    results = results_of(tried, {job: result.outcome for job, result in ran.items()}, seeds)
    reusable = reusable_share(workloads[0])
    advice = judge(
        setup,
        results,
        reusable=reusable,
        num_requests=len(workloads[0]),
        ttft_target_s=options.ttft_target,
        recorded=recorded,
    )
    unsure = doubt(results, len(workloads[0]), reusable, recorded)
    facts = _facts(options, name, setup, workloads, reusable, notes)
    if as_json:
        report = {"facts": facts, "runs": results, "advice": advice, "doubt": unsure}
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        return 0
    _show(facts, results, advice, unsure, output_console())
    return 0


def see(url: str) -> ObservedFleet:
    """Describe the fleet behind a router: engines, their groups, the smallest pool. Raises
    ``ConfigError``."""
    base = url.rstrip("/")
    with refused(f"--router {url}", OSError, msgspec.MsgspecError):
        engines = msgspec.json.decode(fetch_from_router(f"{base}/kvatlas/engines"), type=list[_Engine])
    if not engines:
        raise ConfigError(f"--router {url}: it has no engines")
    layouts = [engine.layout.groups for engine in engines if engine.layout is not None]
    if len(set(layouts)) > 1:
        raise ConfigError(f"--router {url}: its engines have different cache layouts; give --model")
    sizes = [_pool_of(engine.engine) for engine in engines]
    known = [size for size in sizes if size is not None]
    return ObservedFleet(
        engines=len(engines), groups=layouts[0] if layouts else None, blocks=min(known, default=None)
    )


def _pool_of(engine_id: str) -> int | None:
    base, _, rank = engine_id.partition("#dp")
    try:
        page = fetch(base)
    except OSError:
        return None
    return read_pool_blocks(page.encode(), int(rank) if rank.isdecimal() else None)


def _timing(options: AdviseOptions, workload: str) -> tuple[Timing, list[str], float | None]:
    """Return rates fitted to the capture, if it is one and sufficient; else the defaults, with the reason;
    and the share of its prompt tokens that engines reported as cached."""
    path = Path(workload)
    if not path.is_file():
        return Timing(), ["rates: the defaults, as a generated workload has none"], None
    with refused("workload", WorkloadError):
        if not is_capture(path):
            return Timing(), ["rates: the defaults, as this file is no usage record"], None
        captured = read_capture(path, options.served_model)
    recorded = cached_share(captured)
    try:
        return fit_capture(captured, Timing()).timing, ["rates: fitted to the usage record"], recorded
    except FitError as error:
        return (
            Timing(),
            [f"rates: the defaults, as the usage record is not sufficient to fit them: {error}"],
            recorded,
        )


def _setup(
    options: AdviseOptions, seen: ObservedFleet | None, workloads: Workloads, timing: Timing
) -> tuple[FleetSetup, list[str]]:
    notes = []
    engines = options.engines or (ENGINES if seen is None else seen.engines)
    if options.model is None and seen is not None and seen.groups is not None:
        groups = seen.groups
        notes.append("groups: from the router")
    else:
        groups = read_model(options.model or MODEL, options.block_tokens)
        if options.model is None:
            notes.append(f"groups: {MODEL}, as neither --model nor --router gives them")
    if options.pool is None and seen is not None and seen.blocks is not None:
        blocks = seen.blocks
        notes.append("blocks: the smallest engine's, from its metrics")
    elif options.pool is None:
        blocks = pool_blocks(workloads[0], groups, engines, 0.25)
        notes.append(
            f"blocks: {POOL} of what these {len(workloads[0])} requests fill, as the engines' number is "
            "unknown: give --pool (vLLM's num_gpu_blocks)"
        )
    else:
        blocks = read_pool(options.pool, groups, engines, workloads)
    retentions = read_retentions(options.retention, groups)
    if len(retentions) > 1:
        raise ConfigError(f"--retention {options.retention!r}: expected the engines' one current value")
    tiers = read_tiers(options.host_memory, options.store, options.kv_kib_per_token, groups, blocks, engines)
    setup = FleetSetup(
        pd=transfers(options.kv_kib_per_token),
        groups=groups,
        num_blocks=blocks,
        engines=engines,
        retention=retentions[0],
        timing=timing,
        tiers=tiers or TierSetup(block_bytes=block_bytes(groups, options.kv_kib_per_token)),
    )
    return setup, notes


def _at_speed(
    options: AdviseOptions, workload: str, setup: FleetSetup, workloads: Workloads, notes: list[str]
) -> FleetSetup:
    """Use recorded times for a usage record; otherwise the speed at which round robin is busy for
    ``LOAD``."""
    path = Path(workload)
    recorded = path.is_file() and is_capture(path)
    if options.speed is not None or (recorded and options.load is None):
        speed = options.speed or 1.0
        notes.append(f"arrivals: {speed:g} x the recorded speed")
        return msgspec.structs.replace(setup, speed=speed)
    load = options.load or LOAD
    job = round_robin(setup)
    even = run_all([job], workloads, processes=1)[job]
    notes.append(
        f"arrivals: so fast that prompts take round robin {load:.0%} of the time; busy %: as measured"
    )
    return msgspec.structs.replace(setup, speed=speed_for(load, workloads[0], even))


def _facts(
    options: AdviseOptions,
    name: str,
    setup: FleetSetup,
    workloads: Workloads,
    reusable: float,
    notes: list[str],
) -> dict[str, Any]:
    return {
        "workload": name,
        "requests": len(workloads[0]),
        "seeds": options.seeds,
        "engines": setup.engines,
        "blocks_per_engine": setup.num_blocks,
        "retention": retention_text(setup.retention),
        "reusable_share": reusable,
        "speed": setup.speed,
        "timing": setup.timing,
        "notes": notes,
    }


def _show(
    facts: dict[str, Any], results: list[TrialResult], advice: list[Advice], unsure: str, console: Console
) -> None:
    console.print(
        f"[bold]{facts['workload']}[/]: {facts['requests']} requests, {facts['seeds']} seeds; "
        f"{facts['engines']} engines of {facts['blocks_per_engine']} blocks, retention {facts['retention']}",
        highlight=False,
    )
    for note in facts["notes"]:
        console.print(note, style="dim", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=0, show_edge=False)
    table.add_column("what is changed")
    table.add_column("to")
    for name in ("hit %", "mean s", "p90 s", "p99 s", "busy %", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    topic = ""
    for one in results:
        shown, topic = ("" if one.topic == topic else one.topic), one.topic
        table.add_row(
            shown,
            one.value,
            f"{100 * one.hit_share:.1f}",
            f"{one.mean_s:.3f}",
            f"{one.p90_s:.2f}",
            f"{one.p99_s:.2f}",
            f"{100 * one.busy_share:.0f}",
            "" if one.topic == "now" or one.value in {ALIKE, NO_PULL} else f"{one.change:+.1%}",
        )
    console.print(table)
    if unsure:
        console.print(f"[yellow]Only hints: {unsure}.[/]", highlight=False)
    for one_advice in advice:
        mark = "[green]=[/]" if one_advice.value is None else "[yellow]>[/]"
        mark = mark if one_advice.firm else "[dim]?[/]"
        console.print(f"{mark} {one_advice.text}", highlight=False)
