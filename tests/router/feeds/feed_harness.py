"""A feed under test over ZMQ, with a recording sink."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import zmq

from kvatlas.publisher.events import DecodedBatch
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.feeds.base import FeedSettings, FeedSink
from kvatlas.router.feeds.subscriber import Feed

ANY = "tcp://127.0.0.1:*"
FAST = FeedSettings(
    replay_timeout_s=0.3, replay_backoff_s=0.02, hold_s_max=1.0, resync_backoff_s=0.2, tick_s=0.02
)


class NoSnapshots:
    """The part of a sink that takes snapshots, where none may come."""

    def stage(self, engine_id: str, batch: DecodedBatch) -> None:
        raise AssertionError("no snapshots here")

    def adopt(self, engine_id: str) -> None:
        raise AssertionError("no snapshots here")

    def unstage(self, engine_id: str) -> None:
        pass


class RecordingSink(NoSnapshots):
    """Keeps the time stamps of what was applied since the last ``forget``."""

    def __init__(self) -> None:
        self.batches: list[DecodedBatch] = []
        self.forgets = 0

    @property
    def stamps(self) -> list[float]:
        return [batch.ts for batch in self.batches]

    def apply(self, engine_id: str, batch: DecodedBatch) -> None:
        assert engine_id == "e"
        self.batches.append(batch)

    def forget(self, engine_id: str) -> None:
        assert engine_id == "e"
        self.batches.clear()
        self.forgets += 1


@asynccontextmanager
async def following(
    events: str,
    replay: str | None,
    sink: FeedSink,
    *,
    topic: str = "",
    settings: FeedSettings = FAST,
    snapshot: str | None = None,
) -> AsyncIterator[Feed]:
    """A running feed in its own ZMQ context, closed at the end."""
    with zmq.Context() as context:
        feed = Feed(
            "e", events, replay, topic, sink, settings=settings, context=context, snapshot_endpoint=snapshot
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed.run())
            try:
                yield feed
            finally:
                feed.close()


@asynccontextmanager
async def followed(
    context: zmq.Context, sink: FeedSink, history: Iterable[bytes] = ()
) -> AsyncIterator[tuple[ZmqPublisher, Feed]]:
    """A publisher with a replay socket that has published these payloads, and a running feed of it."""
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, context=context)
    publisher.start()
    for payload in history:
        publisher.publish_payload(payload)
    try:
        async with following(publisher.endpoint, publisher.replay_endpoint, sink) as feed:
            yield publisher, feed
    finally:
        publisher.close()
