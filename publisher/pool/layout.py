"""What a hybrid block pool derives once from the groups of a model: sizes, alignment, lookup classes.

A hit is a multiple of ``alignment``: the least common multiple of the block sizes, or one hash block where
sub-block ("partial") hits are on. Combinations that vLLM itself refuses are refused here, with the reason.
Facts: ``KVCacheCoordinator`` and ``resolve_kv_cache_block_sizes`` of vLLM 0.32.

Always true of a layout that could be built: every block size is a multiple of ``hash_block_size`` and
divides ``scheduler_block_size``.
"""

from __future__ import annotations

import msgspec

from publisher.block_hash import HashScheme
from publisher.events import Family, GroupSpec, scheduler_block_size

MAMBA_MODES = ("align", "all")


class LookupClass(msgspec.Struct, frozen=True):
    """Groups of equal spec, which the engine looks up together; ``drops_last`` is the EAGLE rule."""

    spec: GroupSpec
    group_idxs: tuple[int, ...]
    drops_last: bool


class PoolLayout(msgspec.Struct, frozen=True):
    """Sizes in tokens. ``retention`` is None (dense), 0 or an interval; ``chunk_align`` the step of an
    align-mode Mamba prefill; ``eagle`` the groups that hold one block past a boundary."""

    groups: tuple[GroupSpec, ...]
    classes: tuple[LookupClass, ...]
    hash_block_size: int
    scheduler_block_size: int
    alignment: int
    chunk_align: int
    partial_hits: bool
    retention: int | None
    eagle: frozenset[int]
    aligned_mamba: bool

    @property
    def single(self) -> bool:
        """One group: its hits and stores are never rounded to a common block size."""
        return len(self.groups) == 1

    @property
    def has_quiet_decodes(self) -> bool:
        """Whether tokens inside a block change nothing in any group."""
        sizes = {group.block_size for group in self.groups}
        return sizes == {self.hash_block_size} and all(g.family is not Family.MAMBA for g in self.groups)

    @property
    def uses_eagle(self) -> bool:
        return bool(self.eagle)

    def cacheable_tokens(self, num_tokens: int, group_idx: int) -> int:
        """How much of a computed prefix a group may store: no more than a later hit can use."""
        if self.single or self.partial_hits:
            return num_tokens
        aligned = num_tokens - num_tokens % self.scheduler_block_size
        if group_idx in self.eagle and aligned > 0:
            return min(num_tokens, aligned + self.groups[group_idx].block_size)
        return aligned

    def replay_boundaries(self, num_prompt_tokens: int) -> tuple[int, ...]:
        """Where a resend or a longer sibling of this prompt can resume."""
        if not self.uses_eagle:
            return (num_prompt_tokens - 1,)
        size = self.scheduler_block_size
        resend = (num_prompt_tokens - 1) // size * size
        extension = num_prompt_tokens // size * size
        return tuple(sorted({max(resend - size, 0), max(extension - size, 0)}))


def pool_layout(
    groups: tuple[GroupSpec, ...], scheme: HashScheme, retention_interval: int | None
) -> PoolLayout:
    """The layout of a model. Raises ``ValueError`` for one vLLM would not run with prefix caching."""
    _check_groups(groups, scheme)
    hash_size, sched_size = scheme.hash_block_size, scheduler_block_size(groups)
    classes = _lookup_classes(groups)
    partial = len(groups) > 1 and _partial_hits(groups, hash_size)
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
        chunk_align=min(group.block_size for group in groups),
        partial_hits=partial,
        retention=retention_interval,
        eagle=frozenset(idx for cls in classes if cls.drops_last for idx in cls.group_idxs),
        aligned_mamba=any(group.mamba_cache_mode == "align" for group in groups),
    )


def checkpoint_position(num_tokens: int, size: int, *, eagle: bool) -> int:
    """Where the reusable state of a prefill of ``num_tokens`` lies: its last boundary short of the end
    (under EAGLE one boundary earlier, of the whole)."""
    if eagle:
        return max(num_tokens // size * size - size, 0)
    return max(num_tokens - 1, 0) // size * size


def _check_groups(groups: tuple[GroupSpec, ...], scheme: HashScheme) -> None:
    if not groups:
        raise ValueError("a pool needs at least one group")
    if scheme.lookahead:
        raise ValueError("look-ahead hashes (vLLM 0.33 with a drafter) are not simulated")
    for position, group in enumerate(groups):
        if group.group_idx != position:
            raise ValueError(f"group {group.group_idx} stands at position {position}")
        _check_group(group, scheme.hash_block_size)
    if len(groups) == 1 and groups[0].block_size != scheme.hash_block_size:
        raise ValueError(
            f"one group: hash block {scheme.hash_block_size} must equal its block size {groups[0].block_size}"
        )
    modes = {group.mamba_cache_mode for group in groups if group.family is Family.MAMBA}
    if len(modes) > 1:
        raise ValueError(f"Mamba groups of different modes: {sorted(map(str, modes))}")
    chunked = any(group.family is Family.CHUNKED for group in groups)
    if chunked and any(group.is_eagle and group.family is Family.CHUNKED for group in groups):
        raise ValueError("chunked local attention cannot be an EAGLE group")


def _check_group(group: GroupSpec, hash_size: int) -> None:
    label = f"group {group.group_idx} ({group.kind})"
    if group.block_size <= 0 or hash_size <= 0 or group.block_size % hash_size:
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
        case _:
            pass


def _check_retention(groups: tuple[GroupSpec, ...], interval: int | None, sched_size: int) -> None:
    if interval is None or interval == 0:
        return
    if not any(group.family in {Family.WINDOW, Family.MAMBA} for group in groups):
        raise ValueError(f"retention interval {interval} has no effect without a window or Mamba group")
    if interval < 0 or interval % sched_size:
        raise ValueError(f"retention interval {interval} is no multiple of {sched_size}")


def _lookup_classes(groups: tuple[GroupSpec, ...]) -> tuple[LookupClass, ...]:
    """Full attention first, else by first group; one EAGLE group makes its whole class drop."""
    members: dict[GroupSpec, list[GroupSpec]] = {}
    for group in groups:
        key = msgspec.structs.replace(group, group_idx=-1, is_eagle=False)
        members.setdefault(key, []).append(group)
    classes = [
        LookupClass(
            same[0],
            tuple(group.group_idx for group in same),
            any(group.is_eagle for group in same),
        )
        for same in members.values()
    ]
    return tuple(sorted(classes, key=lambda cls: cls.spec.family is not Family.FULL))


def _partial_hits(groups: tuple[GroupSpec, ...], hash_size: int) -> bool:
    """Sub-block hits: an align-mode Mamba group coarser than the hash block, every other group able."""
    coarse = any(g.mamba_cache_mode == "align" and g.block_size > hash_size for g in groups)
    able = (Family.FULL, Family.MAMBA)
    return coarse and all(g.family in able or g.block_size == hash_size for g in groups)
