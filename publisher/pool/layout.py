"""Layout of a hybrid block pool, derived once from the groups of a model: sizes, alignment, lookup classes.

A hit is a multiple of ``alignment``: the least common multiple of the block sizes, or one hash block if
sub-block ("partial") hits are on. Combinations that vLLM refuses are refused here, with the reason. Facts:
``KVCacheCoordinator`` and ``resolve_kv_cache_block_sizes`` of vLLM 0.32.

Invariant: every block size is a multiple of ``hash_block_size`` and divides ``scheduler_block_size``; for a
hidden group only the second holds.
"""

from __future__ import annotations

import msgspec

from kvatlas.publisher.block_hash import SGLANG, HashScheme
from kvatlas.publisher.groups import Family, GroupSpec, SpecClass, scheduler_block_size, spec_classes

MAMBA_MODES = ("align", "all")


class PoolLayout(msgspec.Struct, frozen=True):
    """Sizes and lookup classes of one model; sizes in tokens.

    ``retention`` is None (dense), 0 or an interval. ``chunk_align`` is the step of an align-mode Mamba
    prefill. ``eagle`` are the groups that hold one block past a boundary. ``replay`` is the part of a hit
    that bounded replay recomputes; a shorter hit is not used.
    """

    groups: tuple[GroupSpec, ...]
    classes: tuple[SpecClass, ...]
    hash_block_size: int
    scheduler_block_size: int
    alignment: int
    chunk_align: int
    partial_hits: bool
    retention: int | None
    eagle: frozenset[int]
    aligned_mamba: bool
    replay: int = 0

    @property
    def single(self) -> bool:
        """Whether there is one group only: its hits and stores are not rounded to a common block size."""
        return len(self.groups) == 1

    @property
    def has_quiet_decodes(self) -> bool:
        """Whether tokens inside a block change nothing in any group."""
        sizes = {group.block_size for group in self.groups}
        loud = any(group.family is Family.MAMBA or group.is_hidden for group in self.groups)
        return sizes == {self.hash_block_size} and not loud

    @property
    def uses_eagle(self) -> bool:
        return bool(self.eagle)

    def cacheable_tokens(self, num_tokens: int, group_idx: int) -> int:
        """Tokens of a computed prefix that a group may store: no more than a later hit can use."""
        if self.single or self.partial_hits:
            return num_tokens
        # Hits end at the common block size, so blocks beyond it could never be used: vLLM does not store
        # them.
        aligned = num_tokens - num_tokens % self.scheduler_block_size
        if group_idx in self.eagle and aligned > 0:
            # EAGLE drops one block of a hit, so one block beyond the boundary serves it.
            return min(num_tokens, aligned + self.groups[group_idx].block_size)
        return aligned

    def replay_boundaries(self, num_prompt_tokens: int) -> tuple[int, ...]:
        """Positions at which a resend or an extension of this prompt can resume."""
        if not self.uses_eagle:
            return (num_prompt_tokens - 1,)
        size = self.scheduler_block_size
        # A resend computes at least its last token; an extension may use the whole prompt. EAGLE drops a
        # block of either.
        resend = (num_prompt_tokens - 1) // size * size
        extension = num_prompt_tokens // size * size
        return tuple(sorted({max(resend - size, 0), max(extension - size, 0)}))


def pool_layout(
    groups: tuple[GroupSpec, ...],
    scheme: HashScheme,
    retention_interval: int | None,
    dcp_world_size: int = 1,
) -> PoolLayout:
    """Make the layout of a model. Raises ``ValueError`` for one vLLM would not run with prefix caching.

    Block sizes are those in events: with decode context parallelism, over all ``dcp_world_size`` ranks.
    """
    _check_groups(groups, scheme, dcp_world_size)
    hash_size, sched_size = scheme.hash_block_size, scheduler_block_size(groups)
    classes = spec_classes(groups)
    partial = len(groups) > 1 and _partial_hits(groups, hash_size, dcp_world_size)
    alignment = hash_size if partial else sched_size
    for group in groups:
        if group.family is Family.CHUNKED and group.block_size != alignment:
            raise ValueError(
                f"group {group.group_idx}: chunked local attention needs block size {alignment}, "
                f"the alignment of this model's hits; it has {group.block_size}"
            )
    _check_retention(groups, retention_interval, sched_size)
    return PoolLayout(
        groups=groups,
        classes=classes,
        hash_block_size=hash_size,
        scheduler_block_size=sched_size,
        alignment=alignment,
        chunk_align=_chunk_align(groups, dcp_world_size),
        partial_hits=partial,
        retention=retention_interval,
        eagle=frozenset(idx for cls in classes if cls.spec.is_eagle for idx in cls.group_idxs),
        aligned_mamba=any(group.mamba_cache_mode == "align" for group in groups),
        replay=max((group.sliding_window or 0 for group in groups if not group.cacheable), default=0),
    )


