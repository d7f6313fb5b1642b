"""Interface of a store of block values that several engines share, and the frame of a value.

Keys are opaque bytes with a namespace prefix, values are whole rows with a frame. Every call ends by its
deadline, or as soon after it as its wait can be interrupted (a hung network file system cannot). A thread
that must not block leaves the call to another thread. A missing, corrupt or foreign value is a counted miss
and never raises; a store that cannot be reached raises ``StoreUnavailable``.
"""

from __future__ import annotations

import enum
import hashlib
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import xxhash

from connectors.settings import ConfigError, size_bytes


class StoreUnavailable(Exception):  # noqa: N818
    """The store is unreachable, or did not answer by the deadline."""


class BlockStore(Protocol):
    """A shared store. Thread-safe."""

    name: str
    """``ownership`` in KV events."""

    def register_buffer(self, buffer: memoryview) -> None:
        """Register the memory of all values; it stays valid until ``close``. Call it once, before
        transfers."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """One answer per key; ``deadline_s``: seconds from now for the whole call."""

    def put(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        """Write values; an existing one is kept or replaced by an equal one. True: other engines can read
        it."""

    def get_into(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        """Fill each buffer with its key's value of exactly its length. False: a miss, with the buffer
        undefined.

        Buffers are written to until the call returns, never afterwards.
        """

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Remove bad values; absent ones are no error."""

    def counters(self) -> dict[str, int]:
        """Counts of errors, misses and other events since the start, by reason; they only grow."""

    def close(self) -> None: ...


def close_within(store: BlockStore, timeout_s: float) -> bool:
    """Close a store whose client may wait for a lost server. False: it still waits after ``timeout_s``."""
    thread = threading.Thread(target=store.close, name="kvatlas-store-close", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


class Deadline:
    """A point in time, ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() >= self._end


class Counters:
    """Named counts that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self._counts[reason] += count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Options:
    """A mapping of settings that is checked while it is read; ``where`` is its name in errors.

    Read all keys, then call ``finish``, which raises for unknown keys.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._known: set[str] = set()

    def key(self, name: str) -> str:
        """The full name of a setting, for errors."""
        return f"{self._where}.{name}"

    def text(self, name: str, default: str | None = None, *, choices: tuple[str, ...] = ()) -> str:
        """A non-empty text, or the default; without a default the key is required."""
        value = self._get(name, default)
        if not isinstance(value, str) or (not value and value != default):
            raise ConfigError(self.key(name), value, "give a text")
        if choices and value not in choices:
            raise ConfigError(self.key(name), value, f"choose one of: {', '.join(choices)}")
        return value

    def file(self, name: str) -> Path | None:
        """Path of a readable file, or None if it is not given."""
        value = self.text(name, "")
        if not value:
            return None
        path = Path(value)
        try:
            with path.open("rb"):
                return path
        except OSError as error:
            raise ConfigError(
                self.key(name), value, f"name a file that can be read ({error.strerror})"
            ) from error

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(self.key(name), value, "give a number")
        if not low <= value <= high:
            raise ConfigError(self.key(name), value, f"give a number from {low} to {high}")
        return float(value)

    def whole(self, name: str, default: int, *, low: int, high: int) -> int:
        value = self.number(name, default, low=low, high=high)
        if value != int(value):
            raise ConfigError(self.key(name), value, "give a whole number")
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(self.key(name), value, "give true or false")
        return value

    def size(self, name: str, default: str) -> int:
        """Bytes, given as a number or as text such as "8GiB"."""
        return size_bytes(self._get(name, default), self.key(name))

    def finish(self) -> None:
        """Raise ConfigError for an unknown key."""
        for name in self._values:
            if name not in self._known:
                known = ", ".join(sorted(self._known))
                raise ConfigError(self.key(name), self._values[name], f"no such setting; there are: {known}")

    def _get(self, name: str, default: object) -> Any:
        self._known.add(name)
        value = self._values.get(name, default)
        if value is None:
            raise ConfigError(self.key(name), None, "it must be given")
        return value


# The frame of a row in a shared store, which lets a reader verify that it is the expected row.
#
# A value is the row's bytes followed by 64 bytes, little-endian: magic, format version, length of the row,
# digest of the namespace, digest of the block key, xxh3_64 of the row. The frame comes last, so that row and
# frame are contiguous and the row begins where the transfer engine put it. Invariant: a value that is
# corrupt, truncated, or of another format, namespace or key never passes ``find_fault``.


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
