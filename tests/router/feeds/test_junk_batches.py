"""Cost of a publisher of junk: bounded memory, and the loop keeps turning."""

from __future__ import annotations

import asyncio
import gc
import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.event_decoder import decode_batch, decode_in_pieces
from kvatlas.publisher.events import (
    BLOCKS_MAX,
    EVENTS_MAX,
    BlockRemoved,
    BlockStored,
    EventDecodeError,
    encode_batch,
    encode_tokens,
)
from kvatlas.router.feeds.frames import live_in_pieces
from kvatlas.router.feeds.sockets import Slice

SIZE = 1 << 20
FACTOR = 24
"""Bytes in memory for one on the wire; lists of small integers take eight, events of a few bytes more."""


def array(count: int, item: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def batch_of(events: bytes) -> bytes:
    return b"\x93\xcb" + bytes(8) + events + b"\xc0"


def stored(**fields: bytes) -> bytes:
    """A stored event whose fields are given encoded."""
    known: dict[str, bytes] = {
        "type": b"\xabBlockStored",
        "block_hashes": b"\x90",
        "parent_block_hash": b"\xc0",
        "token_ids": b"\x90",
        "block_size": b"\x10",
        **dict.fromkeys(("lora_id", "medium", "lora_name"), b"\xc0"),
    }
    members = {**known, **fields}
    encode = msgspec.msgpack.encode
    return bytes([0x80 + len(members)]) + b"".join(encode(k) + v for k, v in members.items())


JUNK: dict[str, Callable[[], bytes]] = {
    "events of one byte": lambda: batch_of(array(SIZE, b"\x01")),
    "unknown events": lambda: batch_of(array(EVENTS_MAX, b"\x81\xa4type\xa1x")),
    "empty events": lambda: batch_of(array(EVENTS_MAX, b"\x80" * 1)),
    "clears": lambda: batch_of(array(EVENTS_MAX, b"\x91\xb0AllBlocksCleared")),
    "hashes": lambda: batch_of(array(1, stored(block_hashes=array(SIZE, b"\x01")))),
    "many hashes": lambda: batch_of(array(16, stored(block_hashes=array(BLOCKS_MAX, b"\x01")))),
    "extra keys": lambda: batch_of(array(1, stored(extra_keys=array(2 * SIZE, b"\x90")))),
    "many extra keys": lambda: batch_of(array(64, stored(extra_keys=array(SIZE // 32, b"\x90")))),
    "extra keys of an array": lambda: batch_of(
        array(
            1,
            b"\x98\xabBlockStored\x90\xc0\x90\x10\xc0\xc0\xc0".replace(b"\x98", b"\x99")
            + array(2 * SIZE, b"\x90"),
        )
    ),
    "look-ahead": lambda: batch_of(array(1, stored(lookahead_token_ids=array(2 * SIZE, b"\x90")))),
    "nesting": lambda: batch_of(array(1, stored(extra_keys=b"\x91" * SIZE + b"\x90"))),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", JUNK)
def test_decoding_takes_bounded_memory(kind: str) -> None:
    payload = JUNK[kind]()
    gc.collect()
    tracemalloc.start()
    try:
        try:
            batch = decode_batch(payload)
        except EventDecodeError:
            batch = None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < FACTOR * max(len(payload), SIZE) + (64 << 20) * ("many extra" in kind)
    assert batch is None or len(batch.events) + len(batch.rejected) + len(batch.unknown) <= EVENTS_MAX


def test_a_batch_of_too_many_events_is_none() -> None:
    with pytest.raises(EventDecodeError, match="length <= 131072"):
        decode_batch(batch_of(array(EVENTS_MAX + 1, b"\x01")))
    assert len(decode_batch(batch_of(array(EVENTS_MAX, b"\x01"))).rejected) == EVENTS_MAX


def test_too_much_in_one_event_costs_that_event_only() -> None:
    good = stored(block_hashes=array(3, b"\x05"))
    for bad in (
        stored(block_hashes=array(BLOCKS_MAX + 1, b"\x01")),
        stored(extra_keys=array(2 * SIZE, b"\x90")),
        stored(lookahead_token_ids=array(2 * SIZE, b"\x90")),
    ):
        batch = decode_batch(batch_of(b"\x93" + good + bad + good))
        assert [event.block_hashes for event in batch.events if isinstance(event, BlockStored)] == [
            [5] * 3
        ] * 2
        assert len(batch.rejected) == 1


def large_batch() -> tuple[list[Any], bytes]:
    """2,000 events with all that events carry, some hundred kilobytes."""
    events: list[Any] = []
    for number in range(1000):
        events.append(
            BlockStored(
                [number, b"\x07" * 32],
                None,
                encode_tokens(list(range(32))),
                16,
                None,
                "GPU",
                "adapter",
                extra_keys=[[["lora", "adapter", "/path"]], None],
                group_idx=1,
                kv_cache_spec_kind="full_attention",
                lookahead_token_ids=[[1], [2, 3]] if number % 2 else None,
            )
        )
        events.append(BlockRemoved([number], "CPU", 3, remaining_copy_counts=[None]))
    return events, encode_batch(2.5, events, 3)


def test_a_large_batch_is_decoded_as_a_small_one_is() -> None:
    events, payload = large_batch()
    assert len(payload) > 1 << 18
    pieces = decode_in_pieces(payload)
    assert sum(1 for _ in pieces) > 3
    batch = decode_batch(payload)
    assert (batch.ts, batch.data_parallel_rank, batch.rejected) == (2.5, 3, [])
    small = [decode_batch(encode_batch(2.5, [event], 3)).events[0] for event in events]
    for found, wanted in zip(batch.events, small, strict=True):
        assert type(found) is type(wanted)
        for name in wanted.__struct_fields__:
            left, right = getattr(found, name), getattr(wanted, name)
            assert (bytes(left), name) == (bytes(right), name) if name == "token_ids" else left == right


async def test_the_loop_turns_while_junk_is_decoded() -> None:
    message = [b"", bytes(8), JUNK["unknown events"]()]
    work = Slice(itertools.count().__next__)  # every look at the clock is a second later
    work.begin()
    decoding = asyncio.create_task(work.all(live_in_pieces(message)))
    turns = 0
    while not decoding.done():
        turns += 1
        await asyncio.sleep(0)
    batch = (await decoding).batch
    assert len(batch.unknown) == EVENTS_MAX
    assert turns > 10
