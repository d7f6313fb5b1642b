"""What an operator must say about a model, and the cache layout learned from an engine's events.

Groups, kinds, block sizes and windows come from ``BlockStored`` events. What no event carries (attention
chunk, Mamba mode, EAGLE flags) comes from ``ModelFacts``. A group's block size is the largest one seen in
it: events of partial blocks carry the hash block size instead.
"""

from __future__ import annotations

import math

import msgspec

from publisher.events import BlockStored
from publisher.groups import Family, GroupSpec, SpecClass, scheduler_block_size, spec_classes


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Per model: what events do not tell. All sizes in tokens.

    ``eagle_groups`` lists the groups whose look-up drops the last block (EAGLE/MTP drafter before 0.33);
    ``partial_hash_hits`` overrides what is derived; ``report_mode_full`` says that requests set
    ``kv_cache_report_mode=full`` (better: never do); ``hash_seeds`` are tried first when a scheme is
    detected (the engines' PYTHONHASHSEED); ``kinds`` and ``windows`` serve vLLM 0.20-0.21, which does not
    publish them.
    """

    attention_chunk_size: int | None = None
    mamba_cache_mode: str | None = None
    eagle_groups: tuple[int, ...] = ()
    partial_hash_hits: bool | None = None
    report_mode_full: bool = False
    hash_seeds: tuple[str, ...] = ()
    lora_paths: dict[str, str] = {}
    kinds: dict[int, str] = {}
    windows: dict[int, int] = {}


class CacheLayout(msgspec.Struct, frozen=True):
    """How one engine's look-up works: its spec classes, and where a hit may end.

    ``alignment`` and ``hash_block_size`` in tokens; a hit is a multiple of ``alignment``.
    """

    groups: tuple[GroupSpec, ...]
    classes: tuple[SpecClass, ...]
    hash_block_size: int
    alignment: int
    lookahead: int = 0

    @property
    def single_group(self) -> bool:
        return len(self.groups) == 1

    @property
    def missing_facts(self) -> tuple[str, ...]:
        """Settings without which no hit can be predicted; empty for a complete description."""
        missing = []
        for spec in (c.spec for c in self.classes):
            if spec.family is Family.WINDOW and not spec.sliding_window:
                missing.append(f"windows.{spec.group_idx}")
            if spec.family is Family.CHUNKED and not spec.attention_chunk_size:
                missing.append("attention_chunk_size")
        return tuple(dict.fromkeys(missing))


def make_layout(
    groups: tuple[GroupSpec, ...], facts: ModelFacts, hash_block_size: int | None, lookahead: int = 0
) -> CacheLayout:
    """The layout vLLM would derive from these groups (vLLM 0.32 ``resolve_kv_cache_block_sizes``).

    ``hash_block_size`` is what was detected; None: the greatest common divisor of the block sizes.
    """
    unit = hash_block_size or math.gcd(*(group.block_size for group in groups))
    partial = facts.partial_hash_hits
    if partial is None:
        partial = _partial_hits(groups, unit)
    alignment = unit if partial else scheduler_block_size(groups)
    if len(groups) == 1 and not partial:
        alignment = groups[0].block_size
    return CacheLayout(groups, spec_classes(groups), unit, alignment, lookahead)


def _partial_hits(groups: tuple[GroupSpec, ...], unit: int) -> bool:
    """A Mamba align group with blocks larger than a hash block, every other group able to follow."""
    align = any(
        g.family is Family.MAMBA and g.mamba_cache_mode == "align" and g.block_size > unit for g in groups
    )
    able = all(g.family in {Family.FULL, Family.MAMBA} or g.block_size == unit for g in groups)
    return align and able and len(groups) > 1


class GroupLearner:
    """Groups of one engine as its events reveal them."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._groups: dict[int, GroupSpec] = {}
        self.assumed_kinds: set[int] = set()
        """Groups whose kind neither an event nor the configuration gave: taken for full attention."""

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return tuple(self._groups[idx] for idx in sorted(self._groups))

    def observe(self, event: BlockStored) -> bool:
        """Learn from one GPU event; True when a group is new or changed."""
        idx = event.group_idx or 0
        known = self._groups.get(idx)
        if known is not None and known.block_size >= event.block_size:
            return False
        if event.block_size == 0:
            return False
        self._groups[idx] = self._describe(idx, event)
        return True

    def _describe(self, idx: int, event: BlockStored) -> GroupSpec:
        kind = event.kv_cache_spec_kind or self._facts.kinds.get(idx)
        if kind is None:
            kind = "full_attention"
            self.assumed_kinds.add(idx)
        spec = GroupSpec(idx, kind, event.block_size)
        family = spec.family
        return GroupSpec(
            idx,
            kind,
            event.block_size,
            sliding_window=event.kv_cache_spec_sliding_window or self._facts.windows.get(idx),
            attention_chunk_size=self._facts.attention_chunk_size if family is Family.CHUNKED else None,
            mamba_cache_mode=self._facts.mamba_cache_mode if family is Family.MAMBA else None,
            is_eagle=idx in self._facts.eagle_groups,
        )
