"""Model facts that must be configured, and the cache layout learned from an engine's events.

Groups, kinds, block sizes and windows come from ``BlockStored`` events. Facts that no event carries
(attention chunk, Mamba mode, EAGLE flags) come from ``ModelFacts``, configured or found (``facts.py``). A
group's block size is the largest one seen in it: events of partial blocks carry the hash block size instead
(``PartialEvidence``), and no event marks them as such.

If hits may end inside a block, vLLM publishes the end of a prompt as a block of one hash block, under that
hash (``BlockPool.cache_partial_block``, vLLM 0.32). Two conclusions follow:

- *A block size not seen yet.* The parent of a whole full-attention block is the block before it, which the
  same request still holds. So a block of one hash block whose parent the group does not hold is a part of
  a longer one; until a whole block arrives, every prefix stored there is shorter than a block.
- *Hits inside a block under decode context parallelism (DCP)*, where a Mamba block is as long as a hash
  block (``partial_hash_hits_enabled``). Without such hits a prefix is stored up to a multiple of all block
  sizes (``HybridKVCacheCoordinator.get_num_cacheable_tokens``): a state that ends elsewhere proves them,
  and so does a part directly after the whole blocks of its group. Groups with the EAGLE flag store one
  block more, and prove nothing.

Look-ahead hashes (vLLM 0.33) weaken the second conclusion. The hash of a block is known a token or more after
its end, so that without hits inside a block, too, a prefix may be stored up to the hash before a multiple of
all block sizes, and the part of a prompt before the whole block around it. There only a state proves hits
inside a block, and only at another place than that, once all block sizes are known.

This applies only to models with Mamba groups in align mode. Nothing is inferred from missing events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec.structs import replace

from kvatlas.publisher.events import BlockStored
from kvatlas.publisher.groups import (
    Family,
    GroupSpec,
    SpecClass,
    hash_unit,
    scheduler_block_size,
    spec_classes,
)

_SILENT_ROOTS_MAX = 16
_ENDS_MAX = 64


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of a model that events do not carry. All sizes in tokens.

    ``attention_chunk_sizes`` gives the chunk by group if ``attention_chunk_size`` does not apply to all.
    ``eagle_groups`` lists the groups whose lookup drops the last block (EAGLE/MTP drafter before 0.33),
    None: to be found; ``eagle_groups_apart``: their layers have other heads than the model's, so that vLLM
    looks them up apart from similar groups; ``attention_block_size`` and ``mamba_block_size`` are those that
    the engine states; ``decode_ranks`` is its decode context parallelism; ``retention_interval`` is the
    distance of the blocks that windows and states keep, None: to be found;
    ``partial_hash_hits`` overrides the derived value; ``report_mode_full`` means that requests set
    ``kv_cache_report_mode=full`` (not recommended); ``hash_seeds`` are tried first when a scheme is
    detected (the engines' PYTHONHASHSEED); ``kinds`` and ``windows`` are for vLLM 0.20-0.21, which does
    not publish them. ``shared_stores`` names the stores (by the owner in events) that every engine loads
    from, even if it never wrote to them; entries of a store expire after ``shared_store_ttl_s``.
    ``first_connector_loads``: of several connectors the first that holds anything loads, not the one
    that holds most. ``hidden_groups``: the engine has groups that publish nothing, although no group
    number is missing; ``replay_tokens``: number of tokens of a hit that are recomputed for such groups
    (bounded replay). ``blocks_per_chunk``: number of blocks that vLLM's own offloading keeps under one
    hash, None: to be found.
    """

    attention_chunk_size: int | None = None
    attention_chunk_sizes: dict[int, int] = {}
    mamba_cache_mode: str | None = None
    eagle_groups: tuple[int, ...] | Literal["all"] | None = None
    eagle_groups_apart: bool = False
    attention_block_size: int | None = None
    mamba_block_size: int | None = None
    decode_ranks: int = 1
    retention_interval: int | Literal["dense"] | None = None
    partial_hash_hits: bool | None = None
    report_mode_full: bool = False
    hash_seeds: tuple[str, ...] = ()
    lora_paths: dict[str, str] = {}
    kinds: dict[int, str] = {}
    windows: dict[int, int] = {}
    shared_stores: tuple[str, ...] = ()
    shared_store_ttl_s: float = 1800.0
    first_connector_loads: bool = False
    hidden_groups: bool = False
    replay_tokens: int = 0
    blocks_per_chunk: int | None = None

    def is_eagle(self, group_idx: int) -> bool:
        """Whether the lookup of this group drops its last block."""
        return self.eagle_groups == "all" or group_idx in (self.eagle_groups or ())

    @property
    def has_chunks(self) -> bool:
        """Whether a group is known to have chunked local attention, which hits in an empty cache too."""
        return bool(self.attention_chunk_size or self.attention_chunk_sizes)

    def chunk_size(self, group_idx: int) -> int | None:
        """Return the attention chunk of a group in tokens, None if unknown."""
        return self.attention_chunk_sizes.get(group_idx, self.attention_chunk_size)


