"""The frame of a row in a shared store, which lets a reader verify that it is the expected row.

A value is the row's bytes followed by 64 bytes, little-endian: magic, format version, length of the row,
digest of the namespace, digest of the block key, xxh3_64 of the row. The frame comes last, so that row and
frame are contiguous and the row begins where the transfer engine put it. Invariant: a value that is
corrupt, truncated, or of another format, namespace or key never passes ``find_fault``.
"""

from __future__ import annotations

import enum
import hashlib
import struct

import xxhash

FORMAT_VERSION = 1
FRAME_BYTES = 64
DIGEST_BYTES = 16
_MAGIC = b"KVAT"
_FRAME = struct.Struct("<4sHxxQ16s16sQ8x")


class FrameFault(enum.Enum):
    """Fault of a value; the enum value is its name in counters."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    NAMESPACE = "namespace"
    KEY = "key"
    LENGTH = "length"
    CHECKSUM = "checksum"


def _split(value: memoryview) -> tuple[memoryview, memoryview]:
    row_bytes = len(value) - FRAME_BYTES
    return value[:row_bytes], value[row_bytes:]


def _key_digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=DIGEST_BYTES).digest()


def seal(value: memoryview, namespace: bytes, key: bytes) -> None:
    """Write the frame into the last ``FRAME_BYTES`` of ``value``, after the row.

    ``namespace``: a digest of ``DIGEST_BYTES``. ValueError if there is no room for a frame.
    """
    if len(value) < FRAME_BYTES or len(namespace) != DIGEST_BYTES:
        raise ValueError(f"cannot frame {len(value)} bytes under a namespace of {len(namespace)} bytes")
    row, frame = _split(value)
    checksum = xxhash.xxh3_64_intdigest(row)
    _FRAME.pack_into(frame, 0, _MAGIC, FORMAT_VERSION, len(row), namespace, _key_digest(key), checksum)


def find_fault(value: memoryview, namespace: bytes, key: bytes) -> FrameFault | None:
    """Fault of this value as the value of ``key``; None if it is valid."""
    if len(value) < FRAME_BYTES:
        return FrameFault.SHORT
    row, frame = _split(value)
    magic, version, length, its_namespace, its_key, checksum = _FRAME.unpack_from(frame)
    for differs, fault in (
        (magic != _MAGIC, FrameFault.MAGIC),
        (version != FORMAT_VERSION, FrameFault.VERSION),
        (its_namespace != namespace, FrameFault.NAMESPACE),
        (its_key != _key_digest(key), FrameFault.KEY),
        (length != len(row), FrameFault.LENGTH),
    ):
        if differs:
            return fault
    return FrameFault.CHECKSUM if checksum != xxhash.xxh3_64_intdigest(row) else None
