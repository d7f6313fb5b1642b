"""Estimated sizes of parts of a client's request, in bytes, and compact forms of them.

Caches are bounded by these estimates, so they must not be too low: a megabyte of empty lists is twenty when
decoded. Long values that are only compared are kept as digests.
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from typing import Any, Final

import msgspec
import numpy as np

from publisher.block_hash import NO_EXTRAS, PromptExtras

SHARE: Final = 4
"""Values that take more than this fraction of a cache are not cached: one client would empty it."""
_TEXTS: Final = frozenset({str, type(None)})
_PLAIN_BYTES_MAX: Final = 256
_RAW_BYTES: Final = 100
"""Size of raw JSON besides its bytes."""
_ITEM_BYTES: Final = 200
"""Size of a multimodal item besides its identifier."""


INLINE_BYTES_MAX: Final = 1 << 18
"""Larger bodies are processed in a thread: rendering takes about 0.6 us per KB."""
INLINE_VALUES_MAX: Final = 512
"""Bodies with more lists and objects too: a message takes about 15 us to convert, decode, check and
render."""
VALUES_MAX: Final = 50_000
"""Decoding more of them holds the interpreter for 10 ms and longer, in any thread."""
_COUNTED_TOGETHER_MIN: Final = 4096
_WINDOW_BYTES: Final = 1 << 16
"""Larger windows do not fit the processor's cache, and their copies are returned to the system each time."""
_OPENING: Final = ord("{")
_BRACKETS_DIFFER: Final = np.uint8(ord("{") - ord("["))


def num_values(data: bytes | msgspec.Raw) -> int:
    """Upper bound of the lists and objects in JSON: brackets within texts count too."""
    if len(data) < _COUNTED_TOGETHER_MIN:
        data = bytes(data)
        return data.count(b"{") + data.count(b"[")
    # Both in one pass, which is six times as fast for longer data.
    count, numbers = 0, np.frombuffer(data, np.uint8)
    for start in range(0, len(data), _WINDOW_BYTES):
        window = numbers[start : start + _WINDOW_BYTES]
        count += int(np.count_nonzero((window | _BRACKETS_DIFFER) == _OPENING))
    return count


def has_many_values(data: bytes | msgspec.Raw, limit: int) -> bool:
    """Whether JSON may have more lists and objects than this; each takes two bytes at least."""
    return len(data) > 2 * limit and num_values(data) > limit


def compact(data: bytes) -> bytes:
    """``data``, or its digest if that is shorter: equal exactly if the data are, also against chosen
    inputs."""
    return data if len(data) <= _PLAIN_BYTES_MAX else blake2b(data, digest_size=32).digest()


def kept_bytes(value: Any) -> int:
    """Memory of a decoded JSON value, or of structs of such and raw JSON, with everything in it."""
    if type(value) is dict and _TEXTS.issuperset(map(type, value.values())):  # most messages
        return sum(map(sys.getsizeof, (value, *value, *value.values())))
    size, waiting = 0, [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, msgspec.Raw):  # sys.getsizeof of one is meaningless
            size += _RAW_BYTES + len(current)
            continue
        size += sys.getsizeof(current)
        if isinstance(current, dict):
            waiting.extend(current)
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)
        elif isinstance(current, msgspec.Struct):
            waiting.extend(msgspec.structs.astuple(current))
    return size


def extras_bytes(extras: PromptExtras) -> int:
    """The same for the extra inputs of hashes; names of adapters belong to the configuration."""
    if extras is NO_EXTRAS:
        return 0
    salt = 0 if extras.cache_salt is None else sys.getsizeof(extras.cache_salt)
    return salt + sum(_ITEM_BYTES + sys.getsizeof(item.identifier) for item in extras.multimodal)
