"""gRPC over HTTP/2: messages in their frames, and the fields around them.

Pure. Messages come whole out of ``GrpcReader`` however they were cut; one that is too long, or
compressed, is refused before it has come.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from router.http.h2.hpack import literal

_HEAD: Final = struct.Struct(">BI")  # compressed or not, and the length
_HEAD_BYTES: Final = 5
_MESSAGES_MAX: Final = 1024
"""In one DATA frame, which are all read in one turn of the loop. Of 64 KiB, each would have 64 bytes."""
OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED = 0, 3, 5, 8
FAILED_PRECONDITION, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 9, 12, 13, 14

HEAD: Final = b"\x88" + literal(b"content-type", b"application/grpc")
"""The header block that begins every answer."""


class GrpcError(Exception):
    """The call ends with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@lru_cache(maxsize=64)
def trailers(status: int, message: str = "") -> bytes:
    """The header block that ends an answer."""
    block = literal(b"grpc-status", b"%d" % status)
    return block + literal(b"grpc-message", _percent(message)) if message else block


def only_trailers(status: int, message: str) -> bytes:
    """The header block that is a whole answer."""
    return HEAD + trailers(status, message)


def _percent(message: str) -> bytes:
    """As gRPC writes texts into a header field."""
    return b"".join(
        b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        for byte in message.encode()[:500]
    )


def message_frame(message: bytes) -> bytes:
    """A message as it is sent."""
    return message_head(len(message)) + message


def message_head(size: int) -> bytes:
    """What stands before a message of so many bytes."""
    return size.to_bytes(_HEAD_BYTES)  # its first byte: not compressed


class GrpcReader:
    """Bytes in, whole messages out. ``message_bytes_max``: of the longest one."""

    __slots__ = ("_message_bytes_max", "_needed_bytes", "_rest")

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._rest = bytearray()  # of a message that is not whole
        self._needed_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole now. Raises ``GrpcError``."""
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
        """The messages that are whole, and where the next one begins."""
        found, at, size = [], 0, len(data)
        end = _HEAD_BYTES  # of the next message, as far as it is known
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
