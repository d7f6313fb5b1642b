"""What memory behind the GPUs brings at real bandwidths, and which policy uses it: simulated fleets.

    python -m benchmarks.tiers [--trace TRACE.jsonl.gz] [--seeds 2] [--requests 1500] [--out FILE]
        [--models gpt-oss-like,mamba-hybrid]

Eight engines, a pool of 25 % of what the workload fills, 100 KiB of KV per token,
arrivals so fast that round robin without any memory behind the GPUs is busy for 85 % of the time. All tiers
and arms of a workload and seed meet the same requests at the same times. ``no limit`` is a store that holds
everything and takes no time: what a perfect cache that all share would bring. Workloads are generated ones,
and a trace where one is given, each with every layout. The report is written anew after every table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import msgspec

from router.simulate.plan import groups_of
from router.simulate.run.arms import arms_of
from router.simulate.run.setup import FleetSetup
from router.simulate.run.tiers import KV_KIB_PER_TOKEN, TierSetup, block_bytes, read_host, read_store
from router.simulate.study import Job, Outcome, pool_blocks, result_of, round_robin, run_one, speed_for
from router.simulate.workload.requests import Request
from router.simulate.workload.sources import WorkloadSource

ENGINES, POOL, LOAD = 8, 0.25, 0.85
MODELS = "gpt-oss-like,mamba-hybrid"
FIRST_SEED = 11
"""As benchmarks/routing.py: the policy's defaults were chosen on seeds 1 and 2."""
ARMS = ("kvatlas", "kvatlas:scarcity=0", "gpu-only", "least-load")
NONE = "none"
TIERS: dict[str, tuple[str | None, str | None]] = {
    NONE: (None, None),
    "host memory 100 %, PCIe 5": ("100%", None),
    "host memory 400 %, PCIe 5": ("400%", None),
    "host memory 400 %, PCIe 4": ("400%:gbyte_s=20", None),
    "store 400 %, 25 Gbit/s": (None, "400%:gbit_s=25"),
    "store 400 %, 100 Gbit/s": (None, "400%:gbit_s=100"),
    "host 100 % and store, 25 Gbit/s": ("100%", "400%:gbit_s=25"),
    "host 100 % and store, 100 Gbit/s": ("100%", "400%:gbit_s=100"),
    "no limit": (None, "10000%:gbit_s=1e9+latency_ms=0"),
}
"""Host memory and store, as ``kvatlas simulate`` takes them; shares are of the GPUs'."""

Found = dict[tuple[str, str], list[Outcome]]
"""By tier and arm, over the seeds."""


def run_workload(name: str, model: str, seeds: range, count: int) -> Found:
    """Every tier and arm of one workload and layout."""
    source = WorkloadSource(name=name, requests_max=count)
    found: Found = {}
    for seed, requests in source.draws(seeds).items():
        base = _base(requests, model, seed)
        for tier, (host, store) in TIERS.items():
            setup = msgspec.structs.replace(base, tiers=_tiers(base, host, store))
            for arm, how in arms_of(ARMS).items():
                outcome = result_of(run_one(Job(name=arm, arm=how, setup=setup), requests)).outcome
                found.setdefault((tier, arm), []).append(outcome)
                print(
                    f"{name} {model} seed {seed}, {tier}, {arm}: {outcome.ttft_mean_s:.3f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return found


def _base(requests: list[Request], model: str, seed: int) -> FleetSetup:
    groups = groups_of(model)
    blocks = pool_blocks(requests, groups, ENGINES, POOL)
    setup = FleetSetup(groups=groups, num_blocks=blocks, engines=ENGINES, seed=seed)
    even = result_of(run_one(round_robin(setup), requests))
    return msgspec.structs.replace(setup, speed=speed_for(LOAD, requests, even))


def _tiers(setup: FleetSetup, host: str | None, store: str | None) -> TierSetup:
    size = block_bytes(setup.groups, KV_KIB_PER_TOKEN)
    return TierSetup(
        block_bytes=size,
        host=None if host is None else read_host(host, setup.num_blocks, size),
        store=None if store is None else read_store(store, setup.num_blocks * ENGINES, size),
    )


def intro(seeds: range, count: int) -> str:
    """What was run, and how to read it."""
    return (
        f"`python -m benchmarks.tiers --seeds {len(seeds)} --requests {count}`: {ENGINES} engines, "
        f"pool {POOL:.0%}, {KV_KIB_PER_TOKEN:g} KiB per token, round robin without such memory {LOAD:.0%} "
        f"busy, seeds {seeds.start} to {seeds[-1]}. Cells: hit %, mean and p99 seconds to the first token, "
        f"means over the seeds; bold: the shortest mean. `gain`: of {ARMS[0]}'s mean, against none. Sizes "
        "are shares of what the GPUs have. `least-load` knows no cache, but its engines load all the same. "
        "What is simulated and what not: docs/simulate.md; what follows: "
        "docs/decisions/ 010-loads-in-the-queue.md, 012-price-of-a-sequence.md, 013-price-of-scarce-pages.md."
    )


def table(name: str, found: Found) -> list[str]:
    """Rows of one workload and layout: a tier each, the arms side by side."""
    now_s = _mean(found[NONE, ARMS[0]], "ttft_mean_s")
    rows = [
        f"## {name}",
        "",
        "| memory behind the GPUs | gain | " + " | ".join(ARMS) + " |",
        "|---|---|" + "---|" * len(ARMS),
    ]
    for tier in TIERS:
        best = min(_mean(found[tier, arm], "ttft_mean_s") for arm in ARMS)
        cells = [_cell(found[tier, arm], best) for arm in ARMS]
        gain = 1 - _mean(found[tier, ARMS[0]], "ttft_mean_s") / now_s
        rows.append(f"| {tier} | {'' if tier == NONE else f'{gain:.0%}'} | " + " | ".join(cells) + " |")
    return [*rows, ""]


def _cell(outcomes: list[Outcome], best_s: float) -> str:
    mean_s = _mean(outcomes, "ttft_mean_s")
    text = f"{mean_s:.3f}"
    text = f"**{text}**" if mean_s == best_s else text
    return f"{_mean(outcomes, 'hit_share'):.0%} {text} {_mean(outcomes, 'ttft_p99_s'):.1f}"


def _mean(outcomes: list[Outcome], field: str) -> float:
    return statistics.fmean(getattr(outcome, field) for outcome in outcomes)


def main() -> int:
    """Run by ``python -m benchmarks.tiers``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", help="a recorded workload to run beside the generated ones")
    parser.add_argument("--models", default=MODELS, help="layouts, separated by commas")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tiers.md"))
    options = parser.parse_args()
    if options.seeds < 1 or options.requests < 1:
        parser.error("--seeds and --requests: expected 1 or more")
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    lines = ["# Memory behind the GPUs: simulated fleets", "", intro(seeds, options.requests), ""]
    names = ["agents", "tenants", *([options.trace] if options.trace else [])]
    for name in names:
        for model in options.models.split(","):
            found = run_workload(name, model, seeds, options.requests)
            lines += table(f"{Path(name).name}, {model}", found)
            options.out.write_text("\n".join(lines), encoding="utf-8")  # what is done stays
    return 0


if __name__ == "__main__":
    sys.exit(main())
