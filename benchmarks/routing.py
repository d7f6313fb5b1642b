"""kvatlas and other routers, where: fleets of simulated engines over workloads, models, pools, loads, seeds.

    python benchmarks/routing.py [--trace TRACE] [--sessions TRACE] [--seeds 3] [--quick] [--runs F] [--out F]

Workloads: Mooncake's conversation trace (``--trace`` or KVATLAS_CONVERSATION_TRACE), agent sessions
(``--sessions`` or KVATLAS_AGENT_SESSIONS: any workload of ``kvatlas simulate``; replayed at the recorded
times, and closed, where a turn waits for the answer before it), and generated documents, shared prompts in
bursts, and tenants. A file that is not named is left out, with a line that says so. Four cache layouts; pools
of 25 and 50 % of what the workload fills; arrivals so fast that round robin is busy for 60, 85 or 100 %.
Eight engines. kvatlas polls gauges every 2 s (``--gauge-s``); other routers place by their own formulas and
poll at their own intervals (``benchmarks/peers.py``). Every arm of a cell and seed meets the same requests at
the same times; in closed sessions, the same requests and pauses.

Runs go, one JSON line each, into ``--runs`` as cells finish; what is there already, for the same settings and
number of requests, is not run again. ``--workloads``, ``--models``, ``--pools`` and ``--loads`` run a part.
The report, in Markdown, is of all that is there. ``--quick``: 1,000 requests, one seed, the larger pool, the
middle load.
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

from benchmarks.peers import COMPARED, PEERS
from benchmarks.routing_report import CLOSED, Run, report
from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.simulation.cache_layouts import MODELS, groups_of, pool_blocks
from kvatlas.router.simulation.outcome import result_of
from kvatlas.router.simulation.requests import Request
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.study import Job, round_robin, run_one, speed_for
from kvatlas.router.simulation.variants import variants_of
from kvatlas.router.simulation.workload import GENERATORS, WorkloadSource

TRACE_VARIABLE = "KVATLAS_CONVERSATION_TRACE"
SESSIONS_VARIABLE = "KVATLAS_AGENT_SESSIONS"
TRACE = "conversation"
SESSIONS = "agent sessions"
ENGINES = 8
GAUGE_S = 2.0
POOLS = (0.25, 0.5)
LOADS = (0.85, 1.0, 0.6)
ARMS = ("kvatlas", *PEERS)
GENERATED = ("documents", "shared", "tenants")


class Cell(NamedTuple):
    """Values shared by all arms of one draw."""

    workload: str
    model: str
    pool: float
    load: float
    seed: int


def settings_name(gauge_s: float = GAUGE_S) -> str:
    """The serving policy's own numbers, and how old gauges get: runs of other ones are not these."""
    knobs = PolicySettings()
    names = ("beta", "eviction_premium", "spread", "room_share", "crowding")
    values = ", ".join(f"{name} {getattr(knobs, name):g}" for name in names)
    return f"{values}; gauges polled every {gauge_s:g} s, by other routers at their own intervals"


_requests: dict[tuple[str, int], list[Request]] = {}


def requests_of(cell: Cell, count: int, files: Mapping[str, str]) -> list[Request]:
    """The draw of a cell; the last few are kept, for the next cells of this process."""
    workload = SESSIONS if cell.workload == CLOSED else cell.workload
    key = (workload, cell.seed)
    if key not in _requests:
        while len(_requests) >= 3:
            del _requests[next(iter(_requests))]
        name = workload if workload in GENERATORS else files[workload]
        _requests[key] = WorkloadSource(name=name, requests_max=count).draws([cell.seed])[cell.seed]
    return _requests[key]


def run_cell(cell: Cell, arms: list[str], count: int, files: Mapping[str, str], gauge_s: float) -> list[Run]:
    """The arms that are missing of one cell."""
    requests = requests_of(cell, count, files)
    groups = groups_of(cell.model)
    setup = FleetSetup(
        groups=groups,
        num_blocks=pool_blocks(requests, groups, ENGINES, cell.pool),
        engines=ENGINES,
        seed=cell.seed,
        closed=cell.workload == CLOSED,
        gauge_s=gauge_s,
    )
    even = result_of(run_one(round_robin(setup), requests))
    setup = msgspec.structs.replace(setup, speed=speed_for(cell.load, requests, even))
    found = []
    for name, arm in variants_of(arms, COMPARED).items():
        outcome = result_of(run_one(Job(name=name, variant=arm, setup=setup), requests)).outcome
        found.append(
            Run(
                workload=cell.workload,
                model=cell.model,
                pool=cell.pool,
                load=cell.load,
                seed=cell.seed,
                arm=name,
                requests=count,
                settings=settings_name(gauge_s),
                hit_share=outcome.hit_share,
                mean_s=outcome.ttft_mean_s,
                p99_s=outcome.ttft_p99_s,
                error_tokens=outcome.error_mean_tokens,
                answer_s=outcome.answer_mean_s,
                lasted_s=outcome.lasted_s,
            )
        )
    return found


