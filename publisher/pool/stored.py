"""Writes the ``BlockStored`` events of a pool exactly as vLLM 0.32 would.

An event covers the tokens of all blocks that became full, but lists only the hashes of those stored, in
order: none at all is an event too. A boundary stored inside a block is an event of one hash block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from publisher.block_hash import NO_EXTRAS, extra_keys
from publisher.events import BlockStored, encode_tokens
from publisher.groups import GroupSpec
from publisher.pool.request import PoolRequest
from publisher.pool.store import MEDIUM, BlockStore

LoraIds = dict[str, int]


class EventWriter:
    """Says what is stored, into the store's event list. LoRA ids not given count up as names appear."""

    def __init__(self, store: BlockStore, hash_block_size: int, lora_ids: LoraIds) -> None:
        self._store = store
        self._hash_block_size = hash_block_size
        self._lora_ids = lora_ids

    def stored(
        self, request: PoolRequest, spec: GroupSpec, start: int, end: int, held: Sequence[int]
    ) -> None:
        """Blocks ``start`` to ``end`` became full, of which ``held`` are stored (block positions)."""
        if self._store.events is None:
            return
        size = spec.block_size
        scale = size // self._hash_block_size
        self._say(
            request,
            spec,
            block_size=size,
            hash_positions=[(position + 1) * scale - 1 for position in held],
            parent=start * scale - 1,
            span=(start * size, end * size),
            keys=[self._keys(request, position * size, (position + 1) * size) for position in held],
        )

    def stored_part(self, request: PoolRequest, spec: GroupSpec, num_tokens: int) -> None:
        """A block is stored as the prefix of ``num_tokens``, a hash boundary inside it."""
        if self._store.events is None:
            return
        size = self._hash_block_size
        start, last = num_tokens - size, num_tokens // size - 1
        self._say(
            request,
            spec,
            block_size=size,
            hash_positions=[last],
            parent=last - 1,
            span=(start, num_tokens),
            keys=[self._keys(request, start, num_tokens)],
        )

    def _say(
        self,
        request: PoolRequest,
        spec: GroupSpec,
        *,
        block_size: int,
        hash_positions: list[int],
        parent: int,
        span: tuple[int, int],
        keys: list[tuple[Any, ...] | None],
    ) -> None:
        name = request.extras.lora_name
        self._store.say(
            BlockStored(
                block_hashes=[request.hashes[position] for position in hash_positions],
                parent_block_hash=request.hashes[parent] if parent >= 0 else None,
                token_ids=encode_tokens(request.token_ids[slice(*span)]),
                block_size=block_size,
                lora_id=None if name is None else self._lora_ids.setdefault(name, len(self._lora_ids) + 1),
                medium=MEDIUM,
                lora_name=name,
                extra_keys=keys or None,
                group_idx=spec.group_idx,
                kv_cache_spec_kind=spec.kind,
                kv_cache_spec_sliding_window=spec.sliding_window,
            )
        )

    @staticmethod
    def _keys(request: PoolRequest, start: int, end: int) -> tuple[Any, ...] | None:
        if request.extras == NO_EXTRAS:
            return None
        return extra_keys(request.extras, start, end, tagged=False) or None
