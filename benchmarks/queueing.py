"""Gain of holding requests in the router: arms that hold against today's, on fleets of simulated engines.

    python benchmarks/queueing.py [--trace TRACE.jsonl.gz] [--requests 1000] [--seeds 2]
                                  [--pools 0.25,0.5,1] [--processes 1] [--runs F] [--out F]

Workloads: tenants, agents that fan out, chats, and the conversation trace where it is at hand; four cache
layouts; pools of 25, 50 and 100 % of what the workload fills; a load of 85 % (as in
``benchmarks/routing.py``) and two far beyond it, where the fleet is saturated. An arm's name says what it
holds back:
``hold`` is the queue in seconds beyond which an engine is saturated, ``ageing`` the order (0: arrival; k:
arrival plus k times a request's own work), ``siblings`` the part of a prompt that must be shared with one in
flight to go immediately. Runs go, one JSON line each, into
``--runs``; those there already for the same settings and number of requests are not run again. The report,
Markdown, gives each arm's mean and p99 first-token time over those of the same draw without a queue
(geometric mean over cells and seeds; below 1 is better), and its worst cell.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.routing import (
    TRACE,
    TRACE_VARIABLE,
    Cell,
    Options,
    draw_of,
    files_given,
    put,
    run_missing,
    runs_in,
    shares,
)
from benchmarks.routing_report import Run
from kvatlas.router.simulation.cache_layouts import MODELS

BASE = "kvatlas"
ARMS = (
    BASE,
    "kvatlas:hold=0.25",
    "kvatlas:hold=1",
    "kvatlas:hold=4",
    "kvatlas:hold=1+siblings=0.5",
    "kvatlas:hold=1+ageing=2",
    "kvatlas:hold=1+ageing=10",
    "kvatlas:hold=1+ageing=10+siblings=0.5",
)
WORKLOADS = ("agents", "tenants", "chat")
LOADS = (5.0, 2.5, 0.85)
POOLS = (0.25, 0.5, 1.0)


def report(runs: list[Run]) -> str:
    """Tables by pool and load: an arm per row, a workload per column."""
    lines = [
        (
            f"{len(runs)} runs of {runs[0].requests} requests, {len({run.seed for run in runs})} seeds, "
            f"{len({run.model for run in runs})} cache layouts, eight engines; "
            f"{runs[0].settings}."
        ),
        "Each number: first-token time over that of `kvatlas` without a queue, of the same draw.",
    ]
    for pool, load in sorted({(run.pool, run.load) for run in runs}, key=lambda at: (at[0], -at[1])):
        lines += [
            "",
            f"### Pools of {pool:.0%}, arrivals that would keep round robin busy for {load:.0%}",
            "",
        ]
        lines += list(_table([run for run in runs if (run.pool, run.load) == (pool, load)]))
    return "\n".join(lines) + "\n"


def _table(runs: list[Run]) -> Iterator[str]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    base = {draw_of(run): run for run in runs if run.arm == BASE}
    for run in runs:
        if draw_of(run) in base:
            other = base[draw_of(run)]
            found[run.arm, run.workload].append((run.mean_s / other.mean_s, run.p99_s / other.p99_s))
    workloads = [one for one in (TRACE, *WORKLOADS) if any(run.workload == one for run in runs)]
    yield "| arm | " + " | ".join(f"{one}: mean, worst mean, p99" for one in workloads) + " |"
    yield "| --- " * (len(workloads) + 1) + "|"
    for arm in ARMS[1:]:
        cells = []
        for workload in workloads:
            ratios = found[arm, workload]
            means, tails = [mean for mean, _ in ratios], [tail for _, tail in ratios]
            cells.append(f"{_middle(means):.2f}, {max(means):.2f}, {_middle(tails):.2f}" if ratios else "")
        yield f"| `{arm}` | " + " | ".join(cells) + " |"
    if base:
        seconds = [
            f"{_middle([run.mean_s for run in base.values() if run.workload == one]):.2f} s"
            for one in workloads
        ]
        yield "| `kvatlas`, mean | " + " | ".join(seconds) + " |"


def _middle(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", default=os.environ.get(TRACE_VARIABLE))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--pools", type=shares, default=POOLS, help="parts of what a workload fills")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("queueing-runs.jsonl"))
    parser.add_argument("--out", type=Path, help="the report; default: standard output")
    options = parser.parse_args()
    files = files_given({TRACE: (options.trace, f"--trace nor {TRACE_VARIABLE}")})
    shared = Options(options.requests, files)
    runs = [run for run in runs_in(options.runs, shared) if run.arm in ARMS]
    workloads = [*files, *WORKLOADS]
    wanted = {
        Cell(workload, model, pool, load, seed): ARMS
        for seed in range(21, 21 + options.seeds)
        for load in LOADS
        for pool in options.pools
        for workload in workloads
        for model in MODELS
    }
    runs += run_missing(wanted, runs, options=shared, processes=options.processes, into=options.runs)
    put(report(runs), options.out)


if __name__ == "__main__":
    main()
