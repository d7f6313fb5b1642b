"""gRPC over HTTP/2: messages in their frames, and the fields around them.

Pure. Messages come whole out of ``GrpcReader`` however they were cut; one that is too long, or
compressed, is refused before it has come.
"""

from __future__ import annotations

from typing import Final

from router.http.h2.hpack import literal

_HEAD_BYTES: Final = 5
OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED = 0, 3, 5, 8
FAILED_PRECONDITION, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 9, 12, 13, 14

HEAD: Final = b"\x88" + literal(b"content-type", b"application/grpc")
"""The header block that begins every answer."""


class GrpcError(Exception):
    """The call ends with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
    return b"\0" + len(message).to_bytes(4) + message


class GrpcReader:
    """Bytes in, whole messages out. ``message_bytes_max``: of the longest one."""

    __slots__ = ("_message_bytes_max", "_rest")

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._rest = bytearray()

    @property
    def held_bytes(self) -> int:
        """Of a message that is not whole."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole now. Raises ``GrpcError``."""
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < _HEAD_BYTES or len(rest) < _HEAD_BYTES + self._length(rest, 0):
                return []
            data = bytes(rest)
            rest.clear()
        found, at, size = [], 0, len(data)
        while size - at >= _HEAD_BYTES:
            end = at + _HEAD_BYTES + self._length(data, at)
            if end > size:
                break
            found.append(data[at + _HEAD_BYTES : end])
            at = end
        if at < size:
            rest += data[at:]
        return found

    def _length(self, data: bytes | bytearray, at: int) -> int:
        if data[at]:
            raise GrpcError(UNIMPLEMENTED, "compressed messages are not read")
        length = int.from_bytes(data[at + 1 : at + _HEAD_BYTES])
        if length > self._message_bytes_max:
            raise GrpcError(RESOURCE_EXHAUSTED, f"a message of {length} bytes")
        return length
