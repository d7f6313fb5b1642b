"""Cost of the next turn of a conversation whose connections change: one worker, and several.

    python -m benchmarks.worker_turns [--workers 1 2] [--bytes 1024 32768] [--conversations 400] [--rounds 4]
        [--instructions] [--tree CHECKOUT]

Four cheap engines hold nothing of these conversations. Each has a beginning of the given size, then four
turns of 900 bytes; all of them have a turn, then there is a pause, as between question and answer. Each
request takes one of 32 connections by chance, so any worker. One line per number of workers and size:
microseconds of CPU per request, all workers together, by turn: medians over the rounds, each of new
conversations. With few of them the share of polls and timers grows. ``--instructions``: thousands of
instructions under valgrind's callgrind instead, which other work on the machine changes less; timers run
fifty times as often there. ``--tree``: the router of another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.fake_engine_events import _WORDS
from benchmarks.instructions import HERE, totals
from benchmarks.legs import CONNECTIONS, Router, _post, engines, read_answer, router_words, running
from benchmarks.picker import cpu_s
from benchmarks.worker_throughput import worker_pids

EVENTS_PORT, PUBLIC_PORT = 19501, 19521
TURNS = 4
PAUSE_S = 0.5
VALGRIND = ("valgrind", "--quiet", "--tool=callgrind", "--separate-threads=no", "--trace-children=yes")


def text(rng: random.Random, size: int) -> str:
    """Words of about this many bytes."""
    return " ".join(rng.choices(_WORDS, k=size // 6))


class Conversations:
    """New conversations; ``bodies`` of the next turn of each."""

    def __init__(self, rng: random.Random, count: int, size: int) -> None:
        self._rng = rng
        self._chats = [
            [{"role": role, "content": text(rng, size // 2)} for role in ("system", "user")]
            for _ in range(count)
        ]

    def bodies(self) -> list[bytes]:
        """A request of each."""
        made = [json.dumps({"model": "fake-model", "messages": chat}).encode() for chat in self._chats]
        for chat in self._chats:
            said = (("assistant", 600), ("user", 300))
            chat += [{"role": role, "content": text(self._rng, size)} for role, size in said]
        return made


async def send(port: int, bodies: list[bytes], rng: random.Random) -> None:
    """Send each on a connection drawn by chance."""
    queues: list[list[bytes]] = [[] for _ in range(CONNECTIONS)]
    for body in bodies:
        rng.choice(queues).append(body)

    async def client(queue: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in queue:
            writer.write(_post(body))
            await read_answer(reader)
        writer.close()

    await asyncio.gather(*map(client, queues))


def spent(pids: list[int], counts: Path | None) -> float:
    """Microseconds of CPU of these processes so far; or thousands of instructions since the last call."""
    if counts is None:
        return 1e6 * sum(map(cpu_s, pids))
    for pid in pids:
        subprocess.run(["callgrind_control", "--dump", str(pid)], check=True, stdout=subprocess.DEVNULL)
    files = list(counts.iterdir())
    number = sum(totals(file)["Ir"] for file in files)
    for file in files:
        file.unlink()
    return number / 1000


async def costs(
    router: Router, pids: list[int], size: int, count: int, seed: int, counts: Path | None
) -> list[float]:
    """Cost per request of each turn."""
    rng, found = random.Random(seed), []
    chats = Conversations(rng, count, size)
    for _ in range(1 + TURNS):
        bodies = chats.bodies()
        before = spent(pids, counts)
        await send(router.port, bodies, rng)
        after = spent(pids, counts)
        found.append((after if counts else after - before) / count)
        await asyncio.sleep(PAUSE_S)
    return found


async def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bytes", type=int, nargs="+", default=[1024, 32768])
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--tree", type=Path, default=HERE)
    args = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(args.tree)}
    with ExitStack() as stack:
        told = stack.enter_context(engines(("",) * 4, EVENTS_PORT, sizes=[1024]))
        for at, number in enumerate(args.workers):
            port = PUBLIC_PORT + 2 * at
            words, counts = [*router_words(told, port, port + 1), "--workers", str(number)], None
            if args.instructions:
                counts = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                words = [*VALGRIND, f"--callgrind-out-file={counts}/%p", *words]
            with running(words, port, port + 1, cwd=args.tree, env=environment) as router:
                pids = worker_pids(router.process)
                for size in args.bytes:
                    rounds = [
                        await costs(router, pids, size, args.conversations, seed, counts)
                        for seed in range(1 + args.rounds)
                    ][1:]  # in the first one memory is used that is new
                    turns = [statistics.median(turn) for turn in zip(*rounds, strict=True)]
                    line = f"{size // 1024} KB, {number} workers: first turn {turns[0]:.0f}, next turns "
                    print(line + " ".join(f"{one:.0f}" for one in turns[1:]), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
