"""Which prefix of a prompt can be loaded, and which blocks of which group that takes.

The rules are the engine's: each group's own manager class says what is a hit, what is reachable and what is
skipped; here they are asked about blocks held outside the GPU instead of the engine's pool, and their
answers are brought to one length that all groups accept. Groups that the engine itself never caches by hash
are left out. What always holds: a hit is aligned as the engine aligns its own, never reaches the prompt's
last token, and every block of ``load_mask`` for it is held.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from connectors.hits.group_rules import GroupFamily, OutsidePool, make_families
from connectors.hits.group_shapes import GroupKind
from connectors.messages.keys import block_key

Held = Callable[[bytes], bool] | Container[bytes]
"""Whether the block of a key could be loaded now."""


class HitResolver:
    """Hits, load masks and store masks of one engine. Group indices are the model's; all lengths in tokens.

    ``partial_hits``: the engine lets hits end inside a block, on a hash block (Mamba, finer hashes).
    With EAGLE they end on whole blocks here all the same: proving one takes a second key for the same bytes.
    ``reprefill_tokens``: tokens at the end of what is computed that may be computed again (multi-module MTP).
    ValueError where a group's block is no multiple of the hash block, or no divisor of the scheduler block.
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
        self._one_pass = self._single or simple  # what comes after full attention cannot spoil it again
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
        """As the engine of this configuration resolves its block sizes, EAGLE and partial hits."""
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
        """Keys whose residency decides the hit of this prompt; ``find_hit`` needs no other.

        With ``known`` (answers so far, at first empty): the keys to ask next. First, in hope, whole prefixes
        of full groups and the tails at the last boundary (and some keys that turn out not to matter); then
        every tail that still matters; empty when ``find_hit`` over what is known is decided: two rounds at
        most.
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
        """Group -> indices in the request's block table to load for a hit of ``hit_tokens``.

        These are the blocks the engine allocates and reads: all beyond the local ones that its manager does
        not skip at this length.
        """
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
        """Group -> indices of full blocks worth storing once ``num_computed_tokens`` are computed.

        Only what can serve a hit at a boundary. ``first_token``: what was computed at the call before; blocks
        that were due then are left out. ``shared_prefix_tokens``: where the engine saw another request leave
        this prompt (its ``shared_prefix_boundary``), 0 for none. State groups have none here: their states
        are stored at the boundaries the engine hands over (``state_key``).
        """
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
        """Full group -> (block index, end in tokens) of the block in which the prompt's last boundary lies.

        Only where hits may end inside a block; empty until that boundary is computed, and where it is the
        end of a block. Its key is ``key_at(..., end_tokens=end)``.
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
        """Key of a block of this prompt. ``end_tokens``: where the hit ends, if it may end inside the block.

        IndexError where the prompt has no such block.
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
        """The longest joint hit whose last blocks are held under the hash at its end.

        Only where hits may end inside a block can the rules also accept a block that is held under a later
        hash: the engine would find that block again by its id, a load has nothing but the key.
        """
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
        """The longest length all families accept: each may shorten it, until none does.

        An EAGLE family proves a length by matching beyond it and dropping that part; it does so once per
        length that the others agreed on, or every round would shorten the hit again.
        """
        local = frozenset(block_hashes[: num_local_tokens // self.hash_block_tokens])
        pool = OutsidePool(self.hash_block_tokens, held, local)
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
        """How much of what is computed the engine itself would cache: up to the last boundary."""
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
