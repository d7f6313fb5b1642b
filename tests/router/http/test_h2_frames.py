"""Frames, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http import h2_codec as h2
from router.http.h2_codec import FrameReader, H2Error, H2Frame, frame, header_block_fragment, strip_padding
from tests.support.examples import examples

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


@settings(max_examples=examples(200), deadline=None)
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


def test_what_stands_around_a_header_block_is_taken_away() -> None:
    flags = h2.PADDED | h2.HAS_PRIORITY
    assert (
        header_block_fragment(H2Frame(h2.HEADERS, flags, 3, b"\x02" + bytes(5) + b"block" + b"\0\0"))
        == b"block"
    )
    with pytest.raises(H2Error):
        header_block_fragment(H2Frame(h2.HEADERS, h2.HAS_PRIORITY, 3, b"\0\0\0\x03\x10block"))
