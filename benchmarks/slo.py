"""Goodput under a target for the first token: kvatlas beside FIFO, other routers and a trained regression.

    python -m benchmarks.slo [--trace TRACE.jsonl.gz] [--requests 1000] [--seeds 2] [--out FILE]

Eight simulated engines, pools of 50 % of what the workload fills, a gpt-oss-like layout; loads as in
``benchmarks/routing.py``: the share of time for which round robin would keep the engines busy. Goodput is the
share of all requests, refused ones included, whose first token came within the target. ``kvatlas`` has no
target (first in, first out); ``slo=T`` skips engines predicted to miss it; ``refuse=1`` also refuses requests
that every engine lets wait longer, ``refuse=2`` those that miss it with their own prefill.
``ttft-regression`` sends each request to the engine with the lowest first token by a regression on prompt
length, hit and queue, trained on every first token; with ``refuse=1`` it refuses what it predicts to be late
everywhere. The trace is left out, with a line that says so, where none is given. The report is rewritten
after every table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import msgspec

from benchmarks.peers import COMPARED
from kvatlas.router.simulation.cache_layouts import groups_of, pool_blocks
from kvatlas.router.simulation.outcome import Outcome, result_of
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.study import Job, round_robin, run_one, speed_for
from kvatlas.router.simulation.variants import variants_of
from kvatlas.router.simulation.workload import WorkloadSource

ENGINES, POOL, MODEL, FIRST_SEED = 8, 0.5, "gpt-oss-like", 11
LOADS = (0.85, 1.2)
TARGETS = (1, 3)
"""Seconds; ``Outcome`` counts requests within these."""
WORKLOADS = ("chat", "agents", "tenants")
TITLE = "# Goodput under a target for the first token: simulated fleets"


def arms(target_s: int) -> tuple[str, ...]:
    """Arms of one table."""
    slo = f"slo={target_s}"
    return (
        "kvatlas",
        f"kvatlas:{slo}",
        f"kvatlas:{slo}+refuse=1",
        f"kvatlas:{slo}+refuse=2",
        "llm-d",
        "llm-d-precise",
        "ttft-regression",
        f"ttft-regression:{slo}+refuse=1",
        "round-robin",
    )


def goodput(outcome: Outcome, target_s: int) -> float:
    """Share of all requests within the target."""
    return outcome.within_1_s_share if target_s == 1 else outcome.within_3_s_share


def run_workload(source: WorkloadSource, seeds: range, load: float) -> dict[str, list[Outcome]]:
    """Every arm of one workload and load, over the seeds."""
    names = list(dict.fromkeys(name for target_s in TARGETS for name in arms(target_s)))
    found: dict[str, list[Outcome]] = {name: [] for name in names}
    groups = groups_of(MODEL)
    for seed, requests in source.draws(seeds).items():
        blocks = pool_blocks(requests, groups, ENGINES, POOL)
        setup = FleetSetup(groups=groups, num_blocks=blocks, engines=ENGINES, seed=seed)
        even = result_of(run_one(round_robin(setup), requests))
        setup = msgspec.structs.replace(setup, speed=speed_for(load, requests, even))
        for name, arm in variants_of(names, COMPARED).items():
            outcome = result_of(run_one(Job(name=name, variant=arm, setup=setup), requests)).outcome
            found[name].append(outcome)
            print(f"{source.name} load {load} seed {seed} {name}", file=sys.stderr, flush=True)
    return found


def row(name: str, load: float, target_s: int, found: dict[str, list[Outcome]]) -> str:
    """Goodput of each arm, the share refused in brackets; the best one bold."""
    shares = [statistics.mean(goodput(one, target_s) for one in found[arm]) for arm in arms(target_s)]
    cells = []
    for arm, share in zip(arms(target_s), shares, strict=True):
        refused = statistics.mean(one.refused / (one.refused + one.requests) for one in found[arm])
        text = f"{share:.1%}" if share < max(shares) else f"**{share:.1%}**"
        cells.append(text + (f" ({refused:.0%})" if refused else ""))
    return f"| {name}, {load:g} | " + " | ".join(cells) + " |"


def report(rows: dict[int, list[str]], seeds: range, count: int) -> str:
    """The page, with a table per target."""
    intro = (
        f"`python -m benchmarks.slo --seeds {len(seeds)} --requests {count}`: {ENGINES} engines, {MODEL}, "
        f"pools of {POOL:.0%}, seeds {seeds.start} to {seeds[-1]}. Share of all requests whose first token "
        "came within the target (refused in brackets); rows: workload and load. docs/simulate.md says "
        "what is simulated."
    )
    lines = [TITLE, "", intro]
    for target_s, found in rows.items():
        heads = [arm.replace(f"slo={target_s}", "slo") for arm in arms(target_s)]
        lines += ["", f"## Within {target_s} s", "", f"| workload, load | {' | '.join(heads)} |"]
        lines += [f"|---{'|---' * len(heads)}|", *found]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
    names = [*WORKLOADS, *([] if args.trace is None else [args.trace])]
    if args.trace is None:
        print("no --trace: recorded conversations are left out", file=sys.stderr)
    rows: dict[int, list[str]] = {target_s: [] for target_s in TARGETS}
    for name in names:
        source = WorkloadSource(name=name, requests_max=args.requests)
        for load in LOADS:
            found = run_workload(source, seeds, load)
            for target_s in TARGETS:
                rows[target_s].append(row(Path(name).name, load, target_s, found))
            text = report(rows, seeds, args.requests)
            if args.out is not None:
                args.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
