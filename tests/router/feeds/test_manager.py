"""Following engines: one feed each, stopped before its next batch, begun again after a fault."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import AllBlocksCleared, DecodedBatch
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.feeds import manager as module
from kvatlas.router.feeds.base import FeedSettings, FeedState, FeedStats
from kvatlas.router.feeds.manager import FeedManager
from kvatlas.router.feeds.residency_audit import ResidencyAudit
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.status import EngineStatus
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.index.places import GPU
from tests.router.feeds.feed_harness import NoSnapshots
from tests.support.event_writer import Writer, batch, tokens
from tests.support.waiting import until


class Sink(NoSnapshots):
    """Remembers what it got; may stop the follower at a batch."""

    def __init__(self) -> None:
        self.applied: list[str] = []
        self.forgotten: list[str] = []
        self.feeds: FeedManager | None = None
        self.stop_at = 0

    def apply(self, engine_id: str, batch: DecodedBatch) -> None:
        self.applied.append(engine_id)
        if self.feeds is not None and len(self.applied) == self.stop_at:
            self.feeds.stop(engine_id)

    def forget(self, engine_id: str) -> None:
        self.forgotten.append(engine_id)


def publisher_of(count: int) -> ZmqPublisher:
    """A publisher with ``count`` batches to be replayed."""
    publisher = ZmqPublisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    publisher.start()
    for _ in range(count):
        publisher.publish([AllBlocksCleared()])
    return publisher


def engine_of(publisher: ZmqPublisher) -> EngineAddress:
    return EngineAddress("http://h:1", None, publisher.endpoint, publisher.replay_endpoint)


async def test_after_stop_not_one_batch_is_applied() -> None:
    sink, told = Sink(), list[FeedStats | None]()
    sink.feeds = feeds = FeedManager(
        sink,
        clock=time.monotonic,
        settings=FeedSettings(),
        on_change=lambda engine_id, stats: told.append(stats),
    )
    sink.stop_at = 50
    publisher = publisher_of(400)
    engine = engine_of(publisher)
    async with asyncio.TaskGroup() as tasks:
        feeds.follow(engine, "m", tasks)
        (task,) = [t for t in asyncio.all_tasks() if t.get_name().startswith("feed ")]
        await until(task.done, "the feed has ended")
    assert len(sink.applied) == 50
    assert sink.forgotten[-1] == engine.engine_id
    assert not feeds.follows(engine, "m")
    assert feeds.stats == {}
    feeds.stop(engine.engine_id)  # a second time: nothing
    assert told[-1] is None, "no state follows its end"
    publisher.close()


async def test_an_engine_may_be_followed_again_immediately() -> None:
    sink = Sink()
    feeds = FeedManager(sink, clock=time.monotonic, settings=FeedSettings())
    old, new = publisher_of(3), publisher_of(5)
    async with asyncio.TaskGroup() as tasks:
        feeds.follow(engine_of(old), "m", tasks)
        await until(lambda: len(sink.applied) == 3, "the old one's batches")
        assert feeds.follows(engine_of(old), "m")
        assert not feeds.follows(engine_of(old), "other")
        assert not feeds.follows(engine_of(new), "m")
        feeds.stop("http://h:1")
        feeds.follow(engine_of(new), "m", tasks)
        old.publish([AllBlocksCleared()])
        await until(lambda: len(sink.applied) == 8, "the new one's batches")
        assert feeds.stats["http://h:1"].batches == 5
        feeds.stop_all()
    assert len(sink.applied) == 8
    old.close()
    new.close()


async def test_a_feed_that_fails_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESTART_S", 0.01)

    sink = Sink()
    feeds = FeedManager(sink, clock=time.monotonic, settings=FeedSettings())
    async with asyncio.TaskGroup() as tasks:
        feeds.follow(EngineAddress("http://h:1", None, "tcp://not an endpoint"), "m", tasks)
        await until(lambda: len(sink.forgotten) > 2, "begun again and again")
        feeds.stop_all()
    assert sink.applied == []


def test_an_engine_with_more_blocks_than_its_pool_is_read_again() -> None:
    """Once, and not again for a minute; never while its feed is not ready or its pool unknown."""
    now, distrusted = [100.0], list[tuple[str, str]]()
    scopes = ModelIndexes(lambda model: ModelFacts())
    engine = scopes.assign("e", "m")
    engine.apply(batch(Writer(HashScheme()).stored(tokens(160))))
    held = scopes.scope("m").index.physical("e", GPU)
    assert held > 5
    feeds = FeedManager(scopes, clock=lambda: now[0], settings=FeedSettings())
    feeds.distrust = lambda engine_id, reason: distrusted.append((engine_id, reason))  # type: ignore[method-assign]
    stats = FeedStats(state=FeedState.READY)
    feeds._followed["e"] = cast("module._Followed", SimpleNamespace(feed=SimpleNamespace(stats=stats)))
    audit = ResidencyAudit((), scopes, feeds, clock=lambda: now[0])

    def look(pool_blocks: int | None) -> int:
        before = len(distrusted)
        audit.audit(cast("EngineStatus", SimpleNamespace(engine_id="e", pool_blocks=pool_blocks)))
        return len(distrusted) - before

    assert [look(None), look(held), look(held - 1)] == [0, 0, 1]
    assert (distrusted, stats.phantom_alarms) == ([("e", "phantom")], 1)
    now[0] += 59.0
    assert look(held - 1) == 0
    now[0] += 2.0
    stats.state = FeedState.REPLAYING
    assert look(held - 1) == 0
    stats.state = FeedState.READY
    assert look(held - 1) == 1
