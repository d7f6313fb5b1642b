"""Gain of a second worker where cores are free: requests per second of one worker and of two.

    sudo python -m benchmarks.worker_throughput [--share 0.3] [--seconds 2] [--rounds 15]
        [--bytes 1024 32768] [--workers 1 2]

On a machine whose cores the load and the engines need as well, a second worker has no core of its own. So
each
worker gets the same share of one, by a quota of the kernel (the cpu controller of cgroup v1; needs to be
root): what two workers of a share each serve beside one worker with one share says what two cores would
bring beside one, as far as cores do not slow each other down. Four cheap engines hold every session's prompt
but for its end (``fake_engine_events``); 32 connections always have a request open, and are made again in
each round, so that the kernel spreads them over the workers in many ways. The routers are loaded in turn. One
line per size and number of workers: medians over the rounds, how many times the first number of workers'
requests that are, and the workers' CPU per request.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvloop

from benchmarks.fake_engine_events import SESSIONS
from benchmarks.legs import Load, Router, engines, router_words, running
from benchmarks.picker import cpu_s

CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
EVENTS_PORT, PUBLIC_PORT = 19301, 19321
WARM_ROUNDS = 20
"""Times each session is read before anything counts: every worker is to have read it."""


@contextmanager
def limited(pid: int, share: float) -> Iterator[None]:
    """A process gets so much of a core, all its threads together."""
    group = CPU_GROUPS / f"kvatlas-{pid}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US)))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (CPU_GROUPS / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def worker_pids(process: subprocess.Popen[bytes]) -> list[int]:
    """Those that serve: the children, or the process itself where it has none."""
    told = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in told.split()] or [process.pid]


class Workers:
    """One router with this many workers."""

    def __init__(self, router: Router, pids: Sequence[int], sizes: Sequence[int]) -> None:
        self.pids = pids
        self.loads = {size: Load(router, size, stream=False) for size in sizes}
        self.per_second: dict[int, list[float]] = {size: [] for size in sizes}
        self.us: dict[int, list[float]] = {size: [] for size in sizes}

    async def warm(self, size: int) -> None:
        """Have every worker read every session."""
        sent = 0
        while sent < WARM_ROUNDS * SESSIONS:
            sent += await self.loads[size].send(lambda some: some >= SESSIONS)

    async def turn(self, size: int, seconds: float) -> None:
        """One round."""
        before_s, began_s = sum(map(cpu_s, self.pids)), time.monotonic()
        sent = await self.loads[size].send(lambda _: time.monotonic() - began_s >= seconds)
        self.per_second[size].append(sent / (time.monotonic() - began_s))
        self.us[size].append(1e6 * (sum(map(cpu_s, self.pids)) - before_s) / sent)


@contextmanager
def workers(
    told: Sequence[str], number: int, port: int, share: float, sizes: Sequence[int]
) -> Iterator[Workers]:
    """A router with this many workers, each with its share of a core."""
    words = [*router_words(told, port, port + 1), "--workers", str(number)]
    with running(words, port, port + 1) as router, ExitStack() as limits:
        pids = worker_pids(router.process)
        if len(pids) != number:
            raise RuntimeError(f"{number} workers were asked for, {len(pids)} serve")
        for pid in pids:
            limits.enter_context(limited(pid, share))
        yield Workers(router, pids, sizes)


async def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1024, 32768], choices=[1024, 32768])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    if not os.access(CPU_GROUPS / "cgroup.procs", os.W_OK):
        sys.exit(f"{CPU_GROUPS}: no cpu controller of cgroup v1 that this user may write to; see --help")
    with ExitStack() as stack:
        told = stack.enter_context(engines(("",) * 4, EVENTS_PORT))
        made = [
            stack.enter_context(workers(told, number, PUBLIC_PORT + 2 * at, args.share, args.bytes))
            for at, number in enumerate(args.workers)
        ]
        for size in args.bytes:
            for each in made:
                await each.warm(size)
            for _ in range(args.rounds):
                for each in made:
                    await each.turn(size, args.seconds)
            first = made[0].per_second[size]
            for number, each in zip(args.workers, made, strict=True):
                here, us = each.per_second[size], statistics.median(each.us[size])
                times = statistics.median(one / other for one, other in zip(here, first, strict=True))
                line = f"{size // 1024} KB, {number} of {args.share:g} cores: {statistics.median(here):.0f}"
                print(f"{line} requests per second, {times:.2f} times; {us:.0f} us of CPU each", flush=True)


if __name__ == "__main__":
    uvloop.run(main())
