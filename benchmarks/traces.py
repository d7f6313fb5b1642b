"""Cost of OpenTelemetry: CPU time of ``kvatlas serve`` per request, with traces off and sampled.

    python benchmarks/traces.py [--rounds 12] [--requests 400] [--ratio 0.01] [--out F]

Two routers in processes of their own before the same simulated engine, one of them with ``traces.endpoint``
at a collector that takes everything. They get the same streamed chats in turn, round after round, and the
order changes with each; counted is the CPU time of all threads of each process, export included. Figures are
of pairs of rounds, so what else the machine does meanwhile meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from http import HTTPStatus
from pathlib import Path

import aiohttp
from aiohttp import web

from benchmarks.routing import put
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR, EngineSettings
from kvatlas.router.simulation.demo.engines import engine_process

ENGINE = EngineSettings(prefill_s_per_token=1e-7, decode_s_per_token=1e-5)
CLIENTS = 8
TEXT = "The quick router reads a long story about a small engine and its famous garden. "


class Serving:
    """One ``kvatlas serve``."""

    def __init__(self, engine: str, *settings: str) -> None:
        self._words = ["-m", "kvatlas", "serve", "--engine", engine, "--tokenizer", str(DEMO_TOKENIZER_DIR)]
        self._words += ["--port", "0", "--ops-port", "off", "--set", "server.log_format=json"]
        for setting in settings:
            self._words += ["--set", setting]

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Until it is ready."""
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(sys.executable, *self._words, stderr=pipe)
        stderr = self.process.stderr
        while stderr is not None and (line := await stderr.readline()):
            if b'"listening"' in line:
                self.url = line.partition(b'"url": "')[2].partition(b'"')[0].decode()
                break
        while True:
            async with session.get(f"{self.url}/ready") as answer:
                if answer.status == HTTPStatus.OK:
                    return
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """SIGTERM, and its end."""
        if hasattr(self, "process"):
            self.process.terminate()
            await self.process.communicate()

    def cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


async def load(session: aiohttp.ClientSession, router: Serving, requests: int, round_number: int) -> None:
    """This many chats, a few at a time."""
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            text = f"{round_number}.{number % 20} " + TEXT * 20
            message = {"role": "user", "content": text}
            body = {"model": ENGINE.model, "messages": [message], "max_tokens": 4, "stream": True}
            async with session.post(f"{router.url}/v1/chat/completions", json=body) as answer:
                await answer.read()
                answer.raise_for_status()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def pair_of_rounds(
    session: aiohttp.ClientSession, off: Serving, on: Serving, requests: int, number: int
) -> tuple[float, float]:
    """CPU seconds per request of each."""
    used: dict[Serving, float] = {}
    for router in (off, on) if number % 2 else (on, off):
        before = router.cpu_s()
        await load(session, router, requests, number)
        used[router] = (router.cpu_s() - before) / requests
    return used[off], used[on]


async def measure(rounds: int, requests: int, ratio: float) -> str:
    """The report."""
    received = 0

    async def take(request: web.Request) -> web.Response:
        nonlocal received
        received += len(await request.read())
        return web.Response()

    collector = web.Application()
    collector.router.add_post("/v1/traces", take)
    runner = web.AppRunner(collector)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
    with engine_process([ENGINE]) as (engine,):
        off = Serving(engine)
        on = Serving(engine, f"traces.endpoint={endpoint}", f"traces.sample_ratio={ratio}")
        try:
            async with aiohttp.ClientSession() as session:
                for router in (off, on):
                    await router.start(session)
                    await load(session, router, requests, -1)
                spent = [await pair_of_rounds(session, off, on, requests, n) for n in range(rounds)]
        finally:
            for router in (off, on):
                await router.stop()
    await runner.cleanup()
    ratios = sorted(with_s / without_s for without_s, with_s in spent)
    middle = statistics.median(ratios)
    return (
        f"{rounds} pairs of rounds of {requests} streamed chats, {ratio:.0%} sampled; the collector got "
        f"{received} bytes.\n\n"
        "| | CPU per request, median |\n| --- | --- |\n"
        f"| traces off | {statistics.median(pair[0] for pair in spent) * 1e6:.0f} us |\n"
        f"| traces on | {statistics.median(pair[1] for pair in spent) * 1e6:.0f} us |\n"
        f"| on over off, median of pairs | {middle:.3f} "
        f"(quartiles {ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}) |\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--out", type=Path, help="the report; default: standard output")
    options = parser.parse_args()
    put(asyncio.run(measure(options.rounds, options.requests, options.ratio)), options.out)


if __name__ == "__main__":
    main()
