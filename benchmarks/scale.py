"""How a router's costs grow with the number of engines: 8, 64, 256 and 1024 of them, made up, in one process.

    python -m benchmarks.scale [--engines 8,64,256,1024] [--rounds 60] [--out FILE]

Per number of engines, the least CPU of many short rounds: one placement, one request (benchmarks/decision.py
says what these are), one report of load to other workers, one page of metrics; and the resident memory that
an engine adds. Then one block of a KV event, and memory per million blocks. JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.decision import Bench, cpu_us
from router.api.metrics.page import families, render
from router.replication.gossip.load import LoadGossip


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def least_us(work: Callable[[], object], rounds: int) -> float:
    """CPU of one run in microseconds: the least of ``rounds``."""
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best * 1e6


async def by_engines(engines: int, rounds: int) -> dict[str, Any]:
    """One line."""
    before = resident_bytes()
    bench = Bench(engines)
    await bench.warm()
    after = resident_bytes()
    router = bench.router
    for engine in router.fleet:
        engine.load.admit(uncached_tokens=500, now=time.monotonic())

    def report() -> None:
        LoadGossip("0", router._own_load, started=1).field(time.monotonic())  # noqa: SLF001

    found = {
        "engines": engines,
        "placement_us": round(await cpu_us(bench.place, rounds)),
        "request_us": round(await cpu_us(bench.ask, rounds)),
        "load_report_us": round(least_us(report, rounds)),
        "metrics_page_ms": round(least_us(lambda: render(families(router._sources)), 3) / 1000, 1),  # noqa: SLF001
        "resident_kib_per_engine": round((after - before) / engines / 1024),
    }
    router.proxy.close()
    router.reader.close()
    return found


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="8,64,256,1024")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(os.devnull))
    args = parser.parse_args()
    with args.out.open("a", encoding="ascii") as out:
        for engines in map(int, args.engines.split(",")):
            line = json.dumps(asyncio.run(by_engines(engines, args.rounds)))
            print(line, flush=True)
            print(line, file=out, flush=True)


if __name__ == "__main__":
    main()
