"""Feeds over ZMQ, against our own publisher and against hand-made ones."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import structlog
import zmq

from kvatlas.publisher.events import (
    UNKNOWN_TYPES_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    encode_batch,
)
from kvatlas.publisher.zmq_publisher import END_SEQ, ZmqPublisher
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.frames import REASONS
from tests.router.feeds.feed_harness import ANY, FAST, RecordingSink, followed, following
from tests.support.waiting import until


def batch(number: int) -> bytes:
    return encode_batch(float(number), [BlockRemoved([number], "GPU", 0)], 0)


def publish(publisher: ZmqPublisher, count: int) -> None:
    for _ in range(count):
        publisher.publish_payload(batch(publisher.next_seq))


def history(count: int) -> list[bytes]:
    return [batch(number) for number in range(count)]


def stamps(count: int) -> list[float]:
    return [float(number) for number in range(count)]


async def test_late_start_gets_history_by_replay_then_live(context: zmq.Context, sink: RecordingSink) -> None:
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, topic="kv", context=context)
    publisher.start()
    publish(publisher, 2000)
    async with following(publisher.endpoint, publisher.replay_endpoint, sink, topic="kv") as feed:
        await until(lambda: feed.state is FeedState.READY and len(sink.batches) == 2000)
        publish(publisher, 10)
        await until(
            lambda: feed.state is FeedState.READY and len(sink.batches) >= 2010,
            meanwhile=lambda: publish(publisher, 1),
        )
        assert sink.stamps == stamps(len(sink.batches))
        assert feed.stats.events == feed.stats.batches == len(sink.batches)
        assert feed.stats.lag_s is not None
    assert sink.forgets == 1  # the feed was removed
    publisher.close()


async def test_an_engine_without_a_history_is_ready_by_its_answer(
    context: zmq.Context, sink: RecordingSink
) -> None:
    async with followed(context, sink) as (_, feed):
        await until(lambda: feed.state is FeedState.READY)
        assert (feed.stats.replays, feed.stats.replay_failures) == (1, 0)


async def test_a_gap_is_repaired_by_replay(context: zmq.Context, sink: RecordingSink) -> None:
    async with followed(context, sink) as (publisher, feed):
        await until(lambda: feed.stats.batches > 0, meanwhile=lambda: publish(publisher, 1))
        while publisher.next_seq % 50:
            publish(publisher, 1)
        kept_for_replay_only = publisher.next_seq
        publisher._ring.append((kept_for_replay_only, batch(kept_for_replay_only)))
        publisher._next_seq += 1
        publish(publisher, 5)
        await until(lambda: len(sink.batches) == publisher.next_seq)
        assert sink.stamps == stamps(publisher.next_seq)
        await until(lambda: feed.state is FeedState.READY)  # once the replay has ended
        assert feed.stats.gaps >= 1
        assert feed.stats.lost_batches == 0


async def test_restart_in_place_with_its_first_batches_unheard(
    context: zmq.Context, sink: RecordingSink
) -> None:
    first = ZmqPublisher(ANY, replay_endpoint=ANY, context=context)
    first.start()
    endpoint, replay = first.endpoint, first.replay_endpoint
    async with following(endpoint, replay, sink) as feed:
        await until(lambda: feed.stats.batches >= 5, meanwhile=lambda: publish(first, 1))
        first.close()
        await until(lambda: feed.stats.disconnects > 0)
        assert feed.state is not FeedState.READY
        second = await rebind(context, endpoint, replay)
        for number in range(40):  # more than before: the seq alone would look like a gap
            second.publish_payload(batch(1000 + number))
        second.start()
        await until(lambda: feed.state is FeedState.READY)
        await until(lambda: sink.stamps == [1000.0 + number for number in range(40)])
        assert feed.stats.restarts == 1
        second.close()


async def rebind(context: zmq.Context, endpoint: str, replay: str | None) -> ZmqPublisher:
    """The same ports again, as soon as the closed sockets have released them."""
    for _ in range(1000):
        try:
            return ZmqPublisher(endpoint, replay_endpoint=replay, context=context)
        except zmq.ZMQError:
            await asyncio.sleep(0.01)
    raise TimeoutError(endpoint)


async def test_without_replay_an_unknown_history_shows_until_a_cache_clear(
    context: zmq.Context, sink: RecordingSink
) -> None:
    publisher = ZmqPublisher(ANY, context=context)
    publish(publisher, 7)
    async with following(publisher.endpoint, None, sink) as feed:
        await until(lambda: feed.stats.batches > 0, meanwhile=lambda: publish(publisher, 1))
        assert (feed.state, feed.stats.reason) == (FeedState.DEGRADED, "history_unknown")
        assert feed.stats.missing_batches == sink.stamps[0] >= 7
        publisher.publish([AllBlocksCleared()])
        await until(lambda: feed.state is FeedState.READY)
    publisher.close()


async def test_a_silent_replay_socket_costs_completeness_but_not_live_events(
    context: zmq.Context, sink: RecordingSink
) -> None:
    publisher = ZmqPublisher(ANY, context=context)
    mute = context.socket(zmq.ROUTER)
    port = mute.bind_to_random_port("tcp://127.0.0.1")
    publish(publisher, 3)
    async with following(publisher.endpoint, f"tcp://127.0.0.1:{port}", sink) as feed:
        await until(lambda: feed.stats.batches > 10, meanwhile=lambda: publish(publisher, 1))
        await until(lambda: feed.state is FeedState.DEGRADED)
        assert feed.stats.replay_failures > 0
        assert feed.stats.missing_batches == sink.stamps[0]
        assert sink.stamps == [sink.stamps[0] + n for n in range(len(sink.stamps))]
    mute.close(linger=0)
    publisher.close()


async def test_replay_answers_of_older_publishers_have_no_topic_frame(
    context: zmq.Context, sink: RecordingSink
) -> None:
    publisher = ZmqPublisher(ANY, context=context)
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with following(publisher.endpoint, f"tcp://127.0.0.1:{port}", sink) as feed:
        await until(lambda: bool(router.poll(0)))
        peer, _, start = router.recv_multipart()
        assert start == b"snapshot"  # which such a publisher takes for a seq
        router.send_multipart([peer, b"", END_SEQ, b""])
        await until(lambda: bool(router.poll(0)))
        peer, _, start = router.recv_multipart()
        assert start == bytes(8)
        for number in (0, 1, 1, 2):
            router.send_multipart([peer, b"", number.to_bytes(8, "big"), batch(number)])
        router.send_multipart([peer, b"", END_SEQ, b""])
        await until(lambda: feed.state is FeedState.READY)
        assert sink.stamps == stamps(3)
    router.close(linger=0)
    publisher.close()


BAD_MESSAGES: dict[str, tuple[list[bytes], str]] = {
    "one frame": ([b"x"], "frame_count"),
    "four frames": ([b"", bytes(8), b"", b""], "frame_count"),
    "short seq": ([b"", b"\0" * 7, batch(0)], "seq_length"),
    "long seq": ([b"", b"\0" * 9, batch(0)], "seq_length"),
    "negative seq": ([b"", b"\xff" * 8, batch(0)], "seq_range"),
    "truncated msgpack": ([b"", b"SEQ", batch(0)[:-3]], "payload_undecodable"),
    "empty payload": ([b"", b"SEQ", b""], "payload_undecodable"),
    "not a batch": ([b"", b"SEQ", msgspec.msgpack.encode({"a": 1})], "payload_undecodable"),
    "events not a list": ([b"", b"SEQ", msgspec.msgpack.encode([1.0, "x", 0])], "payload_undecodable"),
    "array said to be huge": ([b"", b"SEQ", b"\x93\x01\xdd\xff\xff\xff\xff"], "payload_undecodable"),
    "too large": ([b"", b"SEQ", bytes(5000)], "payload_oversize"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_malformed_messages_are_counted_by_name_and_the_feed_lives_on(
    name: str, context: zmq.Context, sink: RecordingSink
) -> None:
    frames, reason = BAD_MESSAGES[name]
    assert reason in REASONS
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    settings = msgspec.structs.replace(FAST, payload_bytes_max=4000)
    async with following(f"tcp://127.0.0.1:{port}", None, sink, settings=settings) as feed:
        seq = 0

        def send() -> None:
            nonlocal seq
            publisher.send_multipart([b"", seq.to_bytes(8, "big"), batch(seq)])
            seq += 1

        await until(lambda: feed.stats.batches > 0, meanwhile=send)
        first = int(sink.stamps[0])
        spends_seq = b"SEQ" in frames
        bad_seq = seq
        publisher.send_multipart([seq.to_bytes(8, "big") if f == b"SEQ" else f for f in frames])
        seq += spends_seq
        send()
        await until(lambda: sink.stamps[-1:] == [seq - 1.0])
        good = [float(n) for n in range(first, seq) if not (spends_seq and n == bad_seq)]
        assert sink.stamps == good
        assert feed.stats.malformed_frames == {reason: 1}
        assert feed.stats.lost_batches == spends_seq
        assert (feed.stats.gaps, feed.stats.restarts, sink.forgets) == (0, 0, 0)
    publisher.close(linger=0)


async def test_bad_events_cost_themselves_only(context: zmq.Context, sink: RecordingSink) -> None:
    events = [
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"},
        {"type": "BlockTeleported", "to": "moon"},
        {"type": "BlockStored", "block_hashes": [1]},
        {"type": "BlockRemoved", "block_hashes": "x", "medium": "GPU"},
        {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "group_idx": -1},
        {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU", "group_idx": 10**9},
        {
            "type": "BlockStored",
            "block_hashes": [4],
            "parent_block_hash": None,
            "token_ids": [1],
            "block_size": -16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "news": [1, 2]},
        7,
        None,
    ]
    async with followed(context, sink, [msgspec.msgpack.encode([1.0, events, 0])]) as (_, feed):
        await until(lambda: feed.state is FeedState.READY)
        assert sink.batches[0].events == [BlockRemoved([1], "GPU"), BlockRemoved([5], "GPU")]
        assert (feed.stats.events, feed.stats.rejected_events, feed.stats.unknown_events) == (2, 7, 1)
        assert feed.stats.malformed_frames == {}


async def test_an_unknown_type_is_logged_once(context: zmq.Context, sink: RecordingSink) -> None:
    """The number of types kept apart is bounded, whatever a publisher sends."""
    inactive = [{"type": "BlockInactive", "block_hashes": [number]} for number in range(3)]
    many = [{"type": f"New{number}"} for number in range(40)]
    payloads = [msgspec.msgpack.encode([1.0, events, 0]) for events in (inactive, inactive, many)]
    with structlog.testing.capture_logs() as logs:
        async with followed(context, sink, payloads) as (_, feed):
            await until(lambda: feed.state is FeedState.READY)
            assert (feed.stats.unknown_events, feed.stats.rejected_events) == (46, 0)
    types = [line["type"] for line in logs if line["event"] == "events of an unknown type are skipped"]
    assert types == ["BlockInactive", *(f"New{number}" for number in range(UNKNOWN_TYPES_MAX - 1))]


async def test_a_burst_is_worked_off_in_slices(context: zmq.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work of the loop gets its turn between batches, however many are waiting."""
    monkeypatch.setattr("kvatlas.router.feeds.sockets.SLICE_S", 0.0)

    class SlowSink(RecordingSink):
        turns_seen: set[int]

        def apply(self, engine_id: str, batch: DecodedBatch) -> None:
            super().apply(engine_id, batch)
            self.turns_seen.add(turn)

    turn = 0
    sink = SlowSink()
    sink.turns_seen = set()
    async with followed(context, sink, history(3000)):
        while len(sink.batches) < 3000:
            turn += 1
            await asyncio.sleep(0)
    assert len(sink.turns_seen) > 1000


