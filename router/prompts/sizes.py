"""What is kept of a client's request, in bytes, and in little room.

Caches are bounded by these estimates, so they must not fall short: a megabyte of empty lists is twenty
when decoded. What is only compared is kept as a digest where it is long.
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from typing import Any, Final

import msgspec
import numpy as np

from publisher.block_hash import PromptExtras

SHARE: Final = 4
"""Nothing is kept that takes more than one part in so many of a cache: one client would empty it."""
_TEXTS: Final = frozenset({str, type(None)})
_PLAIN_BYTES_MAX: Final = 256
_RAW_BYTES: Final = 100
"""Raw JSON besides its bytes."""
_ITEM_BYTES: Final = 200
"""A multimodal item besides its identifier."""


INLINE_BYTES_MAX: Final = 1 << 18
"""A larger body is worked on in a thread: rendering takes about 0.6 us per KB."""
INLINE_VALUES_MAX: Final = 512
"""One with more lists and objects too: a message takes about 15 us to convert, decode, check and render."""
VALUES_MAX: Final = 50_000
"""Decoding more of them holds the interpreter for 10 ms and longer, in any thread."""
_COUNTED_TOGETHER_MIN: Final = 4096
_WINDOW_BYTES: Final = 1 << 16
"""More at a time does not fit the processor's cache, and its copies go back to the system each time."""
_OPENING: Final = ord("{")
_BRACKETS_DIFFER: Final = np.uint8(ord("{") - ord("["))


def num_values(data: bytes | msgspec.Raw) -> int:
    """How many lists and objects JSON has, at most: brackets within texts count too."""
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
    """``data``, or its digest where that is shorter: equal exactly where the data are, whoever chose them."""
    return data if len(data) <= _PLAIN_BYTES_MAX else blake2b(data, digest_size=32).digest()


def kept_bytes(value: Any) -> int:
    """Memory of a decoded JSON value, or of structs of such and raw JSON, and all that is in it."""
    if type(value) is dict and _TEXTS.issuperset(map(type, value.values())):  # most messages
        return sum(map(sys.getsizeof, (value, *value, *value.values())))
    size, waiting = 0, [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, msgspec.Raw):  # sys.getsizeof of one is a number without meaning
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
    """The same for what a prompt's hashes cover besides tokens; names of adapters are the configuration's."""
    salt = 0 if extras.cache_salt is None else sys.getsizeof(extras.cache_salt)
    return salt + sum(_ITEM_BYTES + sys.getsizeof(item.identifier) for item in extras.multimodal)
