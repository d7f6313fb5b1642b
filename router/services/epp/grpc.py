"""Frame gRPC messages over HTTP/2, and map header fields.

Pure. ``GrpcReader`` returns complete messages however they were split; a message that is too long or
compressed is refused before it has been received.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from kvatlas.router.http.h2_codec import encode_literal

_HEAD: Final = struct.Struct(">BI")  # compressed flag and length
_HEAD_BYTES: Final = 5
# Messages in one DATA frame, all read in one turn of the loop: 64 bytes each in a frame of 64 KiB.
_MESSAGES_MAX: Final = 1024
OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED = 0, 3, 5, 8
FAILED_PRECONDITION, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 9, 12, 13, 14

# Header block that begins every answer.
HEAD: Final = b"\x88" + encode_literal(b"content-type", b"application/grpc")


class GrpcError(Exception):
    """Ends the call with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@lru_cache(maxsize=64)
def trailers(status: int, message: str = "") -> bytes:
    """Header block that ends an answer."""
    block = encode_literal(b"grpc-status", b"%d" % status)
    return block + encode_literal(b"grpc-message", _percent(message)) if message else block


def only_trailers(status: int, message: str) -> bytes:
    """Header block of an answer without a body."""
    return HEAD + trailers(status, message)


def _percent(message: str) -> bytes:
    """Percent-encode a text as gRPC does in header fields."""
    return b"".join(
        b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        for byte in message.encode()[:500]
    )


def message_frame(message: bytes) -> bytes:
    """Encode a message with its frame head."""
    return message_head(len(message)) + message


def message_head(size: int) -> bytes:
    return size.to_bytes(_HEAD_BYTES)  # first byte 0: not compressed


class GrpcReader:
    """Splits bytes into messages. ``message_bytes_max``: longest message."""

    __slots__ = ("_message_bytes_max", "_needed_bytes", "_rest")

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._rest = bytearray()  # bytes of an incomplete message
        self._needed_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete now. Raises ``GrpcError``."""
        rest = self._rest
        if not rest:
            found, at = self._cut(data)
            if at < len(data):
                rest += data[at:]
            return found
        rest += data
        if len(rest) < self._needed_bytes:
            return []
        with memoryview(rest) as view:
            found, at = self._cut(view)
        del rest[:at]
        return found

    def _cut(self, data: bytes | memoryview) -> tuple[list[bytes], int]:
        """Return the complete messages and where the next one begins."""
        found, at, size = [], 0, len(data)
        # Size of the next message, if its head is complete.
        end = _HEAD_BYTES
        while size >= end:
            compressed, length = _HEAD.unpack_from(data, at)
            if compressed:
                raise GrpcError(UNIMPLEMENTED, "compressed messages are not read")
            if length > self._message_bytes_max:
                raise GrpcError(RESOURCE_EXHAUSTED, f"a message of {length} bytes")
            begin = at + _HEAD_BYTES
            end = begin + length
            if end > size:
                break
            found.append(bytes(data[begin:end]))
            if len(found) > _MESSAGES_MAX:
                raise GrpcError(RESOURCE_EXHAUSTED, f"more than {_MESSAGES_MAX} messages in one frame")
            at = end
            end += _HEAD_BYTES
        self._needed_bytes = end - at
        return found, at
