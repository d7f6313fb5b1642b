"""The shared index: look-up latency, ingest rate, bytes per block, time to forget; beside a common schema.

    python benchmarks/redis_index.py [--server redis-server] [--quick] [--json]

Starts servers of its own (one, and a Cluster of three) on loopback, without persistence. Look-up: who holds
each of N blocks, rows decoded; every engine holds a prefix of its own length in two groups, beside 200,000
other blocks. Ingest: (block, group) presence changes per second of one writer, from ``store`` to the server's
last answer, events of 64 blocks in two groups; and removals. Bytes: the server's memory per block that all
engines hold. Forget: one engine with a million blocks.

The baseline, in the same run and over the same connections: one hash per block with a JSON field per (pod,
tier, group), read by one HKEYS per block in one pipeline, fields decoded; cleared by a SCAN of everything.
Medians of several rounds; the client shares the machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Plane
from kvatlas.router.replication.leases import Leases
from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.reader import SharedReader
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import pack
from kvatlas.router.replication.settings import SharedSettings

FULL, WINDOW = Plane("GPU", 0), Plane("GPU", 1)
MODEL = "bench/model"
OTHERS = 200_000
Result = dict[str, Any]


class Servers:
    """One server, or three nodes that form a Cluster."""

    def __init__(self, binary: str, nodes: int, first_port: int) -> None:
        self.ports = [first_port + number for number in range(nodes)]
        self._folder = tempfile.TemporaryDirectory(prefix="kvatlas-bench-")
        self._processes = []
        for port in self.ports:
            command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            command += ["--dir", self._folder.name, "--loglevel", "warning"]
            if nodes > 1:
                command += ["--cluster-enabled", "yes", "--cluster-config-file", f"{port}.conf"]
            self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        self.url = f"redis://127.0.0.1:{first_port}"

    async def form(self) -> None:
        """Wait until they answer; join them to a Cluster."""
        for number, port in enumerate(self.ports):
            while True:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except OSError:
                    await asyncio.sleep(0.02)
            if len(self.ports) > 1:
                first, last = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
                writer.write(pack("CLUSTER", "ADDSLOTSRANGE", first, last))
                writer.write(pack("CLUSTER", "SET-CONFIG-EPOCH", number + 1))
                writer.write(pack("CLUSTER", "MEET", "127.0.0.1", self.ports[0]))
                for _ in range(3):
                    await reader.readline()
            writer.close()
        for port in self.ports if len(self.ports) > 1 else []:
            while not await _formed(port):  # noqa: ASYNC110  # another process: nothing to wait on
                await asyncio.sleep(0.05)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()
        self._folder.cleanup()


async def _formed(port: int) -> bool:
    """Whether a node sees the whole Cluster."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(pack("CLUSTER", "INFO"))
    info = await reader.readuntil(b"cluster_slots_fail")
    writer.close()
    return b"cluster_state:ok" in info and b"slots_assigned:16384" in info


class Bench:
    """A writer and a reader in a namespace of their own."""

    async def open(self, url: str, namespace: str) -> Bench:
        settings = SharedSettings(
            url=url, namespace=namespace, lease_s=3600.0, block_ttl_s=7200.0, lookup_timeout_s=5.0
        )
        self.writing, self.reading = Client(settings), Client(settings)
        for client in (self.writing, self.reading):
            if not await client.start(20):
                raise SystemExit(f"no connection: {client.last_error}")
        self.mirror = MirroredIndex(self.writing, MODEL)
        self.leases = Leases(self.writing, MODEL, "bench")
        self.reader = SharedReader(self.reading)
        return self

    async def take(self, engine_id: str) -> None:
        token = await self.leases.acquire(engine_id)
        await self.mirror.take_over(engine_id, token or 0)

    async def close(self) -> None:
        for client in (self.writing, self.reading):
            for master in client.masters():
                await master.execute_command("FLUSHALL", "SYNC")
            await client.close()


def random_blocks(rng: random.Random, count: int) -> list[BlockHash]:
    return [BlockHash(rng.getrandbits(64)) for _ in range(count)]


def quantiles(samples: list[float]) -> tuple[float, float]:
    """(median, 99th percentile) in ms."""
    ordered = sorted(samples)
    return statistics.median(ordered) * 1e3, ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3


async def timed(rounds: int, work: Callable[[], Awaitable[Any]]) -> list[float]:
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        samples.append(time.perf_counter() - began)
    return samples


