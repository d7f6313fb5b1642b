"""The engine's own rules for one KV cache group, asked about blocks that are held outside the GPU.

vLLM keeps these rules in its single-type managers, as class methods that ask a block pool which hashes it
holds. ``OutsidePool`` answers in the pool's place; ``GroupFamily`` is one manager and the groups that share
its spec, which the engine looks up together. No rule is written again here, so none can drift from the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from connectors.hits.group_shapes import GroupKind, GroupShape
from connectors.messages.keys import block_key


class OutsidePool:
    """What the managers ask of a block pool, answered from ``held``; hashes in ``local`` count as held."""

    def __init__(
        self, hash_block_tokens: int, held: Callable[[bytes], bool], local: frozenset[bytes]
    ) -> None:
        self.hash_block_size = hash_block_tokens
        self.null_block = object()
        self._block = object()
        self._held = held
        self._local = local

    def get_cached_block(self, block_hash: bytes, group_ids: list[int]) -> list[object] | None:
        """A stand-in block per group where all these groups have this hash, else None."""
        if block_hash not in self._local:
            for group_idx in group_ids:
                if not self._held(block_key(block_hash, group_idx)):
                    return None
        return [self._block] * len(group_ids)


@dataclass(slots=True)
class GroupFamily:
    """One spec, its manager, and the groups that have it."""

    spec: Any
    manager: Any
    group_ids: list[int]
    kind: GroupKind
    eagle: bool
    peek_tokens: int = 0
    """How far past a hit an EAGLE family matches before it drops that part again."""

    @property
    def block_tokens(self) -> int:
        return int(self.spec.block_size)

    def shape(self, group_idx: int) -> GroupShape:
        """What the eviction policies need to know of this member group."""
        tokens = self.block_tokens
        if self.kind is GroupKind.FULL:
            return GroupShape(group_idx, self.kind, tokens)
        if self.kind is GroupKind.STATE:
            return GroupShape(group_idx, self.kind, tokens, tokens)
        window = getattr(self.spec, "attention_chunk_size", None) or self.spec.sliding_window - 1
        return GroupShape(group_idx, self.kind, tokens, -(-window // tokens) * tokens)

    def longest_hit(
        self, block_hashes: Sequence[bytes], limit: int, pool: OutsidePool, alignment: int, *, prove: bool
    ) -> int:
        """Tokens, at most ``limit``, these groups can resume from; ``prove``: EAGLE matches beyond it."""
        peek = self.peek_tokens if prove else 0
        # Chunked local attention only knows hits on its own blocks; with EAGLE they end on coarser ones here.
        chunked = (
            getattr(self.spec, "attention_chunk_size", None) is not None and self.kind is GroupKind.WINDOW
        )
        _, reach = type(self.manager).find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=min(limit + peek, len(block_hashes) * pool.hash_block_size),
            kv_cache_group_ids=self.group_ids,
            block_pool=pool,
            kv_cache_spec=self.spec,
            drop_eagle_block=prove,
            alignment_tokens=self.block_tokens if chunked else alignment,
        )
        return int(reach) // alignment * alignment if chunked else int(reach)

    def reachable(
        self, first: int, end: int, alignment: int, retention: int | None, boundaries: Sequence[int]
    ) -> list[int]:
        """Block indices in [first, end) that can serve a hit at some boundary."""
        if end <= first:
            return []
        mask = type(self.manager).reachable_block_mask(
            start_block=first,
            end_block=end,
            alignment_tokens=alignment,
            kv_cache_spec=self.spec,
            use_eagle=self.eagle,
            retention_interval=retention,
            reachable_boundaries=boundaries,
        )
        if mask is None:
            return list(range(first, end))
        return [first + i for i, wanted in enumerate(mask) if wanted]

    def first_read(self, hit_tokens: int) -> int:
        """The first token that the engine still reads, or allocates, at this length."""
        return int(self.manager.get_num_skipped_tokens(hit_tokens))


def make_families(
    config: Any, *, scheduler_block_tokens: int, hash_block_tokens: int, use_eagle: bool, dcp_world_size: int
) -> list[GroupFamily]:
    """Families of the groups that the engine caches by hash, full attention first, as the engine asks them.

    ValueError where a block is no multiple of the hash block or no divisor of the scheduler block.
    """
    from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_cache_spec  # noqa: PLC0415
    from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec  # noqa: PLC0415

    pool = BlockPool(1, enable_caching=False, hash_block_size=hash_block_tokens)
    flagged = {i for i, group in enumerate(config.kv_cache_groups) if group.is_eagle_group}
    families: list[GroupFamily] = []
    for group_idx in config.prefix_cacheable_group_ids:
        group = config.kv_cache_groups[group_idx]
        spec = _with_retained(resolve_dcp_kv_cache_spec(_one_spec(group.kv_cache_spec), dcp_world_size))
        _check_block(group_idx, spec.block_size, hash_block_tokens, scheduler_block_tokens)
        eagle = group_idx in flagged or (use_eagle and not flagged)
        manager = get_manager_for_kv_cache_spec(
            kv_cache_spec=spec,
            max_in_flight_tokens=scheduler_block_tokens,
            max_model_len=scheduler_block_tokens,
            role=group.role,
            block_pool=pool,
            enable_caching=False,
            kv_cache_group_id=group_idx,
            scheduler_block_size=scheduler_block_tokens,
        )
        for family in families:
            if family.spec == spec and type(family.manager) is type(manager):
                family.group_ids.append(group_idx)
                family.eagle = family.eagle or eagle
                break
        else:
            families.append(GroupFamily(spec, manager, [group_idx], _kind(spec), eagle))
    return sorted(families, key=lambda family: family.kind is not GroupKind.FULL)


def _check_block(group_idx: int, block_tokens: int, hash_tokens: int, scheduler_tokens: int) -> None:
    if block_tokens % hash_tokens or scheduler_tokens % block_tokens:
        raise ValueError(
            f"group {group_idx}: its block of {block_tokens} tokens must be a multiple of the hash block "
            f"({hash_tokens}) and divide the scheduler block ({scheduler_tokens})"
        )


def _one_spec(spec: Any) -> Any:
    """The spec that stands for all layers of a group that has one per layer."""
    layers = getattr(spec, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else spec


def _with_retained(spec: Any) -> Any:
    """Count tokens the engine keeps below a window as part of it: what it allocates there must be loaded."""
    extra = getattr(spec, "extra_retained_tokens", 0)
    if not extra:
        return spec
    return replace(spec, sliding_window=spec.sliding_window + extra, extra_retained_tokens=0)


def _kind(spec: Any) -> GroupKind:
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    if isinstance(spec, FullAttentionSpec):
        return GroupKind.FULL
    if isinstance(spec, MambaSpec):
        return GroupKind.STATE
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return GroupKind.WINDOW
    raise ValueError(f"no hit rules known for KV cache spec {type(spec).__name__}")
