"""Tables of Mamba groups: a block holds a state, and only the last state is needed to continue.

A state stored in a step is written when that step ends, so a request that hits it waits for the next step.
Facts: ``MambaManager`` of vLLM 0.32, without draft tokens and without checkpoints inside a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from publisher.events import GroupSpec
from publisher.pool.layout import checkpoint_position
from publisher.pool.store import NULL, PoolRequest
from publisher.pool.tables import DueBlock, GroupTable, PoolParts


class MambaTable(GroupTable):
    """Mamba, mode "all": one state per block, of which only the last is needed to continue."""

    def __init__(self, spec: GroupSpec, parts: PoolParts) -> None:
        super().__init__(spec, parts)
        self.stored_this_step: set[object] = set()

    def skipped_tokens(self, num_computed: int) -> int:
        return num_computed - 1

    def blocks_to_admit(
        self, hit_blocks: list[int], hit: int, num_tokens: int, *, capped: bool, loaded_to: int = 0
    ) -> int:
        if self.is_unwritten(hit_blocks):
            return self.store.num_blocks
        return super().blocks_to_admit(hit_blocks, hit, num_tokens, capped=capped, loaded_to=loaded_to)

    def is_unwritten(self, hit_blocks: list[int]) -> bool:
        """Whether the hit's state was stored in this step: it is written only when the step ends."""
        return bool(hit_blocks) and self.store.hash_of[hit_blocks[-1]] in self.stored_this_step

    def kept_blocks(self, start: int, end: int, boundaries: Sequence[int]) -> Iterable[int] | None:
        retention, alignment = self.layout.retention, self.layout.alignment
        if retention is None:
            return None
        kept: set[int] = set()
        if retention:
            per = retention // self.block_size
            if per <= 1:
                return None
            kept.update(range((start + per) // per * per - 1, end, per))
        for boundary in boundaries:
            block = boundary // alignment * alignment // self.block_size - 1
            if start <= block < end:
                kept.add(block)
        return sorted(kept)

    def cache(self, request: PoolRequest, num_tokens: int, boundaries: Sequence[int]) -> None:
        start = request.num_cached[self.group_idx]
        super().cache(request, num_tokens, boundaries)
        table, hash_of = request.tables[self.group_idx], self.store.hash_of
        for position in range(start, request.num_cached[self.group_idx]):
            block_hash = hash_of[table[position]]  # None for the null block
            if block_hash is not None:
                self.stored_this_step.add(block_hash)

    def due(self, request: PoolRequest, start: int, end: int, boundaries: Sequence[int]) -> list[DueBlock]:
        """States are copied out of the blocks that they were stored in."""
        found = super().due(request, start, end, boundaries)
        return [one for one in found if self.store.hash_of[one.block] == one.block_hash]

    def end_step(self) -> None:
        self.stored_this_step.clear()


class AlignedMambaTable(MambaTable):
    """Mamba, mode "align": one running state, saved at chunk ends; all other positions stay null."""

    def blocks_to_admit(
        self, hit_blocks: list[int], hit: int, num_tokens: int, *, capped: bool, loaded_to: int = 0
    ) -> int:
        del capped
        if self.is_unwritten(hit_blocks):
            return self.store.num_blocks
        if loaded_to:
            hit_blocks = []  # only the state at the end of the load is needed
        partial = bool(hit_blocks) and hit % self.block_size != 0
        fresh = -(-num_tokens // self.block_size) - len(hit_blocks)
        return self._at_most_one(fresh, partial=partial) + self.num_unused(hit_blocks)

    def blocks_needed(self, request: PoolRequest, num_tokens: int) -> int:
        fresh = -(-num_tokens // self.block_size) - len(request.tables[self.group_idx])
        return self._at_most_one(fresh, partial=self.group_idx in request.partial)

    def blocks_to_finish(self, request: PoolRequest, num_tokens: int) -> int:
        return self.blocks_needed(request, num_tokens)

    @staticmethod
    def _at_most_one(fresh: int, *, partial: bool) -> int:
        """Blocks to take: one for the new state, one more to copy a shared state; gaps between are null."""
        return min(max(fresh, 0), 1) + partial

    def drop_skipped(self, request: PoolRequest, num_computed: int) -> None:
        super().drop_skipped(request, num_computed)
        idx = self.group_idx
        table = request.tables[idx]
        last = request.last_state.get(idx)
        if last is not None and last < -(-num_computed // self.block_size) - 1 and table[last]:
            self.store.free([table[last]])
            table[last] = NULL

    def allocate(self, request: PoolRequest, num_tokens: int) -> None:
        idx = self.group_idx
        table = request.tables[idx]
        required = -(-num_tokens // self.block_size)
        partial = request.partial.get(idx)
        if required > len(table) or partial is not None:
            if table:
                request.last_state[idx] = len(table) - 1
            table += [NULL] * (required - 1 - len(table))
            fresh = max(required - len(table), 0)
            blocks = self.store.take(fresh + (partial is not None))
            if partial is not None:
                self._copy_state(request, blocks.pop(0))
            table += blocks
        request.allocated.add(idx)

    def _copy_state(self, request: PoolRequest, target: int) -> None:
        """Copy a shared state.

        A running request keeps writing into its block, so the copy takes over the hash. A new request uses
        the copy itself.
        """
        if self.group_idx not in request.allocated:
            self.copy_tail(request, target)
            return
        source = request.partial.pop(self.group_idx)[1]
        store = self.store
        store.move(source, target)
        self.copies.append((source, target))
        store.refs[source] += 1
        if store.hash_of[target] is not None:
            self.stored_this_step.add(store.hash_of[target])

    def cache(self, request: PoolRequest, num_tokens: int, boundaries: Sequence[int]) -> None:
        super().cache(request, num_tokens, boundaries)
        hash_size = self.layout.hash_block_size
        if num_tokens <= 0 or num_tokens % hash_size or num_tokens != self._prompt_boundary(request):
            return
        position = -(-num_tokens // self.block_size) - 1
        table = request.tables[self.group_idx]
        if position >= len(table) or not table[position]:
            return
        block = table[position]
        self.cache_partial(request, block, num_tokens)
        self.stored_this_step.add(request.hashes[num_tokens // hash_size - 1])
        if num_tokens % self.block_size:
            request.partial[self.group_idx] = (position, block)
            request.num_cached[self.group_idx] = position

    def due(self, request: PoolRequest, start: int, end: int, boundaries: Sequence[int]) -> list[DueBlock]:
        found = super().due(request, start, end, boundaries)
        boundary, table = self._prompt_boundary(request), request.tables[self.group_idx]
        inside = start < boundary == end and boundary % self.block_size
        if inside and (block := table[boundary // self.block_size]):
            named = request.hashes[boundary // self.layout.hash_block_size - 1]
            found.append(DueBlock(boundary, self.group_idx, named, block))
        return found

    def _prompt_boundary(self, request: PoolRequest) -> int:
        layout = self.layout
        return checkpoint_position(request.num_prompt_tokens, layout.hash_block_size, eagle=layout.uses_eagle)
