"""What a request costs the router in instructions, which other work on the machine does not change.

    python -m benchmarks.instructions [--bytes 1024 32768] [--requests 960] [--stream] [--legs]
        [--tree CHECKOUT ...] [--port-base 24000] [--functions 0]

One ``kvatlas serve`` runs under valgrind's callgrind before four cheap engines that hold every session's
prompt but for its end (``fake_engine_events``); with ``--legs`` before one that prefills and one that
decodes, so that every request has two legs, and then before the decode engine alone. Thirty-two connections
always have a request open: chats of 64 sessions, each ending as none before did. Counting begins when each
session has been read three times. One line per tree and size: thousands of instructions in user space per
request, all threads together; 4,000 are about a microsecond. ``--functions N`` adds the N functions of the
interpreter and its libraries with most of them. Several trees, this one if none is named, are counted one
after the other. What the kernel does is not counted, and SHA-256 is overstated: valgrind shows a processor
without the instruction for it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop

from benchmarks.fake_engine_events import SESSIONS
from benchmarks.legs import Load, Router, engines, hold, router_words, running

HERE = Path(__file__).resolve().parent.parent
WARM_ROUNDS = 3
TOTAL = re.compile(rb"^(?:summary|totals): (\d+)", re.MULTILINE)


@contextmanager
def counted_router(tree: Path, told: Sequence[str], port: int, counts: Path) -> Iterator[Router]:
    """The tree's router under callgrind, its feeds followed, counting nothing yet."""
    words = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=no"]
    words += [f"--callgrind-out-file={counts}/callgrind.out.%p", *router_words(told, port, port + 1)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with running(words, port, port + 1, cwd=tree, env=environment) as router:
        yield router


async def count(router: Router, load: Load, requests: int, counts: Path) -> float:
    """Thousands of instructions per request; the profile is the newest file of the folder."""
    await load.send(lambda sent: sent >= WARM_ROUNDS * SESSIONS)
    _control(router, "--instr=on")
    sent = await load.send(lambda sent: sent >= requests)
    _control(router, "--instr=off")
    _control(router, "--dump")
    return instructions(newest(counts)) / sent / 1000


def _control(router: Router, option: str) -> None:
    subprocess.run(
        ["callgrind_control", option, str(router.process.pid)], check=True, stdout=subprocess.DEVNULL
    )


def newest(counts: Path) -> Path:
    """The profile that was written last."""
    return max(counts.glob("callgrind.out.*"), key=lambda file: file.stat().st_mtime_ns)


def instructions(profile: Path) -> int:
    """All of a profile's. Raises ``ValueError`` where it names no sum."""
    if not (found := TOTAL.findall(profile.read_bytes())):
        raise ValueError(f"{profile} has no sum")
    return int(found[-1])


def functions(profile: Path, number: int) -> str:
    """A table of the functions with most instructions of their own."""
    words = ["callgrind_annotate", "--threshold=100", str(profile)]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return "\n".join([line for line in lines if re.match(r" *[\d,]+ \(", line)][1 : number + 1])


async def measure(args: argparse.Namespace, tree: Path, told: Sequence[str]) -> None:
    """One tree, one line per size."""
    for size in args.bytes:
        line = f"{tree.name}: {size // 1024} KB"
        two = await measured(args, tree, told, size)
        if not args.legs:
            print(f"{line}: {two:.0f} thousand instructions", flush=True)
            continue
        one = await measured(args, tree, [told[1].removesuffix(",role=decode")], size)
        print(
            f"{line}: two legs {two:.0f}, one {one:.0f}, more {two - one:.0f} thousand instructions",
            flush=True,
        )


async def measured(args: argparse.Namespace, tree: Path, told: Sequence[str], size: int) -> float:
    """One router's count, and its functions where they are asked for."""
    with (
        tempfile.TemporaryDirectory() as folder,
        counted_router(tree, told, args.port_base + 20, Path(folder)) as router,
    ):
        held = await hold(router.port) if args.legs else None
        thousands = await count(router, Load(router, size, stream=args.stream), args.requests, Path(folder))
        if args.functions:
            print(functions(newest(Path(folder)), args.functions))
        if held:
            held.close()
        return thousands


async def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, nargs="+", default=[1024, 32768], choices=[1024, 32768])
    parser.add_argument("--requests", type=int, default=960)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--legs", action="store_true")
    parser.add_argument("--tree", type=Path, nargs="+", default=[HERE])
    parser.add_argument("--port-base", type=int, default=24000)
    parser.add_argument("--functions", type=int, default=0)
    args = parser.parse_args()
    with engines(("prefill", "decode") if args.legs else ("",) * 4, args.port_base) as told:
        for tree in args.tree:
            await measure(args, tree.resolve(), told)


if __name__ == "__main__":
    uvloop.run(main())
