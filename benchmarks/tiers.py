"""What memory behind the GPUs brings at real bandwidths, and which policy uses it: simulated fleets.

    python -m benchmarks.tiers [--trace TRACE.jsonl.gz] [--seeds 2] [--requests 1500] [--out FILE]
        [--models gpt-oss-like,mamba-hybrid] [--pulls]

Eight engines, a pool of 25 % of what the workload fills, 100 KiB of KV per token,
arrivals so fast that round robin without any memory behind the GPUs is busy for 85 % of the time. All tiers
and arms of a workload and seed meet the same requests at the same times. ``no limit`` is a store that holds
everything and takes no time: what a perfect cache that all share would bring. Workloads are generated ones,
and a trace where one is given, each with every layout. The report is written anew after every table.

``--pulls`` writes the second half of the report instead: host memory of 400 %, without and with engines that
pull prefixes from each other's host memory, against one cache of that size that all share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import msgspec

from router.simulate.plan import groups_of
from router.simulate.run.setup import FleetSetup
from router.simulate.run.tiers import KV_KIB_PER_TOKEN, TierSetup, block_bytes, read_host, read_store
from router.simulate.run.variants import variants_of
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

PULLED_HOST = "400%"
POOLED = "one cache"
PULLS: dict[str, float | None] = {NONE: None, "25 Gbit/s": 25.0, "100 Gbit/s": 100.0, "400 Gbit/s": 400.0}
"""Links between the engines."""
PULL_WORKLOADS = ("documents", "agents", "tenants", "shared")
PULL_TITLE = "# Pulling prefixes from other engines' host memory: simulated fleets"

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
            for arm, how in variants_of(ARMS).items():
                outcome = result_of(run_one(Job(name=arm, variant=how, setup=setup), requests)).outcome
                found.setdefault((tier, arm), []).append(outcome)
                print(
                    f"{name} {model} seed {seed}, {tier}, {arm}: {outcome.ttft_mean_s:.3f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return found


def run_pulls(name: str, model: str, seeds: range, count: int) -> dict[str, list[Outcome]]:
    """Every link of one workload and layout, and the cache that all share, over the seeds."""
    source = WorkloadSource(name=name, requests_max=count)
    arm = variants_of(ARMS[:1])[ARMS[0]]
    found: dict[str, list[Outcome]] = {}
    for seed, requests in source.draws(seeds).items():
        base = _base(requests, model, seed)
        host = _tiers(base, PULLED_HOST, None)
        ways = {
            link: msgspec.structs.replace(host, pull_bytes_per_s=(gbit_s or 0.0) * 1e9 / 8)
            for link, gbit_s in PULLS.items()
        }
        ways[POOLED] = _tiers(base, None, f"{PULLED_HOST}:gbit_s=1e9+latency_ms=0")
        for way, tiers in ways.items():
            setup = msgspec.structs.replace(base, tiers=tiers)
            outcome = result_of(run_one(Job(name=ARMS[0], variant=arm, setup=setup), requests)).outcome
            found.setdefault(way, []).append(outcome)
            print(f"{name} {model} seed {seed}, {way}: {outcome.ttft_mean_s:.3f} s", file=sys.stderr)
    return found


def pull_row(name: str, found: dict[str, list[Outcome]]) -> str:
    """One workload and layout: mean and p99 of each link, its change, and what was pulled of what was
    promised."""
    now_s = _mean(found[NONE], "ttft_mean_s")
    cells = [f"{now_s:.3f} {_mean(found[NONE], 'ttft_p99_s'):.1f}"]
    for link in [link for link in PULLS if link != NONE]:
        shares = f"{_mean(found[link], 'pull_share'):.1%} of {_mean(found[link], 'promised_share'):.1%}"
        cells.append(f"{_against(found[link], now_s)}, {shares}")
    cells.append(_against(found[POOLED], now_s))
    return f"| {name} | " + " | ".join(cells) + " |"


def _against(outcomes: list[Outcome], now_s: float) -> str:
    mean_s = _mean(outcomes, "ttft_mean_s")
    return f"{mean_s / now_s - 1:+.0%} {mean_s:.3f} {_mean(outcomes, 'ttft_p99_s'):.1f}"


def pull_intro(seeds: range, count: int) -> str:
    """What was run, and how to read it."""
    return (
        f"`python -m benchmarks.tiers --pulls --seeds {len(seeds)} --requests {count}`: fleets as above with "
        f"host memory of {PULLED_HOST}, seeds {seeds.start} to {seeds[-1]}, by link between the engines. "
        "Cells: change of the mean against none, mean and p99 seconds to the first token, tokens pulled of "
        f"those that decisions promised, as shares of all prompt tokens. `{POOLED}`: {PULLED_HOST} of the "
        "fleet in one cache that all share, loaded in no time: a bound. What is simulated: docs/simulate.md."
    )


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


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    """Run by ``python -m benchmarks.tiers``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", help="a recorded workload to run beside the generated ones")
    parser.add_argument("--models", default=MODELS, help="layouts, separated by commas")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--pulls", action="store_true", help="the second half: pulling prefixes")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tiers.md"))
    options = parser.parse_args()
    if options.seeds < 1 or options.requests < 1:
        parser.error("--seeds and --requests: expected 1 or more")
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    before, title, after = _read(options.out).partition(PULL_TITLE)
    if options.pulls:
        lines = [PULL_TITLE, "", pull_intro(seeds, options.requests), ""]
        lines += ["| workload | " + " | ".join([*PULLS, POOLED]) + " |", "|---|" + "---|" * (len(PULLS) + 1)]
        for name in [*PULL_WORKLOADS, *([options.trace] if options.trace else [])]:
            for model in options.models.split(","):
                pulls = run_pulls(name, model, seeds, options.requests)
                lines.append(pull_row(f"{Path(name).name}, {model}", pulls))
                options.out.write_text(before + "\n".join(lines) + "\n", encoding="utf-8")
        return 0
    lines = ["# Memory behind the GPUs: simulated fleets", "", intro(seeds, options.requests), ""]
    for name in ["agents", "tenants", *([options.trace] if options.trace else [])]:
        for model in options.models.split(","):
            lines += table(f"{Path(name).name}, {model}", run_workload(name, model, seeds, options.requests))
            # Finished tables stay if a later one fails.
            options.out.write_text("\n".join(lines) + "\n" + title + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
