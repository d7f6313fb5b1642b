"""HTTP/2 frames as bytes (RFC 9113, section 4 and 6): cut out of what was received, and made.

Pure. ``FrameReader`` gives whole frames however the bytes were cut, and refuses a frame longer than was
announced before it has come; ``unpadded`` and ``fragment`` take away what stands around a payload.
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

SETTINGS_HEADER_TABLE_SIZE, SETTINGS_MAX_CONCURRENT_STREAMS = 0x1, 0x3
SETTINGS_INITIAL_WINDOW_SIZE, SETTINGS_MAX_FRAME_SIZE, SETTINGS_MAX_HEADER_LIST_SIZE = 0x4, 0x5, 0x6

WINDOW_DEFAULT: Final = 65_535
WINDOW_MAX: Final = (1 << 31) - 1
FRAME_BYTES_MIN: Final = 16_384
"""Frame size that every peer accepts; also the default."""
FRAME_BYTES_MAX: Final = (1 << 24) - 1
_HEAD: Final = struct.Struct(">BHBBI")  # length in two parts, kind, flags, stream
_HEAD_BYTES: Final = 9


class H2Error(Exception):
    """The peer broke the protocol or a limit: the connection ends with this code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class H2Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame without its head."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class FrameReader:
    """Bytes in, whole frames out."""

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[H2Frame]:
        """The frames that are whole now. Raises ``H2Error`` where the next one is too long."""
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < _HEAD_BYTES or len(rest) < _HEAD_BYTES + int.from_bytes(rest[:3]):
                self._check(rest, 0)
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
            self._check(data, at)
            rest += data[at:]

    def _check(self, data: bytes | bytearray, at: int) -> None:
        """Of a frame that is not whole: is it short enough?"""
        length = int.from_bytes(data[at : at + 3])
        if len(data) - at >= 3 and length > self._frame_bytes_max:
            raise H2Error(FRAME_SIZE_ERROR, f"a frame of {length} bytes")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return frame_head(kind, flags, stream_id, len(payload)) + payload


def frame_head(kind: int, flags: int, stream_id: int, size: int) -> bytes:
    """Return the header of a frame with a payload of this length."""
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id)


def settings_frame(values: dict[int, int]) -> bytes:
    """Our settings."""
    pairs = (key.to_bytes(2) + value.to_bytes(4) for key, value in values.items())
    return frame(SETTINGS, 0, 0, b"".join(pairs))


def read_settings(payload: bytes) -> dict[int, int]:
    """A peer's settings. Raises ``H2Error``."""
    if len(payload) % 6:
        raise H2Error(FRAME_SIZE_ERROR, "SETTINGS of an odd size")
    return {
        int.from_bytes(payload[at : at + 2]): int.from_bytes(payload[at + 2 : at + 6])
        for at in range(0, len(payload), 6)
    }


def goaway_frame(last_stream_id: int, code: int, why: str = "") -> bytes:
    """The last stream that will be answered, and why."""
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4) + code.to_bytes(4) + why.encode()[:200])


def window_frame(stream_id: int, increment: int) -> bytes:
    """Allow the peer to send this number of further bytes; stream 0: on the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def reset_frame(stream_id: int, code: int) -> bytes:
    """The stream ends here."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4))


def unpadded(found: H2Frame) -> bytes:
    """A DATA or HEADERS payload without its padding. Raises ``H2Error``."""
    if not found.flags & PADDED:
        return found.payload
    payload = found.payload
    if not payload or payload[0] > len(payload) - 1:
        raise H2Error(PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def fragment(found: H2Frame) -> bytes:
    """The header block in a HEADERS frame. Raises ``H2Error``."""
    block = unpadded(found)
    if not found.flags & HAS_PRIORITY:
        return block
    if len(block) < 5:
        raise H2Error(FRAME_SIZE_ERROR, "a priority without its five bytes")
    if int.from_bytes(block[:4]) & WINDOW_MAX == found.stream_id:
        raise H2Error(PROTOCOL_ERROR, "a stream that depends on itself")
    return block[5:]


def word(payload: bytes) -> int:
    """The one number of a WINDOW_UPDATE or RST_STREAM. Raises ``H2Error``."""
    if len(payload) != 4:
        raise H2Error(FRAME_SIZE_ERROR, "a frame of four bytes has another size")
    return int.from_bytes(payload)
