"""How a router's costs grow with engines and with blocks, all made up, in one process.

    python -m benchmarks.scale [--engines 8,64,256,1024] [--blocks-m 1,10] [--rounds 60] [--out FILE]

Per number of engines, the least CPU of many short rounds: one placement, one request (benchmarks/decision.py
says what these are), one block of KV events that the engines send in turn (decoded and applied, 64 blocks an
event, each stored and removed again), one report of load to other workers, one page of metrics; the longest
step of each of five pages, also of a worker's for its siblings; and the resident memory that an engine adds.
Per number of blocks (in millions, one engine, a process of its own): the bytes of a block, storing one, and
finding a prompt of a thousand among them. JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TextIO

from benchmarks.decision import Bench, cpu_us
from benchmarks.index import payloads, resident_bytes
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockHash, BlockRemoved, BlockStored, encode_batch
from kvatlas.router.api.metrics_page import families, prepare
from kvatlas.router.api.prometheus_text import in_steps, page_steps
from kvatlas.router.index.base import Plane
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.replication.load_gossip import LoadGossip
from kvatlas.router.serve import tame_garbage_collection
from kvatlas.router.workers.merged_metrics import encoded_family

EVENT_BLOCKS, EVENTS_PER_BATCH = 64, 4
PROMPT_BLOCKS, PROMPTS = 1000, 64
"""Prompts looked up in turn, so that the processor's cache does not hold the answer."""
STORED_AT_ONCE = 1000
PAGES = 5


def least_us(work: Callable[[], object], rounds: int) -> float:
    """CPU of one run in microseconds: the least of ``rounds``."""
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best * 1e6


def step_times_s(steps: Generator[None, None, object]) -> list[float]:
    """CPU of each step of a generator in seconds, of the one that ends it too."""
    found, start, left = [], time.thread_time(), object()
    while next(steps, left) is not left:
        now = time.thread_time()
        found.append(now - start)
        start = now
    return [*found, time.thread_time() - start]


async def by_engines(engines: int, rounds: int) -> dict[str, Any]:
    """One line."""
    rng, before = random.Random(5), resident_bytes()
    bench = Bench(engines)
    await bench.warm()
    after = resident_bytes()
    router = bench.router
    for engine in router.fleet:
        engine.load.admit(uncached_tokens=500, now=time.monotonic())

    def report() -> None:
        LoadGossip("0", router.peers.own_load, started=1).field(time.monotonic())

    pairs = [
        _stored_and_removed(payload) for payload in payloads(EVENT_BLOCKS, 1 << 14, EVENTS_PER_BATCH, rng)
    ]
    turns = itertools.cycle(router.fleet)

    def feed() -> None:
        for pair in pairs:
            engine_id = next(turns).engine_id
            for payload in pair:
                router.scopes.apply(engine_id, decode_batch(payload))

    prepare(router.sources)
    tame_garbage_collection()  # as a router does
    pages_s = [step_times_s(page_steps(families(router.sources))) for _ in range(PAGES)]
    sent_s = [step_times_s(in_steps(encoded_family, families(router.sources))) for _ in range(PAGES)]
    gc.unfreeze()
    changes = 2 * len(pairs) * EVENT_BLOCKS * EVENTS_PER_BATCH
    found = {
        "engines": engines,
        "placement_us": round(await cpu_us(bench.place, rounds, bench.settle)),
        "request_us": round(await cpu_us(bench.ask, rounds, bench.settle)),
        "event_block_us": round(least_us(feed, 5) / changes, 3),
        "load_report_us": round(least_us(report, rounds)),
        "metrics_page_ms": round(min(map(sum, pages_s)) * 1000, 1),
        "metrics_step_ms": [round(max(steps_s) * 1000, 1) for steps_s in pages_s],
        "metrics_worker_step_ms": [round(max(steps_s) * 1000, 1) for steps_s in sent_s],
        "resident_kib_per_engine": round((after - before) / engines / 1024),
    }
    router.proxy.close()
    router.reader.close()
    return found


def _stored_and_removed(payload: bytes) -> tuple[bytes, bytes]:
    """A batch of stored events, and the one that takes their blocks away again."""
    stored = [event for event in decode_batch(payload).events if isinstance(event, BlockStored)]
    removed = [BlockRemoved(event.block_hashes, "GPU", group_idx=0) for event in stored]
    return payload, encode_batch(0.0, removed)


def by_blocks(millions: int) -> dict[str, Any]:
    """One line."""
    rng, index, plane = random.Random(6), MemoryIndex(), Plane("GPU", 0)
    count, spent_s = millions * 1_000_000, 0.0
    prompts: list[list[BlockHash]] = [[] for _ in range(PROMPTS)]
    before = resident_bytes()
    for number in range(count // STORED_AT_ONCE):
        hashes = [BlockHash(rng.getrandbits(64)) for _ in range(STORED_AT_ONCE)]
        start = time.thread_time()
        index.store("engine-0", plane, hashes)
        spent_s += time.thread_time() - start
        if number % (count // STORED_AT_ONCE // PROMPT_BLOCKS) == 0:
            for prompt, block in zip(prompts, hashes, strict=False):
                prompt.append(block)  # those of one prompt lie far apart in memory
    resident = resident_bytes() - before

    def look() -> None:
        for prompt in prompts:
            index.lookup(prompt[:PROMPT_BLOCKS])

    return {
        "blocks_m": millions,
        "bytes_per_block": round(resident / count, 1),
        "store_us_per_block": round(1e6 * spent_s / count, 3),
        "lookup_1000_us": round(least_us(look, 10) / PROMPTS),
    }


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="8,64,256,1024")
    parser.add_argument("--blocks-m", default="1,10")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(os.devnull))
    args = parser.parse_args()
    with args.out.open("a", encoding="ascii") as out:
        asyncio.run(by_engines(1, 1))  # what is loaded once is no engine's
        for engines in map(int, filter(None, args.engines.split(","))):
            _tell(asyncio.run(by_engines(engines, args.rounds)), out)
        for millions in map(int, filter(None, args.blocks_m.split(","))):
            with multiprocessing.get_context("spawn").Pool(1) as alone:
                _tell(alone.apply(by_blocks, (millions,)), out)


def _tell(found: dict[str, Any], out: TextIO) -> None:
    line = json.dumps(found)
    print(line, flush=True)
    print(line, file=out, flush=True)


if __name__ == "__main__":
    main()
