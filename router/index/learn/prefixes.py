"""Learned mode: engine hashes looked up by token prefix, where they cannot be computed.

From every stored event whose tokens and parent are known, our own chained key of the prefix is computed and
mapped to the hash the engine gave it. A query computes the own keys of its prompt and translates them. What
cannot be placed (parent unknown, masked blocks that no full event of another group names, several media
items in a block larger than a hash block) is left out and counted: learned mode under-predicts, it never
invents a block. Bounded: when more than ``_ENTRIES_MAX`` keys are held the oldest half is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from publisher.block_hash import hash_function
from publisher.events import BlockHash, BlockStored, EventDecodeError, to_block_hash

_ENTRIES_MAX = 1 << 19
"""About 150 MB; engines hold fewer blocks than this."""

_ABSENT = BlockHash(-1)
"""Stands for "no such block": hashes on the wire are never negative, so no index holds it."""


class LearnedKeys:
    """Own key of a prefix -> the engine's hash of it, for one engine."""

    def __init__(self) -> None:
        self._digest = hash_function("learned")
        self._digest_of: dict[BlockHash, bytes] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self.unplaced = 0

    def __len__(self) -> int:
        return len(self._hash_of)

    def observe(self, event: BlockStored, unit: int) -> None:
        """Learn from one stored event; ``unit`` is the hash block size in tokens."""
        hashes, size = event.block_hashes, event.block_size
        if not hashes or size == 0 or size % unit:
            return
        if event.num_tokens() != len(hashes) * size:
            return  # masked: the positions of its blocks are learned from full events only
        parent = self._parent(event)
        if parent is None:
            self.unplaced += len(hashes)
            return
        try:
            self._learn(event, event.tokens(), parent, unit)
        except (EventDecodeError, _BadExtraKeysError):
            self.unplaced += len(hashes)
        self._bound()

    def translate(self, own_keys: Sequence[int]) -> list[BlockHash]:
        """The engine's hash for each own key; -1, which no index holds, where none is known."""
        get = self._hash_of.get
        return [get(key, _ABSENT) for key in own_keys]

    def _parent(self, event: BlockStored) -> bytes | None:
        if event.parent_block_hash is None:
            return self._digest("")
        return self._digest_of.get(to_block_hash(event.parent_block_hash))

    def _learn(self, event: BlockStored, tokens: list[int], parent: bytes, unit: int) -> None:
        size, per_block = event.block_size, event.block_size // unit
        for number, wire in enumerate(event.block_hashes):
            extra = _with_lookahead(event, number, _extra(event, number))
            if extra is not None and per_block > 1:
                self.unplaced += len(event.block_hashes) - number
                return
            for start in range(number * size, (number + 1) * size, unit):
                parent = self._digest((parent, tuple(tokens[start : start + unit]), extra))
            block = to_block_hash(wire)
            self._digest_of[block] = parent
            self._hash_of[int.from_bytes(parent[-8:], "big")] = block

    def _bound(self) -> None:
        tables: tuple[dict[Any, Any], ...] = (self._hash_of, self._digest_of)
        for table in tables:
            if len(table) > _ENTRIES_MAX:
                for key in list(islice(table, _ENTRIES_MAX // 2)):
                    del table[key]


class _BadExtraKeysError(ValueError):
    """Extra keys that vLLM never writes."""


def _extra(event: BlockStored, number: int) -> tuple[Any, ...] | None:
    """Extra keys of one listed block in the untagged form that ``block_hash.extra_keys`` gives."""
    if event.extra_keys is None:
        return _fields(event, number)
    keys = event.extra_keys[number] if number < len(event.extra_keys) else None
    if not keys:
        return None
    if not isinstance(keys, list):
        raise _BadExtraKeysError
    return tuple(tuple(key) if isinstance(key, list) else key for key in keys)


def _fields(event: BlockStored, number: int) -> tuple[str, ...] | None:
    """The same of an engine that sends fields in the place of extra keys (SGLang)."""
    first = number == 0 and event.parent_block_hash is None
    keys = (event.lora_name, event.cache_salt if first else None)
    return tuple(key for key in keys if key) or None


def _with_lookahead(event: BlockStored, number: int, keys: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """The extra a look-ahead hash covers: the keys and the tokens after the block."""
    ahead = event.lookahead_token_ids
    if not ahead or number >= len(ahead) or not ahead[number]:
        return keys
    return (keys, *ahead[number])
