"""Workers: what telling each other costs per request, and what it gives to placement.

    python benchmarks/workers.py cost [--requests 2000] [--blocks 16,512]
    python benchmarks/workers.py quality [--workers 1,4] [--seconds 20] [--rounds 1] [--trace TRACE.jsonl.gz]

``cost``: CPU of telling and hearing per request, both together, of two workers with real sockets.
``quality``: the demo's load over as many routers, in one process but with sockets between them, connections
spread at random: cached share and how evenly engines compute; or the first requests of a trace, as text of
about a fifteenth of its tokens, eight times as fast, to one router after the other. One JSON line each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from kvatlas.publisher.events import BlockHash
from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe.log_lines import configure_logging
from kvatlas.router.observe.prefix_ids import UNIT_TOKENS
from kvatlas.router.placement.inflight import InflightPrefixes
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.server_lifecycle import make_server
from kvatlas.router.simulation.demo import run as demo
from kvatlas.router.simulation.demo.engines import engine_process
from kvatlas.router.simulation.demo.load import ChatLoad, ChatOutcome
from kvatlas.router.simulation.requests import Request
from kvatlas.router.simulation.workload import WorkloadSource
from kvatlas.router.workers.context import WorkerContext
from kvatlas.router.workers.gossip import SiblingGossip

E = "http://engine:8000"
TRACE_SPEED = 8.0
TRACE_SHARE = 20
WORDS_PER_BLOCK = 10
TRACE_ENGINE = msgspec.structs.replace(demo.ENGINE, num_blocks=6000)
"""A pool that has room for the trace's conversations."""
_WORDS = tuple("alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike".split())  # noqa: SIM905


@contextmanager
def seats(count: int, folder: Path) -> Iterator[list[WorkerContext]]:
    """Places of workers with sockets between them; their control ports lie in ``folder``."""
    pairs = {}
    for pair in itertools.combinations(range(count), 2):
        pairs[pair] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in pairs[pair]:
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    controls = []
    for slot in range(count):
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        (folder / str(slot)).unlink(missing_ok=True)
        control.bind(str(folder / str(slot)))
        control.listen()
        controls.append(control)
    try:
        yield [
            WorkerContext(
                slot,
                count,
                life=0,
                public=[],
                ops=None,
                admin=None,
                control=controls[slot],
                mesh={a + b - slot: ends[slot != a] for (a, b), ends in pairs.items() if slot in (a, b)},
                folder=folder,
                counters_fd=os.memfd_create("counters"),
                ops_at="",
                started=lambda: None,
                parent=-1,
            )
            for slot in range(count)
        ]
    finally:
        for one in [*controls, *itertools.chain(*pairs.values())]:
            one.close()


async def cost(requests: int, blocks: int) -> dict[str, Any]:
    """CPU per request, in microseconds, of a request that is sent, prefilled and ended."""
    prompts = [[BlockHash((n << 20) + block) for block in range(blocks)] for n in range(requests)]

    async def turns(books: InflightPrefixes) -> float:
        """Four requests every 3 ms, as they come at over 1000 a second."""
        began = time.process_time()
        for start in range(0, requests, 4):
            for hashes in prompts[start : start + 4]:
                now = time.monotonic()
                prompt = books.add(E, hashes, now, (range(blocks, blocks + 1),))
                books.prefilled(prompt, now)
                books.end(prompt, now)
            await asyncio.sleep(0.003)
        await asyncio.sleep(0.05)
        return time.process_time() - began

    alone_s = await turns(InflightPrefixes())
    with seats(2, Path("/tmp")) as places:  # no control port is opened
        load = {E: OthersLoad(4, 2, 1000)}
        gossips = [SiblingGossip(place, lambda now: load, clock=time.monotonic) for place in places]
        teller, hearer = gossips
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(gossip.run()) for gossip in gossips]
            await asyncio.sleep(0.01)
            both_s = await turns(teller.inflight)
            for task in running:
                task.cancel()
        heard = hearer.inflight.gossip_stats.received
        missed = teller.stats.missed
        buckets = hearer.delays.buckets()
    return {
        "blocks": blocks,
        "requests": requests,
        "heard": heard,
        "missed": missed,
        "alone_us": round(1e6 * alone_s / requests, 1),
        "tell_and_hear_us": round(1e6 * (both_s - alone_s) / requests, 1),
        "delay_buckets": {bound: round(count / max(1, buckets[-1][1]), 3) for bound, count in buckets},
    }


