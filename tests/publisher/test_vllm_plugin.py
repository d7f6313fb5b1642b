"""The publisher that goes into vLLM, without vLLM: what is queued is sent, numbered, identified and kept."""

from __future__ import annotations

import sys

import msgspec
import pytest
import zmq

from kvatlas.publisher import vllm_plugin
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockStored, Event, encode_tokens
from kvatlas.publisher.vllm_plugin import EventPublisher, register


class Batch(msgspec.Struct):
    """As vLLM's ``KVEventBatch``, as far as it is read."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def stored(*hashes: int) -> BlockStored:
    tokens = encode_tokens(list(range(4 * len(hashes))))
    return BlockStored(list(hashes), None, tokens, 4, None, "GPU", None)


def test_it_serves_a_snapshot_of_what_was_published() -> None:
    publisher = EventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", buffer_steps=2, topic="kv")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        assert publisher.replay_endpoint is not None
        dealer.connect(publisher.replay_endpoint)
        for number in range(10):
            publisher.publish(Batch(1.0, [stored(number)]))
        while True:  # batches go through a queue; a request may overtake them
            dealer.send_multipart([b"", b"snapshot"])
            assert dealer.poll(10_000)
            _, cut, publisher_id, *chunks = dealer.recv_multipart()
            if int.from_bytes(cut, "big", signed=True) >= 9:
                break
        assert len(publisher_id) == 16
        named = [
            block
            for chunk in chunks
            for event in decode_batch(chunk).events
            if isinstance(event, BlockStored) and not event.block_size
            for block in event.block_hashes
        ]
        assert sorted(named) == list(range(10))
        dealer.send_multipart([b"", (8).to_bytes(8, "big")])
        assert dealer.poll(10_000)
        _, topic, _, payload = dealer.recv_multipart()
        assert topic == b"kv"
        batch = decode_batch(payload)
        assert batch.publisher_id == publisher_id
        assert batch.data_parallel_rank == 0
        publisher.shutdown()
        publisher.shutdown()


def test_without_the_variable_it_does_not_even_look_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_plugin.ENABLE, raising=False)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test may have looked for it
    register()
    assert "vllm" not in sys.modules
