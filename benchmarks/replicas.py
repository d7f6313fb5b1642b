"""How the cost of a shared index grows with the replicas that use it: one server, and a Cluster of three.

    python -m benchmarks.replicas [--share blocks,load] [--replicas 1,2,4,8] [--seconds 10] [--per-s 20]
                                  [--server redis-server]

Every replica is a process with a client of its own and does what a router does for this many requests per
second: a look-up of a thousand blocks (with the load and the prompts in flight of all replicas), an entry of
its own prompt in flight, a report of its load, and the events of the prompt at the one engine that it
follows: 64 new blocks in two groups, as many removed. With ``--share load`` (``index.share``) the look-up is
in the replica's own memory, and it applies the events of as many engines as there are replicas. Results, as
JSON lines: what the servers spend per request, all of the above together; what a replica spends; the time of
a look-up. Decoding events is not in it: a sixth to a quarter of what they cost (``index.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from collections import deque
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.redis_index import FULL, MODEL, WINDOW, Bench, Servers, quantiles, random_blocks
from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.replication.gossip import GossipedInflight
from kvatlas.router.replication.keys import ScopeKeys
from kvatlas.router.replication.load_gossip import LoadGossip
from kvatlas.router.replication.lookup_fallback import IndexLookup
from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.service import InflightStream
from kvatlas.router.replication.shared_load import RECEIVE_PAUSE_S, RECEIVE_WAIT_S

PROMPT_BLOCKS, EVENT_BLOCKS, PROMPTS, KEPT = 1000, 64, 32, 50_000
NAMESPACE = "replicas"
FIRST_PORT = 17440


def prompts() -> list[list[BlockHash]]:
    """Blocks that every replica asks for."""
    rng = random.Random(8)
    return [random_blocks(rng, PROMPT_BLOCKS) for _ in range(PROMPTS)]


class _OneOfMany:
    """Implements ``Ownership``: another replica is there."""

    others_alive = True

    def follows(self, engine_id: str) -> bool:
        return bool(engine_id)

    holds_exclusively = follows


class Engines:
    """The events of some engines, each with ``KEPT`` blocks beside its parts of the prompts. One step stores
    ``EVENT_BLOCKS`` new ones in two groups and removes as many."""

    def __init__(self, index: MirroredIndex | MemoryIndex, names: list[str], rng: random.Random) -> None:
        self._index = index
        self._batches = {
            name: deque(random_blocks(rng, EVENT_BLOCKS) for _ in range(2 * KEPT // EVENT_BLOCKS))
            for name in names
        }
        for name, batches in self._batches.items():
            held = [block for prompt in prompts() for block in prompt[: rng.randrange(PROMPT_BLOCKS)]]
            for batch in list(batches)[len(batches) // 2 :]:
                held += batch
            for plane in (FULL, WINDOW):
                index.store(name, plane, held)

    def step(self) -> None:
        """One at each engine: the first of its batches is new, that in the middle the oldest that is held."""
        for name, batches in self._batches.items():
            new, gone = batches[0], batches[len(batches) // 2]
            batches.rotate(-1)
            for plane in (FULL, WINDOW):
                self._index.store(name, plane, new)
                self._index.remove(name, plane, gone)


async def receive(lookup: IndexLookup) -> None:
    """As ``SharedLoad`` does."""
    while True:
        await lookup.receive(MODEL, RECEIVE_WAIT_S)
        await asyncio.sleep(RECEIVE_PAUSE_S)


async def replica(pipe: Connection, url: str, number: int, per_s: float, followed: int) -> None:
    """One replica: fills the engines it follows, says so, works until told to stop, and says what it took.

    ``followed``: how many; 0 for one of its own, whose blocks are shared.
    """
    name, rng, bench = f"replica-{number}", random.Random(number), await Bench().open(url, NAMESPACE)
    engine_id, keys, asked = f"engine-{number}", ScopeKeys(NAMESPACE, MODEL), prompts()
    await bench.take(engine_id)
    own = MemoryIndex() if followed else None
    names = [f"engine-{n}" for n in range(followed)] or [engine_id]
    engines = Engines(bench.mirror if own is None else own, names, rng)
    await bench.mirror.flush()
    stream = InflightStream(bench.writing)
    flights = GossipedInflight(
        name,
        number + 1,
        lambda _, entry: stream.put(keys.inflight, entry),
    )
    load = LoadGossip(name, lambda _: {engine_id: OthersLoad(4, 2, rng.randrange(1000))}, started=number + 1)
    tasks = [asyncio.create_task(bench.mirror.run()), asyncio.create_task(stream.run())]
    shared = IndexLookup(
        lambda: bench.reader,
        _OneOfMany(),
        load,
        receive_inflight=lambda entries: flights.receive(entries, time.monotonic()),
        clock=time.monotonic,
    )
    if own is not None:
        tasks.append(asyncio.create_task(receive(shared)))
    pipe.send("filled")
    while not pipe.poll():  # noqa: ASYNC110  # another process says when
        await asyncio.sleep(0.01)
    pipe.recv()
    samples: list[float] = []
    began, cpu = time.monotonic(), time.process_time()
    while not pipe.poll():
        due = began + (len(samples) + rng.random()) / per_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        prompt = rng.choice(asked)
        start = time.perf_counter()
        if own is not None:
            own.lookup(prompt)
        else:
            found = await bench.reader.lookup(prompt, MODEL)
            flights.receive(found.inflight, time.monotonic())
            load.others(found.load, time.monotonic())
        samples.append(time.perf_counter() - start)
        now = time.monotonic()
        flight = flights.add(engine_id, prompt, now, (range(PROMPT_BLOCKS, PROMPT_BLOCKS + 1),))
        field = load.field(now)
        if field is not None:
            await bench.writing.command("HSET", keys.load, name, field)
            load.sent(field, now)
        engines.step()
        flights.end(flight, now)
    cpu = time.process_time() - cpu
    for task in tasks:
        task.cancel()
    pipe.send((samples, cpu))
    for client in (bench.writing, bench.reading):
        await client.close()


def replica_process(pipe: Connection, url: str, number: int, per_s: float, followed: int) -> None:
    """The process of one."""
    uvloop.run(replica(pipe, url, number, per_s, followed))


async def measure(
    binary: str, share: str, nodes: int, replicas: int, seconds: float, per_s: float
) -> dict[str, Any]:
    """One line."""
    servers = Servers(binary, nodes, FIRST_PORT)
    try:
        await servers.form()
        bench, context = await Bench().open(servers.url, "watch"), multiprocessing.get_context("spawn")
        pipes = []
        for number in range(replicas):
            ours, theirs = multiprocessing.Pipe()
            pipes.append(ours)
            args = theirs, servers.url, number, per_s, replicas if share == "load" else 0
            context.Process(target=replica_process, args=args, daemon=True).start()
        for pipe in pipes:
            await asyncio.to_thread(pipe.recv)
        before = await _servers_cpu_s(bench)
        for pipe in pipes:
            pipe.send("go")
        await asyncio.sleep(seconds)
        spent = await _servers_cpu_s(bench)
        for pipe in pipes:
            pipe.send("stop")
        told = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
        for client in (bench.writing, bench.reading):
            await client.close()
    finally:
        servers.close()
    samples = [one for its, _ in told for one in its]
    p50, p99 = quantiles(samples)
    requests = len(samples)
    return {
        "share": share,
        "nodes": nodes,
        "replicas": replicas,
        "requests_per_s": round(requests / seconds),
        "servers_us_per_request": round(
            1e6 * sum(a - b for a, b in zip(spent, before, strict=True)) / requests
        ),
        "busiest_server_share": round(max(a - b for a, b in zip(spent, before, strict=True)) / seconds, 3),
        "replica_us_per_request": round(1e6 * sum(cpu for _, cpu in told) / requests),
        "lookup_p50_ms": round(p50, 2),
        "lookup_p99_ms": round(p99, 2),
    }


async def _servers_cpu_s(bench: Bench) -> list[float]:
    """CPU of each server since its start."""
    found = []
    for master in bench.writing.masters():
        info = await master.info("cpu")
        found.append(float(info["used_cpu_user"]) + float(info["used_cpu_sys"]))
    return found


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", default="blocks,load")
    parser.add_argument("--replicas", default="1,2,4,8")
    parser.add_argument("--nodes", default="1,3")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--per-s", type=float, default=20.0, help="requests per second of each replica")
    parser.add_argument("--server", default="redis-server", help="the server program to start")
    args = parser.parse_args()
    for share, nodes, replicas in product(
        args.share.split(","), map(int, args.nodes.split(",")), map(int, args.replicas.split(","))
    ):
        found = asyncio.run(measure(args.server, share, nodes, replicas, args.seconds, args.per_s))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
