"""Cost of reading the gauges of engines: CPU per poll, and the share of a core by fleet and interval.

    python -m benchmarks.polling [--engines 64,1024] [--intervals 2,0.5] [--seconds 10] [--page-kib 57]
        [--whole]

The router's own poller reads ``/metrics`` of engines on loopback addresses, served by another process, over
real connections; a page has the size of vLLM 0.32's (``PrometheusStatLogger`` of one engine: 58,014 bytes,
576 lines), and is asked for the samples that are used, by name; with ``--whole`` the servers do not answer by
name. Health polls are as by default. The CPU is that of this process, fleet and load accounts included,
less what it takes while no gauges are read. JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import structlog
from aiohttp import web

from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.poller import FleetPoller
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.http.client import HttpClient
from kvatlas.router.placement.engine import Engine

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
LABELS = f'engine="0",model_name="{MODEL}"'
NEVER_S = 1e6


def page(size: int) -> bytes:
    """A metrics page of the given size in bytes, with gauges among histograms as in vLLM's."""
    lines, number = [], 0
    gauges = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
    while sum(map(len, lines)) + len(lines) < size:
        name = f"vllm:request_histogram_{number}_seconds"
        lines += [f"# HELP {name} Histogram of one kind of time in seconds.", f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{{LABELS},le="{1.5**edge:g}"}} {edge}.0' for edge in range(20)]
        if gauges:
            gauge = f"vllm:{gauges.pop()}"
            lines += [f"# TYPE {gauge} gauge", f"{gauge}{{{LABELS}}} 0.0"]
        number += 1
    lines.append('vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="8192"} 1.0')
    return "\n".join([*lines, "process_start_time_seconds 1.7e+09", ""]).encode()


async def serve(pipe: Connection, size: int, *, by_name: bool) -> None:
    """The engines: every address and port of this machine answers alike."""
    body, models = page(size), {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="text/plain")

    async def named(request: web.Request) -> web.Response:
        names = tuple(name.encode() for name in request.query.getall("name[]"))
        names += tuple(b"# TYPE " + name for name in names)
        lines = (line for line in body.splitlines(keepends=True) if line.startswith(names))
        return web.Response(body=b"".join(lines), content_type="text/plain")

    async def listed(request: web.Request) -> web.Response:
        return web.json_response(models)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/v1/models", listed)])
    if by_name:
        app.add_routes([web.get("/metrics/", named)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", 0, backlog=4096)  # all of 127.0.0.0/8
    await site.start()
    pipe.send(runner.addresses[0][1])
    while not pipe.poll():  # noqa: ASYNC110  # another process says when
        await asyncio.sleep(0.05)
    await runner.cleanup()


def _serve(pipe: Connection, size: int, by_name: bool) -> None:  # a process's argument
    asyncio.run(serve(pipe, size, by_name=by_name))


async def measure(port: int, engines: int, interval_s: float, seconds: float) -> tuple[float, float]:
    """CPU seconds and polls of gauges per second, once every engine is up."""
    listed = tuple(EngineAddress(f"http://127.0.{n // 250}.{n % 250 + 1}:{port}") for n in range(engines))
    settings = FleetSettings(gauge_interval_s=interval_s)
    router = Router(Config(engines=listed, fleet=settings))
    polls, report = 0, router.lifecycle.engine_load

    def count(engine: Engine, *, running: int, waiting: int) -> None:
        nonlocal polls
        polls += 1
        report(engine, running=running, waiting=waiting)

    router.lifecycle.engine_load = count  # type: ignore[method-assign]
    async with HttpClient(requests_max=engines) as client:
        poller = FleetPoller(router.fleet, router.lifecycle, settings, client)
        running = asyncio.create_task(poller.run())
        while polls < engines:  # noqa: ASYNC110  # each has been read once
            await asyncio.sleep(0.1)
        before, began, cpu = polls, time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        passed_s = time.monotonic() - began
        found = (time.process_time() - cpu) / passed_s, (polls - before) / passed_s
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    router.proxy.close()
    router.reader.close()
    return found


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="64,1024")
    parser.add_argument("--intervals", default="2,0.5")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--page-kib", type=int, default=57)
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    server = context.Process(target=_serve, args=(other, args.page_kib * 1024, not args.whole), daemon=True)
    server.start()
    port = pipe.recv()
    for engines in map(int, args.engines.split(",")):
        idle, _ = asyncio.run(measure(port, engines, NEVER_S, args.seconds))
        for interval_s in map(float, args.intervals.split(",")):
            cpu, per_s = asyncio.run(measure(port, engines, interval_s, args.seconds))
            print(json.dumps(_line(engines, interval_s, cpu - idle, per_s)), flush=True)
    pipe.send("end")
    server.join()


def _line(engines: int, interval_s: float, cpu: float, per_s: float) -> dict[str, Any]:
    return {
        "engines": engines,
        "interval_s": interval_s,
        "polls_per_s": round(per_s, 1),
        "cpu_us_per_poll": round(1e6 * cpu / per_s),
        "core_share": round(cpu, 3),
    }


if __name__ == "__main__":
    main()
