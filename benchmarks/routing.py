"""Which policy, where: fleets of simulated engines over workloads, models, pools, loads and seeds.

    python benchmarks/routing.py [--trace TRACE.jsonl.gz] [--seeds 3] [--quick] [--runs F] [--out F]

Workloads: Mooncake's conversation trace (``--trace`` or KVATLAS_CONVERSATION_TRACE; left out, with a line
that says so, where neither names a file), and generated tenants and agents. Four cache layouts; pools of 25,
50 and 100 % of what the workload fills; arrivals so fast that round robin is busy for 60 or 85 %. Eight
engines. Every arm of a cell and seed meets the same requests at the same times.

Runs go, one JSON line each, into ``--runs`` as cells finish; what is there already, for the same settings and
number of requests, is not run again. The higher load comes first, and in it seed after seed. The report, in
Markdown, is of all that is there: tables with 95 % intervals over the seeds, and what became of each bar that
the serving policy is held to. The defaults were chosen on seeds 1 and 2, so seeds start at ``--first-seed``
11 here. ``--quick``: 1,000 requests, one seed, the middle pool, the higher load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.routing_report import Run, report
from router.placement.candidate import PolicySettings
from router.simulate.models import MODELS, groups_of
from router.simulate.outcome import result_of
from router.simulate.run.arms import arms_of
from router.simulate.run.setup import FleetSetup
from router.simulate.study import Job, pool_blocks, round_robin, run_one, speed_for
from router.simulate.workload.generate import GENERATORS
from router.simulate.workload.requests import Request
from router.simulate.workload.sources import WorkloadSource

TRACE_VARIABLE = "KVATLAS_CONVERSATION_TRACE"
TRACE = "conversation"
ENGINES = 8
POOLS = (0.25, 0.5, 1.0)
LOADS = (0.85, 0.6)
ARMS = (
    "kvatlas",
    "full-attention",
    "full-attention-in-flight",
    "approx-tree-capped",
    "exact",
    "least-load",
)
MORE_ARMS = ("rules", "approx-tree", "session-hash", "power-of-two", "round-robin")
"""Only at the tightest pool and the higher load."""


class Cell(NamedTuple):
    """What is the same for all arms of one draw."""

    workload: str
    model: str
    pool: float
    load: float
    seed: int


def settings_name() -> str:
    """The serving policy's own numbers: runs of other ones are not these."""
    knobs = PolicySettings()
    return f"beta {knobs.beta:g}, eviction_premium {knobs.eviction_premium:g}"


def cells_of(workloads: list[str], seeds: range, *, quick: bool) -> list[Cell]:
    """In the order of running: the higher load first, in it whole seeds."""
    pools, loads = (POOLS[1:2], LOADS[:1]) if quick else (POOLS, LOADS)
    order = itertools.product(loads, seeds, pools, workloads, MODELS)
    return [Cell(workload, model, pool, load, seed) for load, seed, pool, workload, model in order]


def arms_in(cell: Cell) -> tuple[str, ...]:
    hardest = (cell.pool, cell.load) == (POOLS[0], LOADS[0])
    return ARMS + MORE_ARMS if hardest else ARMS


_requests: dict[tuple[str, int], list[Request]] = {}


def requests_of(cell: Cell, count: int, trace: str | None) -> list[Request]:
    """The draw of a cell; the last few are kept, for the next cells of this process."""
    key = (cell.workload, cell.seed)
    if key not in _requests:
        while len(_requests) >= 3:
            del _requests[next(iter(_requests))]
        name = cell.workload if cell.workload in GENERATORS else str(trace)
        _requests[key] = WorkloadSource(name=name, requests_max=count).draws([cell.seed])[cell.seed]
    return _requests[key]


def run_cell(cell: Cell, arms: list[str], count: int, trace: str | None) -> list[Run]:
    """The arms that are missing of one cell."""
    requests = requests_of(cell, count, trace)
    groups = groups_of(cell.model)
    setup = FleetSetup(
        groups=groups,
        num_blocks=pool_blocks(requests, groups, ENGINES, cell.pool),
        engines=ENGINES,
        seed=cell.seed,
    )
    even = result_of(run_one(round_robin(setup), requests))
    setup = msgspec.structs.replace(setup, speed=speed_for(cell.load, requests, even))
    found = []
    for name, arm in arms_of(arms).items():
        outcome = result_of(run_one(Job(name=name, arm=arm, setup=setup), requests)).outcome
        found.append(
            Run(
                workload=cell.workload,
                model=cell.model,
                pool=cell.pool,
                load=cell.load,
                seed=cell.seed,
                arm=name,
                requests=count,
                settings=settings_name(),
                hit_share=outcome.hit_share,
                mean_s=outcome.ttft_mean_s,
                p99_s=outcome.ttft_p99_s,
                error_tokens=outcome.error_mean_tokens,
            )
        )
    return found


def draw_of(run: Run) -> Cell:
    """What all arms of this run's cell and seed met."""
    return Cell(run.workload, run.model, run.pool, run.load, run.seed)


def runs_in(path: Path, count: int) -> list[Run]:
    """The runs of earlier times that are of these settings and this length."""
    if not path.exists():
        return []
    found = [msgspec.json.decode(line, type=Run) for line in path.read_bytes().splitlines() if line.strip()]
    return [run for run in found if (run.requests, run.settings) == (count, settings_name())]


def with_trace(trace: str | None, others: Iterable[str]) -> list[str]:
    """The workloads: the conversation trace before the others, where there is one; else a line says why
    not."""
    if trace is not None and Path(trace).is_file():
        return [TRACE, *others]
    told = f"{trace} is not a file" if trace else f"neither --trace nor {TRACE_VARIABLE} names it"
    sys.stderr.write(f"conversation trace left out: {told}\n")
    return list(others)


def run_missing(
    wanted: Mapping[Cell, Sequence[str]],
    done: Iterable[Run],
    *,
    count: int,
    trace: str | None,
    processes: int,
    into: Path,
) -> list[Run]:
    """The arms of each cell that are not ``done``; each cell's runs are appended to ``into`` as it ends."""
    known = {(draw_of(run), run.arm) for run in done}
    missing = {cell: [arm for arm in arms if (cell, arm) not in known] for cell, arms in wanted.items()}
    found: list[Run] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as workers:
        running = [
            workers.submit(run_cell, cell, arms, count, trace) for cell, arms in missing.items() if arms
        ]
        for number, future in enumerate(as_completed(running), 1):
            finished = future.result()
            found += finished
            with into.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(msgspec.to_builtins(run)) + "\n" for run in finished)
            sys.stderr.write(f"{number}/{len(running)} {finished[0].where}, seed {finished[0].seed}\n")
    return found


def put(text: str, out: Path | None) -> None:
    """A report into its file, or to standard output."""
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", default=os.environ.get(TRACE_VARIABLE))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=11)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=Path, default=Path("routing-runs.jsonl"))
    parser.add_argument("--out", type=Path, help="the report; default: standard output")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    count, draws = (1000, 1) if options.quick else (options.requests, options.seeds)
    seeds = range(options.first_seed, options.first_seed + draws)
    workloads = with_trace(options.trace, ("agents", "tenants"))
    runs = runs_in(options.runs, count)
    wanted = {cell: arms_in(cell) for cell in cells_of(workloads, seeds, quick=options.quick)}
    runs += run_missing(
        wanted, runs, count=count, trace=options.trace, processes=options.processes, into=options.runs
    )
    put(report(runs, settings_name(), count), options.out)


if __name__ == "__main__":
    main()