async def test_a_sink_that_fails_degrades_the_feed_and_no_more(context: zmq.Context) -> None:
    class FailingSink(RecordingSink):
        refused = 0

        def apply(self, engine_id: str, batch: DecodedBatch) -> None:
            if batch.ts == 1.0:
                self.refused += 1
                raise KeyError("index")
            super().apply(engine_id, batch)

    sink = FailingSink()
    async with followed(context, sink, history(3)) as (_, feed):
        await until(lambda: sink.stamps == [0.0, 2.0])
        await until(lambda: (feed.state, feed.stats.reason) == (FeedState.DEGRADED, "sink_error"))
        assert feed.stats.sink_errors == sink.refused > 0  # the missing batch is fetched again and again


async def test_close_before_anything_was_heard_and_twice(sink: RecordingSink) -> None:
    async with following("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", sink) as feed:
        assert feed.state is FeedState.COLD
        feed.close()
        feed.close()
    assert sink.forgets == 1


async def test_cancelling_run_ends_it_without_leaks(context: zmq.Context, sink: RecordingSink) -> None:
    async def follow() -> None:
        async with followed(context, sink, history(5)):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(follow())
    await until(lambda: len(sink.batches) == 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_large_batch_is_handed_on_in_pieces_in_order(
    context: zmq.Context, sink: RecordingSink
) -> None:
    async with followed(context, sink) as (publisher, feed):
        await until(lambda: feed.stats.batches > 0, meanwhile=lambda: publish(publisher, 1))
        large = publisher.next_seq
        removed = [BlockRemoved([number], "GPU", 0) for number in range(1000)]
        publisher.publish_payload(encode_batch(float(large), [*removed], 0))
        publish(publisher, 1)
        await until(lambda: sink.stamps[-1:] == [large + 1.0])
        pieces = [one for one in sink.batches if one.ts == large]
        assert [event for piece in pieces for event in piece.events] == removed
        assert max(len(piece.events) for piece in pieces) <= 100
        assert feed.stats.batches == large + 2
        assert sink.stamps == sorted(sink.stamps)


async def test_no_piece_of_a_large_batch_divides_the_stores_of_one_request(
    context: zmq.Context, sink: RecordingSink
) -> None:
    """Reports of hits and stores are distinguished by all groups of a request."""
    groups = 5
    stored = [
        BlockStored(
            [number], None, msgspec.Raw(msgspec.msgpack.encode([1] * 16)), 16, medium="GPU", group_idx=group
        )
        for number in range(100)
        for group in range(groups)
    ]
    async with followed(context, sink) as (publisher, feed):
        await until(lambda: feed.stats.batches > 0, meanwhile=lambda: publish(publisher, 1))
        large = publisher.next_seq
        publisher.publish_payload(encode_batch(float(large), [*stored], 0))
        await until(lambda: feed.stats.batches == large + 1)
        pieces = [one.events for one in sink.batches if one.ts == large]
    assert len(pieces) > 3
    assert [len(piece) % groups for piece in pieces] == [0] * len(pieces)


async def test_a_feed_that_connects_again_asks_for_what_it_missed(
    context: zmq.Context, sink: RecordingSink
) -> None:
    async with followed(context, sink) as (publisher, feed):
        await until(lambda: feed.stats.batches > 0, meanwhile=lambda: publish(publisher, 1))
        await until(lambda: feed.state is FeedState.READY and feed.stats.batches == publisher.next_seq)
        feed.reconnect()
        publish(publisher, 20)
        await until(
            lambda: feed.state is FeedState.READY and len(sink.batches) == publisher.next_seq,
            meanwhile=lambda: publish(publisher, publisher.next_seq < 200),
        )
        assert feed.stats.disconnects == 1
        assert feed.stats.lost_batches == 0
        assert sink.stamps == stamps(publisher.next_seq)
    feed.reconnect()  # has ended: nothing to connect
