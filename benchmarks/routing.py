"""kvatlas and other routers, where: fleets of simulated engines over workloads, models, pools, loads, seeds.

    python benchmarks/routing.py [--trace TRACE] [--sessions TRACE] [--seeds 5] [--quick] [--runs F] [--out F]
        [--half shown|hidden --split-seed N] [--ablations [--store SIZE]]

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

``--half`` takes one half of each workload's sessions, drawn by ``--split-seed``. Rule for tuning: constants
are chosen on the shown half alone; a result is of the hidden half, or of another split.

``--ablations``: instead of other routers, kvatlas without one part of its decision after the other
(``benchmarks/ablations.py``); ``--store`` puts a store behind the GPUs, where prompts are loaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks import ablations
from benchmarks.peers import COMPARED, PEERS
from benchmarks.routing_report import CLOSED, Run, report
from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.simulation.cache_layouts import MODELS, groups_of, pool_blocks
from kvatlas.router.simulation.outcome import result_of
from kvatlas.router.simulation.requests import Request
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.study import Job, round_robin, run_one, speed_for
from kvatlas.router.simulation.tiers import KV_KIB_PER_TOKEN, TierSetup, block_bytes, read_store
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


class Options(NamedTuple):
    """Values shared by all runs of one call. ``half``: "" for all sessions."""

    requests: int
    files: Mapping[str, str]
    gauge_s: float = GAUGE_S
    half: str = ""
    split_seed: int = 0
    store: str = ""

    @property
    def settings(self) -> str:
        """The serving policy's own numbers and what else a run depends on: runs of other ones are not
        these."""
        knobs = PolicySettings()
        names = ("beta", "eviction_premium", "delay", "spread", "room_share")
        values = ", ".join(f"{name} {getattr(knobs, name):g}" for name in names)
        half = f"; {self.half} half of split {self.split_seed}" if self.half else ""
        store = f"; a store of {self.store}" if self.store else ""
        return (
            f"{values}; gauges polled every {self.gauge_s:g} s, by other routers at their own intervals"
            f"{half}{store}"
        )


_requests: dict[tuple[str, int, int, str, int], list[Request]] = {}


def requests_of(cell: Cell, options: Options) -> list[Request]:
    """The draw of a cell; the last few are kept, for the next cells of this process."""
    workload = SESSIONS if cell.workload == CLOSED else cell.workload
    key = (workload, cell.seed, options.requests, options.half, options.split_seed)
    if key not in _requests:
        while len(_requests) >= 3:
            del _requests[next(iter(_requests))]
        name = workload if workload in GENERATORS else options.files[workload]
        most = 2 * options.requests if options.half else options.requests
        found = WorkloadSource(name=name, requests_max=most).draws([cell.seed])[cell.seed]
        if options.half:
            found = half_of(found, options.split_seed, shown=options.half == "shown")
        _requests[key] = found[: options.requests]
    return _requests[key]


def half_of(requests: Sequence[Request], split_seed: int, *, shown: bool) -> list[Request]:
    """One half of the sessions, drawn by this seed; the other half has the others."""
    sessions = list(dict.fromkeys(request.session for request in requests))
    random.Random(split_seed).shuffle(sessions)
    first = set(sessions[: (len(sessions) + 1) // 2])
    kept = [at for at, request in enumerate(requests) if (request.session in first) == shown]
    places = {old: new for new, old in enumerate(kept)}
    found = []
    for at in kept:
        request, follows = requests[at], requests[at].follows
        if follows is not None:
            place = places.get(follows.request)
            follows = None if place is None else msgspec.structs.replace(follows, request=place)
            request = msgspec.structs.replace(request, follows=follows)
        found.append(request)
    return found


def run_cell(cell: Cell, arms: list[str], options: Options) -> list[Run]:
    """The arms that are missing of one cell."""
    requests = requests_of(cell, options)
    groups = groups_of(cell.model)
    setup = FleetSetup(
        groups=groups,
        num_blocks=pool_blocks(requests, groups, ENGINES, cell.pool),
        engines=ENGINES,
        seed=cell.seed,
        closed=cell.workload == CLOSED,
        gauge_s=options.gauge_s,
    )
    even = result_of(run_one(round_robin(setup), requests))
    setup = msgspec.structs.replace(setup, speed=speed_for(cell.load, requests, even))
    if options.store:
        size = block_bytes(groups, KV_KIB_PER_TOKEN)
        store = read_store(options.store, setup.num_blocks * ENGINES, size)
        setup = msgspec.structs.replace(setup, tiers=TierSetup(block_bytes=size, store=store))
    found = []
    off = ablations.ABLATIONS
    named = variants_of([arm for arm in arms if arm not in off], COMPARED)
    for name in arms:
        arm = named[name] if name in named else off[name]
        asked = msgspec.structs.replace(setup, gauge_s=ablations.gauge_s(name, options.gauge_s))
        outcome = result_of(run_one(Job(name=name, variant=arm, setup=asked), requests)).outcome
        found.append(
            Run(
                workload=cell.workload,
                model=cell.model,
                pool=cell.pool,
                load=cell.load,
                seed=cell.seed,
                arm=name,
                requests=options.requests,
                settings=options.settings,
                hit_share=outcome.hit_share,
                mean_s=outcome.ttft_mean_s,
                p99_s=outcome.ttft_p99_s,
                error_tokens=outcome.error_mean_tokens,
                answer_s=outcome.answer_mean_s,
                lasted_s=outcome.lasted_s,
                revision=revision(),
            )
        )
    return found


@cache
def revision() -> str:
    """The checkout's revision, with a + where it has been changed; "" without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _runs_of(path: Path) -> list[Run]:
    """All runs of a file."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Run) for line in path.read_bytes().splitlines() if line.strip()]


def draw_of(run: Run) -> Cell:
    """Load of all arms of this run's cell and seed."""
    return Cell(run.workload, run.model, run.pool, run.load, run.seed)


