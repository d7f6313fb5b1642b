"""Parsing of ZMQ messages into frames."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from publisher.events import AllBlocksCleared, encode_batch
from router.feeds.base import REASONS, Frame, WireError, parse_live, parse_replay

SEQ = (7).to_bytes(8, "big")
PAYLOAD = encode_batch(1.5, [AllBlocksCleared()], 0)
END = b"\xff" * 8


def test_a_live_message() -> None:
    frame = parse_live([b"topic", SEQ, PAYLOAD])
    assert frame.seq == 7
    assert frame.batch is not None
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
        ([SEQ, PAYLOAD], "frame_count"),
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


def test_an_unusable_payload_still_has_its_seq() -> None:
    assert parse_live([b"", SEQ, b"\xc1"]).fault == "payload_undecodable"
    oversize = parse_live([b"", SEQ, PAYLOAD], payload_bytes_max=len(PAYLOAD) - 1)
    assert (oversize.seq, oversize.batch, oversize.fault) == (7, None, "payload_oversize")


@settings(deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=30), st.just(SEQ), st.just(PAYLOAD)), max_size=5))
def test_any_message_is_a_frame_or_a_named_error(message: list[bytes]) -> None:
    for parse in (parse_live, parse_replay):
        try:
            outcome: object = parse(message)
        except WireError as error:
            outcome = error.reason
        assert outcome is None or isinstance(outcome, Frame) or outcome in REASONS
