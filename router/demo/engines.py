"""The demo's engines: a process of its own that runs N simulated engines until its input closes.

Started by ``router.demo.run``; prints one JSON line with the base URLs once all of them listen. Being tied to
its standard input, it also ends when the demo is killed.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop

from publisher.engine import EngineSettings, SimulatedEngine


async def _serve(count: int, settings: EngineSettings) -> None:
    engines = [SimulatedEngine(settings) for _ in range(count)]
    for engine in engines:
        await engine.start()
    print(msgspec.json.encode([engine.base_url for engine in engines]).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for engine in engines:
        await engine.stop()


def main() -> None:
    """Arguments: the number of engines, and ``EngineSettings`` as JSON."""
    uvloop.run(_serve(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=EngineSettings)))


if __name__ == "__main__":
    main()