def runs_in(path: Path, options: Options) -> list[Run]:
    """The runs of earlier times that are of these settings and this length."""
    return [
        run for run in _runs_of(path) if (run.requests, run.settings) == (options.requests, options.settings)
    ]


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
    options: Options,
    processes: int,
    into: Path,
) -> list[Run]:
    """The arms of each cell that are not ``done``; each cell's runs are appended to ``into`` as it ends."""
    known = {(draw_of(run), run.arm) for run in done}
    missing = {cell: [arm for arm in arms if (cell, arm) not in known] for cell, arms in wanted.items()}
    found: list[Run] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as workers:
        running = [workers.submit(run_cell, cell, arms, options) for cell, arms in missing.items() if arms]
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
    parser.add_argument("--seeds", type=int, default=5)
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
    parser.add_argument("--half", choices=("shown", "hidden"), default="", help="of each workload's sessions")
    parser.add_argument("--split-seed", type=int, default=0, help="draws the halves")
    parser.add_argument("--ablations", action="store_true", help="kvatlas without one part after the other")
    parser.add_argument("--store", default="", help="a store behind the GPUs, as for kvatlas simulate")
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
    arms = ablations.arms_of(options.store) if options.ablations else ARMS
    wanted = {Cell(workload, model, pool, load, seed): arms for load, seed, pool, workload, model in order}
    shared = Options(count, files, options.gauge_s, options.half, options.split_seed, options.store)
    runs = runs_in(options.runs, shared)
    runs += run_missing(wanted, runs, options=shared, processes=options.processes, into=options.runs)
    if options.ablations:
        put(ablations.report(_runs_of(options.runs)), options.out)
    else:
        put(report([run for run in runs if run.arm in ARMS], shared.settings, count), options.out)


if __name__ == "__main__":
    main()
