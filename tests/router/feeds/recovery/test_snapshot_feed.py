"""Feeds that recover by snapshot, over ZMQ: our publisher, and the proposed forms of vLLM."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq

from kvatlas.publisher.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    Event,
    encode_batch,
    encode_tokens,
)
from kvatlas.publisher.snapshot import SnapshotLedger
from kvatlas.publisher.zmq_publisher import END_SEQ, ZmqPublisher
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.recovery import RESTART_PAUSE_S
from kvatlas.router.index.base import Plane
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from tests.router.feeds.feed_harness import ANY, FAST, following
from tests.support.waiting import until

FULL = Plane("GPU", 0)
ID, OTHER_ID = b"publisher number", b"another process!"


def stored(*hashes: int, group: int = 0, size: int = 4, parent: int | None = None) -> BlockStored:
    tokens = encode_tokens(list(range(len(hashes) * size)))
    return BlockStored(list(hashes), parent, tokens, size, None, "GPU", None, None, group, "full_attention")


def named(*hashes: int, group: int = 0) -> BlockStored:
    return BlockStored(list(hashes), None, encode_tokens([]), 0, None, "GPU", None, None, group)


def removed(*hashes: int, group: int = 0) -> BlockRemoved:
    return BlockRemoved(list(hashes), "GPU", group)


def copies(fleet: FleetResidency, *hashes: int, group: int = 0) -> list[bool]:
    """Which blocks the index shows for the engine."""
    slot = fleet.index.slot("e")
    if slot is None:
        return [False] * len(hashes)
    rows = fleet.index.lookup([BlockHash(block) for block in hashes])
    words = rows.plane(Plane("GPU", group), slot.word)
    return [bool(int(word) >> slot.bit & 1) for word in words]


async def test_a_late_router_has_all_that_rolled_out_of_the_replay_buffer(context: zmq.Context) -> None:
    publisher = ZmqPublisher(
        ANY, replay_endpoint=ANY, buffer_steps=4, context=context, ledger=SnapshotLedger()
    )
    for number in range(5000):  # two groups with blocks of unequal size
        publisher.publish([stored(number), stored(number, group=1, size=16)])
    publisher.publish([removed(0), stored(1), removed(7, group=1)])
    publisher.start()
    fleet = FleetResidency(ModelFacts())
    async with following(publisher.endpoint, publisher.replay_endpoint, fleet) as feed:
        await until(lambda: feed.state is FeedState.READY)
        assert feed.stats.snapshots == 1
        assert feed.stats.replays == 0
        assert copies(fleet, 0, 1, 4999, 5000) == [False, True, True, False]
        assert copies(fleet, 7, 8, group=1) == [False, True]
        assert fleet.index.copies("e", FULL) == 4999
        publisher.publish([removed(1)])  # two copies were there
        publisher.publish([removed(2)])
        await until(lambda: feed.stats.batches >= 2)
        assert copies(fleet, 1, 2) == [True, False]
        layout = fleet.engine("e").layout
        assert [group.block_size for group in layout.groups] == [4, 16]
        assert fleet.index.check_integrity() == []
    publisher.close()


async def test_an_index_that_fails_at_a_snapshot_does_not_end_the_feed(
    context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, context=context, ledger=SnapshotLedger())
    publisher.publish([stored(1)])
    publisher.start()
    fleet = FleetResidency(ModelFacts())
    stage, failures = fleet.stage, [RuntimeError("a defect of the index")]

    def fails_once(engine_id: str, batch: DecodedBatch) -> None:
        if failures:
            raise failures.pop()
        stage(engine_id, batch)

    monkeypatch.setattr(fleet, "stage", fails_once)
    async with following(publisher.endpoint, publisher.replay_endpoint, fleet) as feed:
        await until(lambda: copies(fleet, 1) == [True])
        assert feed.stats.sink_errors == 1
    publisher.close()


async def test_live_batches_go_on_while_a_snapshot_is_taken_down(context: zmq.Context) -> None:
    publisher = ZmqPublisher(
        ANY, replay_endpoint=ANY, buffer_steps=4, context=context, ledger=SnapshotLedger()
    )
    publisher.publish([stored(*range(60_000))])
    publisher.start()
    fleet = FleetResidency(ModelFacts())
    async with following(publisher.endpoint, publisher.replay_endpoint, fleet) as feed:
        number = 100_000
        while publisher.stats.snapshots == 0:  # asked for, being taken down, sent
            publisher.publish([stored(number), removed(number - 100_000)])
            number += 1
            await asyncio.sleep(0)
        await until(lambda: feed.state is FeedState.READY)
        await until(lambda: copies(fleet, number - 1) == [True])
        gone = number - 100_000
        assert copies(fleet, gone - 1, gone, number - 1) == [False, True, True]
        assert fleet.index.copies("e", FULL) == 60_000
    publisher.close()


async def test_idle_publishers_beat_and_their_silence_shows(context: zmq.Context) -> None:
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, context=context, ledger=SnapshotLedger())
    publisher.start()
    fleet = FleetResidency(ModelFacts())
    async with following(publisher.endpoint, publisher.replay_endpoint, fleet) as feed:
        await until(lambda: feed.stats.batches >= 1)
        assert publisher.stats.heartbeats >= 1
        assert feed.state is FeedState.READY
    publisher.close()


class Scripted:
    """A publisher whose frames the test writes: PUB, and a ROUTER for replay or snapshots."""

    def __init__(self, context: zmq.Context) -> None:
        self.pub = context.socket(zmq.PUB)
        self.router = context.socket(zmq.ROUTER)
        self.events = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.side = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def live(self, seq: int, *events: Event, publisher_id: bytes | None = None, wide: bool = False) -> None:
        number = seq.to_bytes(8, "big") + (publisher_id if wide and publisher_id else b"")
        payload = encode_batch(float(seq), list(events), 0, None if wide else publisher_id)
        self.pub.send_multipart([b"kv", number, payload])

    async def asked(self, what: bytes = b"snapshot") -> bytes:
        """The peer that sends this request; others are answered with the end marker."""
        while True:
            await until(lambda: bool(self.router.poll(0)))
            peer, _, request = self.router.recv_multipart()
            if request == what:
                return peer
            self.router.send_multipart([peer, b"", b"", END_SEQ, b""])

    def answer(self, peer: bytes, *frames: bytes) -> None:
        self.router.send_multipart([peer, b"", *frames])

    def close(self) -> None:
        self.pub.close(linger=0)
        self.router.close(linger=0)


def signed(seq: int) -> bytes:
    return seq.to_bytes(8, "big", signed=True)


PROGRAM = (
    encode_batch(0.0, [stored(1, 2, 3), stored(4, parent=3), removed(3)]),  # taught; 3 is dead
    encode_batch(0.0, [named(1, 2, 4), named(1), removed(1), removed(2), removed(4)]),
)
"""vLLM #57789's order: teach, bury, count, take the teaching back. Block 1 ends with two copies."""


