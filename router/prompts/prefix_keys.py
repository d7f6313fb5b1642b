"""Keys of a prompt's beginnings, each covering the scope and all up to its end: of a chat one per message,
else one per chunk of its text or ids. Equal beginnings have equal keys, in every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from kvatlas.router.prompts.cuts import Ids

CHUNK_BYTES: Final = 1024
CHUNK_TOKENS: Final = CHUNK_BYTES // 4


def message_keys(scope: bytes, raws: Sequence[msgspec.Raw]) -> list[int]:
    """One key per message, covering the scope and all messages up to it."""
    key = xxhash.xxh3_64_intdigest(scope)
    keys, digest = [], xxhash.xxh3_64_intdigest
    for raw in raws:
        key = digest(raw, key)
        keys.append(key)
    return keys


def token_keys(scope: bytes, ids: Ids) -> list[int]:
    """One key per full chunk of ids, and one for the rest of a shorter or uneven prompt."""
    return _chunk_keys(xxhash.xxh3_64_intdigest(scope, 1), ids.tobytes())


def text_keys(scope: bytes, text: str) -> list[int]:
    """The same for a prompt's text."""
    return _chunk_keys(xxhash.xxh3_64_intdigest(scope, 2), text.encode(errors="surrogatepass"))


def _chunk_keys(key: int, data: bytes) -> list[int]:
    keys = []
    for start in range(0, len(data), CHUNK_BYTES):
        key = xxhash.xxh3_64_intdigest(data[start : start + CHUNK_BYTES], key)
        keys.append(key)
    return keys
