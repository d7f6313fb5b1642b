"""The demo's engines: a separate process that runs simulated engines until its input closes.

Started by ``run.py``; prints one JSON line with the base URLs once all of them
listen. Since it depends on its standard input, it also ends when the demo is killed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import uvloop

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.config.errors import ConfigError


@contextmanager
def engine_process(settings: Sequence[EngineSettings]) -> Iterator[list[str]]:
    """Run simulated engines with these settings in a process; yields their base URLs."""
    command = [
        sys.executable,
        "-m",
        "kvatlas.router.simulation.demo.engines",
        msgspec.json.encode(settings).decode(),
    ]
    process = subprocess.Popen(  # noqa: S603  # our own module
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    if process.stdin is None or process.stdout is None:
        raise AssertionError("both were asked for")
    try:
        line = process.stdout.readline()
        if not line:
            raise ConfigError("the simulated engines did not start; their error is above")
        yield msgspec.json.decode(line, type=list[str])
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


async def _serve(settings: list[EngineSettings]) -> None:
    engines = [SimulatedEngine(each) for each in settings]
    for engine in engines:
        await engine.start()
    print(msgspec.json.encode([engine.base_url for engine in engines]).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for engine in engines:
        await engine.stop()


def main() -> None:
    """Run engines; the argument is their settings as JSON."""
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=list[EngineSettings])))


if __name__ == "__main__":
    main()