@pytest.mark.parametrize("wide", [False, True], ids=["in-the-payload", "in-the-seq-frame"])
async def test_vllm_57789_with_the_id(wide: bool, context: zmq.Context) -> None:
    engine, fleet = Scripted(context), FleetResidency(ModelFacts())
    async with following(engine.events, None, fleet, snapshot=engine.side) as feed:
        peer = await engine.asked()
        await until(
            lambda: feed.stats.held_batches > 0,
            meanwhile=lambda: engine.live(7, removed(1), publisher_id=ID, wide=wide),
        )  # heard live while the snapshot is being made
        assert fleet.index.copies("e", FULL) == 0
        engine.answer(peer, signed(6), ID, *PROGRAM)
        await until(lambda: feed.state is FeedState.READY)
        assert copies(fleet, 1, 2, 3, 4) == [True, True, False, True]
        engine.live(8, removed(1), publisher_id=ID, wide=wide)
        await until(lambda: feed.stats.last_seq == 8)
        assert copies(fleet, 1, 2) == [False, True]
        engine.live(9, publisher_id=OTHER_ID, wide=wide)  # another process: nothing is credited
        await until(lambda: feed.stats.restarts == 1)
        assert copies(fleet, 1, 2, 4) == [False, False, False]
        await engine.asked()
        engine.live(10, publisher_id=ID, wide=wide)  # two that publish at one address
        await until(lambda: feed.stats.restarts == 2)
        loop = asyncio.get_running_loop()
        restarted_s = loop.time()
        await engine.asked()
        assert loop.time() - restarted_s > 0.9 * RESTART_PAUSE_S, "not for every batch of the other"
    engine.close()