def retained_tokens(interval: int | Literal["dense"] | None) -> int | None:
    """Return a retention interval in tokens as vLLM has it: None for ``dense``, its default 0 if unknown."""
    return None if interval == "dense" else interval or 0


class CacheLayout(msgspec.Struct, frozen=True, cache_hash=True):
    """How one engine's lookup works: its spec classes, and where a hit may end.

    ``alignment`` and ``hash_block_size`` in tokens; a hit is a multiple of ``alignment``.
    """

    groups: tuple[GroupSpec, ...]
    classes: tuple[SpecClass, ...]
    hash_block_size: int
    alignment: int
    lookahead: int = 0
    first_connector_loads: bool = False
    inside_seen: bool = False
    """Whether events proved that hits end inside a block."""
    hidden_groups: bool = False
    """Whether the engine has groups without events."""
    replay_tokens: int = 0
    """Tokens of a hit that are recomputed; a hit of no more than these is none."""
    computed_tokens: int = 1
    """Tokens at the end of each prompt that no hit covers."""
    load_tokens_min: int = 1
    """Fewest tokens that are loaded from outside the GPU; fewer are computed."""
    blocks_per_chunk: int = 1
    """Blocks that vLLM's own offloading keeps under one hash."""

    @property
    def single_group(self) -> bool:
        """Whether the engine looks up its only group directly, not class by class."""
        return len(self.groups) == 1 and not self.hidden_groups

    @property
    def has_parts(self) -> bool:
        """Whether a block may be stored under several hashes, at its end and at the ends of parts of it
        (``BlockPool.cache_partial_block``, vLLM 0.32): then more may be stored than the pool has blocks."""
        states = any(c.family is Family.MAMBA and c.spec.mamba_cache_mode != "all" for c in self.classes)
        return states and any(c.spec.lookup_block_size > self.hash_block_size for c in self.classes)

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the end of a stored prefix that a lookup drops for EAGLE, where hits are aligned."""
        return self.alignment if not self.lookahead and any(c.spec.is_eagle for c in self.classes) else 0

    @property
    def first_group(self) -> tuple[int, int] | None:
        """A group of the first class, full attention if there is any, and its block size; None without
        one."""
        return (self.classes[0].group_idxs[0], self.classes[0].block_size) if self.classes else None

    @property
    def missing_facts(self) -> tuple[str, ...]:
        """Settings without which no hit can be predicted; empty if the description is complete."""
        missing = []
        for spec in (c.spec for c in self.classes):
            if spec.family is Family.WINDOW and not spec.sliding_window:
                missing.append(f"windows.{spec.group_idx}")
            chunk = spec.attention_chunk_size
            if spec.family is Family.CHUNKED and (not chunk or chunk % spec.block_size):
                missing.append("attention_chunk_size")
        return tuple(dict.fromkeys(missing))


def make_layout(
    groups: tuple[GroupSpec, ...],
    facts: ModelFacts,
    hash_block_size: int | None,
    lookahead: int = 0,
    *,
    inside_seen: bool = False,
    sglang: bool = False,
) -> CacheLayout:
    """Derive the layout as vLLM does (vLLM 0.32 ``resolve_kv_cache_block_sizes``).

        ``hash_block_size`` is the detected one; None: the greatest common divisor of the block sizes.
            ``inside_seen``: events proved hits inside a block (``PartialEvidence``), or decode context
    parallelism does.
    """
    # The last token is computed for its logits. SGLang looks its pages up without that token, so the second
    # one of a page's last pair must come before it (srt/managers/schedule_batch.py of 0.5.23,
    # ``_compute_max_prefix_len``); vLLM 0.33 looks ahead at all tokens.
    computed = 1 + lookahead if sglang else 1
    unit = hash_block_size or hash_unit(groups)
    inside_seen = inside_seen or facts.decode_ranks > 1
    hidden = _has_hidden(groups, facts)
    partial = (hidden or len(groups) > 1) and _partial_hits(groups, unit, lookahead, inside_seen=inside_seen)
    if facts.partial_hash_hits is not None:
        # Without states vLLM never allows them, whatever is set (``partial_hash_hits_enabled``, vLLM 0.33).
        partial = facts.partial_hash_hits and _saves_states(groups) and _can_end_inside(groups, unit)
    alignment = unit if partial else scheduler_block_size(groups)
    return CacheLayout(
        groups,
        spec_classes(groups),
        unit,
        alignment,
        lookahead,
        facts.first_connector_loads,
        inside_seen=inside_seen,
        hidden_groups=hidden,
        replay_tokens=facts.replay_tokens,
        computed_tokens=computed,
        # ``load_back_threshold`` (srt/mem_cache/unified_radix_cache.py of 0.5.23).
        load_tokens_min=10 if sglang else 1,
        blocks_per_chunk=facts.blocks_per_chunk or 1,
    )


def _partial_hits(groups: tuple[GroupSpec, ...], unit: int, lookahead: int, *, inside_seen: bool) -> bool:
    """Whether hits may end inside a block, in an engine with several groups.

    True with a Mamba align group whose blocks are larger than a hash block, if every other group can follow.
    With decode context parallelism a Mamba block equal to a hash block is sufficient
    (``partial_hash_hits_enabled``, vLLM 0.32); no event says so, but stores inside a block prove it. A
    full-attention group that published only parts of blocks proves it too, unless hashes look ahead: then
    a part may be published before the whole block around it.
    """
    least = unit if inside_seen else unit + 1
    align = any(
        g.family is Family.MAMBA and g.mamba_cache_mode == "align" and g.block_size >= least for g in groups
    )
    proven = align or (not lookahead and any(group.partial_only for group in groups))
    return proven and _can_end_inside(groups, unit)


def has_gaps(groups: tuple[GroupSpec, ...]) -> bool:
    """Whether group numbers are missing: those of groups without events."""
    return bool(groups) and len(groups) < 1 + max(group.group_idx for group in groups)


def _has_hidden(groups: tuple[GroupSpec, ...], facts: ModelFacts) -> bool:
    """Whether there are groups without events.

    Ring buffers and windows that are rebuilt by replay publish nothing, but vLLM counts them when it selects
    the coordinator (``get_kv_cache_coordinator``, vLLM 0.32). They may leave gaps in the group numbers.
    """
    return has_gaps(groups) or facts.hidden_groups or bool(facts.replay_tokens)


def _can_end_inside(groups: tuple[GroupSpec, ...], unit: int) -> bool:
    """Whether every group could resume at any hash block."""
    return all(g.family in {Family.FULL, Family.MAMBA} or g.block_size == unit for g in groups)


def _drops_states(groups: tuple[GroupSpec, ...]) -> bool:
    return any(group.is_eagle and group.family is Family.MAMBA for group in groups)


class GroupLearner:
    """Learns the groups of one engine from its events.

    ``expected`` are the groups it had before a restart. They count until its events contradict them: by
    describing one of them differently, or by ``_SILENT_ROOTS_MAX`` prompts long enough to fill its blocks
    that leave one out. Without them the first short prompts would show only some groups, and hits that the
    others forbid would be predicted.
    """

    def __init__(
        self, facts: ModelFacts, expected: tuple[GroupSpec, ...] = (), *, inside_seen: bool = False
    ) -> None:
        self._facts = facts
        self._partial = PartialEvidence(inside_seen=inside_seen)
        # Observed sizes of blocks that are parts of longer ones, according to the engine.
        self.part_sizes: set[int] = set()
        self._groups: dict[int, GroupSpec] = {}
        self._expected = {group.group_idx: group for group in expected}
        # Of these two; every event asks.
        self._known: tuple[GroupSpec, ...] | None = None
        self._started = False
        self._silent_roots = 0
        # Groups whose kind neither an event nor the configuration gave: assumed to be full attention.
        self.assumed_kinds: set[int] = set()

    @property
    def known(self) -> tuple[GroupSpec, ...]:
        """Seen and expected groups."""
        if self._known is None:
            merged = self._expected | self._groups
            self._known = tuple(merged[idx] for idx in sorted(merged))
        return self._known

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Seen and expected groups; none before the first event."""
        return self.known if self._started else ()

    @property
    def inside_seen(self) -> bool:
        """Whether events proved that hits end inside a block."""
        return self._partial.inside_seen

    def watches(self, group_idx: int) -> bool:
        """Whether further events of this group may change the knowledge."""
        return bool(self._expected) or self._partial.watches(self.known, group_idx)

    def take_facts(self, facts: ModelFacts) -> None:
        """Replace the facts, and apply them to the groups known already."""
        self._facts = facts
        flagged = _drops_states(self.known)
        for groups in (self._groups, self._expected):
            groups.update({idx: self._fitted(group) for idx, group in groups.items()})
        self._known = None
        if _drops_states(self.known) and not flagged:
            # States one block behind a boundary may have been taken for proof of hits inside a block.
            self._partial.withdraw()

    def expect(self, groups: tuple[GroupSpec, ...]) -> bool:
        """Expect groups of another engine of the same model; returns whether the groups changed."""
        missing = {group.group_idx: self._fitted(group) for group in groups} if self._started else {}
        for idx in self._expected.keys() | self._groups.keys():
            missing.pop(idx, None)
        self._expected |= missing
        self._known = None
        return bool(missing)

    def observe(self, event: BlockStored, held: Callable[[], bool]) -> bool:
        """Learn from one GPU event with blocks of at least one token; returns whether the groups changed.

        ``held``: whether its group holds the event's parent. Raises ``ValueError`` for an unknown kind.
        """
        before = self.groups, self.inside_seen
        idx = event.group_idx or 0
        known = self._groups.get(idx)
        if known is None or known.block_size < event.block_size:
            self._see(self._describe(idx, event), event)
        if self._partial.watches(self.known, idx):
            if (seen := self._groups.get(idx)) is not None:
                sized = self._partial.sized(event, seen, known, held)
                if sized is not seen:
                    self._groups[idx], self._known = sized, None
            self._partial.prove_inside(event, self.known)
        if self._expected:
            self._count_silence(event)
        self._started = True
        return (self.groups, self.inside_seen) != before

    def _see(self, seen: GroupSpec, event: BlockStored) -> None:
        expected = self._expected.get(seen.group_idx)
        if expected is not None and expected.partial_only and expected.block_size == seen.block_size:
            seen = replace(seen, partial_only=True)
        if expected is not None and seen != expected:
            partial = event.num_tokens() == event.block_size < expected.block_size
            if partial and replace(seen, block_size=expected.block_size) == expected:
                # Possibly a partial block: wait for an event with more than one block.
                return
            self._expected.clear()
        elif expected is None and self._expected:
            self._expected.clear()
        self._expected.pop(seen.group_idx, None)
        self._groups[seen.group_idx] = seen
        self._known = None

    def _count_silence(self, event: BlockStored) -> None:
        """Count a prompt long enough to show every expected group."""
        longest = max(group.block_size for group in self._expected.values())
        if event.parent_block_hash is None and event.num_tokens() >= longest:
            self._silent_roots += 1
        if self._silent_roots >= _SILENT_ROOTS_MAX:
            self._expected.clear()
            self._known = None

    def _describe(self, idx: int, event: BlockStored) -> GroupSpec:
        kind = event.kv_cache_spec_kind or self._facts.kinds.get(idx)
        if kind is None:
            kind = "full_attention"
            self.assumed_kinds.add(idx)
        chunked = GroupSpec(idx, kind, event.block_size).family is Family.CHUNKED
        spec = GroupSpec(
            idx,
            kind,
            event.block_size,
            sliding_window=event.kv_cache_spec_sliding_window or self._facts.windows.get(idx),
            attention_chunk_size=self._facts.chunk_size(idx) if chunked else None,
        )
        return self._fitted(spec)

    def _fitted(self, group: GroupSpec) -> GroupSpec:
        """Apply the facts to a group.

        If the engine states a multiple of an observed block size, the observed size is that of a part of a
        block.
        """
        facts, family, size = self._facts, group.family, group.block_size
        stated = None
        if family is Family.FULL:
            stated = facts.attention_block_size
        elif family is Family.MAMBA:
            stated = facts.mamba_block_size
        if stated is not None and stated > size and stated % size == 0:
            self.part_sizes.add(size)
            group = replace(group, block_size=stated, partial_only=False)
        eagle = facts.is_eagle(group.group_idx)
        return replace(
            group,
            mamba_cache_mode=facts.mamba_cache_mode if family is Family.MAMBA else None,
            is_eagle=eagle,
            apart=eagle and facts.eagle_groups_apart,
        )


