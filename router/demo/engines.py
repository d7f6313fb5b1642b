"""The demo's engines: a process of its own that runs simulated engines until its input closes.

Started by ``router.demo.run``; prints one JSON line with the base URLs once all of them listen. Being tied to
its standard input, it also ends when the demo is killed.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop

from publisher.engine import EngineSettings, SimulatedEngine


async def _serve(settings: list[EngineSettings]) -> None:
    engines = [SimulatedEngine(each) for each in settings]
    for engine in engines:
        await engine.start()
    print(msgspec.json.encode([engine.base_url for engine in engines]).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for engine in engines:
        await engine.stop()


def main() -> None:
    """Argument: the settings of each engine, as JSON."""
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=list[EngineSettings])))


if __name__ == "__main__":
    main()