class TraceLoad:
    """Requests of a trace as completions: each block of it becomes some words that are its own."""

    def __init__(self, addresses: list[str], requests: list[Request], on_done: Callable[[ChatOutcome], None]):
        self._urls = itertools.cycle([address + "/v1/completions" for address in addresses])
        self._requests = requests
        self._on_done = on_done

    async def run(self, seconds: float) -> None:
        """Those of the first ``seconds``."""
        began, connector = time.monotonic(), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as asking:
            for request in self._requests:
                at_s = (request.at_s - self._requests[0].at_s) / TRACE_SPEED
                if at_s > seconds:
                    break
                await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
                asking.create_task(self._ask(session, next(self._urls), request))

    async def _ask(self, session: aiohttp.ClientSession, url: str, request: Request) -> None:
        body = {
            "model": demo.ENGINE.model,
            "prompt": " ".join(map(_words, request.ids[: -(-request.input_tokens // UNIT_TOKENS)])),
            "max_tokens": max(1, request.output_tokens // TRACE_SHARE),
        }
        outcome = ChatOutcome([], body["max_tokens"], 0.0)
        async with session.post(url, json=body) as answer:
            if answer.status == 200:
                usage = (await answer.json())["usage"]
                details = usage.get("prompt_tokens_details") or {}
                outcome = msgspec.structs.replace(
                    outcome,
                    prompt_tokens=usage["prompt_tokens"],
                    cached_tokens=details.get("cached_tokens", 0),
                )
            else:
                outcome = msgspec.structs.replace(outcome, error=f"status {answer.status}")
        self._on_done(outcome)


@lru_cache(maxsize=1 << 16)
def _words(block: int) -> str:
    rng = random.Random(block)
    return " ".join(rng.choices(_WORDS, k=WORDS_PER_BLOCK))


async def quality(
    workers: int, seconds: float, urls: list[str], folder: Path, trace: list[Request]
) -> dict[str, Any]:
    """The demo's load, or a trace, over ``workers`` routers."""
    engines = tuple(map(EngineAddress, urls))
    config: Config = demo._config(engines, 0, IndexSettings(), "")  # noqa: SLF001  # the demo's own
    with seats(workers, folder) as places:
        routers = [Router(config, worker=place) if workers > 1 else Router(config) for place in places]
        servers = [make_server(router) for router in routers]
        serving = [asyncio.create_task(server.serve()) for server in servers]
        for router, server in zip(routers, servers, strict=True):
            await demo._ready(router, server)  # noqa: SLF001
        watched = demo._Demo(routers, len(urls))  # noqa: SLF001
        users = demo._USERS_PER_ENGINE * len(urls)  # noqa: SLF001
        addresses = [server.base_url for server in servers]
        load: ChatLoad | TraceLoad = TraceLoad(addresses, trace, watched.done)
        if not trace:
            load = ChatLoad(addresses, demo.ENGINE.model, users=users, seed=7, on_done=watched.done)
        cpu = time.process_time()
        await load.run(seconds)
        cpu_s = time.process_time() - cpu
        computed: dict[str, int] = {}
        for router in routers:
            for engine_id, tokens in _computed(router).items():
                computed[engine_id] = computed.get(engine_id, 0) + tokens
        delays = [gossip.delays for router in routers if (gossip := router.peers.gossip) is not None]
        for server in servers:
            server.drain()
        await asyncio.wait(serving)
    result = watched.ours.as_json()
    loads = list(computed.values())
    return {
        "workers": workers,
        **result,
        "imbalance": round(max(loads) / statistics.mean(loads), 3) if sum(loads) else None,
        "cpu_ms_per_request": round(1000 * cpu_s / max(1, result.get("requests", 1)), 2),
        "gossip_delay_mean_ms": [round(1000 * one.total / max(1, one.buckets()[-1][1]), 2) for one in delays],
    }


def _computed(router: Router) -> dict[str, int]:
    """Prompt tokens that engines had to compute, by the receipts kept."""
    found: dict[str, int] = {}
    for receipt in router.accounts.receipts.latest:
        tokens = (receipt.reported_prompt_tokens or 0) - (receipt.actual_tokens or 0)
        found[receipt.engine_id] = found.get(receipt.engine_id, 0) + max(0, tokens)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "quality"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--blocks", default="16,512")
    parser.add_argument("--workers", default="1,4")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--trace", help="a recorded workload instead of the demo's")
    args = parser.parse_args()
    trace = WorkloadSource(name=args.trace).draws(range(1))[0] if args.trace else []
    if args.what == "cost":
        for blocks in map(int, args.blocks.split(",")):
            print(json.dumps(uvloop.run(cost(args.requests, blocks))), flush=True)
        return
    import tempfile  # noqa: PLC0415

    configure_logging("error", "console")
    for _ in range(args.rounds):
        for workers in map(int, args.workers.split(",")):
            with (
                tempfile.TemporaryDirectory() as folder,
                engine_process([TRACE_ENGINE if trace else demo.ENGINE] * args.engines) as urls,
            ):
                found = uvloop.run(quality(workers, args.seconds, urls, Path(folder), trace))
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
