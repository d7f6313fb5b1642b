"""Run ``make test`` again and again, each time with another SEED, beside busy processes and without.

What fails in any of these runs depends on order, delays or the load of the machine, and is a fault.

    python scripts/try_seeds.py --busy-runs 20 --runs 20              # whole: hours on two cores
    python scripts/try_seeds.py --busy-runs 1 --runs 0 --args tests/router/fleet

Prints a line a run and, at the end, each test that failed with its seeds. Status 1 if any did.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_SPIN = "while True: pass"


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that each keep one processor busy."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(processes)]  # noqa: S603
    try:
        yield
    finally:
        for one in spinning:
            one.kill()
            one.wait()


def run(seed: int, args: str) -> tuple[bool, list[str]]:
    """One run: whether it passed, and the tests that failed."""
    words = ["make", "test", f"SEED={seed}", f"ARGS={args}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    failed = _FAILED.findall(done.stdout)
    if done.returncode and not failed:  # a crash, or nothing to run: show why
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return done.returncode == 0, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--busy-runs", type=int, default=20, help="runs beside busy processes")
    parser.add_argument("--runs", type=int, default=20, help="runs without")
    parser.add_argument("--processes", type=int, default=2, help="busy processes")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--args", default="", help="ARGS of make test, as a folder of tests")
    options = parser.parse_args()
    seeds_of: dict[str, list[int]] = {}
    bad = 0
    for number in range(options.busy_runs + options.runs):
        seed = options.first_seed + number
        processes = options.processes if number < options.busy_runs else 0
        begun_s = time.monotonic()
        with busy(processes):
            passed, failed = run(seed, options.args)
        bad += not passed
        for test in failed:
            seeds_of.setdefault(test, []).append(seed)
        word = "passed" if passed else f"failed: {len(failed)}"
        print(f"SEED={seed} busy={processes} {time.monotonic() - begun_s:.0f} s {word}", flush=True)
    for test, seeds in sorted(seeds_of.items()):
        print(f"{test}: SEED={','.join(map(str, seeds))}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
