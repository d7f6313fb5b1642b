"""Read and write the messages of ``envoy.service.ext_proc.v3.ExternalProcessor`` that are used.

Pure. Field numbers are those of Envoy's API (stable within v3). Unused parts of a gateway's messages are
skipped; written messages are complete for Envoy 1.34 and later.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal, get_args

import msgspec

from kvatlas.router.services.epp.protobuf import (
    ProtobufError,
    as_bytes,
    as_int,
    bytes_field,
    fields,
    number_field,
    read_varint,
    varint,
)

Header = tuple[bytes, bytes]
Kind = Literal[
    "request_headers",
    "response_headers",
    "request_body",
    "response_body",
    "request_trailers",
    "response_trailers",
]

_KINDS: Final[dict[int, Kind]] = dict(enumerate(get_args(Kind), 2))
# First kind of bodies and of trailers.
_BODIES, _TRAILERS = 4, 6
# First byte of a message with a body.
_BODY_BEGINS: Final[dict[int, Kind]] = {0x22: "request_body", 0x2A: "response_body"}
# ``end_of_stream`` of a body.
_ENDS: Final = number_field(2, 1)
_ANSWERS: Final[dict[Kind, int]] = {kind: at for at, kind in enumerate(get_args(Kind), 1)}
_ANSWER_BEGINS: Final[dict[Kind, bytes]] = {kind: bytes((at << 3 | 2,)) for kind, at in _ANSWERS.items()}
_IMMEDIATE, _DYNAMIC_METADATA = 7, 8
_APPEND, _OVERWRITE = 0, 2
# First bytes of fields 1 and 3 that hold bytes.
_FIRST, _THIRD = 0x0A, 0x1A
# Lengths below this are encoded in one byte.
_ONE_BYTE = 0x80
_HEADERS_MAX: Final = 4096
# Metadata size: about 10,000 endpoints.
_METADATA_BYTES_MAX: Final = 256 * 1024
# Body modes.
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX = range(5)
MODES: Final = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")

LB: Final = "envoy.lb"
SUBSET: Final = "envoy.lb.subset_hint"


class Modes(msgspec.Struct, frozen=True, gc=False):
    """Body modes of the gateway, as its first message says."""

    request_body: int = FULL_DUPLEX
    response_body: int = FULL_DUPLEX


class ProcessingRequest(msgspec.Struct, gc=False):
    """One message of a gateway; ``kind`` is None for unknown kinds."""

    kind: Kind | None = None
    headers: list[Header] = []
    body: bytes = b""
    end_of_stream: bool = False
    metadata: bytes = b""
    """Read by ``endpoints``."""
    modes: Modes | None = None
    observes: bool = False
    """The gateway expects no answer (observability mode)."""


def mode_problem(message: ProcessingRequest, modes: Modes) -> str:
    """Return why a stream cannot be served in these modes, with the remedy; "" if it can."""
    if message.observes:
        return "observability_mode: set it to false"
    mode = modes.request_body
    if message.end_of_stream or mode in (FULL_DUPLEX, BUFFERED):
        return ""
    named = MODES[mode] if mode < len(MODES) else "unknown"
    return f"request_body_mode {named}: set FULL_DUPLEX_STREAMED (or BUFFERED)"


def read_request(message: bytes) -> ProcessingRequest:
    """Decode a message. Raises ``ProtobufError``, also for two messages in one: protobuf would merge them,
    but gateways send none."""
    found = ProcessingRequest()
    for number, value in fields(message, _read_plain_body(message, found)):
        kind = _KINDS.get(number)
        if kind is not None:
            if found.kind is not None:
                raise ProtobufError(f"{found.kind} and {kind} in one message")
            found.kind = kind
            if number < _BODIES:
                found.headers, found.end_of_stream = _read_headers(as_bytes(value))
            elif number < _TRAILERS:
                found.body, found.end_of_stream = _read_body(as_bytes(value))
        elif number == 8:
            # Merge the parts of a message that came in two.
            found.metadata += as_bytes(value)
            if len(found.metadata) > _METADATA_BYTES_MAX:
                raise ProtobufError(f"metadata_context of more than {_METADATA_BYTES_MAX} bytes")
        elif number == 10:
            found.observes = bool(as_int(value))
        elif number == 11:
            found.modes = _read_modes(as_bytes(value))
    return found


def _read_plain_body(message: bytes, found: ProcessingRequest) -> int:
    """Decode a body without copying the message around it; return the position after it. 0: the message does
    not begin with a body in the usual encoding."""
    kind = _BODY_BEGINS.get(message[0]) if message else None
    if kind is None:
        return 0
    length, at = read_varint(message, 1)
    end = at + length
    body = b""
    if length and message[at : at + 1] == b"\n":
        size, begin = read_varint(message, at + 1)
        at = begin + size
        body = message[begin:at]
    ends = message[at:end]
    if max(at, end) > len(message) or at > end or ends not in (b"", _ENDS):
        return 0
    found.kind, found.body, found.end_of_stream = kind, body, ends != b""
    return end


def _read_headers(message: bytes) -> tuple[list[Header], bool]:
    headers: list[Header] = []
    ends = False
    for number, value in fields(message):
        if number == 1:
            headers += _read_map(as_bytes(value))
            if len(headers) > _HEADERS_MAX:
                raise ProtobufError(f"more than {_HEADERS_MAX} header fields")
        elif number == 3:
            ends = bool(as_int(value))
    return headers, ends


def _read_map(message: bytes) -> list[Header]:
    # Every request has about a dozen fields: usual encodings take a fast path without ``fields``.
    headers: list[Header] = []
    at, size = 0, len(message)
    while (
        at < size - 1
        and len(headers) <= _HEADERS_MAX
        and message[at] == _FIRST
        and (length := message[at + 1]) < _ONE_BYTE
    ):
        begin = at + 2
        at = begin + length
        if at > size:
            raise ProtobufError("a header field longer than its message")
        value = begin + 4 + message[begin + 1] if length > 3 else at + 1
        if (
            value <= at
            and message[begin] == _FIRST
            and message[value - 2] == _THIRD
            and message[value - 1] == at - value
        ):
            headers.append((message[begin + 2 : value - 2].lower(), message[value:at]))
        else:
            headers.append(_read_header(message[begin:at]))
    if at < size:  # a long field, or an unknown one
        headers += [_read_header(as_bytes(each)) for number, each in fields(message[at:]) if number == 1]
    return headers


def _read_header(message: bytes) -> Header:
    found = dict(fields(message))
    key, text, raw = (as_bytes(found.get(number, b"")) for number in (1, 2, 3))
    return key.lower(), raw or text


def _read_body(message: bytes) -> tuple[bytes, bool]:
    found = dict(fields(message))
    return as_bytes(found.get(1, b"")), bool(as_int(found.get(2, 0)))


def _read_modes(message: bytes) -> Modes:
    found = dict(fields(message))
    return Modes(as_int(found.get(1, NONE)), as_int(found.get(2, NONE)))


@lru_cache(maxsize=16)
def unchanged(kind: Kind) -> bytes:
    """Encode a ``ProcessingResponse`` that changes nothing."""
    return answer(kind)


def answer(kind: Kind, *, common: bytes = b"", metadata: bytes = b"") -> bytes:
    """Encode a ``ProcessingResponse`` to a message of this kind, with these changes."""
    inner = bytes_field(1, common) if common else b""
    return bytes_field(_ANSWERS[kind], inner) + metadata


def common_response(
    *, headers: bytes = b"", body: bytes | None = None, clear_route_cache: bool = False
) -> bytes:
    """Encode changes of headers (``header_mutation``) and of a buffered body."""
    return b"".join(
        (
            bytes_field(2, headers) if headers else b"",
            bytes_field(3, bytes_field(1, body)) if body is not None else b"",
            number_field(5, 1) if clear_route_cache else b"",
        )
    )


def around_piece(kind: Kind, size: int, *, ends: bool) -> tuple[bytes, bytes]:
    """Return the bytes before and after a piece of a body in a full-duplex ``ProcessingResponse``
    (``response.body_mutation.streamed_response.body``)."""
    before = b"\n" + varint(size) if size else b""
    behind = _ENDS if ends else b""
    size += len(behind)
    for begin in (b"\x1a", b"\x1a", b"\n", _ANSWER_BEGINS[kind]):
        before = begin + varint(size + len(before)) + before
    return before, behind


def header_mutation(sets: Iterable[Header], removes: Iterable[bytes] = ()) -> bytes:
    """Encode fields to set, which replace those of the same name (but repeated ones), and to remove."""
    out: list[bytes] = []
    seen: set[bytes] = set()
    for name, value in sets:
        field = bytes_field(1, bytes_field(1, name) + bytes_field(3, value))
        action = _APPEND if name in seen else _OVERWRITE
        out.append(bytes_field(1, field + number_field(3, action)))
        seen.add(name)
    out.extend(bytes_field(2, name) for name in removes)
    return b"".join(out)


def dynamic_metadata(namespace: str, key: str, text: str) -> bytes:
    """Encode the part of a ``ProcessingResponse`` that passes this text to later filters."""
    inner = _map_entry(key, bytes_field(3, text.encode()))
    outer = _map_entry(namespace, bytes_field(5, inner))
    return bytes_field(_DYNAMIC_METADATA, outer)


def _map_entry(key: str, value: bytes) -> bytes:
    """Encode a ``google.protobuf.Struct`` of one member."""
    return bytes_field(1, bytes_field(1, key.encode()) + bytes_field(2, value))


def immediate(status: int, headers: Iterable[Header], body: bytes, details: str) -> bytes:
    """Encode a ``ProcessingResponse`` that answers the client; ``details`` is for the gateway's log."""
    content = b"".join(
        (
            bytes_field(1, number_field(1, status)),
            bytes_field(2, header_mutation(headers)),
            bytes_field(3, body) if body else b"",
            bytes_field(5, details.encode()),
        )
    )
    return bytes_field(_IMMEDIATE, content)
