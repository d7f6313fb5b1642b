"""A feed behind a bad network follows vLLM's own publisher: real sockets, random faults, the pool as truth.

``KVATLAS_FAULT_SEEDS=50`` runs more seeds, ``KVATLAS_FAULT_SEED=17`` one of them. Faults are drawn from the
seed; when they happen is up to the machine. Judged all the time:

- READY means that the index is the truth as of the batch applied last, block by block and copy by copy;
- batches are applied in order, once, and never those of two processes on top of each other;
- what a clear or another process took is not held beyond the window that docs/feeds.md gives.

Once the network is calm the feed must be at the last batch; and READY, where the publisher's buffer still has
everything, otherwise after the next cache clear.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
import zmq

from kvatlas.publisher.events import (
    AllBlocksCleared,
    BlockHash,
    BlockStored,
    DecodedBatch,
    Event,
    to_block_hash,
)
from kvatlas.router.feeds.base import FeedSettings, FeedState
from kvatlas.router.feeds.frames import Frame
from kvatlas.router.feeds.subscriber import Feed
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.model import FleetResidency
from tests.support.feed_world import LAYOUTS, Engine, Held, credited
from tests.vllm.fault_network import FaultyNetwork
from tests.vllm.publisher_process import VllmPublisher, publisher_process

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ONE = os.environ.get("KVATLAS_FAULT_SEED")
SEEDS = [int(ONE)] if ONE else range(int(os.environ.get("KVATLAS_FAULT_SEEDS", "6")))
SETTINGS = FeedSettings(
    hold_batches_max=256,
    hold_s_max=1.0,
    recent_batches_max=64,
    replay_timeout_s=0.5,
    replay_backoff_s=0.02,
    resync_backoff_s=0.2,
    resync_backoff_s_max=1.0,
    tick_s=0.02,
)
LOOK_S = 0.02
WINDOW_LOOKS = int(2 * SETTINGS.hold_s_max / LOOK_S)
"""Looks at the index while it may hold what a new process has not: twice the documented window, in turns of
the loop, so that a machine that stands still does not count."""
SETTLE_S = 90.0
STAMP = 1_000_000
"""Batch ``seq`` of process ``n`` has the time stamp ``n * STAMP + seq``."""


class Process(Engine):
    """A publisher's life: what its pool did, batch by batch, and what it held then."""

    def __init__(self, number: int, groups: Any, blocks: int) -> None:
        super().__init__(number, groups, blocks=blocks, identified=False)
        self.stored: set[BlockHash] = set()

    def batch(self) -> list[Any] | None:
        """Events since the last call, in the form of ``vllm_event_publisher.py``."""
        events = self.pool.take_events()
        if not events:
            return None
        seq = len(self.truth)
        self.truth.append(self.held())
        self.eras.append(self.era)
        self.cleared.append(any(isinstance(event, AllBlocksCleared) for event in events))
        for event in events:
            if isinstance(event, BlockStored):
                self.stored.update(map(to_block_hash, event.block_hashes))
        return [float(self.number * STAMP + seq), [spec(event) for event in events]]


def spec(event: Event) -> dict[str, Any]:
    """The keyword arguments of vLLM's event."""
    required = {"parent_block_hash", "lora_id", "lora_name", "medium"}
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(event).items()
        if value is not None or (isinstance(event, BlockStored) and name in required)
    }
    if isinstance(event, BlockStored):
        fields["token_ids"] = event.tokens()
    return {"type": type(event).__name__, **fields}


