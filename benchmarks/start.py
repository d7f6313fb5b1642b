"""How soon a router answers after its start, and how much memory its processes take.

    python -m benchmarks.start [--workers 1 4] [--runs 5]

``kvatlas serve`` with the demo's tokenizer and an engine that is not there, on ports 19201 and 19202. Seconds
until ``/health`` answers, by the clock and of CPU (of all its processes), as medians; then, once every worker
answers, the resident memory of one worker, how much of it is its own, and that of the parent. With
one worker there is no parent. What a million blocks take: ``benchmarks.scale``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.picker import cpu_s
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR

PORT, OPS_PORT = 19201, 19202
_UP_S = 2.0
"""After the first answer: until all workers are up and the start's garbage is gone."""


class Memory(NamedTuple):
    """Of one process, in MiB: resident, and what no other process has."""

    resident: float
    own: float


@contextmanager
def started(workers: int) -> Iterator[subprocess.Popen[bytes]]:
    """A router that has just been started."""
    words = [sys.executable, "-m", "kvatlas", "serve", "--tokenizer", str(DEMO_TOKENIZER_DIR)]
    words += ["--engine", "http://127.0.0.1:9", "--port", str(PORT), "--ops-port", str(OPS_PORT)]
    process = subprocess.Popen([*words, "--workers", str(workers), "--log-level", "error"])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for_health(process: subprocess.Popen[bytes]) -> None:
    """Raises ``RuntimeError`` where the router has ended."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.005)
    raise RuntimeError("the router did not start")


def processes(parent: int) -> list[int]:
    """The process and its children."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [parent, *map(int, children.split())]


def memory(pid: int) -> Memory:
    """As ``Memory``."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return Memory(kib["Rss"] / 1024, (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024)


def measure(workers: int, runs: int) -> str:
    """One line."""
    seconds, cpu = [], []
    for _ in range(runs):
        began_s = time.monotonic()
        with started(workers) as process:
            wait_for_health(process)
            seconds.append(time.monotonic() - began_s)
            cpu.append(sum(map(cpu_s, processes(process.pid))))
            time.sleep(_UP_S)
            first, *others = map(memory, processes(process.pid))
    line = f"{workers} workers: /health after {statistics.median(seconds):.2f} s"
    line += f" ({statistics.median(cpu):.2f} s of CPU); "
    if not others:
        return line + f"{first.resident:.0f} MiB resident, {first.own:.0f} its own"
    worker = Memory(*map(statistics.median, zip(*others, strict=True)))
    line += f"a worker {worker.resident:.0f} MiB resident, {worker.own:.0f} its own; "
    return line + f"the parent {first.resident:.0f} and {first.own:.0f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    for workers in args.workers:
        print(measure(workers, args.runs), flush=True)


if __name__ == "__main__":
    main()
