"""How the cost of a shared index grows with the replicas that use it: one server, and a Cluster of three.

    python -m benchmarks.replicas [--replicas 1,2,4,8] [--seconds 10] [--per-s 20] [--server redis-server]

Every replica is a process with a client of its own and does what a router does for this many requests per
second: a look-up of a thousand blocks (with the load and the prompts in flight of all replicas), an entry of
its own prompt in flight, a report of its load, and the events of the prompt at the one engine that it
follows: 64 new blocks in two groups, as many removed. Results, as JSON lines: what the servers spend per
request, all of the above together; what a replica spends; the time of a look-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.redis_index import FULL, MODEL, WINDOW, Bench, Servers, quantiles, random_blocks
from kvatlas.publisher.events import BlockHash
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.replication.codec import ScopeKeys
from kvatlas.router.replication.gossip import GossipedInflight, LoadGossip
from kvatlas.router.replication.service import InflightStream

PROMPT_BLOCKS, EVENT_BLOCKS, PROMPTS, KEPT = 1000, 64, 32, 50_000
NAMESPACE = "replicas"
FIRST_PORT = 17440


def prompts() -> list[list[BlockHash]]:
    """Blocks that every replica asks for."""
    rng = random.Random(8)
    return [random_blocks(rng, PROMPT_BLOCKS) for _ in range(PROMPTS)]


async def replica(pipe: Connection, url: str, number: int, per_s: float) -> None:
    """One replica: fills its engine, says so, works until told to stop, and says what it took."""
    name, rng, bench = f"replica-{number}", random.Random(number), await Bench().open(url, NAMESPACE)
    engine_id, keys, asked = f"engine-{number}", ScopeKeys(NAMESPACE, MODEL), prompts()
    await bench.take(engine_id)
    held = deque(random_blocks(rng, KEPT))
    known = [block for prompt in asked for block in prompt[: rng.randrange(PROMPT_BLOCKS)]]
    for plane in (FULL, WINDOW):
        bench.mirror.store(engine_id, plane, [*known, *held])
    await bench.mirror.flush()
    stream = InflightStream(bench.writing)
    flights = GossipedInflight(
        name,
        number + 1,
        lambda _, entry: stream.put(keys.inflight, entry),
    )
    load = LoadGossip(name, lambda _: {engine_id: OthersLoad(4, 2, rng.randrange(1000))}, started=number + 1)
    tasks = [asyncio.create_task(bench.mirror.run()), asyncio.create_task(stream.run())]
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
        found = await bench.reader.lookup(prompt, MODEL)
        samples.append(time.perf_counter() - start)
        now = time.monotonic()
        flights.receive(found.inflight, now)
        load.others(found.load, now)
        flight = flights.add(engine_id, prompt, now, (PROMPT_BLOCKS,))
        field = load.field(now)
        if field is not None:
            await bench.writing.command("HSET", keys.load, name, field)
            load.sent(field, now)
        new = random_blocks(rng, EVENT_BLOCKS)
        gone = [held.popleft() for _ in new]
        held.extend(new)
        for plane in (FULL, WINDOW):
            bench.mirror.store(engine_id, plane, new)
            bench.mirror.remove(engine_id, plane, gone)
        flights.end(flight, now)
    cpu = time.process_time() - cpu
    for task in tasks:
        task.cancel()
    pipe.send((samples, cpu))
    for client in (bench.writing, bench.reading):
        await client.close()


def replica_process(pipe: Connection, url: str, number: int, per_s: float) -> None:
    """The process of one."""
    uvloop.run(replica(pipe, url, number, per_s))


async def measure(binary: str, nodes: int, replicas: int, seconds: float, per_s: float) -> dict[str, Any]:
    """One line."""
    servers = Servers(binary, nodes, FIRST_PORT)
    try:
        await servers.form()
        bench, context = await Bench().open(servers.url, "watch"), multiprocessing.get_context("spawn")
        pipes = []
        for number in range(replicas):
            ours, theirs = multiprocessing.Pipe()
            pipes.append(ours)
            context.Process(
                target=replica_process, args=(theirs, servers.url, number, per_s), daemon=True
            ).start()
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
    parser.add_argument("--replicas", default="1,2,4,8")
    parser.add_argument("--nodes", default="1,3")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--per-s", type=float, default=20.0, help="requests per second of each replica")
    parser.add_argument("--server", default="redis-server", help="the server program to start")
    args = parser.parse_args()
    for nodes in map(int, args.nodes.split(",")):
        for replicas in map(int, args.replicas.split(",")):
            found = asyncio.run(measure(args.server, nodes, replicas, args.seconds, args.per_s))
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