def _chunk_align(groups: tuple[GroupSpec, ...], dcp_world_size: int) -> int:
    """The engine's ``block_size``: the smallest of one rank's groups that have a prefix cache
    (``EngineCore._initialize_kv_caches``, ``v1/engine/core.py``, vLLM 0.32)."""
    shared = (g for g in groups if not g.is_hidden)
    return min(g.block_size // (dcp_world_size if g.family is Family.FULL else 1) for g in shared)


def checkpoint_position(num_tokens: int, size: int, *, eagle: bool) -> int:
    """Position of the reusable state of a prefill of ``num_tokens``: the last boundary before its end.

    With EAGLE it is one boundary before the last boundary of all tokens.
    """
    if eagle:
        return max(num_tokens // size * size - size, 0)
    return max(num_tokens - 1, 0) // size * size


def _check_groups(groups: tuple[GroupSpec, ...], scheme: HashScheme, dcp_world_size: int) -> None:
    if all(group.is_hidden for group in groups):
        raise ValueError("a pool needs at least one group with a prefix cache")
    if scheme.lookahead and scheme.algo != SGLANG:
        raise ValueError("look-ahead hashes (vLLM 0.33 with a drafter) are not simulated")
    for position, group in enumerate(groups):
        if group.group_idx != position:
            raise ValueError(f"group {group.group_idx} stands at position {position}")
        _check_group(group, scheme.hash_block_size)
        _check_ranks(group, dcp_world_size)
    # Bounded replay recomputes one length for all groups.
    windows = [group for group in groups if group.family is Family.WINDOW]
    replayed = {group.sliding_window for group in windows if not group.cacheable}
    if len(replayed) > 1:
        raise ValueError(f"windows rebuilt by replay must be equal, not {sorted(map(str, replayed))}")
    if len(groups) == 1 and groups[0].block_size != scheme.hash_block_size:
        raise ValueError(
            f"one group: hash block {scheme.hash_block_size} must equal its block size {groups[0].block_size}"
        )
    # ``mamba_cache_mode`` is one setting of vLLM's CacheConfig.
    modes = {group.mamba_cache_mode for group in groups if group.family is Family.MAMBA}
    if len(modes) > 1:
        raise ValueError(f"Mamba groups of different modes: {sorted(map(str, modes))}")
    chunked = any(group.family is Family.CHUNKED for group in groups)
    if chunked and any(group.is_eagle and group.family is Family.CHUNKED for group in groups):
        raise ValueError("chunked local attention cannot be an EAGLE group")


def _check_group(group: GroupSpec, hash_size: int) -> None:
    label = f"group {group.group_idx} ({group.kind})"
    if group.block_size <= 0 or hash_size <= 0 or (group.block_size % hash_size and not group.is_hidden):
        raise ValueError(f"{label}: block size {group.block_size} is no multiple of hash block {hash_size}")
    match group.family:
        case Family.UNUSED:
            raise ValueError(f"{label}: has no prefix cache")
        case Family.WINDOW if not group.sliding_window or group.sliding_window < 1:
            raise ValueError(f"{label}: needs sliding_window")
        case Family.CHUNKED if not group.attention_chunk_size or group.attention_chunk_size < 1:
            raise ValueError(f"{label}: needs attention_chunk_size")
        case Family.MAMBA if group.mamba_cache_mode not in MAMBA_MODES:
            raise ValueError(f"{label}: mamba_cache_mode must be one of {', '.join(MAMBA_MODES)}")
        case family if not group.cacheable and family is not Family.WINDOW and family is not Family.RING:
            raise ValueError(f"{label}: cacheable: only a window can be rebuilt by replay")
        case _:
            pass


def _check_ranks(group: GroupSpec, dcp_world_size: int) -> None:
    """Refuse groups that vLLM 0.32 does not run with decode context parallelism
    (``HybridKVCacheCoordinator``)."""
    if dcp_world_size == 1:
        return
    label = f"group {group.group_idx} ({group.kind})"
    if group.family not in {Family.FULL, Family.MAMBA}:
        raise ValueError(f"{label}: decode context parallelism takes full attention and Mamba groups only")
    if group.family is Family.FULL and group.block_size % dcp_world_size:
        raise ValueError(f"{label}: block size {group.block_size} is no multiple of {dcp_world_size} ranks")


def _check_retention(groups: tuple[GroupSpec, ...], interval: int | None, sched_size: int) -> None:
    if interval is None or interval == 0:
        return
    if not any(group.family in {Family.WINDOW, Family.MAMBA} for group in groups):
        raise ValueError(f"retention interval {interval} has no effect without a window or Mamba group")
    if interval < 0 or interval % sched_size:
        raise ValueError(f"retention interval {interval} is no multiple of {sched_size}")


def _partial_hits(groups: tuple[GroupSpec, ...], hash_size: int, dcp_world_size: int) -> bool:
    """Whether sub-block hits are on. Source: ``partial_hash_hits_enabled``,
    ``v1/core/kv_cache_utils.py``, vLLM 0.32."""
    # Equal sizes give sub-block hits only with decode context parallelism, where a full-attention block spans
    # all ranks.
    # They need an align-mode Mamba group with blocks longer than the hash block (with decode context
    # parallelism: at least as long), and support in every other group.
    least = hash_size + (dcp_world_size == 1)
    coarse = any(g.mamba_cache_mode == "align" and g.block_size >= least for g in groups)
    able = (Family.FULL, Family.MAMBA)
    return coarse and all(g.family in able or g.block_size == hash_size for g in groups if not g.is_hidden)