def prefixes(rng: random.Random, blocks: int, engines: int) -> dict[str, int]:
    """How much of the prompt each engine holds."""
    return {f"engine-{n}": rng.randrange(blocks // 4, blocks + 1) for n in range(engines)}


async def lookups(url: str, blocks: int, engines: int, rounds: int) -> Result:
    """Our look-up, and the baseline's over the same engines and blocks."""
    rng = random.Random(blocks + engines)
    bench = await Bench().open(url, f"l{blocks}e{engines}")
    prompt, held = random_blocks(rng, blocks), prefixes(rng, blocks, engines)
    for engine_id, length in held.items():
        await bench.take(engine_id)
        bench.mirror.store(engine_id, FULL, prompt[:length] + random_blocks(rng, OTHERS // engines))
        bench.mirror.store(engine_id, WINDOW, prompt[max(0, length - 8) : length])
    await bench.mirror.flush()
    bench.mirror = MirroredIndex(bench.writing, MODEL)
    await bench.reader.lookup(prompt, MODEL)
    samples = await timed(rounds, lambda: bench.reader.lookup(prompt, MODEL))
    result: Result = {"blocks": blocks, "engines": engines}
    result["p50_ms"], result["p99_ms"] = quantiles(samples)
    if not bench.writing.cluster:
        baseline = Baseline(bench.writing)
        await baseline.write({e: prompt[:length] for e, length in held.items()}, 0)
        await baseline.write({e: prompt[max(0, length - 8) : length] for e, length in held.items()}, 1)
        samples = await timed(max(5, rounds // 20), lambda: baseline.lookup(prompt))
        result["baseline_p50_ms"], result["baseline_p99_ms"] = quantiles(samples)
    await bench.close()
    return result


class Baseline:
    """One hash per block, one JSON field per (pod, tier, group)."""

    def __init__(self, client: Client) -> None:
        self._link = client.pipelined(b"")

    async def write(self, held: dict[str, list[BlockHash]], group: int) -> None:
        for pod, hashes in held.items():
            field = msgspec.json.encode({"podIdentifier": f"{pod}:8000", "deviceTier": "gpu", "group": group})
            for start in range(0, len(hashes), 500):
                part = hashes[start : start + 500]
                payload = b"".join(pack("HSET", str(block), field, "") for block in part)
                await self._link.ask(payload, len(part), 30)

    async def remove(self, pod: str, hashes: list[BlockHash], group: int) -> None:
        """Per block: delete the field, see whether any is left, else delete the block."""
        field = msgspec.json.encode({"podIdentifier": f"{pod}:8000", "deviceTier": "gpu", "group": group})
        for block in hashes:
            await self._link.ask(pack("HDEL", str(block), field), 1, 30)
            (left,) = await self._link.ask(pack("HLEN", str(block)), 1, 30)
            if not left:
                await self._link.ask(pack("DEL", str(block)), 1, 30)

    async def lookup(self, prompt: list[BlockHash]) -> dict[int, list[Any]]:
        payload = b"".join([pack("HKEYS", str(block)) for block in prompt])
        replies = await self._link.ask(payload, len(prompt), 30)
        decode = msgspec.json.decode
        return {
            block: [decode(field) for field in fields] for block, fields in zip(prompt, replies, strict=True)
        }

    async def clear(self, pod: str) -> None:
        """Every block of the database, for the fields of one pod."""
        mark, cursor = f'"{pod}:8000"'.encode(), b"0"
        while True:
            ((cursor, keys),) = await self._link.ask(pack("SCAN", cursor, "COUNT", 1000), 1, 30)
            replies = await self._link.ask(b"".join(pack("HKEYS", key) for key in keys), len(keys), 30)
            for key, fields in zip(keys, replies, strict=True):
                gone = [f for f in fields if mark in f] if not isinstance(fields, ResponseError) else []
                if gone:
                    await self._link.ask(pack("HDEL", key, *gone), 1, 30)
            if cursor == b"0":
                return


async def ingest(url: str, total: int) -> Result:
    """Presence changes per second: both groups of every block stored, then removed."""
    rng = random.Random(3)
    bench = await Bench().open(url, "ingest")
    await bench.take("engine-0")
    events = [random_blocks(rng, 64) for _ in range(total // 128)]
    changes = len(events) * 128
    await bench.mirror.flush()
    rates = {}
    for name, change in (("stored", bench.mirror.store), ("removed", bench.mirror.remove)):
        began = time.perf_counter()
        for number, hashes in enumerate(events):
            change("engine-0", FULL, hashes)
            change("engine-0", WINDOW, hashes)
            if number % 64 == 63:
                await bench.mirror.flush()
        await bench.mirror.flush()
        rates[f"{name}_per_s"] = changes / (time.perf_counter() - began)
    blocks = [block for hashes in events[:200] for block in hashes]
    bench.mirror.store("engine-0", FULL, blocks)
    began = time.perf_counter()
    await bench.mirror.flush()
    rates["blocks_written_per_s"] = len(blocks) / (time.perf_counter() - began)
    if not bench.writing.cluster:
        baseline = Baseline(bench.writing)
        began = time.perf_counter()
        await baseline.write({"engine-0": blocks}, 0)
        rates["baseline_stored_per_s"] = len(blocks) / (time.perf_counter() - began)
        began = time.perf_counter()
        await baseline.remove("engine-0", blocks[:2000], 0)
        rates["baseline_removed_per_s"] = 2000 / (time.perf_counter() - began)
    await bench.close()
    return rates


async def used_bytes(client: Client) -> int:
    return int((await client.masters()[0].info("memory"))["used_memory"])


async def bytes_per_block(url: str, engines: int, count: int) -> Result:
    """Memory of the server per block that every engine holds in two groups."""
    rng = random.Random(4)
    bench = await Bench().open(url, "kva")
    hashes = random_blocks(rng, count)
    for number in range(engines):
        await bench.take(f"engine-{number}")
    before = await used_bytes(bench.writing)
    for number in range(engines):
        bench.mirror.store(f"engine-{number}", FULL, hashes)
        bench.mirror.store(f"engine-{number}", WINDOW, hashes[: count // 8])
        await bench.mirror.flush()
    ours = (await used_bytes(bench.writing) - before) / count
    for master in bench.writing.masters():
        await master.execute_command("FLUSHALL", "SYNC")
    before = await used_bytes(bench.writing)
    few = hashes[: count // 10]
    baseline = Baseline(bench.writing)
    await baseline.write({f"engine-{n}": few for n in range(engines)}, 0)
    await baseline.write({f"engine-{n}": few[: len(few) // 8] for n in range(engines)}, 1)
    theirs = (await used_bytes(bench.writing) - before) / len(few)
    await bench.close()
    return {"engines": engines, "bytes_per_block": ours, "baseline_bytes_per_block": theirs}


async def forget(url: str, count: int, baseline_count: int) -> Result:
    """Milliseconds from ``forget`` until no reader sees the engine; in memory, and on the server."""
    rng = random.Random(5)
    bench = await Bench().open(url, "forget")
    await bench.take("engine-0")
    await bench.take("engine-1")
    hashes = random_blocks(rng, count)
    bench.mirror.store("engine-0", FULL, hashes)
    bench.mirror.store("engine-1", FULL, hashes[:1000])
    await bench.mirror.flush()
    began = time.perf_counter()
    bench.mirror.forget("engine-0")
    memory = time.perf_counter() - began
    await bench.mirror.flush()
    whole = time.perf_counter() - began
    result = {"blocks": count, "ms": whole * 1e3, "of_it_in_memory_ms": memory * 1e3}
    for master in bench.writing.masters():
        await master.execute_command("FLUSHALL", "SYNC")
    baseline = Baseline(bench.writing)
    await baseline.write({"engine-0": hashes[:baseline_count]}, 0)
    began = time.perf_counter()
    await baseline.clear("engine-0")
    result |= {"baseline_blocks": baseline_count, "baseline_ms": (time.perf_counter() - began) * 1e3}
    await bench.close()
    return result


async def everything(binary: str, *, quick: bool) -> Result:
    """All of it."""
    rounds = 60 if quick else 600
    results: Result = {}
    servers = Servers(binary, 1, 7411)
    try:
        await servers.form()
        results["lookup"] = [
            await lookups(servers.url, blocks, engines, rounds)
            for blocks in (1000, 6250)
            for engines in (4, 16, 64)
        ]
        results["ingest"] = await ingest(servers.url, 100_000 if quick else 1_000_000)
        results["bytes"] = [
            await bytes_per_block(servers.url, engines, 20_000 if quick else 200_000)
            for engines in (1, 4, 16, 64)
        ]
        results["forget"] = await forget(servers.url, 100_000 if quick else 1_000_000, 20_000)
    finally:
        servers.close()
    servers = Servers(binary, 3, 7421)
    try:
        await servers.form()
        results["cluster_lookup"] = [
            await lookups(servers.url, blocks, 64, rounds) for blocks in (1000, 6250)
        ]
        results["cluster_ingest"] = await ingest(servers.url, 100_000 if quick else 1_000_000)
    finally:
        servers.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", default="redis-server", help="the server program to start")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    results: Result = {"server": subprocess.check_output([options.server, "--version"], text=True).strip()}
    results |= asyncio.run(everything(options.server, quick=options.quick))
    if options.json:
        print(msgspec.json.encode(results).decode())
        return
    for name, found in results.items():
        for row in found if isinstance(found, list) else [found]:
            shown = (
                row
                if isinstance(row, str)
                else ", ".join(
                    f"{key} {value:,.2f}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in row.items()
                )
            )
            print(f"{name}: {shown}")


if __name__ == "__main__":
    main()
