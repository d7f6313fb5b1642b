"""The command behind ``make world``: plays seeds and the plans of found defects, and shrinks what fails.

A violation is printed with the seed, the revision, the shrunk plan and the command that replays it with a
log. Exit status 1 if there was any.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.world import kinds
from tests.world.plan import Plan, found, read, write
from tests.world.shrink import shrink
from tests.world.world import Report, play

FIXED_SEEDS = 60
_COUNTED_EVERY = 5
"""Calls of a turn are counted in each fifth world, of every kind by turns: it costs a quarter more."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seed", type=int, help="first seed; default 1, after the plans of found defects")
    parser.add_argument("--seeds", type=int, default=FIXED_SEEDS, help="how many")
    parser.add_argument("--kind", default="", choices=["", *kinds.KINDS], help="only this kind of world")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--plan", type=Path, help="play this plan instead of seeds")
    parser.add_argument("--log", action="store_true", help="print every arrival with its time")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--twice", action="store_true", help="run each world twice and compare every byte")
    options = parser.parse_args(argv)
    return 1 if _play_all(_plans(options), options) else 0


def _plans(options: Any) -> dict[str, Plan]:
    """Worlds to play, by name."""
    if options.plan is not None:
        return {str(options.plan): read(options.plan.read_bytes())}
    everything = options.seed is None and not options.kind
    plans = {f"found {name}": plan for name, plan in found().items()} if everything else {}
    first = 1 if options.seed is None else options.seed
    for seed in range(first, first + options.seeds):
        faults = not options.no_faults
        plans[f"seed {seed}"] = kinds.draw(seed, options.kind, requests=options.requests, faults=faults)
    return plans


def _play_all(plans: dict[str, Plan], options: Any) -> int:
    """Play each; returns how many failed."""
    failed, cpu_s, virtual_s, counts, continued = 0, 0.0, 0.0, Counter[str](), 0
    for number, (name, plan) in enumerate(plans.items()):
        log: list[Any] | None = [] if options.log else None
        report = play(plan, log=log, counts_calls=number % _COUNTED_EVERY == 0)
        if options.twice and (again := play(plan)).digest != report.digest:
            print(f"{name}: another run differs: {report.digest} and {again.digest}")
            failed += 1
        for line in log or ():
            print("  log", *line)
        cpu_s, virtual_s = cpu_s + report.cpu_s, virtual_s + report.virtual_s
        counts.update(report.counts)
        continued += report.continued
        if report.violations:
            failed += 1
            _show(name, plan, report, shrinks=not options.no_shrink)
        elif len(plans) <= 20 or options.plan is not None:
            text = f"{report.counts}, {report.receipts}, {report.cpu_s} s of CPU, digest {report.digest}"
            print(f"{name}: {plan.kind}, {text}")
        sys.stdout.flush()
    print(
        f"{len(plans)} worlds, {failed} with violations; {sum(counts.values())} exchanges, "
        f"{continued} of them continued, "
        f"{virtual_s / 3600:.2f} virtual hours, {cpu_s:.0f} s of CPU; ends: {dict(counts.most_common())}"
    )
    return failed


def _show(name: str, plan: Plan, report: Report, *, shrinks: bool) -> None:
    print(f"\n{name} ({plan.kind}), revision {_revision()}: {len(report.violations)} violations")
    for violation in report.violations[:10]:
        print(f"  {violation}")
    if not shrinks:
        return
    wanted = {violation.oracle for violation in report.violations}
    least = shrink(plan, lambda trial: bool(wanted & {one.oracle for one in play(trial).violations}))
    path = Path(f"world-{plan.kind}-{plan.seed}.json")
    path.write_text(write(least))
    print(f"  shrunk to {len(least.requests)} requests and {len(least.faults)} faults, in {path}:")
    print("    " + write(least).replace("\n", "\n    ").rstrip())
    print(f"  replay: PYTHONHASHSEED=0 python -m tests.world --plan {path} --log")


def _revision() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