async def test_a_snapshot_of_another_process_is_not_adopted(context: zmq.Context) -> None:
    engine, fleet = Scripted(context), FleetResidency(ModelFacts())
    async with following(engine.events, None, fleet, snapshot=engine.side) as feed:
        peer = await engine.asked()
        await until(
            lambda: feed.stats.held_batches > 0, meanwhile=lambda: engine.live(7, stored(9), publisher_id=ID)
        )
        engine.answer(peer, signed(6), OTHER_ID, *PROGRAM)
        await until(lambda: feed.stats.snapshot_failures == 1)
        assert copies(fleet, 1, 9) == [False, True]
        assert feed.state is FeedState.DEGRADED
        engine.answer(await engine.asked(), signed(7), ID, *PROGRAM)
        await until(lambda: feed.state is FeedState.READY)
        assert copies(fleet, 1, 9) == [True, False]
    engine.close()


async def test_unavailable_or_broken_answers_are_asked_for_again(context: zmq.Context) -> None:
    engine, fleet = Scripted(context), FleetResidency(ModelFacts())
    async with following(engine.events, None, fleet, snapshot=engine.side) as feed:
        engine.answer(await engine.asked(), signed(-2), ID)
        await until(lambda: feed.stats.snapshot_failures == 1)
        await until(
            lambda: feed.stats.batches > 0, meanwhile=lambda: engine.live(3, stored(9), publisher_id=ID)
        )
        engine.answer(await engine.asked(), signed(3), ID, PROGRAM[0], b"\x93rubbish")
        await until(lambda: feed.stats.snapshot_failures == 2)
        assert copies(fleet, 1, 9) == [False, True]  # staged, never seen
        assert fleet.index.stats().residencies == 1
        engine.answer(await engine.asked(), signed(-1), ID)
        await until(lambda: feed.stats.snapshots == 1)
    engine.close()


@pytest.mark.parametrize("odd", [(b"kv", b"five"), (b"kv",), (b"kv", signed(6))])
async def test_a_message_of_another_form_within_a_snapshot_breaks_it_off(
    odd: tuple[bytes, ...], context: zmq.Context
) -> None:
    engine, fleet = Scripted(context), FleetResidency(ModelFacts())
    payload = encode_batch(0.0, [AllBlocksCleared(), stored(1)])
    async with following(engine.events, engine.side, fleet) as feed:
        peer = await engine.asked()
        engine.answer(peer, b"kv", signed(5), payload)
        engine.answer(peer, *odd, payload)
        await until(lambda: feed.stats.snapshot_failures == 1)
        assert copies(fleet, 1) == [False], "staged, and never seen"
    engine.close()


