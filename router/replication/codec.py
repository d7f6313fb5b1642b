"""Presence as bytes: one small *code* per engine and block, and its conversion to the rows of a lookup.

A block's value has ``unit`` bytes per engine slot: a code (1 or 2 bytes, little endian) and the slot's
generation (1 byte). A code names the set of planes (medium, group) that hold the block: its *pattern*. The
scope has one table of patterns for all its engines, which only grows. Few patterns occur, as blocks of one
prompt share theirs, so one byte represents any number of groups and media; nothing depends on how groups form
spec classes, which is still being learned while blocks are written. Invariant: a byte of another generation,
or an unknown code, means "not present".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvatlas.router.index.base import WORD_BITS, Plane, Rows, Words

Bytes = npt.NDArray[np.uint8]

# Maximum number of planes of one scope; blocks in further ones are not visible to other replicas.
PLANES_MAX = 64


def codes_max(code_bytes: int) -> int:
    """Return the number of patterns a code can represent, besides "nowhere"."""
    return int((1 << 8 * code_bytes) - 1)


def pattern_name(planes: Iterable[Plane]) -> bytes:
    return msgspec.msgpack.encode(sorted(planes))


def pattern_planes(name: bytes) -> tuple[Plane, ...]:
    return tuple(msgspec.msgpack.decode(name, type=tuple[Plane, ...]))


def pack_records(hashes: Words, codes: npt.NDArray[np.intp], generation: int, code_bytes: int) -> bytes:
    """Encode the records of the write script: per block its hash and the slot's new bytes."""
    records = np.zeros((len(hashes), 8 + code_bytes + 1), np.uint8)
    records[:, :8] = hashes.astype("<u8").view(np.uint8).reshape(-1, 8)
    for position in range(code_bytes):
        records[:, 8 + position] = (codes >> 8 * position) & 255
    records[:, -1] = np.where(codes != 0, generation, 0)
    return records.tobytes()


class Decoder:
    """Converts values to rows, for one version of the registry: slots, generations and patterns."""

    def __init__(
        self, code_bytes: int, generations: Mapping[int, int], patterns: Mapping[int, Sequence[Plane]]
    ) -> None:
        self._code_bytes = code_bytes
        self._unit = code_bytes + 1
        slots = max(generations, default=-1) + 1
        self._words = -(-slots // WORD_BITS)
        self._generations = np.zeros(self._words * WORD_BITS, np.uint8)
        for slot, generation in generations.items():
            self._generations[slot] = generation
        self.planes = sorted({plane for planes in patterns.values() for plane in planes})
        size = 1 << 8 * code_bytes
        self._tables = [np.zeros(size, np.uint8) for _ in range(-(-len(self.planes) // 8))]
        for number, plane in enumerate(self.planes):
            held_by = [code for code, planes in patterns.items() if plane in planes]
            self._tables[number // 8][held_by] |= np.uint8(1 << number % 8)
        self._byte_tables = [table.tobytes() for table in self._tables]

    def rows(self, values: Sequence[bytes | None]) -> Rows:
        """Return the presence of each block, in the order of its values."""
        count = len(values)
        if not count or not self._words or not self.planes:
            return Rows(count, {})
        codes = self._codes(values)
        columns: dict[tuple[Plane, int], Words] = {}
        for number in range(len(self._tables)):
            held = self._translate(codes, number)
            for position, plane in enumerate(self.planes[8 * number : 8 * number + 8]):
                bits = np.packbits(held & np.uint8(1 << position), axis=1, bitorder="little")
                words = bits.reshape(-1).view("<u8").reshape(count, self._words)
                for word in range(self._words):
                    columns[plane, word] = np.ascontiguousarray(words[:, word], np.uint64)
        return Rows(count, columns)

    def _codes(self, values: Sequence[bytes | None]) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
        """Return the code per block and slot, 0 if the generation differs."""
        width = self._words * WORD_BITS * self._unit
        joined = b"".join([b"\0" * width if v is None else v[:width].ljust(width, b"\0") for v in values])
        cells = np.frombuffer(joined, np.uint8).reshape(len(values), -1, self._unit)
        current = cells[:, :, -1] == self._generations
        if self._code_bytes == 1:
            narrow: Bytes = cells[:, :, 0] * current
            return narrow
        wide = cells[:, :, 0].astype(np.uint16) | (cells[:, :, 1].astype(np.uint16) << np.uint16(8))
        codes: npt.NDArray[np.uint16] = wide * current
        return codes

    def _translate(self, codes: npt.NDArray[np.uint8] | npt.NDArray[np.uint16], number: int) -> Bytes:
        """Translate eight planes at once: one bit each per block and slot."""
        if self._code_bytes == 1:
            raw = codes.tobytes().translate(self._byte_tables[number])
            return np.frombuffer(raw, np.uint8).reshape(codes.shape)
        found: Bytes = self._tables[number][codes]
        return found
