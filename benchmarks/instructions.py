"""Instructions of the router per request, which other work on the machine does not change.

    python -m benchmarks.instructions [--bytes 1024 32768] [--layouts full mla ...] [--requests 960]
        [--stream] [--legs] [--tree CHECKOUT ...] [--port-base 24000] [--functions 0] [--misses]

One ``kvatlas serve`` runs under valgrind's callgrind before four cheap engines that hold every session's
prompt but for its end (``fake_engine_events``); with ``--legs`` before one that prefills and one that
decodes, so that every request has two legs, and then before the decode engine alone. Thirty-two connections
always have a request open: chats of 64 sessions, each ending as none before did. Counting begins when each
session has been read three times. One line per cache layout, tree and size: thousands of instructions in user
space per request, all threads together; 4,000 are about a microsecond. What runs by the clock (feeds, polls,
timers) is counted without requests as well: under valgrind a request takes fifty times as long, so that about
a seventh of the count is theirs. On a busy machine that part differs by run: it is shown, not taken off.
``--functions N`` adds the N functions of the interpreter and its libraries with most of them; ``--misses``
what misses the first and the last cache by callgrind's model of this processor (five times as slow). Several
trees, this one if none is named, are counted one after the other. What the kernel does is not counted, and
SHA-256 is overstated: valgrind shows a processor without the instruction for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import uvloop

from benchmarks.fake_engine_events import SESSIONS
from benchmarks.layouts import LAYOUTS
from benchmarks.legs import Load, Router, engines, hold, router_words, running
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR

HERE = Path(__file__).resolve().parent.parent
WARM_ROUNDS = 3
IDLE_S = 5.0
TOTAL = re.compile(rb"^(?:summary|totals): (.+)", re.MULTILINE)
EVENTS = re.compile(rb"^events: (.+)", re.MULTILINE)
_Result = TypeVar("_Result")


@contextmanager
def counted_router(
    tree: Path, told: Sequence[str], port: int, counts: Path, layout: str, *, misses: bool
) -> Iterator[Router]:
    """The tree's router under callgrind, its feeds followed, counting nothing yet."""
    words = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=no"]
    words += [f"--cache-sim={'yes' if misses else 'no'}"]
    config = write_config(counts, layout)
    words += [f"--callgrind-out-file={counts}/callgrind.out.%p", *router_words(told, port, port + 1, config)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with running(words, port, port + 1, cwd=tree, env=environment) as router:
        yield router


def write_config(folder: Path, layout: str) -> str:
    """Write what no event carries of the layout, and the tokenizer. Returns the file's path."""
    facts = {"tokenizer": str(DEMO_TOKENIZER_DIR), **LAYOUTS[layout].facts}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in facts.items()]
    path = folder / "kvatlas.toml"
    path.write_text("".join(['[models."*"]\n', *lines]))
    return str(path)


async def count(router: Router, load: Load, requests: int, counts: Path) -> tuple[dict[str, float], Path]:
    """Events per request by callgrind's name, ``clock`` those of time alone; and the profile."""
    await load.send(lambda sent: sent >= WARM_ROUNDS * SESSIONS)
    sent, seconds, profile = await _counted(router, counts, load.send(lambda sent: sent >= requests))
    _, idle_s, idle = await _counted(router, counts, asyncio.sleep(IDLE_S))
    found = {name: number / sent for name, number in totals(profile).items()}
    return {**found, "clock": totals(idle)["Ir"] * seconds / idle_s / sent}, profile


async def _counted(router: Router, counts: Path, step: Awaitable[_Result]) -> tuple[_Result, float, Path]:
    """Count during a step. Returns its result, its seconds, and the profile."""
    _control(router, "--instr=on")
    begun_s = time.monotonic()
    result = await step
    seconds = time.monotonic() - begun_s
    _control(router, "--instr=off")
    _control(router, "--dump")
    return result, seconds, newest(counts)


def _control(router: Router, option: str) -> None:
    words = ["callgrind_control", option, str(router.process.pid)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def newest(counts: Path) -> Path:
    """The profile that was written last."""
    return max(counts.glob("callgrind.out.*"), key=lambda file: file.stat().st_mtime_ns)


def totals(profile: Path) -> dict[str, int]:
    """All of a profile's events by name. Raises ``ValueError`` where it names no sum."""
    text = profile.read_bytes()
    names, found = EVENTS.search(text), TOTAL.findall(text)
    if names is None or not found:
        raise ValueError(f"{profile} has no sum")
    return dict(zip(names[1].decode().split(), map(int, found[-1].split()), strict=False))


def functions(profile: Path, number: int) -> str:
    """A table of the functions with most instructions of their own."""
    words = ["callgrind_annotate", "--threshold=100", str(profile)]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return "\n".join([line for line in lines if re.match(r" *[\d,]+ \(", line)][1 : number + 1])


async def measure(args: argparse.Namespace, tree: Path, told: Sequence[str], layout: str) -> None:
    """One tree and layout, one line per size."""
    for size in args.bytes:
        line = f"{tree.name}, {layout}: {size // 1024} KB"
        two = await measured(args, tree, told, size, layout)
        if not args.legs:
            print(f"{line}: {text(two)}", flush=True)
            continue
        one = await measured(args, tree, [told[1].removesuffix(",role=decode")], size, layout)
        more = {name: number - one[name] for name, number in two.items()}
        print(f"{line}: two legs {text(two)}; one {text(one)}; more {text(more)}", flush=True)


def text(events: Mapping[str, float]) -> str:
    """Thousands of events per request."""
    thousands = {name: number / 1000 for name, number in events.items()}
    line = f"{thousands['Ir']:.0f} thousand instructions, {thousands['clock']:.0f} of them the clock's"
    if "I1mr" in thousands:
        data = {level: thousands[f"{level}mr"] + thousands[f"{level}mw"] for level in ("D1", "DL")}
        line += f", misses {thousands['I1mr']:.1f} and {data['D1']:.1f} thousand (first cache, instructions"
        line += f" and data), {thousands['ILmr']:.2f} and {data['DL']:.2f} (last cache)"
    return line


async def measured(
    args: argparse.Namespace, tree: Path, told: Sequence[str], size: int, layout: str
) -> dict[str, float]:
    """One router's counts, and its functions where they are asked for."""
    with (
        tempfile.TemporaryDirectory() as folder,
        counted_router(tree, told, args.port_base + 20, Path(folder), layout, misses=args.misses) as router,
    ):
        held = await hold(router.port) if args.legs else None
        load = Load(router, size, stream=args.stream)
        counted, profile = await count(router, load, args.requests, Path(folder))
        if args.functions:
            print(functions(profile, args.functions))
        if held:
            held.close()
        return counted


async def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, nargs="+", default=[1024, 32768])
    parser.add_argument("--layouts", nargs="+", default=["full", "gpt-oss-like"], choices=LAYOUTS)
    parser.add_argument("--requests", type=int, default=960)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--legs", action="store_true")
    parser.add_argument("--misses", action="store_true")
    parser.add_argument("--tree", type=Path, nargs="+", default=[HERE])
    parser.add_argument("--port-base", type=int, default=24000)
    parser.add_argument("--functions", type=int, default=0)
    args = parser.parse_args()
    roles = ("prefill", "decode") if args.legs else ("",) * 4
    for layout in args.layouts:
        with engines(roles, args.port_base, layout, args.bytes) as told:
            for tree in args.tree:
                await measure(args, tree.resolve(), told, layout)


if __name__ == "__main__":
    uvloop.run(main())
