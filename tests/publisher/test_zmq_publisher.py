"""The publisher over the sockets of ZMQ: live frames, replay, ring bound, bad requests, clean close."""

from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import AllBlocksCleared, encode_batch
from kvatlas.publisher.zmq_publisher import END_SEQ, ZmqPublisher, rank_endpoint

pytestmark = pytest.mark.real  # ZMQ's library

ANY = "tcp://127.0.0.1:*"


async def replay(context: zmq.asyncio.Context, endpoint: str, start: int) -> list[list[bytes]]:
    """A whole answer, end marker included."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.set_hwm(0)
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        answer: list[list[bytes]] = []
        while not answer or answer[-1][-2] != END_SEQ:
            answer.append(await dealer.recv_multipart())
        return answer


def payload(number: int) -> bytes:
    return encode_batch(float(number), [AllBlocksCleared()], 0)


async def test_live_frames_are_topic_seq_payload() -> None:
    with zmq.asyncio.Context() as context:
        publisher = ZmqPublisher(ANY, topic="kv@1", data_parallel_rank=3, clock=lambda: 12.5)
        subscriber = context.socket(zmq.XSUB)  # sends its subscription as a message we can wait for
        subscriber.connect(publisher.endpoint)
        await subscriber.send(b"\x01kv")
        frames: list[bytes] = []
        while not frames:
            publisher.publish([AllBlocksCleared()])
            if await subscriber.poll(20):
                frames = await subscriber.recv_multipart()
        assert [frames[0], len(frames), len(frames[1])] == [b"kv@1", 3, 8]
        assert int.from_bytes(frames[1], "big") < publisher.next_seq
        batch = decode_batch(frames[2])
        assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
        assert batch.events == [AllBlocksCleared()]
        subscriber.close(linger=0)
        publisher.close()


async def test_replay_gives_the_ring_from_the_asked_seq_then_the_end_marker() -> None:
    with zmq.asyncio.Context() as context:
        publisher = ZmqPublisher(ANY, replay_endpoint=ANY, topic="t", buffer_steps=4)
        publisher.start()
        assert publisher.replay_endpoint is not None
        assert [publisher.publish_payload(payload(n)) for n in range(6)] == list(range(6))
        end = [b"", b"", END_SEQ, b""]
        whole = [[b"", b"t", n.to_bytes(8, "big"), payload(n)] for n in range(2, 6)]
        assert await replay(context, publisher.replay_endpoint, 0) == [*whole, end]
        assert await replay(context, publisher.replay_endpoint, 5) == [whole[-1], end]
        assert await replay(context, publisher.replay_endpoint, 6) == [end]
        publisher.close()


async def test_a_long_answer_arrives_whole_and_live_publishing_goes_on_during_it() -> None:
    with zmq.asyncio.Context() as context:
        publisher = ZmqPublisher(ANY, replay_endpoint=ANY)
        publisher.start()
        assert publisher.replay_endpoint is not None
        for number in range(10_000):
            publisher.publish_payload(payload(number))
        task = asyncio.ensure_future(replay(context, publisher.replay_endpoint, 0))
        while not task.done():
            publisher.publish_payload(b"\x00")
            await asyncio.sleep(0)
        answer = await task
        seqs = [int.from_bytes(frames[2], "big") for frames in answer[:-1]]
        assert seqs == list(range(seqs[0], seqs[0] + 10_000))
        publisher.close()


async def test_bad_requests_are_counted_and_do_no_harm() -> None:
    with zmq.asyncio.Context() as context:
        publisher = ZmqPublisher(ANY, replay_endpoint=ANY)
        publisher.start()
        assert publisher.replay_endpoint is not None
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(publisher.replay_endpoint)
            for request in ([b""], [b"", b"x" * 9], [b"a", b"b", b"c"], [b"\xff"]):
                await dealer.send_multipart(request)
            await dealer.send_multipart([b"", bytes(8)])
            assert await dealer.recv_multipart() == [b"", b"", END_SEQ, b""]
        assert publisher.stats.bad_replay_requests == 4
        publisher.close()


async def test_close_is_final_and_may_be_repeated() -> None:
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY)
    publisher.start()
    publisher.publish([])
    publisher.close()
    publisher.close()
    assert publisher.closed
    with pytest.raises(RuntimeError):
        publisher.publish([])


def test_an_endpoint_in_use_is_refused_and_leaves_no_socket_open() -> None:
    first = ZmqPublisher(ANY)
    with pytest.raises(zmq.ZMQError):
        ZmqPublisher(ANY, replay_endpoint=first.endpoint)
    first.close()


def test_the_endpoint_of_a_rank() -> None:
    assert rank_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert rank_endpoint("tcp://*:5557", 2) == "tcp://*:5559"
    assert rank_endpoint("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert rank_endpoint("tcp://127.0.0.1:*", 2) == "tcp://127.0.0.1:*"
    assert rank_endpoint("tcp://*:0", 2) == "tcp://*:0"
    assert rank_endpoint("inproc://kv", 2) == "inproc://kv_dp2"
    with pytest.raises(ValueError, match="rank 1"):
        rank_endpoint("ipc:///tmp/kv", 1)
