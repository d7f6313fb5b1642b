"""Find the prefix of a prompt that can be loaded, and the blocks of each group that the load needs.

The rules are the engine's: each group's manager class decides hits, reachable blocks and skipped blocks. Here
the managers are called with blocks held outside the GPU instead of the engine's pool, and their results are
combined to one length that all groups accept. Groups that the engine never caches by hash are omitted.

Invariants: a hit has the engine's alignment, never reaches the prompt's last token, and every block of its
``load_mask`` is held.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvatlas.connectors.group_shapes import GroupKind, GroupShape
from kvatlas.connectors.tier.base import block_key


class OffloadedBlocks:
    """The block pool interface used by the managers, backed by ``held``; hashes in ``local`` count as held.

    The engine's rules for one KV cache group, applied to blocks held outside the GPU.

    vLLM has these rules in its single-type managers, as class methods that query a block pool.
    ``OffloadedBlocks`` replaces the pool; ``GroupFamily`` is one manager and the groups that share its spec,
    which the engine looks up together. No rule is reimplemented here, so none can differ from the engine's.
    """

    def __init__(
        self, hash_block_tokens: int, held: Callable[[bytes], bool], local: frozenset[bytes]
    ) -> None:
        self.hash_block_size = hash_block_tokens
        self.null_block = object()
        self._block = object()
        self._held = held
        self._local = local

    def get_cached_block(self, block_hash: bytes, group_ids: list[int]) -> list[object] | None:
        """A placeholder block per group if all these groups have this hash, else None."""
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
    """Tokens past a hit that an EAGLE family matches and then drops."""

    @property
    def block_tokens(self) -> int:
        return int(self.spec.block_size)

    def shape(self, group_idx: int) -> GroupShape:
        """Shape of this member group, for the eviction policies."""
        tokens = self.block_tokens
        if self.kind is GroupKind.FULL:
            return GroupShape(group_idx, self.kind, tokens)
        if self.kind is GroupKind.STATE:
            return GroupShape(group_idx, self.kind, tokens, tokens)
        window = getattr(self.spec, "attention_chunk_size", None) or self.spec.sliding_window - 1
        return GroupShape(group_idx, self.kind, tokens, -(-window // tokens) * tokens)

    def longest_hit(
        self, block_hashes: Sequence[bytes], limit: int, pool: OffloadedBlocks, alignment: int, *, prove: bool
    ) -> int:
        """Longest hit of these groups in tokens, at most ``limit``; ``prove``: EAGLE matches beyond it."""
        peek = self.peek_tokens if prove else 0
        # Chunked local attention supports hits on its own blocks only; with EAGLE the alignment here is
        # coarser.
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
        """The first token that the engine reads or allocates at this length."""
        return int(self.manager.get_num_skipped_tokens(hit_tokens))


def make_families(
    config: Any, *, scheduler_block_tokens: int, hash_block_tokens: int, use_eagle: bool, dcp_world_size: int
) -> list[GroupFamily]:
    """Make the families of the groups that the engine caches by hash, full attention first, as in the engine.

    ValueError if a block is no multiple of the hash block or no divisor of the scheduler block.
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
    """One spec for all layers of a group that has a spec per layer."""
    layers = getattr(spec, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else spec


def _with_retained(spec: Any) -> Any:
    """Add the tokens that the engine retains below a window to it: blocks allocated there must be loaded."""
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


Held = Callable[[bytes], bool] | Container[bytes]
"""Whether the block of a key can be loaded now."""


class HitResolver:
    """Hits, load masks and store masks of one engine. Group indices are the model's; all lengths in tokens.

    ``partial_hits``: the engine allows hits that end inside a block, on a hash block (Mamba, finer hashes).
    With EAGLE, hits here still end on whole blocks: proving another end needs a second key for the same
    bytes. ``reprefill_tokens``: computed tokens at the end that may be computed again (multi-module MTP).
    ValueError if a group's block is no multiple of the hash block, or no divisor of the scheduler block.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        *,
        scheduler_block_size: int,
        hash_block_size: int,
        use_eagle: bool = False,
        partial_hits: bool = False,
        dcp_world_size: int = 1,
        reprefill_tokens: int = 0,
    ) -> None:
        self.scheduler_block_tokens = scheduler_block_size
        self.hash_block_tokens = hash_block_size
        self._retention_tokens: int | None = kv_cache_config.prefix_cache_retention_interval
        self._reprefill_tokens = reprefill_tokens
        self._single = len(kv_cache_config.kv_cache_groups) == 1
        self._families = make_families(
            kv_cache_config,
            scheduler_block_tokens=scheduler_block_size,
            hash_block_tokens=hash_block_size,
            use_eagle=use_eagle,
            dcp_world_size=dcp_world_size,
        )
        simple = len(self._families) == 2 and self._families[0].kind is GroupKind.FULL
        # One family after full attention can only shorten the hit, which full attention still serves.
        self._one_pass = self._single or simple
        self._by_group = {g: family for family in self._families for g in family.group_ids}
        self.group_ids = tuple(sorted(self._by_group))
        self.group_shapes = tuple(self._by_group[g].shape(g) for g in self.group_ids)
        self._any_eagle = any(family.eagle for family in self._families)
        self.partial_hits = partial_hits and not self._any_eagle
        self.alignment_tokens = hash_block_size if self.partial_hits else scheduler_block_size
        for family in self._families:
            if family.eagle and family.kind is not GroupKind.STATE and not self._single:
                family.peek_tokens = family.block_tokens

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, kv_cache_config: Any) -> HitResolver:
        """Make a resolver with the engine's block sizes, EAGLE and partial hits."""
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # noqa: PLC0415

        scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        speculative = vllm_config.speculative_config
        alignment = kv_cache_config.cache_hit_alignment_tokens
        return cls(
            kv_cache_config,
            scheduler_block_size=scheduler_tokens,
            hash_block_size=hash_tokens,
            use_eagle=speculative is not None and speculative.use_eagle_block_drop(),
            partial_hits=alignment is not None and alignment < scheduler_tokens,
            dcp_world_size=vllm_config.parallel_config.decode_context_parallel_size,
            reprefill_tokens=max(0, vllm_config.num_prefill_lookahead_tokens - 1),
        )

    def lookup_keys(
        self,
        block_hashes: Sequence[bytes],
        num_tokens: int,
        *,
        num_local_tokens: int = 0,
        known: Mapping[bytes, bool] | None = None,
    ) -> list[bytes]:
        """Keys whose residency decides the hit of this prompt; ``find_hit`` needs no others.

        With ``known`` (answers so far, initially empty): the keys to look up next, in at most two rounds. The
        first round assumes a full hit: whole prefixes of full groups and the tails at the last boundary (and
        some keys that turn out to be unneeded). The second round has every other tail that matters. Empty
        when ``known`` decides ``find_hit``.
        """
        limit = self._limit(block_hashes, num_tokens)
        if known is None:
            return self._deciding_keys(block_hashes, limit, num_local_tokens)
        wanted: dict[bytes, None] = {}

        def hoped_for(key: bytes) -> bool:
            answer = known.get(key)
            if answer is None:
                wanted[key] = None
                return True
            return answer

        reach = self._loadable_hit(block_hashes, limit, hoped_for, num_local_tokens)
        if not known or not wanted:
            return list(wanted)
        below = self._deciding_keys(block_hashes, reach, num_local_tokens)
        return [key for key in below if key not in known]

    def find_hit(
        self, block_hashes: Sequence[bytes], num_tokens: int, held: Held, *, num_local_tokens: int = 0
    ) -> int:
        """Tokens of the longest prefix that all groups can resume from; 0, or more than ``num_local_tokens``.

        ``block_hashes``: one per hash block of the prompt. ``num_local_tokens``: already in the GPU (counted
        from the first token, aligned); its blocks need not be held. At most ``num_tokens`` - 1.
        """
        test = held if callable(held) else held.__contains__
        hit = self._loadable_hit(block_hashes, self._limit(block_hashes, num_tokens), test, num_local_tokens)
        return hit if hit > num_local_tokens else 0

    def load_mask(self, num_local_tokens: int, hit_tokens: int) -> dict[int, list[int]]:
        """Group -> indices in the request's block table to load for a hit of ``hit_tokens``."""
        # These are the blocks that the engine allocates and reads: all after the local ones that its manager
        # does not skip at this length.
        mask: dict[int, list[int]] = {}
        for group_idx, family in self._by_group.items():
            tokens = family.block_tokens
            first = max(num_local_tokens, family.first_read(hit_tokens)) // tokens
            mask[group_idx] = list(range(first, -(-hit_tokens // tokens)))
        return mask

    def store_mask(
        self,
        num_computed_tokens: int,
        num_prompt_tokens: int,
        *,
        first_token: int = 0,
        shared_prefix_tokens: int = 0,
    ) -> dict[int, list[int]]:
        """Group -> indices of full blocks to store after ``num_computed_tokens`` are computed.

        Only blocks that can serve a hit at a boundary. ``first_token``: tokens computed at the previous call;
        blocks due then are omitted. ``shared_prefix_tokens``: end of the prefix that another request shares
        (the engine's ``shared_prefix_boundary``), 0 for none.
        """
        # State groups have no blocks here: their states are stored at the boundaries that the engine passes
        # to the connector (``state_key``).
        from vllm.v1.core.kv_cache_coordinator import replay_boundaries  # noqa: PLC0415

        boundaries = list(
            replay_boundaries(num_prompt_tokens, self.scheduler_block_tokens, use_eagle=self._any_eagle)
        )
        if shared_prefix_tokens:
            boundaries.append(shared_prefix_tokens)
        mask: dict[int, list[int]] = {}
        for group_idx, family in self._by_group.items():
            if family.kind is GroupKind.STATE:
                mask[group_idx] = []
                continue
            tokens = family.block_tokens
            first = self._cacheable_tokens(family, first_token) // tokens
            end = self._cacheable_tokens(family, num_computed_tokens) // tokens
            mask[group_idx] = family.reachable(
                first, end, self.alignment_tokens, self._retention_tokens, boundaries
            )
        return mask

    def partial_tail(self, num_computed_tokens: int, num_prompt_tokens: int) -> dict[int, tuple[int, int]]:
        """Full group -> (block index, end in tokens) of the block with the prompt's last boundary.

        Only with partial hits; empty until that boundary is computed, or if it is the end of a block. Its key
        is ``key_at(..., end_tokens=end)``.
        """
        if not self.partial_hits:
            return {}
        tails: dict[int, tuple[int, int]] = {}
        for group_idx, family in self._by_group.items():
            end = (num_prompt_tokens - 1) // self.hash_block_tokens * self.hash_block_tokens
            tokens = family.block_tokens
            if family.kind is GroupKind.FULL and 0 < end <= num_computed_tokens and end % tokens:
                tails[group_idx] = (end // tokens, end)
        return tails

    def key_at(
        self, block_hashes: Sequence[bytes], group_idx: int, block_index: int, end_tokens: int | None = None
    ) -> bytes:
        """Key of a block of this prompt. ``end_tokens``: end of the hit, if it may be inside the block.

        IndexError if the prompt has no such block.
        """
        end = (block_index + 1) * self._by_group[group_idx].block_tokens
        return self.state_key(block_hashes, group_idx, end if end_tokens is None else min(end, end_tokens))

    def state_key(self, block_hashes: Sequence[bytes], group_idx: int, boundary_tokens: int) -> bytes:
        """Key of the value of this group that ends at this boundary (a multiple of the hash block)."""
        index, rest = divmod(boundary_tokens, self.hash_block_tokens)
        if index < 1 or rest:
            raise IndexError(f"no block hash ends at token {boundary_tokens}")
        return block_key(block_hashes[index - 1], group_idx)

    def _limit(self, block_hashes: Sequence[bytes], num_tokens: int) -> int:
        return max(0, min(num_tokens - 1, len(block_hashes) * self.hash_block_tokens))

    def _loadable_hit(
        self, block_hashes: Sequence[bytes], limit: int, held: Callable[[bytes], bool], num_local_tokens: int
    ) -> int:
        """The longest joint hit whose last blocks are held under the hash at its end."""
        # With partial hits the rules also accept a block held under a later hash: the engine finds that block
        # by its id, but a load has only the key.
        hit = self._joint_hit(block_hashes, limit, held, num_local_tokens)
        while hit > num_local_tokens and not all(
            held(self.state_key(block_hashes, group_idx, hit))
            for group_idx, family in self._by_group.items()
            if hit % family.block_tokens
        ):
            hit = self._joint_hit(block_hashes, hit - 1, held, num_local_tokens)
        return hit

    def _joint_hit(
        self, block_hashes: Sequence[bytes], limit: int, held: Callable[[bytes], bool], num_local_tokens: int
    ) -> int:
        """The longest length that all families accept: each may shorten it, until none does."""
        # An EAGLE family proves a length by matching beyond it and dropping that part. It does so once per
        # length that the others agreed on; otherwise every round would shorten the hit again.
        local = frozenset(block_hashes[: num_local_tokens // self.hash_block_tokens])
        pool = OffloadedBlocks(self.hash_block_tokens, held, local)
        full_reach: dict[int, int] = {}
        proven: set[int] = set()
        hit = limit
        while self._families and hit > 0:
            agreed = hit
            for at, family in enumerate(self._families):
                if at in full_reach:
                    agreed = min(agreed, full_reach[at])
                    continue
                prove = family.eagle and at not in proven
                reach = family.longest_hit(block_hashes, agreed, pool, self.alignment_tokens, prove=prove)
                if prove:
                    proven.add(at)
                elif reach < agreed:
                    proven.clear()
                if family.kind is GroupKind.FULL:
                    full_reach[at] = reach
                agreed = reach
            if agreed >= hit or self._one_pass:
                return agreed
            hit = agreed
        return 0

    def _cacheable_tokens(self, family: GroupFamily, num_computed_tokens: int) -> int:
        """Computed tokens that the engine itself would cache: up to the last boundary."""
        final = max(0, num_computed_tokens - self._reprefill_tokens)
        if self._single or self.partial_hits:
            return final
        aligned = num_computed_tokens // self.alignment_tokens * self.alignment_tokens
        if not family.eagle or not aligned:
            return aligned
        return min(final, final // self.alignment_tokens * self.alignment_tokens + family.peek_tokens)

    def _deciding_keys(self, block_hashes: Sequence[bytes], limit: int, num_local_tokens: int) -> list[bytes]:
        keys: list[bytes] = []
        for group_idx in self.group_ids:
            family = self._by_group[group_idx]
            tokens = family.block_tokens
            if self.partial_hits and family.kind is not GroupKind.WINDOW:
                tokens = self.hash_block_tokens
            reach = min(limit + family.peek_tokens, len(block_hashes) * self.hash_block_tokens)
            first, end = num_local_tokens // tokens, reach // tokens
            if family.kind is GroupKind.WINDOW:
                blocks = family.reachable(first, end, self.alignment_tokens, None, ())
            else:
                stride = self.alignment_tokens // tokens if family.kind is GroupKind.STATE else 1
                blocks = [i for i in range(first, end) if (i + 1) % stride == 0]
            per_block = tokens // self.hash_block_tokens
            keys.extend(block_key(block_hashes[(i + 1) * per_block - 1], group_idx) for i in blocks)
        return keys
