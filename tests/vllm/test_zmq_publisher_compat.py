"""Our publisher and vLLM's speak alike, byte for byte, and our feed follows vLLM's through its mishaps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvatlas.publisher.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, encode_tokens
from kvatlas.publisher.zmq_publisher import END_SEQ, ZmqPublisher
from kvatlas.router.feeds.base import FeedSettings, FeedState
from tests.router.feeds import feed_harness
from tests.router.feeds.feed_harness import RecordingSink
from tests.support.ports import free_port
from tests.support.waiting import until
from tests.vllm.publisher_process import VllmPublisher, publisher_process

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ANY = "tcp://127.0.0.1:*"
# Deadlines fit a busy machine: if an engine's process gets no processor for some seconds, the feed rightly
# gives a repair up and counts lost batches.
SETTINGS = FeedSettings(tick_s=0.05, hold_s_max=120.0, replay_timeout_s=60.0)
# Where vLLM's replay socket drops the end of an answer, only silence says so: several times within a test.
OFTEN = msgspec.structs.replace(SETTINGS, replay_timeout_s=8.0)


def stored(hashes: list[Any], **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [1, 2, 300, 70_000],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {"type": "BlockStored", **body, **more}


KINDS: list[list[dict[str, Any]]] = [
    [stored([2**64 - 1], group_idx=0, kv_cache_spec_kind="full_attention")],
    [
        stored(
            [5, 6],
            parent_block_hash=2**63,
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=64,
            extra_keys=[["adapter", ["image-1", -3], "salt"], None],
            lora_id=7,
            lora_name="adapter",
        ),
        {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 1},
    ],
    [stored(["hex:" + "ab" * 32], parent_block_hash="hex:" + "cd" * 32)],
    [stored([], medium=None, locality="LOCAL", ownership="tier", session_id="s", extra_keys=[])],
    [
        {
            "type": "BlockRemoved",
            "block_hashes": [1, 2],
            "medium": "CPU",
            "locality": "REMOTE",
            "ownership": "o",
        }
    ],
    [{"type": "AllBlocksCleared"}],
    [],
]
"""Events of every kind and optional field; batch number n of a test carries ``KINDS[n % len(KINDS)]``."""


def our_event(spec: dict[str, Any]) -> Event:
    def hashed(value: Any) -> Any:
        return bytes.fromhex(value[4:]) if isinstance(value, str) else value

    fields = {key: value for key, value in spec.items() if key != "type"}
    if spec["type"] == "AllBlocksCleared":
        return AllBlocksCleared()
    fields["block_hashes"] = [hashed(value) for value in fields["block_hashes"]]
    if spec["type"] == "BlockRemoved":
        return BlockRemoved(**fields)
    fields["parent_block_hash"] = hashed(fields["parent_block_hash"])
    fields["token_ids"] = encode_tokens(fields["token_ids"])
    return BlockStored(**fields)


class Publisher(VllmPublisher):
    """``published`` counts the batches of the present incarnation."""

    published = 0

    def open(self, **arguments: Any) -> None:
        super().open(**arguments)
        self.published = 0

    def publish(self, count: int = 1) -> None:
        numbers = range(self.published, self.published + count)
        self.call("publish", [[float(n), KINDS[n % len(KINDS)]] for n in numbers])
        self.published += count

    def restart(self) -> None:
        super().restart()
        self.published = 0


@pytest.fixture(scope="module")
def vllm_process(vllm_python: str) -> Iterator[Publisher]:
    with publisher_process(vllm_python, Publisher) as publisher:
        yield publisher


def stamps(start: int, stop: int) -> list[float]:
    return [float(number) for number in range(start, stop)]


following = partial(feed_harness.following, topic="kv", settings=SETTINGS)


async def live_frames(
    context: zmq.asyncio.Context, endpoints: Sequence[str], publish: Callable[[], None], count: int
) -> list[dict[bytes, list[bytes]]]:
    """Live messages of each publisher by their seq frame, at least ``count`` of the same numbers; ``publish``
    has each publish one, again and again until the subscriptions have taken effect."""
    frames: list[dict[bytes, list[bytes]]] = [{} for _ in endpoints]
    with ExitStack() as stack:
        subscribers = [stack.enter_context(context.socket(zmq.SUB)) for _ in endpoints]
        for subscriber, endpoint in zip(subscribers, endpoints, strict=True):
            subscriber.subscribe(b"")
            subscriber.connect(endpoint)
        while len(set.intersection(*map(set, frames))) < count:
            publish()
            for subscriber, found in zip(subscribers, frames, strict=True):
                while await subscriber.poll(20):
                    message = await subscriber.recv_multipart()
                    found[message[1]] = message
    return frames


async def replayed(context: zmq.asyncio.Context, endpoint: str, start: int) -> list[list[bytes]]:
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        answer: list[list[bytes]] = []
        while not answer or answer[-1][2] != END_SEQ:
            answer.append(await dealer.recv_multipart())
    return answer


@pytest.mark.parametrize("rank", [0, 3])
async def test_frames_are_byte_identical(vllm_process: Publisher, rank: int) -> None:
    ports = {"endpoint": free_port(), "replay_endpoint": free_port()}
    vllm_process.open(
        topic="kv@x",
        data_parallel_rank=rank,
        buffer_steps=10,
        **{name: f"tcp://*:{port - rank}" for name, port in ports.items()},
    )
    ours = ZmqPublisher(ANY, replay_endpoint=ANY, topic="kv@x", data_parallel_rank=rank, buffer_steps=10)
    ours.start()

    def publish_both() -> None:
        number = ours.next_seq
        ours.publish([our_event(spec) for spec in KINDS[number % len(KINDS)]], ts=float(number))
        vllm_process.publish()

    with zmq.asyncio.Context() as context:
        theirs = f"tcp://127.0.0.1:{ports['endpoint']}"
        count = 2 * len(KINDS)
        our_frames, their_frames = await live_frames(context, (ours.endpoint, theirs), publish_both, count)
        both = our_frames.keys() & their_frames.keys()
        assert [our_frames[seq] for seq in both] == [their_frames[seq] for seq in both]

        assert ours.replay_endpoint is not None
        replay = f"tcp://127.0.0.1:{ports['replay_endpoint']}"
        for start in (0, ours.next_seq - 3, ours.next_seq + 5):
            answer = await replayed(context, ours.replay_endpoint, start)
            assert answer == await replayed(context, replay, start)
    ours.close()
    vllm_process.close()


async def test_live_from_the_start(vllm_process: Publisher) -> None:
    sink = RecordingSink()
    vllm_process.open(topic="kv")
    async with following(vllm_process.endpoint, vllm_process.replay_endpoint, sink) as feed:
        await until(lambda: feed.state is FeedState.READY)
        vllm_process.publish(500)
        vllm_process.publish(1)
        await until(lambda: feed.state is FeedState.READY and len(sink.batches) == 501)
        assert sink.stamps == stamps(0, 501)
        for number, batch in enumerate(sink.batches[: len(KINDS)]):
            assert batch.events == [our_event(spec) for spec in KINDS[number]]
            assert (batch.data_parallel_rank, batch.rejected) == (0, [])
    vllm_process.close()


async def test_late_start_with_a_full_replay_buffer(vllm_process: Publisher) -> None:
    """10,000 batches: more than vLLM's replay socket takes in one burst, so its answer may have holes, or no
    end."""
    sink = RecordingSink()
    vllm_process.open(topic="kv")
    vllm_process.publish(10_000)
    async with following(vllm_process.endpoint, vllm_process.replay_endpoint, sink, settings=OFTEN) as feed:
        await until(lambda: feed.state is FeedState.READY and len(sink.batches) == 10_000)
        assert sink.stamps == stamps(0, 10_000)
        assert feed.stats.lost_batches == 0
    vllm_process.close()


async def test_late_start_after_the_buffer_rolled(vllm_process: Publisher) -> None:
    sink = RecordingSink()
    vllm_process.open(topic="kv", buffer_steps=4)
    vllm_process.publish(12)  # the last four hold no cache clear
    async with following(vllm_process.endpoint, vllm_process.replay_endpoint, sink) as feed:
        await until(lambda: len(sink.batches) == 4)
        await until(lambda: feed.state is FeedState.DEGRADED)
        assert sink.stamps == stamps(8, 12)
        assert (feed.stats.reason, feed.stats.missing_batches) == ("history_rolled", 8)
    vllm_process.close()


async def test_a_gap_is_repaired_from_vllms_replay(vllm_process: Publisher) -> None:
    """A relay between the two leaves out some live messages."""

    async def relay(source: zmq.asyncio.Socket, target: zmq.asyncio.Socket) -> None:
        while True:
            message = await source.recv_multipart()
            if int.from_bytes(message[1], "big") % 10 not in {4, 5, 6}:
                await target.send_multipart(message)

    sink = RecordingSink()
    vllm_process.open(topic="kv")
    with zmq.asyncio.Context() as context:
        source, target = context.socket(zmq.SUB), context.socket(zmq.PUB)
        source.subscribe(b"")
        source.connect(vllm_process.endpoint)
        port = target.bind_to_random_port("tcp://127.0.0.1")
        relaying = asyncio.ensure_future(relay(source, target))
        async with following(f"tcp://127.0.0.1:{port}", vllm_process.replay_endpoint, sink) as feed:
            while feed.stats.gaps < 3 or vllm_process.published % 10 != 9:
                vllm_process.publish()
                await asyncio.sleep(0.01)
            await until(lambda: len(sink.batches) == vllm_process.published)
            await until(lambda: feed.state is FeedState.READY)
            assert sink.stamps == stamps(0, vllm_process.published)
            assert feed.stats.lost_batches == 0
        relaying.cancel()
        source.close(linger=0)
        target.close(linger=0)
    vllm_process.close()


async def test_a_full_queue_makes_the_engine_wait_and_loses_nothing(vllm_process: Publisher) -> None:
    """``max_queue_size``: ``publish`` is called in the engine's step and waits for room."""
    sink = RecordingSink()
    vllm_process.open(topic="kv", max_queue_size=1)
    async with following(vllm_process.endpoint, vllm_process.replay_endpoint, sink) as feed:
        await until(lambda: feed.state is FeedState.READY)
        vllm_process.publish(1000)
        await until(lambda: feed.state is FeedState.READY and len(sink.batches) == 1000)
        assert sink.stamps == stamps(0, 1000)
        assert feed.stats.lost_batches == 0
    vllm_process.close()