async def test_vllm_50134_on_the_replay_socket(context: zmq.Context) -> None:
    engine, fleet = Scripted(context), FleetResidency(ModelFacts())
    async with following(engine.events, engine.side, fleet) as feed:
        peer = await engine.asked()
        again: list[Event] = [named(1), removed(1)]
        parts: list[list[Event]] = [
            [AllBlocksCleared(), stored(1, 2)],
            *[again] * 6,
            [stored(3, parent=2), named(1), removed(2)],
        ]
        for events in parts:  # together longer than an answer may take: it goes on
            engine.answer(peer, b"kv", signed(5), encode_batch(0.0, events))
            await asyncio.sleep(FAST.hold_s_max / 5)
        engine.answer(peer, b"", END_SEQ, b"")
        await until(lambda: feed.state is FeedState.READY)
        assert copies(fleet, 1, 2, 3) == [True, False, True]
        while feed.stats.last_seq != 5:
            engine.live(4, removed(3))  # in the snapshot already, still on its way
            engine.live(5, removed(1))
            await asyncio.sleep(0.01)
        assert copies(fleet, 1, 3) == [True, True]
        assert feed.stats.restarts == 0
    engine.close()


async def test_without_snapshots_replay_is_used(context: zmq.Context) -> None:
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, context=context)
    publisher.publish([stored(1, 2)])
    publisher.start()
    fleet = FleetResidency(ModelFacts())
    async with following(publisher.endpoint, publisher.replay_endpoint, fleet) as feed:
        await until(lambda: feed.state is FeedState.READY)
        assert feed.stats.snapshots == feed.stats.snapshot_failures == 0
        assert publisher.stats.replays == 2  # to such a publisher the probe is one
        assert copies(fleet, 1, 2, 3) == [True, True, False]
    publisher.close()


async def test_a_gap_without_replay_is_made_good_by_a_snapshot_while_live_goes_on(
    context: zmq.Context,
) -> None:
    engine, fleet = Scripted(context), FleetResidency(ModelFacts())
    async with following(engine.events, None, fleet, snapshot=engine.side) as feed:
        engine.answer(await engine.asked(), signed(-1), ID)
        await until(lambda: feed.stats.snapshots == 1)
        await until(
            lambda: feed.stats.batches > 0, meanwhile=lambda: engine.live(0, stored(9), publisher_id=ID)
        )
        engine.live(2, stored(5), publisher_id=ID)
        peer = await engine.asked()
        assert feed.state is FeedState.DEGRADED
        assert feed.stats.missing_batches == 1
        engine.live(3, stored(6), publisher_id=ID)
        await until(lambda: feed.stats.last_seq == 3)
        assert copies(fleet, 5, 6, 9) == [True, True, True]
        engine.answer(peer, signed(2), ID, encode_batch(0.0, [stored(5), stored(8)]))
        await until(lambda: feed.state is FeedState.READY)
        assert copies(fleet, 5, 6, 8, 9) == [True, True, True, False]
        assert feed.stats.missing_batches == 0
    engine.close()


async def test_distrust_fetches_everything_again(context: zmq.Context) -> None:
    for ledger in (SnapshotLedger(), None):
        publisher = ZmqPublisher(ANY, replay_endpoint=ANY, context=context, ledger=ledger)
        publisher.publish([stored(1, 2)])
        publisher.start()
        fleet = FleetResidency(ModelFacts())
        async with following(publisher.endpoint, publisher.replay_endpoint, fleet) as feed:
            await until(lambda: feed.state is FeedState.READY)
            fleet.index.store("e", FULL, [BlockHash(77)])  # a phantom
            feed.distrust("phantom")
            assert feed.state is FeedState.DEGRADED
            await until(lambda: feed.state is FeedState.READY)
            assert copies(fleet, 77) == [False]
            assert copies(fleet, 1, 2) == [True, True]
            assert fleet.index.copies("e", FULL) == 2
        publisher.close()


async def test_settings_may_turn_snapshots_off(context: zmq.Context) -> None:
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, context=context, ledger=SnapshotLedger())
    publisher.publish([stored(1)])
    publisher.start()
    fleet = FleetResidency(ModelFacts())
    settings = msgspec.structs.replace(FAST, snapshots=False)
    async with following(publisher.endpoint, publisher.replay_endpoint, fleet, settings=settings) as feed:
        await until(lambda: feed.state is FeedState.READY)
        assert publisher.stats.snapshots == 0
    publisher.close()