class Judge:
    """The feed's sink: the real index, and what must hold; ``wrong``: the first that did not."""

    def __init__(self) -> None:
        self.fleet = FleetResidency(ModelFacts(), MemoryIndex())
        self.processes: list[Process] = []
        self.followed: tuple[int, int] | None = None
        self.heard = 0
        self.looks = 0
        self.wrong = ""

    def apply(self, engine_id: str, batch: DecodedBatch) -> None:
        process, seq = divmod(int(batch.ts), STAMP)
        if self.followed is not None and (process, seq) <= self.followed:
            self._complain(f"{(process, seq)} applied after {self.followed}")
        if self.followed is not None and process != self.followed[0]:
            self._complain(f"{(process, seq)} applied on top of {self.followed}")
        if batch.rejected:
            self._complain(f"rejected: {batch.rejected}")
        self.fleet.apply(engine_id, batch)
        self.followed = process, seq

    def forget(self, engine_id: str) -> None:
        self.fleet.forget(engine_id)
        self.followed = None

    def stage(self, engine_id: str, batch: DecodedBatch) -> None:
        self._complain("a snapshot, of a publisher that has none")

    def adopt(self, engine_id: str) -> None:
        self._complain("a snapshot, of a publisher that has none")

    def unstage(self, engine_id: str) -> None:
        self.fleet.unstage(engine_id)

    def held(self) -> Held:
        blocks = [block for process in self.processes for block in process.stored]
        return credited(self.fleet, self.processes[0].groups, blocks)

    def look(self, state: FeedState) -> None:
        """Invariants of every moment."""
        held = self.held()
        if self.followed is None:
            if held:
                self._complain("credited, though everything was to be forgotten")
            return
        process, seq = self.followed
        self.looks = self.looks + 1 if process < self.heard else 0
        if self.looks > WINDOW_LOOKS:
            self._complain(f"credited from process {process}, long after {self.heard} was heard")
        foreign = {block for _, block in held} - self.processes[process].stored
        if foreign:
            self._complain(f"credited with {len(foreign)} blocks that this process never stored")
        if state is FeedState.READY:
            truth = self.processes[process].truth[seq]
            if set(held) != set(truth):
                self._complain(f"READY at {self.followed}, and wrong by {set(held) ^ set(truth)}")
            if self.fleet.index.physical("e", "GPU") != sum(truth.values()):
                self._complain(f"READY at {self.followed}, copies wrong")

    def _complain(self, what: str) -> None:
        self.wrong = self.wrong or what


