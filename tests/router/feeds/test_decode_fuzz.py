"""Parsing of ZMQ messages, and decoding of any bytes: a batch or ``EventDecodeError``."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    EventDecodeError,
    encode_batch,
    to_block_hash,
)
from kvatlas.router.feeds.frames import REASONS, UNNUMBERED, Frame, WireError, parse_live, parse_replay

encode = msgspec.msgpack.Encoder().encode

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=40),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [*BlockStored.__struct_fields__, "remaining_copy_counts", "type"]
map_events = st.builds(
    lambda tag, body: {"type": tag, **body},
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]) | scalars,
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=12),
)
array_events = st.builds(
    lambda tag, body: [tag, *body],
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]) | scalars,
    st.lists(values, max_size=12),
)
events = st.one_of(map_events, array_events, values)
batches = st.builds(
    lambda ts, events, tail: [ts, events, *tail],
    st.floats() | scalars,
    st.lists(events, max_size=4) | values,
    st.lists(values, max_size=3),
)


def check(payload: bytes) -> DecodedBatch | None:
    try:
        batch = decode_batch(payload)
    except EventDecodeError:
        return None
    assert isinstance(batch.ts, float)
    assert batch.data_parallel_rank is None or isinstance(batch.data_parallel_rank, int)
    assert batch.publisher_id is None or isinstance(batch.publisher_id, bytes)
    assert all(isinstance(reason, str) for reason in batch.rejected)
    for event in batch.events:
        assert isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared)
        if isinstance(event, AllBlocksCleared):
            continue
        assert event.medium is None or isinstance(event.medium, str)
        assert event.group_idx is None or 0 <= event.group_idx < 64
        assert all(0 <= to_block_hash(wire) < 2**64 for wire in event.block_hashes)
        if isinstance(event, BlockStored):
            assert event.num_tokens() >= 0
            with contextlib.suppress(EventDecodeError):
                assert all(isinstance(token, int) for token in event.tokens())
    return batch


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 5000)
@example(b"\x93\xcb\0\0\0\0\0\0\0\0" + b"\x91" * 100_000)
@example(b"\x93\x01\xdd\xff\xff\xff\xff")
@example(b"\x93\x01\x91\xc7\xff\xff\x00")
@example(b"\x92\x01\x91\x81\xa4type\xa1\xff")
@example(b"\x94\x01\x90\x00\x81\x80\x01")  # a map as a map's key
@example(b"\x94\x01\x90\x00\xd7\xff" + b"\xff" * 8)  # a time stamp out of range
def test_any_bytes(payload: bytes) -> None:
    check(payload)


@given(batches)
def test_well_formed_msgpack_of_the_wrong_types(batch: Any) -> None:
    check(encode(batch))


@given(batches, st.data())
def test_truncated_and_flipped_payloads(batch: Any, data: st.DataObject) -> None:
    payload = encode(batch)
    check(payload[: data.draw(st.integers(0, len(payload)))])
    flipped = bytearray(payload)
    if flipped:
        flipped[data.draw(st.integers(0, len(flipped) - 1))] = data.draw(st.integers(0, 255))
        check(bytes(flipped))


@given(st.lists(events, max_size=4), st.integers(0, 4))
def test_a_good_event_survives_its_neighbours(neighbours: list[Any], place: int) -> None:
    good = {"type": "BlockRemoved", "block_hashes": [1, b"\xff" * 32], "medium": "GPU", "group_idx": 3}
    batch = check(encode([1.0, [*neighbours[:place], good, *neighbours[place:]], 0]))
    assert BlockRemoved([1, b"\xff" * 32], "GPU", 3) in batch.events
    assert len(batch.events) + len(batch.rejected) + len(batch.unknown) == len(neighbours) + 1


SEQ = (7).to_bytes(8, "big")
PAYLOAD = encode_batch(1.5, [AllBlocksCleared()], 0)
END = b"\xff" * 8


def test_a_live_message() -> None:
    frame = parse_live([b"topic", SEQ, PAYLOAD])
    assert frame.seq == 7
    assert frame.batch.events == [AllBlocksCleared()]
    assert (frame.publisher_id, frame.fault, frame.size_bytes) == (None, None, len(PAYLOAD))


def test_the_publisher_id_comes_from_the_seq_frame_or_the_payload() -> None:
    identified = msgspec.msgpack.encode([1.5, [], 0, b"i" * 16])
    assert parse_live([b"", SEQ, identified]).publisher_id == b"i" * 16
    assert parse_live([b"", SEQ + b"e" * 16, PAYLOAD]).publisher_id == b"e" * 16


@pytest.mark.parametrize("head", [[b"", b"topic"], [b"", b""], [b""], []], ids=str)
def test_replay_messages_of_all_publishers(head: list[bytes]) -> None:
    frame = parse_replay([*head, SEQ, PAYLOAD])
    assert frame == parse_live([b"topic", SEQ, PAYLOAD])


@pytest.mark.parametrize("message", [[b"", b"", END, b""], [b"", END, b""]])
def test_both_end_markers(message: list[bytes]) -> None:
    assert parse_replay(message) is None


def test_equal_payloads_have_equal_digests_and_others_do_not() -> None:
    other = encode_batch(1.6, [AllBlocksCleared()], 0)
    assert parse_live([b"", SEQ, PAYLOAD]).digest == parse_live([b"x", SEQ, PAYLOAD]).digest
    assert parse_live([b"", SEQ, PAYLOAD]).digest != parse_live([b"", SEQ, other]).digest


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ([], "frame_count"),
        ([SEQ], "frame_count"),
        ([PAYLOAD, SEQ], "frame_count"),
        ([b"", SEQ, PAYLOAD, b""], "frame_count"),
        ([b"", b"", PAYLOAD], "seq_length"),
        ([b"", SEQ + b"x", PAYLOAD], "seq_length"),
        ([b"", END, PAYLOAD], "seq_range"),
    ],
)
def test_a_message_without_a_place_in_the_stream_is_refused(message: list[bytes], reason: str) -> None:
    with pytest.raises(WireError) as error:
        parse_live(message)
    assert error.value.reason == reason


@pytest.mark.parametrize("message", [[PAYLOAD], [b"topic", PAYLOAD]])
def test_batches_without_a_number_are_read(message: list[bytes]) -> None:
    frame = parse_live(message)
    assert frame.seq == UNNUMBERED
    assert frame.batch is not None


def test_an_unusable_payload_still_has_its_seq() -> None:
    assert parse_live([b"", SEQ, b"\xc1"]).fault == "payload_undecodable"
    oversize = parse_live([b"", SEQ, PAYLOAD], payload_bytes_max=len(PAYLOAD) - 1)
    assert (oversize.seq, oversize.batch, oversize.fault) == (7, None, "payload_oversize")


@given(st.lists(st.one_of(st.binary(max_size=30), st.just(SEQ), st.just(PAYLOAD)), max_size=5))
def test_any_message_is_a_frame_or_a_named_error(message: list[bytes]) -> None:
    for parse in (parse_live, parse_replay):
        try:
            outcome: object = parse(message)
        except WireError as error:
            outcome = error.reason
        assert outcome is None or isinstance(outcome, Frame) or outcome in REASONS
