"""Records that all workers of a machine can read, in memory that their parent made before it forked them.

Every worker appends records to a ring of its own, over its oldest ones. One table for all finds them by
key. Nothing is locked: a slot of the table has the place and the size of a record, and a checksum of its
bytes, its place and its key. A reader copies the bytes and compares the checksum. So what is half written,
overwritten meanwhile or left by a killed worker is a miss, also a slot that two workers wrote at once. Places
are never used again, and the checksum is seeded with a secret of this run, so bytes that a client sent never
pass for a record.

Layout, in words of 64 bits: the secret; per worker the end of its last record, in bytes since the start; the
table, in buckets of four slots (key, place, size, checksum); then the rings.

Invariant: ``find`` returns bytes that a worker put under this key, or None, whatever else the memory holds.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final

import xxhash

from kvatlas.router.prompts.request import SHARE
from kvatlas.router.prompts.settings import PromptStats

# Less memory has no room for a record worth sharing.
MEMORY_BYTES_MIN: Final = 1 << 16
_WORD: Final = 8
_SLOT: Final = 4
_BUCKET: Final = 4 * _SLOT
# One bucket (128 bytes) for so much memory: records have 10 KB and more, and up to a dozen keys.
_BYTES_PER_BUCKET: Final = 8192
_MASK: Final = (1 << 64) - 1
_END_MAX: Final = 1 << 48


def make_memory(bytes_max: int) -> mmap.mmap | None:
    """Memory for the records of all workers, made before they are forked; None if it would be too small.

    It is anonymous: no file and no name, so only this process and its children reach it.
    """
    if bytes_max < MEMORY_BYTES_MIN:
        return None
    memory = mmap.mmap(-1, bytes_max // _WORD * _WORD)
    memory[:_WORD] = os.urandom(_WORD)
    return memory


class SharedRecords:
    """The records as one worker sees them, which has slot ``slot`` of ``count``. A worker that takes the slot
    of a dead one goes on behind its last record."""

    def __init__(self, memory: mmap.mmap, slot: int, count: int, stats: PromptStats) -> None:
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._slot, self._count = slot, count
        self._stats = stats
        self._secret: int = self._words[0]
        self._buckets = 1 << (len(memory) // _BYTES_PER_BUCKET).bit_length() - 1
        self._table = 1 + count
        rings = self._table + self._buckets * _BUCKET
        self._rings = rings * _WORD
        self.ring_bytes = (len(self._words) - rings) // count * _WORD
        # No end of a record is that large: these bytes were never written by a worker.
        self._end = self._words[1 + slot] if self._words[1 + slot] < _END_MAX else 0
        self._copy = bytearray()
        self._live = deque(self._left())
        """Place and size of this worker's records, oldest first."""
        stats.shared_entries, stats.shared_bytes = len(self._live), sum(size for _, size in self._live)

    def put(self, keys: Sequence[int], record: bytes) -> bool:
        """Add a record under some keys; False if it is too large."""
        size, ring, stats = len(record), self.ring_bytes, self._stats
        if size > ring // SHARE:
            stats.shared_refused += 1
            return False
        at = self._end
        if at % ring + size > ring:  # no record spans the end of the ring
            at += ring - at % ring
        # First of all, so that the successor of a worker that is killed here does not use this place again.
        self._end = self._words[1 + self._slot] = at + size
        begin = self._rings + self._slot * ring + at % ring
        self._bytes[begin : begin + size] = record
        place = at * self._count + self._slot
        checksum = xxhash.xxh3_64_intdigest(record, self._secret ^ place)
        for key in keys:
            slot = self._slot_for(key)
            self._words[slot : slot + _SLOT] = memoryview(array("Q", (key, place, size, checksum ^ key)))
        self._live.append((at, size))
        stats.shared_written += 1
        stats.shared_bytes += size
        while self._live[0][0] < at + size - ring:
            stats.shared_bytes -= self._live.popleft()[1]
            stats.shared_overwritten += 1
        stats.shared_entries = len(self._live)
        return True

    def find(self, key: int) -> memoryview | None:
        """The record that was put last under this key, if it is still there; valid until the next call."""
        ring = self.ring_bytes
        bucket = self._bucket(key)
        words = self._words[bucket : bucket + _BUCKET].tolist()
        for slot in range(0, _BUCKET, _SLOT):
            _, place, size, checksum = words[slot : slot + _SLOT]
            at, worker = divmod(place, self._count)
            if words[slot] != key or not size or self._words[1 + worker] - at > ring:  # overwritten
                continue
            begin = self._rings + worker * ring + at % ring
            size = min(size, ring // SHARE, ring - at % ring)  # of a torn slot: any
            if size > len(self._copy):  # kept, since new memory costs more than the rest
                self._copy = bytearray(2 * size)
            record = memoryview(self._copy)[:size]
            record[:] = self._bytes[begin : begin + size]
            if xxhash.xxh3_64_intdigest(record, self._secret ^ place) ^ key == checksum:
                return record
            self._stats.shared_torn += 1
        return None

    def _bucket(self, key: int) -> int:
        return self._table + key % self._buckets * _BUCKET

    def _slot_for(self, key: int) -> int:
        """The key's own slot, else an empty one, else the one whose record is overwritten first."""
        bucket = self._bucket(key)
        words = self._words[bucket : bucket + _BUCKET].tolist()
        oldest, age_max = 0, -1
        for slot in range(0, _BUCKET, _SLOT):
            if words[slot] == key or not words[slot + 2]:
                return bucket + slot
            at, worker = divmod(words[slot + 1], self._count)
            age = (self._words[1 + worker] - at) & _MASK  # of a torn slot: any
            if age > age_max:
                oldest, age_max = slot, age
        return bucket + oldest

    def _left(self) -> list[tuple[int, int]]:
        """Place and size of the records that earlier workers of this slot left."""
        if not self._end:
            return []
        words = self._words[self._table : self._table + self._buckets * _BUCKET].tolist()
        found: dict[int, int] = {}
        for place, size in zip(words[1::_SLOT], words[2::_SLOT], strict=True):
            at, worker = divmod(place, self._count)
            if worker == self._slot and 0 < size <= self._end - at <= self.ring_bytes:
                found[at] = size
        return sorted(found.items())