class World:
    """vLLM's publisher, the network and a feed."""

    def __init__(self, seed: int, publisher: VllmPublisher) -> None:
        self.rng = random.Random(seed)
        self.publisher = publisher
        self.groups = self.rng.choice(LAYOUTS)
        self.blocks = self.rng.choice((24, 40, 90))
        self.ring = self.rng.choice((5, 40, 10_000, 10_000))
        self.judge = Judge()
        self._new_process()
        publisher.open(topic="kv", buffer_steps=self.ring)
        self.network = FaultyNetwork(seed + 1, publisher.endpoint, publisher.replay_endpoint)

    @property
    def process(self) -> Process:
        return self.judge.processes[-1]

    def _new_process(self) -> None:
        self.judge.processes.append(Process(len(self.judge.processes), self.groups, self.blocks))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Feed]:
        with zmq.Context() as context:
            async with self.network, asyncio.TaskGroup() as tasks:
                addresses = self.network.events, self.network.replay
                feed = Feed("e", *addresses, "kv", self.judge, settings=SETTINGS, context=context)
                self._listen(feed)
                tasks.create_task(feed.run())
                looking = tasks.create_task(self._look(feed))
                try:
                    yield feed
                finally:
                    looking.cancel()
                    feed.close()

    def _listen(self, feed: Feed) -> None:
        """Notes which process the feed has heard of."""
        machine = feed._machine
        live = machine.live

        def noted(now: float, frame: Frame) -> Any:
            if frame.batch is not None:
                self.judge.heard = max(self.judge.heard, int(frame.batch.ts) // STAMP)
            return live(now, frame)

        machine.live = noted  # type: ignore[method-assign]

    async def _look(self, feed: Feed) -> None:
        while True:
            self.judge.look(feed.state)
            await asyncio.sleep(LOOK_S)

    # What happens.

    async def publish(self, batches: int = 1) -> None:
        for _ in range(batches):
            for _ in range(self.rng.randint(1, 3)):
                self.process.work(self.rng)
            if (batch := self.process.batch()) is not None:
                await asyncio.to_thread(self.publisher.call, "publish", [batch])

    async def reset(self) -> None:
        """The cache is emptied; with the first blocks stored after it, that is published."""
        self.process.reset()
        await self.publish()

    async def cut(self) -> None:
        await self.network.down()
        await self.publish(self.rng.choice((0, 0, 1, 8)))
        await self.network.up()

    async def restart(self) -> None:
        await self.network.down()
        await asyncio.to_thread(self.publisher.restart)
        self._new_process()
        await self.publish(self.rng.choice((0, 1, 3)))
        await self.network.up()
        await self.publish(self.rng.choice((0, 1, 3)))

    async def pause(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 0.3))

    def script(self) -> Iterator[Callable[[], Any]]:
        steps = [(self.publish, 30), (self.pause, 20), (self.reset, 2), (self.cut, 3), (self.restart, 2)]
        steps.append((lambda: self.publish(12), 4))
        kinds, weights = zip(*steps, strict=True)
        yield from self.rng.choices(kinds, weights, k=self.rng.randint(30, 60))

    async def settle(self, feed: Feed) -> None:
        """The network is calm: whatever can be repaired is."""
        self.network.calm = True
        await self._caught_up(feed)
        if self.ring < len(self.process.truth) and feed.state is not FeedState.READY:
            assert feed.stats.missing_batches > 0 or feed.stats.reason == "unverified", feed.stats
            await self.reset()

        async def news() -> None:
            """Batches still to be sent again may leave the ring meanwhile, on a slow machine."""
            await (self.reset() if feed.stats.reason == "history_rolled" else self.publish())

        await self._until(lambda: feed.state is FeedState.READY and self.judge.followed == self._last(), news)

    async def _caught_up(self, feed: Feed) -> None:
        """At the last batch. News is needed now and then: it shows what was lost before it."""
        waiting = {FeedState.REPLAYING, FeedState.COLD}
        await self._until(
            lambda: self.judge.followed == self._last() and feed.state not in waiting, self.publish
        )

    def _last(self) -> tuple[int, int]:
        return self.process.number, len(self.process.truth) - 1

    async def _until(self, reached: Callable[[], bool], news: Callable[[], Any]) -> None:
        async with asyncio.timeout(SETTLE_S):
            while not reached() and not self.judge.wrong:
                await news()
                with suppress(TimeoutError):
                    async with asyncio.timeout(2 * SETTINGS.hold_s_max):
                        while not reached() and not self.judge.wrong:
                            await asyncio.sleep(LOOK_S)


@pytest.fixture(scope="module")
def publisher(vllm_python: str) -> Iterator[VllmPublisher]:
    with publisher_process(vllm_python, VllmPublisher) as process:
        yield process


@pytest.fixture(scope="module")
def seen() -> Iterator[Counter[str]]:
    """Events of all seeds together."""
    counts: Counter[str] = Counter()
    yield counts
    if not ONE:  # the faults really happened, and were met
        for what in ("restarts", "gaps", "replays", "disconnects", "drop", "twice", "overtaken", "silent"):
            assert counts[what] > 0, counts


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_and_nothing_is_invented(
    seed: int, publisher: VllmPublisher, seen: Counter[str]
) -> None:
    async def scenario() -> None:
        world = World(seed, publisher)
        judge = world.judge
        async with world.running() as feed:
            for step in world.script():
                await step()
                if judge.wrong:
                    break
            try:
                await world.settle(feed)
            except TimeoutError:
                judge._complain(f"not settled: {feed.stats}, at {judge.followed}, not {world._last()}")
            judge.look(feed.state)
            stats = feed.stats
            assert not judge.wrong, f"{judge.wrong}; ring {world.ring}, {stats}"
            assert (stats.sink_errors, stats.rejected_events, stats.malformed_frames) == (0, 0, {})
            assert set(judge.held()) == set(world.process.held())
            assert judge.fleet.index.check_integrity() == []
        seen.update(world.network.fates)
        seen.update({name: getattr(stats, name) for name in ("restarts", "gaps", "replays", "disconnects")})

    try:
        asyncio.run(scenario())
    finally:
        publisher.close()