class PartialEvidence:
    """Facts proved by the events of one engine."""

    def __init__(self, *, inside_seen: bool = False) -> None:
        # Whether hits inside a block are proven, if the block sizes leave it open.
        self.inside_seen = inside_seen
        self._whole: set[int] = set()
        self._last: dict[int, int | bytes] = {}
        # Last part of a full-attention block, and last state stored alone. The groups of a request publish
        # one after another.
        self._part: int | bytes | None = None
        self._state: int | bytes | None = None
        # Ends of prefixes with a state, in tokens, seen before block sizes that give them a meaning.
        self._ends: set[int] = set()

    def withdraw(self) -> None:
        """Discard the proof of hits inside a block."""
        self.inside_seen = False
        self._ends.clear()

    def watches(self, known: tuple[GroupSpec, ...], idx: int) -> bool:
        """Whether further events of this group may prove something."""
        if not _saves_states(known):
            return False
        group = next((g for g in known if g.group_idx == idx), None)
        if group is None:
            return True
        unsized = {g.group_idx for g in known if g.family is Family.FULL} - self._whole
        return idx in unsized or (not self.inside_seen and (bool(unsized) or open_inside(known)))

    def sized(
        self, event: BlockStored, group: GroupSpec, known: GroupSpec | None, held: Callable[[], bool]
    ) -> GroupSpec:
        """Return ``group`` with the block size that ``event`` shows.

        ``known`` is the group as known before; ``held``: whether it holds the event's parent.
        """
        idx = group.group_idx
        if group.family is not Family.FULL or event.block_size != group.block_size:
            return group
        grown = known is not None and known.block_size < group.block_size
        if grown or event.num_tokens() > event.block_size:
            self._whole.add(idx)
        if idx in self._whole:
            return replace(group, partial_only=False) if group.partial_only else group
        part = event.parent_block_hash is not None and not held()
        return replace(group, partial_only=True) if part else group

    def prove_inside(self, event: BlockStored, groups: tuple[GroupSpec, ...]) -> None:
        """Record whether ``event`` proves that hits may end inside a block."""
        if self.inside_seen:
            return
        idx = event.group_idx or 0
        group = next((c.spec for c in spec_classes(groups) if idx in c.group_idxs), None)
        if group is None or group.is_eagle:
            return
        ahead = event.num_lookahead()
        root_state = group.family is Family.MAMBA and event.parent_block_hash is None
        if not open_inside(groups):
            if root_state and event.block_hashes and not ahead and len(self._ends) < _ENDS_MAX:
                self._ends.add(event.num_tokens())
            return
        if any(end % scheduler_block_size(groups) for end in self._ends):
            self.inside_seen = True
        elif root_state:
            self.inside_seen = _ends_inside(event, groups, ahead)
        elif ahead:
            return
        elif group.family is Family.MAMBA and event.block_hashes and event.num_tokens() == event.block_size:
            self._state = event.block_hashes[0]
            self.inside_seen = self._state == self._part
        elif group.family is Family.FULL and event.block_size < group.block_size:
            self._part = event.block_hashes[0] if event.block_hashes else None
            parent = event.parent_block_hash
            behind = parent is not None and parent == self._last.get(idx)
            self.inside_seen = behind or (self._part is not None and self._part == self._state)
        elif group.family is Family.FULL and event.block_hashes:
            self._last[idx] = event.block_hashes[-1]


def _saves_states(groups: tuple[GroupSpec, ...]) -> bool:
    return any(g.family is Family.MAMBA and g.mamba_cache_mode != "all" for g in groups)


def _ends_inside(event: BlockStored, groups: tuple[GroupSpec, ...], ahead: int) -> bool:
    """Whether a prefix with a state at its end could be stored only because hits may end inside a block."""
    if ahead and any(group.partial_only for group in groups):
        return False
    # An event without hashes stores no state, and does not show how far its hashes look ahead.
    if not event.block_hashes:
        return False
    unit, whole, end = hash_unit(groups), scheduler_block_size(groups), event.num_tokens()
    # Tokens whose hashes are not known yet when a multiple is reached.
    missing = -(-ahead // unit) * unit
    return end % whole != 0 and (end + missing) % whole != 0


def open_inside(groups: tuple[GroupSpec, ...]) -> bool:
    """Whether vLLM allows hits inside a block of these sizes under decode context parallelism only."""
    unit = hash_unit(groups)
    states = [g.block_size for g in groups if g.family is Family.MAMBA and g.mamba_cache_mode == "align"]
    longer = any(g.family is Family.FULL and g.lookup_block_size > unit for g in groups)
    return longer and bool(states) and max(states) == unit
