"""Two tenants, one flooding: what the other one's first tokens take, against what they take when it is alone.

    python benchmarks/fairness.py [--seeds 8] [--engines 4] [--out F]

Simulated engines of 8,000 prompt tokens per second behind the router's own placement and queue
(``kvatlas.router.simulation``). The guest sends chats of its own at 10, 25, 40 and 45 % of what the fleet can
compute; the flood sends prompts that no engine holds, at ten times an equal share (five times what the fleet
can compute), for the whole time. Three routers: none of it held (today's default), held first come first
served, and held with shares by tenant. The report, Markdown, gives the guest's mean and p99 first-token time,
and what the flood got."""

from __future__ import annotations

import argparse
import math
import random
import statistics
from pathlib import Path

import msgspec

from benchmarks.routing import put
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.observe.prefix_ids import UNIT_TOKENS
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.outcome import FleetRun
from kvatlas.router.simulation.requests import Request
from kvatlas.router.simulation.setup import FleetSetup, Timing
from kvatlas.router.simulation.variants import variants_of

SECONDS = 60.0
TIMING = Timing(chunk_tokens=2048)
TOKENS = 2048
SHARES = (0.1, 0.25, 0.4, 0.45)
ANSWER = 128
GUEST, FLOOD = "guest", "flood"
ALONE = "the guest alone"
ARMS = {
    "no queue": ("kvatlas", True),
    "`saturation_s` 0.05, first come first served": ("kvatlas:hold=0.05", False),
    "`saturation_s` 1, shares by tenant": ("kvatlas:hold=1+credit=2", True),
    "`saturation_s` 0.25, shares by tenant": ("kvatlas:hold=0.25+credit=2", True),
    "`saturation_s` 0.05, shares by tenant": ("kvatlas:hold=0.05+credit=2", True),
    "`saturation_s` 0.02, shares by tenant": ("kvatlas:hold=0.02+credit=2", True),
    "the same, `credit_s` 0": ("kvatlas:hold=0.02", True),
}


def arrivals(tenant: str, per_s: float, tokens: int, rng: random.Random, first_id: int) -> list[Request]:
    """Poisson arrivals of prompts of half to one and a half times this many tokens, nothing shared."""
    found: list[Request] = []
    at_s, number = 0.0, first_id
    while (at_s := at_s + rng.expovariate(per_s)) < SECONDS:
        asked = max(UNIT_TOKENS, int(tokens * rng.uniform(0.5, 1.5)))
        units = -(-(asked + ANSWER) // UNIT_TOKENS)
        ids = tuple(range(number, number + units))
        number += units
        found.append(Request(at_s=at_s, input_tokens=asked, output_tokens=ANSWER, ids=ids, tenant=tenant))
    return found


def simulate(requests: list[Request], arm: str, engines: int) -> FleetRun:
    setup = FleetSetup(
        groups=(GroupSpec(0, "full_attention", 64),), num_blocks=8192, engines=engines, timing=TIMING
    )
    ordered = sorted(requests, key=lambda one: one.at_s)
    return FleetSim(setup, variants_of([arm])[arm]).run(ordered)


def waits_of(requests: list[Request], run: FleetRun, tenant: str) -> list[float]:
    ordered = sorted(requests, key=lambda one: one.at_s)
    return [row.ttft_s for one, row in zip(ordered, run.rows, strict=True) if one.tenant == tenant]


def _all(runs: list[list[float]]) -> list[float]:
    return [wait_s for run in runs for wait_s in run]


def _p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def report(engines: int, share: float, seeds: range) -> str:
    capacity = engines / TIMING.prefill_s_per_token
    found: dict[str, list[list[float]]] = {}
    flooded: dict[str, list[float]] = {}
    for seed in seeds:
        rng = random.Random(seed)
        guest = arrivals(GUEST, share * capacity / TOKENS, TOKENS, rng, 1)
        flood = arrivals(FLOOD, 5.0 * capacity / TOKENS, TOKENS, rng, 10_000_000)
        both = guest + flood
        found.setdefault(ALONE, []).append(waits_of(guest, simulate(guest, "kvatlas", engines), GUEST))
        for name, (arm, by_tenant) in ARMS.items():
            asked = both if by_tenant else [msgspec.structs.replace(one, tenant="") for one in both]
            run = simulate(asked, arm, engines)
            found.setdefault(name, []).append(waits_of(both, run, GUEST))
            flooded.setdefault(name, []).append(statistics.mean(waits_of(both, run, FLOOD)))
    count = sum(map(len, found[ALONE]))
    lines = [
        f"{engines} simulated engines, {SECONDS:.0f} s of arrivals, {len(seeds)} seeds; {TOKENS} tokens a",
        f"prompt on average, none cached; the guest asks for {share:.0%} of what the fleet can compute, the",
        f"flood for 500 % (ten times an equal share). {count} requests of the guest in all; p99 is theirs.",
        "",
        "| router | guest: mean s | guest: p99 s | p99 over alone | worst seed | flood: mean s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    alone = _p99(_all(found[ALONE]))
    for name, waits in found.items():
        tail = _p99(_all(waits))
        worst = max(_p99(own) / _p99(base) for own, base in zip(waits, found[ALONE], strict=True))
        flood_s = statistics.mean(flooded.get(name, [0.0]))
        mean = statistics.mean(_all(waits))
        lines.append(
            f"| {name} | {mean:.2f} | {tail:.2f} | {tail / alone:.2f} | {worst:.2f} | {flood_s:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--out", type=Path, help="the report; default: standard output")
    options = parser.parse_args()
    seeds = range(1, 1 + options.seeds)
    put("\n".join(report(options.engines, share, seeds) for share in SHARES), options.out)


if __name__ == "__main__":
    main()
