"""DNS messages: one question out, the addresses and services of an answer in. Pure bytes.

Only what a stub resolver needs: A, AAAA and SRV of class IN, CNAMEs skipped over, EDNS with a payload size.
Always true: whatever the bytes, ``parse`` returns or raises ``BadMessageError``, in time linear in their
number (compression pointers must lead back, and a name is at most 255 bytes).
"""

from __future__ import annotations

import ipaddress
import struct
from typing import NamedTuple

A, CNAME, AAAA, SRV = 1, 5, 28, 33
_OPT, _IN = 41, 1
_PAYLOAD_BYTES = 1232
"""What fits every path without fragments."""
_NAME_BYTES_MAX = 255
_RECORDS_MAX = 4096
_ANSWER, _TRUNCATED, _WANT_RECURSION = 0x8000, 0x0200, 0x0100
NO_ERROR, NO_SUCH_NAME = 0, 3


class BadMessageError(ValueError):
    """Not an answer to this question."""


class Service(NamedTuple):
    """One SRV record."""

    priority: int
    weight: int
    port: int
    target: str


class Record(NamedTuple):
    """One record of a kind that matters; ``value`` is an address or a service."""

    name: str
    kind: int
    ttl_s: int
    value: str | Service


class Answer(NamedTuple):
    """``code`` 0 is success, 3 no such name. ``extra`` are the records beyond the answer itself."""

    code: int
    truncated: bool
    records: list[Record]
    extra: list[Record]
    ttl_s: int | None
    """Shortest TTL of the answer's records, CNAMEs included; None where it has none."""


def question(ident: int, name: str, kind: int) -> bytes:
    """The question for ``name``. Raises ``ValueError`` for a name that cannot be asked for."""
    head = struct.pack("!6H", ident, _WANT_RECURSION, 1, 0, 0, 1)
    edns = struct.pack("!BHHIH", 0, _OPT, _PAYLOAD_BYTES, 0, 0)
    return head + _encode(name) + struct.pack("!2H", kind, _IN) + edns


def _encode(name: str) -> bytes:
    encoded = b""
    for label in name.rstrip(".").split("."):
        raw = label.encode("ascii")
        if not 0 < len(raw) < 64:
            raise ValueError(f"{name!r} has a label of {len(raw)} bytes; 1 to 63 are possible")
        encoded += bytes([len(raw)]) + raw
    if len(encoded) >= _NAME_BYTES_MAX:
        raise ValueError(f"{name!r} is longer than a name can be")
    return encoded + b"\0"


def parse(message: bytes, ident: int, name: str, kind: int) -> Answer:
    """The answer to ``question(ident, name, kind)``. Raises ``BadMessageError`` for anything else."""
    try:
        return _parse(message, ident, name, kind)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise BadMessageError(f"{type(error).__name__}: {error}") from None


def _parse(message: bytes, ident: int, name: str, kind: int) -> Answer:
    got, flags, questions, answers, authorities, additional = struct.unpack_from("!6H", message)
    if got != ident or not flags & _ANSWER or questions != 1:
        raise BadMessageError("not an answer to this question")
    asked, offset = _name(message, 12)
    if (asked, *struct.unpack_from("!2H", message, offset)) != (name.rstrip(".").lower(), kind, _IN):
        raise BadMessageError("an answer to another question")
    if answers + authorities + additional > _RECORDS_MAX:
        raise BadMessageError("more records than a message has room for")
    offset += 4
    truncated = bool(flags & _TRUNCATED)
    records: list[Record] = []
    extra: list[Record] = []
    ttls: list[int] = []
    for number in range(0 if truncated else answers + authorities + additional):
        of, sort, ttl_s, value, offset = _record(message, offset)
        in_answer = number < answers
        if in_answer and sort in {A, AAAA, CNAME, SRV}:
            ttls.append(ttl_s)
        if value is not None:
            (records if in_answer else extra).append(Record(of, sort, ttl_s, value))
    return Answer(flags & 0xF, truncated, records, extra, min(ttls, default=None))


def _record(message: bytes, offset: int) -> tuple[str, int, int, str | Service | None, int]:
    """Name, kind, TTL, value (None where it does not matter) and where the next record begins."""
    name, offset = _name(message, offset)
    kind, family, ttl_s, length = struct.unpack_from("!HHIH", message, offset)
    offset += 10
    data = message[offset : offset + length]
    if len(data) != length:
        raise BadMessageError("a record reaches beyond the message")
    if ttl_s >= 1 << 31:
        ttl_s = 0  # RFC 2181: a negative TTL is none
    value: str | Service | None = None
    if family == _IN and kind == A and length == 4:
        value = str(ipaddress.IPv4Address(data))
    elif family == _IN and kind == AAAA and length == 16:
        value = str(ipaddress.IPv6Address(data))
    elif family == _IN and kind == SRV and length > 6:
        target, _ = _name(message, offset + 6)
        priority, weight, port = struct.unpack_from("!3H", data)
        value = Service(priority, weight, port, target)
    return name, kind, ttl_s, value, offset + length


def _name(message: bytes, offset: int) -> tuple[str, int]:
    """The name at ``offset`` in lower case, and where it ends."""
    labels: list[str] = []
    size, end, earliest = 0, -1, offset
    while length := message[offset]:
        if length >= 0xC0:
            if end < 0:
                end = offset + 2
            offset = (length & 0x3F) << 8 | message[offset + 1]
            if offset >= earliest:
                raise BadMessageError("a compression pointer leads forward")
            earliest = offset
            continue
        size += length + 1
        if length >= 0x40 or size > _NAME_BYTES_MAX:
            raise BadMessageError("a name that is none")
        label = message[offset + 1 : offset + 1 + length]
        if len(label) != length:
            raise BadMessageError("a name reaches beyond the message")
        labels.append(label.decode("ascii").lower())
        offset += length + 1
    return ".".join(labels), offset + 1 if end < 0 else end
