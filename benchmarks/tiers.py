"""Gain of memory behind the GPUs at real bandwidths, and which policy uses it: simulated fleets.

    python -m benchmarks.tiers [--trace TRACE.jsonl.gz] [--seeds 2] [--requests 1500] [--out FILE]
        [--models gpt-oss-like,mamba-hybrid] [--pulls | --ablations | --hints]

Eight engines, a pool of 25 % of what the workload fills, 100 KiB of KV per token,
arrivals so fast that round robin without any memory behind the GPUs is busy for 85 % of the time. All tiers
and arms of a workload and seed meet the same requests at the same times. ``no limit`` is a store that holds
everything and takes no time: what a perfect cache that all share would bring. Workloads are generated ones,
and a trace where one is given, each with every layout. The report is written again after every table.

``--pulls`` writes the second half of the report instead: host memory of 400 %, without and with engines that
pull prefixes from each other's host memory, against one cache of that size that all share. ``--ablations``
writes the table below it: what one thing alone, made free or perfect, changes at 100 Gbit/s.

``--hints`` writes the third part: host memory that obeys the router's retention hints (policy ``hinted``)
against ``lru``, on two engines with a pool of 5 %, so that sessions compete for host memory. The hints are
made by the router's own code from arrivals alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.router.placement.candidate import Candidate
from kvatlas.router.placement.engine_order import EngineOrder
from kvatlas.router.placement.pull import PullSources
from kvatlas.router.simulation.cache_layouts import groups_of, pool_blocks
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.outcome import Outcome, result_of
from kvatlas.router.simulation.requests import Request
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.study import Job, round_robin, run_one, speed_for
from kvatlas.router.simulation.tiers import KV_KIB_PER_TOKEN, TierSetup, block_bytes, read_host, read_store
from kvatlas.router.simulation.variants import variants_of
from kvatlas.router.simulation.workload import WorkloadSource

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
PULL_WORKLOADS: tuple[str, ...] = ("documents", "agents", "tenants", "shared")
PULL_TITLE = "# Pulling prefixes from other engines' host memory: simulated fleets"

ABLATED_WORKLOADS: tuple[str, ...] = ("documents", "agents", "tenants")
ABLATED_LINK = 100.0
ABLATION_TITLE = "## Where the rest goes"


class Ablation(NamedTuple):
    """One thing made free or perfect, or the price of pages of pulled prefixes held at one value."""

    host: str | None = PULLED_HOST
    store: str | None = None
    gbit_s: float = ABLATED_LINK
    page_price: float | None = None
    true_queues: bool = False


ABLATIONS = {
    "as it is": Ablation(),
    "pages at the price of computing": Ablation(page_price=1.0),
    "pages free": Ablation(page_price=0.0),
    "links free": Ablation(gbit_s=1e9),
    "loads free": Ablation(host=f"{PULLED_HOST}:gbyte_s=1e9+latency_ms=0"),
    "host memory without limit": Ablation(host="10000%"),
    "true queues": Ablation(true_queues=True),
    "one cache, PCIe 5": Ablation(host=None, store=f"{PULLED_HOST}:gbit_s=360+latency_ms=0.1"),
    POOLED: Ablation(host=None, store=f"{PULLED_HOST}:gbit_s=1e9+latency_ms=0"),
}

HINT_ENGINES, HINT_POOL, HINT_S_PER_REQUEST = 2, 0.05, 0.5
HINT_SHARE = 0.75
"""Share of host memory that hinted blocks may take; all requests are of one tenant."""
HINT_HOSTS = ("100%", "200%", "400%")
HINT_WORKLOADS = ("pauses", "agents", "tenants", "chat", "documents")
HINT_TITLE = "# Retention hints: simulated fleets"

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
    """Return the text above the tables: the command, the fleets and the meaning of the cells."""
    return (
        f"`python -m benchmarks.tiers --pulls --seeds {len(seeds)} --requests {count}`: fleets as above with "
        f"host memory of {PULLED_HOST}, seeds {seeds.start} to {seeds[-1]}, by link between the engines. "
        "Cells: change of the mean against none, mean and p99 seconds to the first token, tokens pulled of "
        f"those that decisions promised, as shares of all prompt tokens. `{POOLED}`: {PULLED_HOST} of the "
        "fleet in one cache that all share, loaded in no time: a bound. What is simulated: docs/simulate.md."
    )


class AblatedFleet(FleetSim):
    """A fleet whose router knows the engines' remaining work, or has another price of pulled pages."""

    ablation = Ablation()

    def _sources(self, prompt_tokens: int = 0) -> PullSources:
        found, price = super()._sources(prompt_tokens), self.ablation.page_price
        if price is None:
            return found
        return msgspec.structs.replace(found, page_prices=[price] * len(found.held_tokens))

    def _candidates(
        self, tokens: int, hashes: Sequence[BlockHash], now: float, order: EngineOrder | None = None
    ) -> Sequence[Candidate]:
        found = super()._candidates(tokens, hashes, now, order)
        if not self.ablation.true_queues:
            return found
        return [
            msgspec.structs.replace(one, queue_s=engine.remaining_s(now))
            for one, engine in zip(found, self._engines, strict=True)
        ]