def draw_of(run: Run) -> Cell:
    """Load of all arms of this run's cell and seed."""
    return Cell(run.workload, run.model, run.pool, run.load, run.seed)


def runs_in(path: Path, count: int, gauge_s: float = GAUGE_S) -> list[Run]:
    """The runs of earlier times that are of these settings and this length."""
    if not path.exists():
        return []
    found = [msgspec.json.decode(line, type=Run) for line in path.read_bytes().splitlines() if line.strip()]
    return [run for run in found if (run.requests, run.settings) == (count, settings_name(gauge_s))]


def files_given(files: Mapping[str, tuple[str | None, str]]) -> dict[str, str]:
    """Workloads whose files are there, of (path, where it may be named); a line says which are not."""
    found = {}
    for name, (path, where) in files.items():
        if path is not None and Path(path).exists():
            found[name] = path
        else:
            reason = f"{path} is not there" if path else f"neither {where} names it"
            sys.stderr.write(f"{name} left out: {reason}\n")
    return found


def run_missing(
    wanted: Mapping[Cell, Sequence[str]],
    done: Iterable[Run],
    *,
    count: int,
    files: Mapping[str, str],
    processes: int,
    into: Path,
    gauge_s: float = GAUGE_S,
) -> list[Run]:
    """The arms of each cell that are not ``done``; each cell's runs are appended to ``into`` as it ends."""
    known = {(draw_of(run), run.arm) for run in done}
    missing = {cell: [arm for arm in arms if (cell, arm) not in known] for cell, arms in wanted.items()}
    found: list[Run] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as workers:
        running = [
            workers.submit(run_cell, cell, arms, count, files, gauge_s)
            for cell, arms in missing.items()
            if arms
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


def words(text: str) -> tuple[str, ...]:
    """An option's values, separated by commas."""
    return tuple(word.strip() for word in text.split(","))


def shares(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in words(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", default=os.environ.get(TRACE_VARIABLE))
    parser.add_argument("--sessions", default=os.environ.get(SESSIONS_VARIABLE))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--workloads", type=words, help="a part of them, separated by commas")
    parser.add_argument("--models", type=words, default=tuple(MODELS))
    parser.add_argument("--pools", type=shares, default=POOLS)
    parser.add_argument("--loads", type=shares, default=LOADS)
    parser.add_argument(
        "--gauge-s", type=float, default=GAUGE_S, help="seconds between kvatlas's polls of gauges"
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=Path, default=Path("routing-runs.jsonl"))
    parser.add_argument("--out", type=Path, help="the report; default: standard output")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    count, draws = options.requests, options.seeds
    pools, loads = options.pools, options.loads
    if options.quick:
        count, draws, pools, loads = 1000, 1, POOLS[1:], LOADS[:1]
    files = files_given(
        {
            SESSIONS: (options.sessions, f"--sessions nor {SESSIONS_VARIABLE}"),
            TRACE: (options.trace, f"--trace nor {TRACE_VARIABLE}"),
        }
    )
    there = [*files, *([CLOSED] if SESSIONS in files else []), *GENERATED]
    workloads = [one for one in there if options.workloads is None or one in options.workloads]
    seeds = range(options.first_seed, options.first_seed + draws)
    order = itertools.product(loads, seeds, pools, workloads, options.models)
    wanted = {Cell(workload, model, pool, load, seed): ARMS for load, seed, pool, workload, model in order}
    gauge_s = options.gauge_s
    runs = runs_in(options.runs, count, gauge_s)
    runs += run_missing(
        wanted,
        runs,
        count=count,
        files=files,
        processes=options.processes,
        into=options.runs,
        gauge_s=gauge_s,
    )
    put(report(runs, settings_name(gauge_s), count), options.out)


if __name__ == "__main__":
    main()
