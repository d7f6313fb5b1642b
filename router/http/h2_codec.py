"""HTTP/2 frames on the wire (RFC 9113, sections 4 and 6), and header blocks that are sent.

Pure: bytes in, values out. ``FrameReader`` returns complete frames however the bytes were cut, and refuses a
frame longer than the announced maximum before it has arrived. What we send is never indexed: our header
blocks are few and made once. Every error is an ``H2Error``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import msgspec

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x2, 0x3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 0x5, 0x6, 0x7, 0x8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x9, 0xB

SETTINGS_MAX_CONCURRENT_STREAMS, SETTINGS_INITIAL_WINDOW_SIZE = 0x3, 0x4
SETTINGS_MAX_FRAME_SIZE, SETTINGS_MAX_HEADER_LIST_SIZE = 0x5, 0x6

WINDOW_DEFAULT: Final = 65_535
WINDOW_MAX: Final = (1 << 31) - 1
# Frame size that every peer accepts; also the default.
FRAME_BYTES_MIN: Final = 16_384
FRAME_BYTES_MAX: Final = (1 << 24) - 1
# Length in two parts, kind, flags, stream.
_HEAD: Final = struct.Struct(">BHBBI")
_HEAD_BYTES: Final = 9


class H2Error(Exception):
    """Violation of the protocol or of a limit. ``code`` is the error code (RFC 9113, section 7)."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class H2Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame without its header (section 4.1)."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class FrameReader:
    """Splits received bytes into frames."""

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[H2Frame]:
        """Yield the complete frames. Raises ``H2Error`` if the next one is too long."""
        rest = self._buffer
        if rest:
            rest += data
            if len(rest) < _HEAD_BYTES or len(rest) < _HEAD_BYTES + int.from_bytes(rest[:3]):
                self._check_length(rest, 0)
                return
            data = bytes(rest)
            rest.clear()
        at, size = 0, len(data)
        while size - at >= _HEAD_BYTES:
            high, low, kind, flags, stream_id = _HEAD.unpack_from(data, at)
            begin = at + _HEAD_BYTES
            end = begin + (high << 16 | low)
            if end > size or end - begin > self._frame_bytes_max:
                break
            at = end
            yield H2Frame(kind, flags, stream_id & WINDOW_MAX, data[begin:end])
        if at < size:
            self._check_length(data, at)
            rest += data[at:]

    def _check_length(self, data: bytes | bytearray, at: int) -> None:
        """Raise ``H2Error`` if an incomplete frame is too long."""
        length = int.from_bytes(data[at : at + 3])
        if len(data) - at >= 3 and length > self._frame_bytes_max:
            raise H2Error(FRAME_SIZE_ERROR, f"a frame of {length} bytes")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Encode a frame."""
    return frame_header(kind, flags, stream_id, len(payload)) + payload


def frame_header(kind: int, flags: int, stream_id: int, size: int) -> bytes:
    """Return the header of a frame with a payload of this length."""
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id)


def settings_frame(values: dict[int, int]) -> bytes:
    """Encode a SETTINGS frame."""
    pairs = (key.to_bytes(2) + value.to_bytes(4) for key, value in values.items())
    return frame(SETTINGS, 0, 0, b"".join(pairs))


def parse_settings(payload: bytes) -> dict[int, int]:
    """Decode the payload of a SETTINGS frame. Raises ``H2Error``."""
    # Section 6.5.1: each setting has an identifier of 2 bytes and a value of 4.
    if len(payload) % 6:
        raise H2Error(FRAME_SIZE_ERROR, "SETTINGS of an odd size")
    return {
        int.from_bytes(payload[at : at + 2]): int.from_bytes(payload[at + 2 : at + 6])
        for at in range(0, len(payload), 6)
    }


def goaway_frame(last_stream_id: int, code: int, why: str = "") -> bytes:
    """Encode a GOAWAY frame with the last stream that will be answered."""
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4) + code.to_bytes(4) + why.encode()[:200])


def window_update_frame(stream_id: int, increment: int) -> bytes:
    """Encode a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def rst_stream_frame(stream_id: int, code: int) -> bytes:
    """Encode a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4))


def strip_padding(received: H2Frame) -> bytes:
    """Return a DATA or HEADERS payload without its padding. Raises ``H2Error``."""
    if not received.flags & PADDED:
        return received.payload
    payload = received.payload
    # Section 6.1: padding as long as the payload or longer is an error.
    if not payload or payload[0] > len(payload) - 1:
        raise H2Error(PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def header_block_fragment(received: H2Frame) -> bytes:
    """Return the field block fragment of a HEADERS frame (section 6.2). Raises ``H2Error``."""
    block = strip_padding(received)
    if not received.flags & HAS_PRIORITY:
        return block
    if len(block) < 5:
        raise H2Error(FRAME_SIZE_ERROR, "a priority without its five bytes")
    # Priorities are deprecated (section 5.3.2). A stream must not depend on itself (RFC 7540, section 5.3.1).
    if int.from_bytes(block[:4]) & WINDOW_MAX == received.stream_id:
        raise H2Error(PROTOCOL_ERROR, "a stream that depends on itself")
    return block[5:]


def parse_uint32(payload: bytes) -> int:
    """Decode the payload of a WINDOW_UPDATE or RST_STREAM frame. Raises ``H2Error``."""
    if len(payload) != 4:
        raise H2Error(FRAME_SIZE_ERROR, "a frame of four bytes has another size")
    return int.from_bytes(payload)


_FRAGMENTS_MAX = 64


class HeaderBlockAssembler:
    """Joins the fragments of one field block, of HEADERS and CONTINUATION frames (RFC 9113, section 4.3).
    ``block_bytes_max`` limits its size."""

    def __init__(self, block_bytes_max: int) -> None:
        self._block_bytes_max = block_bytes_max
        self.incomplete = False
        """Whether a block is incomplete: only CONTINUATION may follow (RFC 9113, section 6.10)."""
        self._first_frame: H2Frame | None = None
        self._fragments: list[bytes] = []
        self._size = 0

    def add(self, received: H2Frame) -> tuple[H2Frame, bytes] | None:
        """Add a HEADERS or CONTINUATION frame. Raises ``H2Error``.

        Returns the HEADERS frame and the block once it is complete.
        """
        if received.kind == HEADERS:
            self._first_frame, self._fragments = received, [header_block_fragment(received)]
            self._size = len(self._fragments[0])
        elif self._first_frame is None or self._first_frame.stream_id != received.stream_id:
            raise H2Error(PROTOCOL_ERROR, "a continuation of nothing")
        else:
            self._size += len(received.payload)
            self._fragments.append(received.payload)
        if self._size > self._block_bytes_max or len(self._fragments) > _FRAGMENTS_MAX + 1:
            raise H2Error(ENHANCE_YOUR_CALM, "a header block that is too long")
        self.incomplete = not received.flags & END_HEADERS
        if self.incomplete:
            return None
        first, self._first_frame = self._first_frame, None
        return first, b"".join(self._fragments)


def encode_literal(name: bytes, value: bytes) -> bytes:
    """Encode a field without indexing and Huffman coding (RFC 7541, section 6.2.2)."""
    return b"\0%b%b%b%b" % (_encode_length(len(name)), name, _encode_length(len(value)), value)


def _encode_length(size: int) -> bytes:
    if size < 0x7F:
        return bytes((size,))
    size -= 0x7F
    out = bytearray(b"\x7f")
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)
