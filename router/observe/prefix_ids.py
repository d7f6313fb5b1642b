"""Ids that tell prefixes of a prompt apart and say nothing of their text: what a usage record may hold.

A prompt is cut into units of ``UNIT_TOKENS`` tokens; each gets one id, the last one for what is left. An id
is a keyed hash (BLAKE2b) of everything up to the end of its unit: tokens, adapter, cache salt, images. The
key is made once per installation and stays there, so equal prompts have equal ids here and unrelated ids
elsewhere, and nobody without the key can try texts out. Always true: two prompts share an id exactly where
their prefixes up to it are the same, but for chance (ids have 53 bits, which every JSON reader keeps).
"""

from __future__ import annotations

import os
import secrets
from array import array
from hashlib import blake2b
from pathlib import Path

import msgspec

from publisher.block_hash import PromptExtras

UNIT_TOKENS = 512
KEY_BYTES = 32
_ID_BITS = 53
_encoder = msgspec.msgpack.Encoder()


def read_key(path: Path) -> bytes:
    """The key of this installation, made on first use, for its owner's eyes only. Raises ``OSError``."""
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


def prefix_ids(tokens: array[int], model: str, extras: PromptExtras, key: bytes) -> list[int]:
    """One id per unit of the prompt."""
    state = blake2b(
        _encoder.encode([model, extras.lora_name, extras.lora_path, extras.cache_salt]),
        key=key,
        digest_size=16,
    ).digest()
    ids = []
    view = memoryview(tokens)
    for start in range(0, len(tokens), UNIT_TOKENS):
        unit = blake2b(state, key=key, digest_size=16)
        unit.update(view[start : start + UNIT_TOKENS])
        for item in extras.multimodal:
            if start <= item.offset < start + UNIT_TOKENS:  # before it the prefix is the same without it
                unit.update(_encoder.encode([item.identifier, item.offset]))
        state = unit.digest()
        ids.append(int.from_bytes(state[:8], "big") >> (64 - _ID_BITS))
    return ids
