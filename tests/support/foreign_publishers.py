"""Event frames of publishers other than vLLM and SGLang, written from their formats, and an engine that uses
them.

Sources, read on 2026-11-29:

- TensorRT-LLM: https://github.com/NVIDIA/TensorRT-LLM/pull/17023. vLLM's frames and maps, with ``mm_keys``;
  blocks of 32 tokens; a hash is the first 8 bytes of SHA-256 over its parent and the tokens, as a signed
  number. A salt and an adapter are in the root, and in no event.
- ROCm ATOM: https://github.com/ROCm/ATOM/pull/869. One frame, or two with a topic, without a number; arrays
  in vLLM's order, and its own ``BlockTransferred``; xxh64 over the parent, if any, and the tokens.
- ``unheard``: an unknown publisher: raw bytes of a width of its own, fields and types of
  events of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

_encode = msgspec.msgpack.Encoder().encode
Wire = int | bytes


class Maker(msgspec.Struct, frozen=True):
    """How a publisher hashes and writes events; ``numbered``: whether its messages have a number."""

    name: str
    block_size: int
    hashes: Callable[[Sequence[int], bytes], list[Wire]]
    stored: Callable[[list[Wire], Wire | None, list[int], int], Any]
    removed: Callable[[list[Wire]], Any]
    noise: Any
    numbered: bool = True

    def message(self, seq: int, events: list[Any]) -> list[bytes]:
        """One ZMQ message of these events."""
        payload = _encode([1.0 + seq, events, 0])
        return [b"kv", seq.to_bytes(8, "big"), payload] if self.numbered else [b"kv", payload][seq % 2 :]


def _blocks(tokens: Sequence[int], size: int) -> list[list[int]]:
    return [list(tokens[end - size : end]) for end in range(size, len(tokens) + 1, size)]


def _tensorrt(tokens: Sequence[int], salt: bytes) -> list[Wire]:
    parent = hashlib.sha256(bytes([bool(salt)]) + bytes(8) + salt.ljust(8, b"\0")).digest()
    found: list[Wire] = []
    for block in _blocks(tokens, 32):
        parent = hashlib.sha256(parent + b"".join(t.to_bytes(4, "little") for t in block)).digest()
        found.append(int.from_bytes(parent[:8], "big", signed=True))
    return found


def _atom(tokens: Sequence[int], salt: bytes) -> list[Wire]:
    found: list[Wire] = []
    parent = salt
    for block in _blocks(tokens, 16):
        value = xxhash.xxh64_intdigest(parent + b"".join(t.to_bytes(8, "little", signed=True) for t in block))
        parent = value.to_bytes(8, "little")
        found.append(value)
    return found


def _unheard(width: int) -> Callable[[Sequence[int], bytes], list[Wire]]:
    def hashes(tokens: Sequence[int], salt: bytes) -> list[Wire]:
        found: list[Wire] = []
        parent = b"root" + salt
        for block in _blocks(tokens, 8):
            parent = hashlib.blake2b(parent + repr(block).encode(), digest_size=width).digest()
            found.append(parent)
        return found

    return hashes


def _map(hashes: list[Wire], parent: Wire | None, tokens: list[int], size: int) -> Any:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "mm_keys": [],
        "priority": 35,
    }


def _array(hashes: list[Wire], parent: Wire | None, tokens: list[int], size: int) -> Any:
    return ["BlockStored", hashes, parent, tokens, size, None, "GPU", None, None, None]


MAKERS = (
    Maker(
        "tensorrt-llm",
        32,
        _tensorrt,
        _map,
        lambda hashes: {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"},
        {"type": "BlockUpdated", "block_hash": -5, "cache_level": {"old": 0, "new": 1}},
    ),
    Maker(
        "atom",
        16,
        _atom,
        _array,
        lambda hashes: ["BlockRemoved", hashes, "GPU"],
        ["BlockTransferred", [1, 2], "GPU", "REMOTE"],
        numbered=False,
    ),
    *(
        Maker(
            f"unknown, {width} bytes",
            8,
            _unheard(width),
            lambda hashes, parent, tokens, size: _map(hashes, parent, tokens, size) | {"score": [1.5, None]},
            lambda hashes: {"type": "BlockRemoved", "block_hashes": hashes, "why": "age"},
            {"type": "TierResized", "bytes": 1 << 40},
        )
        for width in (5, 8, 20, 64)
    ),
)


class ForeignEngine:
    """An engine with a prefix cache of ``blocks`` blocks, which evicts the one used longest ago, a prefix's
    end first."""

    def __init__(self, maker: Maker, blocks: int = 60) -> None:
        self.maker = maker
        self._blocks = blocks
        self._held: dict[Wire, None] = {}
        self._seq = 0

    def hit(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Tokens of a prompt that it takes from its cache: all but the last token, whole blocks."""
        hashes = self.maker.hashes(tokens[: len(tokens) - 1], salt)
        held = next((n for n, block in enumerate(hashes) if block not in self._held), len(hashes))
        return held * self.maker.block_size

    def run(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        """Compute a prompt; returns the message of its events."""
        maker, size = self.maker, self.maker.block_size
        hashes = maker.hashes(tokens, salt)
        start = next((n for n, block in enumerate(hashes) if block not in self._held), len(hashes))
        events: list[Any] = [maker.noise]
        for block in reversed(hashes):
            self._held.pop(block, None)
            self._held[block] = None
        if gone := list(self._held)[: max(0, len(self._held) - self._blocks)]:
            for block in gone:
                del self._held[block]
            events.append(maker.removed(gone))
        if start < len(hashes):
            parent = hashes[start - 1] if start else None
            told = list(tokens[start * size : len(hashes) * size])
            events += [maker.stored(hashes[start:], parent, told, size), maker.noise]
        self._seq += 1
        return maker.message(self._seq - 1, events)
