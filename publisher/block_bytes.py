"""Serialize many blocks without extra keys at once: a quarter less time for a thousand blocks.

A block is hashed over ``dumps((parent, tokens, None))``. Only the parent's hash depends on the block before.
One call of the same library therefore writes the tokens of many blocks, and the result is cut into blocks.
The bytes around parent and tokens are copied from an example of the same length. The only knowledge of a
format in this module is the length of a serialized number.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final

import cbor2
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

# Larger numbers are serialized with other lengths.
_ID_MAX: Final = (1 << 31) - 1
# Shorter tuples have other frames (pickle's ``TUPLE1`` to ``TUPLE3``).
_BLOCK_TOKENS_MIN: Final = 4
# Numbers per call: below the size at which pickle begins another frame.
_CHUNK_TOKENS: Final = 8192


class _Format(msgspec.Struct, frozen=True):
    """How an algorithm serializes and hashes.

    A number takes one byte more from each of ``steps`` on, and two more from 65536 on. ``tail`` is the number
    of bytes after the numbers of a tuple that is serialized alone.
    """

    dumps: Callable[[Any], bytes]
    hasher: Callable[[bytes], Any]
    steps: tuple[int, int]
    tail: int = 0


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


_FORMATS: Final = {
    "sha256": _Format(_pickled, hashlib.sha256, (0, 256), 3),
    "sha256_cbor": _Format(_cbor, hashlib.sha256, (24, 256)),
    "xxhash": _Format(_pickled, xxhash.xxh3_128, (0, 256), 3),
    "xxhash_cbor": _Format(_cbor, xxhash.xxh3_128, (24, 256)),
    "learned": _Format(msgspec.msgpack.encode, xxhash.xxh3_128, (128, 256)),
}
# The bytes before the parent's hash, between it and the tokens, and after the tokens.
_Around = tuple[bytes, bytes, bytes]


def plain_hashes(token_ids: Sequence[int], size: int, algo: str, parent: bytes) -> tuple[bytes, bytes] | None:
    """Hash blocks without extra keys; ``parent`` is the hash before the first.

    Returns the full hashes, concatenated, and the last eight bytes of each as native numbers. None for ids or
    a block size that this module cannot serialize.
    """
    try:
        numbers = np.asarray(token_ids, dtype=np.int64)
    except OverflowError:
        return None
    if size < _BLOCK_TOKENS_MIN or numbers.min() < 0 or numbers.max() > _ID_MAX:
        return None
    form = _FORMATS[algo]
    hasher = form.hasher
    step = max(size, _CHUNK_TOKENS - _CHUNK_TOKENS % size)
    full: list[bytes] = []
    examples: dict[int, _Around] = {}
    for start in range(0, len(numbers), step):
        data, ends = _written(numbers[start : start + step], size, form)
        at = ends[0]
        for end in ends[1:]:
            body = data[at:end]
            around = examples.get(end - at)
            if around is None:
                block = token_ids[len(full) * size : (len(full) + 1) * size]
                around = examples[end - at] = _around(form, body, tuple(block), len(parent))
            before, between, after = around
            parent = hasher(before + parent + between + body + after).digest()
            full.append(parent)
            at = end
    words = len(parent) // 8
    whole = b"".join(full)
    return whole, np.frombuffer(whole, ">u8")[words - 1 :: words].astype(np.uint64).tobytes()


def _written(numbers: npt.NDArray[np.int64], size: int, form: _Format) -> tuple[bytes, list[int]]:
    """Serialize all numbers; returns the bytes, the offset of each block and the end of the last."""
    data = form.dumps(tuple(numbers.tolist()))
    lengths = 1 + 2 * (numbers >= 65536).astype(np.uint8)
    for step in form.steps:
        lengths += numbers >= step
    ends = lengths.reshape(-1, size).sum(axis=1, dtype=np.int64).cumsum()
    begin = len(data) - form.tail - int(ends[-1])
    return data, [begin, *(ends + begin).tolist()]


def _around(form: _Format, body: bytes, block: tuple[int, ...], parent_bytes: int) -> _Around:
    """The bytes around parent and tokens, from one block that is serialized whole."""
    parent = b"\xfe" * parent_bytes
    before, _, rest = form.dumps((parent, block, None)).partition(parent)
    at = rest.index(body)
    return before, rest[:at], rest[at + len(body) :]
