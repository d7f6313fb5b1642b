"""Time until a router that knows nothing is READY again, by replay, by snapshot and by Redis.

An engine process holds a million blocks (10,000 batches, all still to be replayed, and a ledger). A feed
is started cold, once with snapshots off and once with them on. Meanwhile the loop is asked for a turn every
millisecond: the longest wait is what a request would have waited at most. The engine keeps publishing.
By Redis (``recovery_redis.py``): another replica follows the engine; needs a server program on PATH.

    PYTHONPATH=. python benchmarks/recovery.py [BLOCKS]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import sys
import time
from multiprocessing.connection import Connection

import msgspec
import structlog
import uvloop

from benchmarks.recovery_redis import measure
from kvatlas.publisher.events import BlockStored, encode_batch, encode_tokens
from kvatlas.publisher.snapshot import SnapshotLedger
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.feeds.base import FeedSettings, FeedState
from kvatlas.router.feeds.subscriber import Feed
from kvatlas.router.index.base import Plane
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency

BATCHES = 10_000
BLOCK_TOKENS = 16
LIVE_PAUSE_S = 0.01
SERVER_PORT = 17390


def batch(number: int, blocks: int, publisher_id: bytes | None) -> bytes:
    """One prompt of its own, as an engine would store it."""
    first = (number + 1) << 32
    hashes = [(first + n) * 0x9E3779B97F4A7C15 & (1 << 64) - 1 for n in range(blocks)]
    tokens = encode_tokens([(number * 31 + n) % 50_000 for n in range(blocks * BLOCK_TOKENS)])
    event = BlockStored(
        list(hashes), first - 1, tokens, BLOCK_TOKENS, None, "GPU", None, None, 0, "full_attention"
    )
    return encode_batch(time.time(), [event], 0, publisher_id)


def engine(pipe: Connection, blocks: int) -> None:
    """The engine's process: publishes the past immediately, then continues slowly until it is stopped."""

    async def publish() -> None:
        publisher = ZmqPublisher(
            "tcp://127.0.0.1:*",
            replay_endpoint="tcp://127.0.0.1:*",
            buffer_steps=2 * BATCHES,
            ledger=SnapshotLedger(),
        )
        for number in range(BATCHES):
            publisher.publish_payload(batch(number, blocks // BATCHES, publisher.publisher_id))
        publisher.start()
        pipe.send((publisher.endpoint, publisher.replay_endpoint))
        number = BATCHES
        longest = 0.0
        while not pipe.poll():
            began = time.perf_counter()
            await asyncio.sleep(LIVE_PAUSE_S)
            longest = max(longest, time.perf_counter() - began - LIVE_PAUSE_S)
            publisher.publish_payload(batch(number, 4, publisher.publisher_id))
            number += 1
        pipe.send(longest)
        publisher.close()

    asyncio.run(publish())


async def recover(events: str, replay: str, settings: FeedSettings) -> tuple[float, float, FleetResidency]:
    """Seconds to READY, and the longest wait for a turn meanwhile."""
    fleet = FleetResidency(ModelFacts())
    feed = Feed("e", events, replay, "", fleet, settings=settings)
    waits = [0.0]

    async def serve() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            waits.append(time.perf_counter() - began - 0.001)

    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve())
        began = time.perf_counter()
        tasks.create_task(feed.run())
        while feed.state is not FeedState.READY:  # noqa: ASYNC110  # a feed has no event for it
            await asyncio.sleep(0.002)
        took = time.perf_counter() - began
        serving.cancel()
        held = fleet.index.copies("e", Plane("GPU", 0))
        feed.close()
    if held < BATCHES:
        raise RuntimeError(f"READY with {held} blocks")
    return took, max(waits), fleet


def main() -> None:
    """Print one line per way."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    base = FeedSettings(hold_s_max=60.0, replay_timeout_s=30.0)
    for name, settings in (
        ("replay", msgspec.structs.replace(base, snapshots=False)),
        ("snapshot", base),
    ):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=engine, args=(theirs, blocks))
        process.start()
        events, replay = ours.recv()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            took, wait, _ = runner.run(recover(events, replay, settings))
        ours.send("stop")
        pause = ours.recv()
        process.join()
        print(
            f"{name}: {blocks} blocks READY after {took:.2f} s; longest wait for a turn: router "
            f"{wait * 1e3:.0f} ms, publisher {pause * 1e3:.0f} ms"
        )
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        print("redis: no redis-server or valkey-server on PATH")
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        started = runner.run(measure(binary, blocks, SERVER_PORT))
    print(
        f"redis: {blocks} blocks, first exact prediction {started.first_exact * 1e3:.0f} ms after the start "
        f"of a replica beside another, {started.again:.2f} s after the server came back empty "
        f"({started.looks} looks without a hit meanwhile)"
    )


if __name__ == "__main__":
    main()
