"""Frame gRPC messages over HTTP/2, and map header fields.

Pure. ``GrpcReader`` returns complete messages however they were split; a message that is too long or
compressed is refused before it has been received.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from kvatlas.router.http.asgi_scope import ASGI, request_head_error, request_scope
from kvatlas.router.http.hpack_decoding import encode_literal
from kvatlas.router.openai.errors import bad_request, head_too_large

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


# Header fields between a gateway and the proxy: what came as HTTP/2 has it, and what is to change of it.
#
# Pure. Invariants: the client's own destination never reaches the proxy nor an engine's choice; framing
# (length, connection, host) stays the gateway's.


Header = tuple[bytes, bytes]
DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
SERVED_KEY: Final = "x-gateway-destination-endpoint-served"
_DESTINATION: Final = DESTINATION.encode()
_FIELD_SIGNS: Final = 4
# Fields of the gateway's own connections.
_HOP_FIELDS: Final = frozenset(
    (
        *(b"host", b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"te", b"trailer"),
        *(b"upgrade", b"expect", b"x-forwarded-for"),
    )
)
_CONNECTION: Final[dict[str, Any]] = {
    "type": "http",
    "asgi": ASGI,
    "scheme": "http",
    "root_path": "",
    "server": None,
    "client": None,
    "state": {},
}


def scope_of(headers: list[Header], header_bytes_max: int) -> dict[str, Any]:
    """The ASGI scope of a request. Raises ``ApiError`` for one that no client of the proxy could send."""
    size, pseudo, kept = 0, {}, []
    for field in headers:
        name, value = field
        size += len(name) + len(value) + _FIELD_SIGNS
        if name[:1] == b":":
            pseudo[name] = value
        elif name != _DESTINATION:
            kept.append(field)
    if size > header_bytes_max:
        raise head_too_large(header_bytes_max)
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    problem = request_head_error("2", path, 0)
    if problem or not method.isalpha() or not (path.startswith(b"/") or path == b"*"):
        raise bad_request("invalid_http", problem or "The gateway sent no valid method or path.")
    host = pseudo.get(b":authority", b"")
    if host and not any(name == b"host" for name, _ in kept):
        kept.append((b"host", host))
    return request_scope(_CONNECTION, "2", method, path, kept)


def status_of(headers: list[Header]) -> tuple[int, list[Header]]:
    """An answer's status, 0 where there is none, and its fields."""
    status = next((value for name, value in headers if name == b":status"), b"")
    return int(status) if status.isdigit() else 0, [field for field in headers if field[0][:1] != b":"]


def own_fields(headers: Iterable[Header]) -> list[Header]:
    """Fields of an answer that the router gives itself, as the gateway takes them."""
    return [field for field in headers if field[0] not in _HOP_FIELDS]


def changes(before: list[Header], after: Iterable[Header]) -> tuple[list[Header], list[bytes]]:
    """Fields to set and names to remove, so that ``before`` becomes ``after``; both without those that HTTP/2
    begins with a colon."""
    fields = [field for field in after if field[0] not in _HOP_FIELDS]
    kept = [field for field in before if field[0] not in _HOP_FIELDS]
    if fields == kept:
        return [], []
    had = set(kept)
    changed = {name for name, value in fields if (name, value) not in had}
    changed |= _counts_differ(before, fields)
    names = {name for name, _ in fields}
    return [f for f in fields if f[0] in changed], sorted({name for name, _ in had} - names)


def _counts_differ(before: list[Header], after: list[Header]) -> set[bytes]:
    """Names that are in both, but not as often."""
    ours = [name for name, _ in after]
    theirs = [name for name, _ in before]
    return {name for name in {*ours} & {*theirs} if ours.count(name) != theirs.count(name)}
