"""HTTP/2 frames and header blocks, cut anywhere, against the library ``hpack`` and against attackers."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.http import h2_codec as h2
from kvatlas.router.http.h2_codec import (
    FrameReader,
    H2Error,
    H2Frame,
    encode_literal,
    frame,
    header_block_fragment,
    strip_padding,
)
from kvatlas.router.http.hpack_decoding import HeaderDecoder, HuffmanError, huffman_decode
from tests.support.examples import examples

NAMES = st.sampled_from([b":path", b":method", b"content-type", b"x-a", b"x-b", b"te"]) | st.binary(
    max_size=20
)
FIELDS = st.lists(st.tuples(NAMES, st.binary(max_size=60)), max_size=12)
LIMIT = 1 << 20


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(FIELDS, st.booleans(), st.sampled_from([None, 0, 100, 4096])), max_size=12))
def test_blocks_of_one_connection_are_read_as_they_were_written(
    blocks: list[tuple[list[tuple[bytes, bytes]], bool, int | None]],
) -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder(LIMIT)
    for fields, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        assert decoder.decode(encoder.encode(fields, huffman=huffman)) == fields


@settings(max_examples=examples(300))
@given(st.lists(st.binary(max_size=60), max_size=6))
def test_whatever_comes_is_read_or_refused(blocks: list[bytes]) -> None:
    decoder, other = HeaderDecoder(LIMIT), hpack.Decoder()
    for block in blocks:
        try:
            found = decoder.decode(block)
        except H2Error:
            return
        try:
            assert [(bytes(n), bytes(v)) for n, v in other.decode(block, raw=True)] == found
        except hpack.HPACKError:
            return  # stricter: an update that is owed, a field with the sign "never indexed" and index 0


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=300)), max_size=5))
def test_other_decoders_read_our_encoding(fields: list[tuple[bytes, bytes]]) -> None:
    block = b"".join(encode_literal(name, value) for name, value in fields)
    found = hpack.Decoder(max_header_list_size=LIMIT).decode(block, raw=True)
    assert [(bytes(n), bytes(v)) for n, v in found] == fields


def test_the_same_block_means_another_thing_once_the_table_has_changed() -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder(LIMIT)
    first = encoder.encode([(b"x-a", b"1")])
    assert decoder.decode(first) == [(b"x-a", b"1")]
    again = encoder.encode([(b"x-a", b"1")])
    assert len(again) == 1
    assert decoder.decode(again) == decoder.decode(again) == [(b"x-a", b"1")]
    decoder.decode(encoder.encode([(b"x-b", b"2")]))
    assert decoder.decode(again) == [(b"x-b", b"2")]


@pytest.mark.parametrize("first", [0x01, 0x11], ids=["without indexing", "never indexed"])
def test_a_field_that_is_not_to_be_kept_is_not(first: int) -> None:
    decoder = HeaderDecoder(LIMIT)
    assert decoder.decode(bytes((first, 1)) + b"a") == [(b":authority", b"a")]
    with pytest.raises(H2Error):
        decoder.decode(b"\xbe")  # the newest entry of the table


def test_a_list_of_fields_is_bounded_however_small_its_block() -> None:
    decoder = HeaderDecoder(1000)
    with pytest.raises(H2Error, match="1000 bytes of header fields"):
        decoder.decode(b"\x82" * 200)


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # index 0
        b"\xff\xff\xff\xff\xff\xff\x7f",  # a number without end
        b"\xbe",  # an entry of the table that is not there
        b"\x00\x05ab",  # a string that is cut
        b"\x00\x81\xff\x00",  # a Huffman string of padding only, longer than a byte's
        b"\x3f\xe2\x1f",  # a table of 4097 bytes
        b"\x82\x20",  # a table size behind a field
    ],
)
def test_nonsense_is_an_error_of_the_connection(block: bytes) -> None:
    with pytest.raises(H2Error):
        HeaderDecoder(LIMIT).decode(block)


@pytest.mark.parametrize("text", [b"\xff\xff\xff\xff", b"\x00\x00\x01", b"\x18"])
def test_huffman_padding_is_checked(text: bytes) -> None:
    with pytest.raises(HuffmanError):
        huffman_decode(text)


FRAMES = st.lists(
    st.builds(
        H2Frame,
        st.integers(0, 255),
        st.integers(0, 255),
        st.integers(0, h2.WINDOW_MAX),
        st.binary(max_size=40),
    ),
    max_size=8,
)


@settings(max_examples=examples(200))
@given(FRAMES, st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_frames_come_out_whole_however_they_are_cut(sent: list[H2Frame], cuts: list[int]) -> None:
    data = b"".join(frame(each.kind, each.flags, each.stream_id, each.payload) for each in sent)
    reader, found, at, turn = FrameReader(100), [], 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        found += list(reader.feed(data[at : at + size]))
        at, turn = at + size, turn + 1
    assert found == sent


def test_a_long_frame_is_refused_by_its_head() -> None:
    reader = FrameReader(100)
    with pytest.raises(H2Error) as caught:
        list(reader.feed((101).to_bytes(3)))
    assert caught.value.code == h2.FRAME_SIZE_ERROR


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x05abcd"])
def test_padding_must_fit(payload: bytes) -> None:
    with pytest.raises(H2Error):
        strip_padding(H2Frame(h2.DATA, h2.PADDED, 1, payload))


def test_padding_and_priority_around_a_header_block_are_removed() -> None:
    flags = h2.PADDED | h2.HAS_PRIORITY
    assert (
        header_block_fragment(H2Frame(h2.HEADERS, flags, 3, b"\x02" + bytes(5) + b"block" + b"\0\0"))
        == b"block"
    )
    with pytest.raises(H2Error):
        header_block_fragment(H2Frame(h2.HEADERS, h2.HAS_PRIORITY, 3, b"\0\0\0\x03\x10block"))
