"""Ids of prompt prefixes that reveal no text, for usage records.

A prompt is cut into units of ``UNIT_TOKENS`` tokens; each gets one id, the last one for the rest. An id is
a keyed hash (BLAKE2b) of everything up to the end of its unit: tokens, adapter, cache salt, images. The key
is made once per installation and stays there, so equal prompts have equal ids here and unrelated ids
elsewhere, and texts cannot be guessed without the key. Two prompts share an id exactly if their prefixes up
to it are equal, except by chance (ids have 53 bits, which every JSON reader keeps).
"""

from __future__ import annotations

import os
import secrets
from array import array
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvatlas.publisher.block_hash import PromptExtras

UNIT_TOKENS = 512
# Of the first ``UNIT_TOKENS``, ids of which are kept too: chats may be shorter than a unit, or share less.
START_UNIT_TOKENS = 32
KEY_BYTES = 32
_ID_BITS = 53
_encoder = msgspec.msgpack.Encoder()


def read_key(path: Path) -> bytes:
    """Read the key of this installation; it is made on first use, readable by its owner only. Raises
    ``OSError``."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _key_of(path)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")
    return _key_of(path)


def _key_of(path: Path) -> bytes:
    text = path.read_text(encoding="ascii", errors="replace").strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise OSError(
            f"{path}: {KEY_BYTES} bytes in hexadecimal expected; remove the file to have a new key made"
        )
    return key


def prefix_ids(
    tokens: array[int], model: str, extras: PromptExtras, key: bytes, unit_tokens: int = UNIT_TOKENS
) -> list[int]:
    """Return one id per unit of the prompt."""
    state = blake2b(
        _encoder.encode([model, extras.lora_name, extras.lora_path, extras.cache_salt]),
        key=key,
        digest_size=16,
    ).digest()
    ids = []
    view = memoryview(tokens)
    for start in range(0, len(tokens), unit_tokens):
        unit = blake2b(state, key=key, digest_size=16)
        unit.update(view[start : start + unit_tokens])
        for item in extras.multimodal:
            # The prefix before it is the same without it.
            if start <= item.offset < start + unit_tokens:
                unit.update(_encoder.encode([item.identifier, item.offset]))
        state = unit.digest()
        ids.append(int.from_bytes(state[:8], "big") >> (64 - _ID_BITS))
    return ids