async def test_messages_dropped_at_the_high_water_mark_are_replayed(vllm_process: Publisher) -> None:
    """A relay that stops to read: its socket and vLLM's fill up, and vLLM drops what comes then. The numbers
    of the dropped batches are used up, so the feed sees the gap, unless it asks before what its beginning
    missed."""
    sink, large = RecordingSink(), [stored([1], token_ids=[70_000] * 20_000)]
    vllm_process.open(topic="kv", hwm=1)
    with zmq.asyncio.Context() as context:
        source, target = context.socket(zmq.SUB), context.socket(zmq.PUB)
        source.set(zmq.RCVHWM, 1)
        source.subscribe(b"")
        source.connect(vllm_process.endpoint)
        port = target.bind_to_random_port("tcp://127.0.0.1")
        relayed = f"tcp://127.0.0.1:{port}"
        async with following(relayed, vllm_process.replay_endpoint, sink, settings=OFTEN) as feed:
            while not await source.poll(50):
                vllm_process.publish()
            for number in range(vllm_process.published, vllm_process.published + 400):
                vllm_process.call("publish", [[float(number), large]])
            vllm_process.published += 400
            last = vllm_process.published - 1
            while len(await replayed(context, vllm_process.replay_endpoint, last)) < 2:
                pass
            passed, quiet_ms = 0, 50
            while len(sink.batches) < vllm_process.published:
                if await source.poll(quiet_ms):
                    await target.send_multipart(await source.recv_multipart())
                    passed += 1
                elif len(sink.batches) < vllm_process.published:
                    # What was dropped last shows by the next one's number. A busy feed has more time for it.
                    vllm_process.publish()
                    quiet_ms *= 2
            assert passed < 400
            assert sink.stamps == stamps(0, vllm_process.published)
            assert feed.stats.lost_batches == 0
            await until(lambda: feed.state is FeedState.READY)
        source.close(linger=0)
        target.close(linger=0)
    vllm_process.close()


async def test_a_restart_in_place(vllm_process: Publisher) -> None:
    sink = RecordingSink()
    vllm_process.open(topic="kv")
    vllm_process.publish(10)
    async with following(vllm_process.endpoint, vllm_process.replay_endpoint, sink) as feed:
        await until(lambda: feed.state is FeedState.READY and len(sink.batches) == 10)
        vllm_process.restart()
        vllm_process.publish(3)
        await until(lambda: feed.stats.restarts == 1 and len(sink.batches) == 3)
        vllm_process.publish(2)
        await until(lambda: feed.state is FeedState.READY and len(sink.batches) == 5)
        assert sink.stamps == stamps(0, 5)
    vllm_process.close()