def run_ablations(name: str, model: str, seeds: range, count: int) -> dict[str, list[Outcome]]:
    """Every ablation of one workload and layout, over the seeds."""
    arm = variants_of(ARMS[:1])[ARMS[0]]
    found: dict[str, list[Outcome]] = {}
    for seed, requests in WorkloadSource(name=name, requests_max=count).draws(seeds).items():
        base = _base(requests, model, seed)
        for way, how in ABLATIONS.items():
            tiers = _tiers(base, how.host, how.store)
            if how.host is not None:
                tiers = msgspec.structs.replace(tiers, pull_bytes_per_s=how.gbit_s * 1e9 / 8)
            setup = msgspec.structs.replace(base, tiers=tiers)
            fleet = AblatedFleet(setup, arm)
            fleet.ablation = how
            outcome = result_of(fleet.run(requests)).outcome
            found.setdefault(way, []).append(outcome)
            print(f"{name} {model} seed {seed}, {way}: {outcome.ttft_mean_s:.3f} s", file=sys.stderr)
    return found


def write_pulls(options: argparse.Namespace, seeds: range, before: str, part: str, after: str) -> None:
    """Write the part on pulls, or the ablations in it, between these texts; ``part``: as it is now."""
    links, _, ablated = part.partition(ABLATION_TITLE)
    if options.ablations:
        before += f"{PULL_TITLE}{links.rstrip()}\n\n"
        how = (
            f"`python -m benchmarks.tiers --ablations --seeds {len(seeds)} --requests {options.requests} "
            f"--models {options.models}`: {ABLATED_LINK:g} Gbit/s, one thing changed at a time. Cells: mean "
            "seconds to the first token, and their distance from one cache."
        )
        lines, columns, names = [ABLATION_TITLE, "", how], [*ABLATIONS], ABLATED_WORKLOADS
    else:
        after = f"{ABLATION_TITLE}{ablated.rstrip()}\n\n{after}" if ablated else after
        lines, columns, names = (
            [PULL_TITLE, "", pull_intro(seeds, options.requests)],
            [*PULLS, POOLED],
            PULL_WORKLOADS,
        )
    lines += ["", "| workload | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name in [*names, *([options.trace] if options.trace else [])]:
        for model in options.models.split(","):
            run, row = (run_ablations, ablation_row) if options.ablations else (run_pulls, pull_row)
            lines.append(row(f"{Path(name).name}, {model}", run(name, model, seeds, options.requests)))
            options.out.write_text(before + "\n".join(lines) + "\n\n" + after, encoding="utf-8")


def ablation_row(name: str, found: dict[str, list[Outcome]]) -> str:
    """One workload and layout: means, and their distance from the cache that all share."""
    bound_s = _mean(found[POOLED], "ttft_mean_s")
    means = [_mean(found[way], "ttft_mean_s") for way in ABLATIONS]
    return f"| {name} | " + " | ".join(f"{mean_s:.3f} {mean_s / bound_s - 1:+.0%}" for mean_s in means) + " |"


class Hinted(msgspec.Struct, frozen=True):
    """One run with or without hints, and seconds to the first token of turns of sessions, and of requests
    that come once."""

    outcome: Outcome
    turns_s: float
    single_s: float


def run_hints(name: str, model: str, seeds: range, count: int) -> dict[tuple[str, bool], list[Hinted]]:
    """Every size of host memory of one workload and layout, without and with hints, over the seeds."""
    source = WorkloadSource(name=name, requests_max=count, seconds=HINT_S_PER_REQUEST * count)
    arm = variants_of(ARMS[:1])[ARMS[0]]
    found: dict[tuple[str, bool], list[Hinted]] = {}
    for seed, requests in source.draws(seeds).items():
        base = _base(requests, model, seed, HINT_ENGINES, HINT_POOL)
        turns = Counter(request.session for request in requests)
        for host in HINT_HOSTS:
            for hints in (False, True):
                tiers = msgspec.structs.replace(_tiers(base, host, None), hint_share=HINT_SHARE * hints)
                setup = msgspec.structs.replace(base, tiers=tiers)
                run = run_one(Job(name=ARMS[0], variant=arm, setup=setup), requests)
                result = result_of(run)
                times: dict[bool, list[float]] = {False: [], True: []}
                for row in run.rows[len(run.rows) - len(result.ttft_s) :]:
                    if row.ttft_s >= 0:
                        times[turns[requests[row.index].session] > 1].append(row.ttft_s)
                means = [statistics.fmean(times[several] or [0.0]) for several in (True, False)]
                found.setdefault((host, hints), []).append(Hinted(result.outcome, *means))
                print(
                    f"{name} {model} seed {seed}, {host}, hints {hints}: {result.outcome.ttft_mean_s:.3f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return found


def hint_rows(name: str, found: dict[tuple[str, bool], list[Hinted]]) -> list[str]:
    """One workload and layout, a row per size of host memory."""
    rows = []
    for host in HINT_HOSTS:
        lru, hinted = found[host, False], found[host, True]
        change = _mean([one.outcome for one in hinted], "ttft_mean_s")
        change /= _mean([one.outcome for one in lru], "ttft_mean_s")
        rows.append(f"| {name} | {host} | {_hint_cell(lru)} | {_hint_cell(hinted)} | {change - 1:+.0%} |")
    return rows


def _hint_cell(runs: list[Hinted]) -> str:
    outcomes = [one.outcome for one in runs]
    turns_s = statistics.fmean(one.turns_s for one in runs)
    single_s = statistics.fmean(one.single_s for one in runs)
    hits = f"{_mean(outcomes, 'hit_share'):.1%} {_mean(outcomes, 'host_share'):.1%}"
    return f"{hits}, {turns_s:.3f} {single_s:.3f} {_mean(outcomes, 'ttft_p99_s'):.1f}"


def hint_intro(seeds: range, count: int, models: str) -> str:
    """Return the text above the tables: the command, the fleets and the meaning of the cells."""
    return (
        f"`python -m benchmarks.tiers --hints --seeds {len(seeds)} --requests {count} --models {models}`: "
        f"{HINT_ENGINES} engines, pool {HINT_POOL:.0%}, host memory in shares of the pool, PCIe 5, seeds "
        f"{seeds.start} to {seeds[-1]}. Cells: hit %, part of it loaded from host memory, mean seconds to "
        "the first token of turns of sessions and of requests that come once, p99 of all. `change`: of the "
        "mean of all. "
        "`pauses` has agents that pause between turns, and floods of single prompts in the pauses; the "
        "others are as above. Hints are made by the router's code from arrivals alone; all are of one "
        f"tenant, whose `hint_share` is {HINT_SHARE:g}."
    )


def _base(
    requests: list[Request], model: str, seed: int, engines: int = ENGINES, pool: float = POOL
) -> FleetSetup:
    groups = groups_of(model)
    blocks = pool_blocks(requests, groups, engines, pool)
    setup = FleetSetup(groups=groups, num_blocks=blocks, engines=engines, seed=seed)
    even = result_of(run_one(round_robin(setup), requests))
    return msgspec.structs.replace(setup, speed=speed_for(LOAD, requests, even))


def _tiers(setup: FleetSetup, host: str | None, store: str | None) -> TierSetup:
    size = block_bytes(setup.groups, KV_KIB_PER_TOKEN)
    return TierSetup(
        block_bytes=size,
        host=None if host is None else read_host(host, setup.num_blocks, size),
        store=None if store is None else read_store(store, setup.num_blocks * setup.engines, size),
    )


def intro(seeds: range, count: int) -> str:
    """Return the text above the tables: the command, the fleets and the meaning of the cells."""
    return (
        f"`python -m benchmarks.tiers --seeds {len(seeds)} --requests {count}`: {ENGINES} engines, "
        f"pool {POOL:.0%}, {KV_KIB_PER_TOKEN:g} KiB per token, round robin without such memory {LOAD:.0%} "
        f"busy, seeds {seeds.start} to {seeds[-1]}. Cells: hit %, mean and p99 seconds to the first token, "
        f"means over the seeds; bold: the shortest mean. `gain`: of {ARMS[0]}'s mean, against none. Sizes "
        "are shares of what the GPUs have. `least-load` places without regard to caches; its engines load "
        "from that memory like all others. What is simulated and what not: docs/simulate.md; what follows: "
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
    parser.add_argument("--ablations", action="store_true", help="below it: one thing free or perfect")
    parser.add_argument("--hints", action="store_true", help="the third part: retention hints")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tiers.md"))
    options = parser.parse_args()
    if options.seeds < 1 or options.requests < 1:
        parser.error("--seeds and --requests: expected 1 or more")
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    whole, _, hinted = _read(options.out).partition(HINT_TITLE)
    before, title, after = whole.partition(PULL_TITLE)
    hinted = f"{HINT_TITLE}{hinted.rstrip()}\n" if hinted else ""
    if options.hints:
        lines = [HINT_TITLE, "", hint_intro(seeds, options.requests, options.models), ""]
        lines += ["| workload | host memory | lru | hinted | change |", "|---|---|---|---|---|"]
        for name in [*HINT_WORKLOADS, *([options.trace] if options.trace else [])]:
            for model in options.models.split(","):
                hint_runs = run_hints(name, model, seeds, options.requests)
                lines += hint_rows(f"{Path(name).name}, {model}", hint_runs)
                text = whole.rstrip() + "\n\n" + "\n".join(lines) + "\n"
                options.out.write_text(text, encoding="utf-8")
        return 0
    if options.pulls or options.ablations:
        write_pulls(options, seeds, before, after, hinted)
        return 0
    lines = ["# Memory behind the GPUs: simulated fleets", "", intro(seeds, options.requests), ""]
    for name in ["agents", "tenants", *([options.trace] if options.trace else [])]:
        for model in options.models.split(","):
            lines += table(f"{Path(name).name}, {model}", run_workload(name, model, seeds, options.requests))
            # Finished tables stay if a later one fails.
            text = "\n".join(lines) + "\n" + title + after + hinted
            options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
