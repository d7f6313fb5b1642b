"""Protocol Buffers' wire format as far as the picker needs it: numbers, bytes, nested messages.

Pure. Unknown fields are skipped and fields come in their order; of a repeated singular field the last one
counts, as in every runtime. The work per message is linear in its bytes and bounded; invalid input raises
``ProtobufError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX: Final = 10
# Fields of one message: reading this many takes about 6 ms.
_FIELDS_MAX: Final = 16_384


class ProtobufError(ValueError):
    """The bytes are not a valid message."""


# Value of a field: a number or bytes.
Value = int | bytes


def fields(message: bytes, at: int = 0) -> Iterator[tuple[int, Value]]:
    """Yield number and value of every field from ``at`` on. Raises ``ProtobufError``."""
    # Fixed-size numbers, which no message here has, are skipped.
    size, left = len(message), _FIELDS_MAX
    while at < size:
        left -= 1
        if left < 0:
            raise ProtobufError(f"more than {_FIELDS_MAX} fields in one message")
        key, at = (message[at], at + 1) if message[at] < 0x80 else read_varint(message, at)
        number, kind = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise ProtobufError(f"field {number}")
        if kind == _BYTES:
            # Most lengths are one byte: inlining this case saves a quarter of the time.
            if at < size and message[at] < 0x80:
                length, at = message[at], at + 1
            else:
                length, at = read_varint(message, at)
            end = at + length
            if end > size:
                raise ProtobufError(f"field {number} is longer than its message")
            yield number, message[at:end]
            at = end
        elif kind == _VARINT:
            value, at = read_varint(message, at)
            yield number, value
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
            if at > size:
                raise ProtobufError(f"field {number} is longer than its message")
        else:
            raise ProtobufError(f"field {number} is of kind {kind}")


def read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number and the position after it. Raises ``ProtobufError``."""
    try:
        byte = message[at]
        if byte < 0x80:
            return byte, at + 1
        value = shift = 0
        for _ in range(_VARINT_BYTES_MAX):
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, at
            shift += 7
    except IndexError:
        raise ProtobufError("a number that is not whole") from None
    raise ProtobufError("a number that is too long")


def as_bytes(value: Value) -> bytes:
    """Return a value that must be bytes. Raises ``ProtobufError``."""
    if isinstance(value, int):
        raise ProtobufError("a number where bytes belong")
    return value


def as_int(value: Value) -> int:
    """Return a value that must be a number. Raises ``ProtobufError``."""
    if not isinstance(value, int):
        raise ProtobufError("bytes where a number belongs")
    return value


def as_text(value: Value) -> str:
    """Return a value that must be text. Raises ``ProtobufError``."""
    try:
        return as_bytes(value).decode()
    except UnicodeDecodeError as error:
        raise ProtobufError(f"text that is not UTF-8: {error}") from None


def varint(value: int) -> bytes:
    """Encode a non-negative number."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_field(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    """Encode a field with bytes, text or a message."""
    size = len(value)
    if size < 0x80 and number < 0x10:
        return b"%c%c%b" % (number << 3 | _BYTES, size, value)
    return b"%b%b%b" % (varint(number << 3 | _BYTES), varint(len(value)), value)
