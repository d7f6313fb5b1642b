"""KV cache groups of a model, and the spec classes vLLM looks up jointly.

A group is the set of layers that share one block table; groups with the same kind, block size and window
form one spec class, in which a block counts as present only if every group of the class holds it.
Facts: vLLM 0.32 ``KVCacheSpecKind`` and ``HybridKVCacheCoordinator``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Family(StrEnum):
    """Lookup rule of a group; several kinds share one."""

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    MAMBA = "mamba"
    RING = "ring"
    """One block per request of any length; never part of a lookup."""
    UNUSED = "unused"
    """Never part of the engine's lookup (encoder-only, cross attention)."""


_FAMILY_OF_KIND = {
    "full_attention": Family.FULL,
    "mla_attention": Family.FULL,
    "sink_full_attention": Family.FULL,
    "sliding_window": Family.WINDOW,
    "sliding_window_mla": Family.WINDOW,
    "chunked_local_attention": Family.CHUNKED,
    "mamba": Family.MAMBA,
    "circular_buffer": Family.RING,
    "encoder_only_attention": Family.UNUSED,
    "cross_attention": Family.UNUSED,
}


# Assumed hash blocks in a block that was never published whole: more than any prompt has.
_UNSEEN_HASH_BLOCKS = 1 << 20


class GroupSpec(msgspec.Struct, frozen=True):
    """One KV cache group; sizes in tokens. ``kind`` is vLLM's name for the spec kind."""

    group_idx: int
    kind: str
    block_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    mamba_cache_mode: str | None = None
    is_eagle: bool = False
    partial_only: bool = False
    """Only parts of its blocks were published: ``block_size`` is that of a hash block; the real blocks are
    longer than any prefix stored there."""
    cacheable: bool = True
    """False: a window that is rebuilt by replay (``bounded_replay``, vLLM 0.32) and publishes nothing."""
    apart: bool = False
    """A drafter's group whose layers differ from the model's in a way that no event shows (number and size of
    heads): it forms its own class, apart from groups with the same spec."""

    @property
    def is_hidden(self) -> bool:
        """Whether it has no prefix cache (``prefix_cacheable`` of vLLM 0.32): no event, no lookup."""
        return not self.cacheable or self.family in {Family.RING, Family.UNUSED}

    @property
    def lookup_block_size(self) -> int:
        return self.block_size * _UNSEEN_HASH_BLOCKS if self.partial_only else self.block_size

    @property
    def family(self) -> Family:
        """The lookup rule of this group. Raises ``ValueError`` for an unknown kind."""
        try:
            return _FAMILY_OF_KIND[self.kind]
        except KeyError:
            raise ValueError(f"group {self.group_idx}: unknown kv_cache_spec_kind {self.kind!r}") from None


class SpecClass(msgspec.Struct, frozen=True):
    """Groups that are looked up jointly, and the spec they share."""

    spec: GroupSpec
    group_idxs: tuple[int, ...]

    @property
    def family(self) -> Family:
        return self.spec.family

    @property
    def block_size(self) -> int:
        return self.spec.lookup_block_size

    @property
    def label(self) -> str:
        """Short name for tables and receipts, e.g. ``sliding_window/16 w128``, chunks as ``c8192``; ``/>16``
        if the blocks are longer than the published parts."""
        more = ">" if self.spec.partial_only else ""
        window = f" w{self.spec.sliding_window}" if self.spec.sliding_window else ""
        chunk = f" c{self.spec.attention_chunk_size}" if self.spec.attention_chunk_size else ""
        return f"{self.spec.kind}/{more}{self.spec.block_size}{window}{chunk}"


def spec_classes(groups: tuple[GroupSpec, ...]) -> tuple[SpecClass, ...]:
    """Spec classes of a model: full attention first, then by first group; hidden groups are omitted."""
    members: dict[GroupSpec, list[GroupSpec]] = {}
    for group in sorted(groups, key=lambda g: g.group_idx):
        if group.is_hidden:
            continue
        key = msgspec.structs.replace(group, group_idx=-1, is_eagle=False)
        members.setdefault(key, []).append(group)
    classes = [_spec_class(spec, joined) for spec, joined in members.items()]
    return tuple(sorted(classes, key=lambda c: (c.family is not Family.FULL, c.group_idxs[0])))


def _spec_class(spec: GroupSpec, members: list[GroupSpec]) -> SpecClass:
    """Make a class; it drops its last block if any member feeds a drafter, as vLLM looks them up as one."""
    eagle = any(group.is_eagle for group in members)
    idxs = tuple(group.group_idx for group in members)
    return SpecClass(msgspec.structs.replace(spec, group_idx=idxs[0], is_eagle=eagle), idxs)


def scheduler_block_size(groups: tuple[GroupSpec, ...]) -> int:
    """Alignment of a hit in tokens: the least common multiple of all block sizes."""
    return math.lcm(*(group.lookup_block_size for group in groups))


def hash_unit(groups: Sequence[GroupSpec]) -> int:
    """Default number of tokens in a hash block: the greatest common divisor of the block sizes that are
    looked up (``resolve_kv_cache_block_sizes``, vLLM 0.32)."""
    return math.gcd(*[g.block_size for g in groups if not g.is_hidden] or [g.block_size for g in groups])
