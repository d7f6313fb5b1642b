"""Following engines: one feed each, stopped before its next batch, begun again after a fault."""

from __future__ import annotations

import asyncio
import time

import pytest

from publisher.events import AllBlocksCleared, DecodedBatch
from publisher.zmq_publisher import ZmqPublisher
from router.feeds import manager as module
from router.feeds.base import FeedSettings
from router.feeds.manager import FeedManager
from router.fleet.engines import EngineAddress
from tests.router.feeds.feed_harness import NoSnapshots
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
    sink = Sink()
    sink.feeds = feeds = FeedManager(sink, clock=time.monotonic, settings=FeedSettings())
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
    publisher.close()


async def test_an_engine_may_be_followed_again_at_once() -> None:
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
