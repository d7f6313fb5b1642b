"""Block tables, one class per kind of group: blocks that a request needs, frees and stores.

A request is adopted with the blocks of its hit. Then, for every chunk, blocks out of reach are freed, new
ones are allocated, and full ones are stored under their hash unless retention skips them. Source:
``v1/core/single_type_kv_cache_manager.py`` of vLLM 0.32; for Mamba, without draft tokens and without
checkpoints inside a chunk.

Invariant: a table covers all computed tokens, block by block; 0 marks a block that is no longer held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.pool.hits import window_blocks
from kvatlas.publisher.pool.layout import PoolLayout, checkpoint_position
from kvatlas.publisher.pool.store import NULL, BlockStore, EventWriter, PoolRequest, WireHash


class PoolParts(NamedTuple):
    """Objects shared by the tables of one pool; ``chunk_tokens_max`` bounds a chunk."""

    layout: PoolLayout
    store: BlockStore
    writer: EventWriter
    chunk_tokens_max: int


class DueBlock(NamedTuple):
    """A block that a connector would copy out; ``end`` is its end in tokens. Sorts in prompt order."""

    end: int
    group_idx: int
    block_hash: WireHash
    block: int

    @property
    def key(self) -> tuple[int, WireHash]:
        return self.group_idx, self.block_hash


class GroupTable:
    """Base class, with the rules of full attention: every block stays in reach, every full block is
    stored."""

    def __init__(self, spec: GroupSpec, parts: PoolParts) -> None:
        self.spec = spec
        self.layout = parts.layout
        self.store = parts.store
        self.writer = parts.writer
        self.group_idx = spec.group_idx
        self.block_size = spec.block_size
        self.scale = spec.block_size // parts.layout.hash_block_size
        # Source and target of this step's block copies; both stay in use until it ends.
        self.copies: list[tuple[int, int]] = []
        self.blocks_max = self.admission_cap(parts.chunk_tokens_max)

    def admission_cap(self, chunk_tokens_max: int) -> int | None:
        """Most blocks that one request holds at once, for kinds that free blocks on the way; else None."""
        del chunk_tokens_max
        return None

    def skipped_tokens(self, num_computed: int) -> int:
        """Tokens from the start that the next token does not attend to."""
        del num_computed
        return 0

    def blocks_to_admit(
        self, hit_blocks: list[int], hit: int, num_tokens: int, *, capped: bool, loaded_to: int = 0
    ) -> int:
        """Free blocks that a new request with this hit needs for ``num_tokens`` tokens.

        ``loaded_to`` is the end of a load that continues the hit, else 0.
        """
        required = -(-num_tokens // self.block_size)
        if capped and self.blocks_max is not None:
            required = min(required, self.blocks_max)
        skipped = self.skipped_tokens(max(hit, loaded_to)) // self.block_size
        # Blocks of the hit inside the window count towards the requirement; otherwise the skipped positions
        # do, which are null blocks.
        fresh = max(required - max(skipped, len(hit_blocks)), 0)
        # A hit inside a block gets a private copy, because the request will write into the rest of it.
        copied = 1 if hit_blocks and hit % self.block_size else 0
        # Free blocks of the hit leave the free queue when touched, so they count as needed
        # (``_get_num_evictable_blocks``).
        return fresh + copied + self.num_unused(hit_blocks[skipped:])

    def num_unused(self, blocks: list[int]) -> int:
        """Number of these blocks that are free now and would leave the free queue."""
        # Null blocks are never used, and do not count.
        return list(map(self.store.refs.__getitem__, blocks)).count(0) - blocks.count(NULL)

    def adopt(self, request: PoolRequest, hit_blocks: list[int], hit: int, loaded_to: int = 0) -> None:
        """Use the blocks of a hit; blocks out of reach after the hit or the load become null."""
        skipped = self.skipped_tokens(max(hit, loaded_to)) // self.block_size
        blocks = hit_blocks[skipped:]
        self.store.touch(blocks)
        request.tables[self.group_idx] = [NULL] * skipped + blocks
        request.num_cached[self.group_idx] = skipped + len(blocks)
        if blocks and hit % self.block_size:
            request.partial[self.group_idx] = (hit // self.block_size, blocks[-1])
            # The copied block is stored again under its own hash when it becomes full.
            request.num_cached[self.group_idx] = hit // self.block_size

    def drop_skipped(self, request: PoolRequest, num_computed: int) -> None:
        """Free the blocks that fell out of reach, last block first."""
        self.drop_before(request, self.skipped_tokens(num_computed) // self.block_size)

    def drop_before(self, request: PoolRequest, end: int) -> None:
        table, start = request.tables[self.group_idx], request.dropped[self.group_idx]
        end = min(end, len(table))
        if end > start:
            request.dropped[self.group_idx] = end
            freed = table[start:end]
            # Last block first: with equal age the start of the prefix, which more prompts share, is evicted
            # later.
            freed.reverse()
            table[start:end] = [NULL] * (end - start)
            self.store.free(freed)

    def blocks_needed(self, request: PoolRequest, num_tokens: int) -> int:
        """Free blocks that ``allocate`` will take."""
        required = -(-num_tokens // self.block_size)
        fresh = max(required - len(request.tables[self.group_idx]), 0)
        return fresh + (self.group_idx in request.partial)

    def blocks_to_finish(self, request: PoolRequest, num_tokens: int) -> int:
        """Upper bound of the net free blocks that a running request needs for ``num_tokens`` tokens."""
        required = -(-num_tokens // self.block_size)
        if self.blocks_max is not None:
            required = min(required, self.blocks_max)
        return max(required - len(request.tables[self.group_idx]), 0)

    def allocate(self, request: PoolRequest, num_tokens: int) -> None:
        """Extend the table to ``num_tokens``; a hit that ends inside a block gets a copy of that block."""
        if self.group_idx in request.partial:
            self.copy_tail(request, self.store.take(1)[0])
        table = request.tables[self.group_idx]
        fresh = -(-num_tokens // self.block_size) - len(table)
        if fresh > 0:
            table += self.store.take(fresh)

    def copy_tail(self, request: PoolRequest, target: int) -> None:
        """Put a private copy in place of the shared last block of a hit."""
        position, source = request.partial.pop(self.group_idx)
        request.tables[self.group_idx][position] = target
        self.copies.append((source, target))
        # The copy runs with the step's forward pass: both blocks stay in use until it has ended.
        self.store.refs[target] += 1

    def cache(self, request: PoolRequest, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Store the blocks that became full at ``num_tokens``."""
        start = request.num_cached[self.group_idx]
        end = num_tokens // self.block_size
        if start >= end:
            return
        request.num_cached[self.group_idx] = end
        table, store = request.tables[self.group_idx], self.store
        kept = self.kept_blocks(start, end, boundaries)
        held = [position for position in (range(start, end) if kept is None else kept) if table[position]]
        if held:
            hashes, scale = request.hashes, self.scale
            blocks = [table[position] for position in held]
            run = [hashes[(position + 1) * scale - 1] for position in held]
            store.insert_run(self.group_idx, blocks, run)
            if scale > 1:
                for position, block in zip(held, blocks, strict=True):
                    store.span_of[block] = (position + 1) * self.block_size
        self.writer.stored(request, self.spec, start, end, held)

    def kept_blocks(self, start: int, end: int, boundaries: Sequence[int]) -> Iterable[int] | None:
        """The blocks from ``start`` to ``end`` that can serve a hit and are stored; None for all."""
        del start, end, boundaries
        return None

    def due(self, request: PoolRequest, start: int, end: int, boundaries: Sequence[int]) -> list[DueBlock]:
        """The blocks that became full between two token counts, are held and can serve a hit."""
        first, last = start // self.block_size, end // self.block_size
        kept = self.kept_blocks(first, last, boundaries) if first < last else ()
        table, hashes = request.tables[self.group_idx], request.hashes
        size, scale, group_idx = self.block_size, self.scale, self.group_idx
        return [
            DueBlock((position + 1) * size, group_idx, hashes[(position + 1) * scale - 1], table[position])
            for position in (range(first, last) if kept is None else kept)
            if position < len(table) and table[position]
        ]

    def cache_partial(self, request: PoolRequest, block: int, num_tokens: int) -> None:
        """Make a block findable at a boundary inside it."""
        store = self.store
        block_hash = request.hashes[num_tokens // self.layout.hash_block_size - 1]
        if store.holds(block, self.group_idx, block_hash):
            return
        # The block grew: its hash for a shorter prefix would now name other content.
        if store.hash_of[block] is not None and store.span_of[block] < num_tokens:
            store.forget(block)
        if store.hash_of[block] is None:
            store.span_of[block] = num_tokens
        store.insert(block, self.group_idx, block_hash)
        self.writer.stored_part(request, self.spec, num_tokens)

    def quiet_to(self, before: int, now: int) -> int:
        """Computed tokens up to which this table needs no change, after a chunk from ``before`` to
        ``now``."""
        del before
        return now if now % self.block_size == 0 else now - now % self.block_size + self.block_size - 1

    def release(self, request: PoolRequest) -> None:
        """Free the whole table, last block first."""
        self.store.free(reversed(request.tables[self.group_idx]))

    def end_step(self) -> None:
        """End the step; blocks stored in it become findable."""


class FullTable(GroupTable):
    """Full attention; with blocks longer than a hash block, it also stores the prompt's end inside a
    block."""

    def cache(self, request: PoolRequest, num_tokens: int, boundaries: Sequence[int]) -> None:
        super().cache(request, num_tokens, boundaries)
        if self.scale == 1:
            return
        boundary = self._last_boundary(request)
        if boundary <= 0 or boundary > num_tokens or not boundary % self.block_size:
            return
        table, position = request.tables[self.group_idx], boundary // self.block_size
        if position < len(table) and table[position]:
            self.cache_partial(request, table[position], boundary)

    def due(self, request: PoolRequest, start: int, end: int, boundaries: Sequence[int]) -> list[DueBlock]:
        found = super().due(request, start, end, boundaries)
        if self.layout.partial_hits and not self.layout.uses_eagle:
            boundary, table = self._last_boundary(request), request.tables[self.group_idx]
            inside = start < boundary <= end and boundary % self.block_size
            if inside and (block := table[boundary // self.block_size]):
                named = request.hashes[boundary // self.layout.hash_block_size - 1]
                found.append(DueBlock(boundary, self.group_idx, named, block))
        return found

    def _last_boundary(self, request: PoolRequest) -> int:
        """The last hash boundary from which a resend of the prompt can continue."""
        # A resend computes at least the last token, so the last useful boundary lies before it. EAGLE groups
        # drop a unit of the hit, so they may store up to the end.
        limit = request.num_prompt_tokens - (self.group_idx not in self.layout.eagle)
        return limit - limit % self.layout.hash_block_size


class WindowTable(GroupTable):
    """Sliding window: frees blocks behind it; stores the blocks that a hit at a kept boundary needs.
    As ``SlidingWindowManager`` of vLLM 0.32."""

    def __init__(self, spec: GroupSpec, parts: PoolParts) -> None:
        self.window = spec.sliding_window or 1
        super().__init__(spec, parts)
        self.shift = int(spec.group_idx in parts.layout.eagle)
        self.need = window_blocks(spec) + self.shift

    def admission_cap(self, chunk_tokens_max: int) -> int | None:
        # A window and one chunk, plus a block because neither begins at a block's edge:
        # ``SlidingWindowSpec.max_admission_blocks_per_request``, vLLM 0.32. Another cap than the pool sizer's
        # would bring the deadlock of vLLM issue #39734.
        return -(-(self.window - 1 + chunk_tokens_max) // self.block_size) + 1

    def skipped_tokens(self, num_computed: int) -> int:
        # The next token attends to itself and ``window - 1`` tokens before it.
        return max(num_computed - self.window + 1, 0)

    def quiet_to(self, before: int, now: int) -> int:
        dropped = self.skipped_tokens(before) // self.block_size
        return min(super().quiet_to(before, now), (dropped + 1) * self.block_size + self.window - 1)

    def kept_blocks(self, start: int, end: int, boundaries: Sequence[int]) -> Iterable[int] | None:
        alignment, retention, shift = self.layout.alignment, self.layout.retention, self.shift
        kept: set[int] = set()
        if retention != 0:
            per = (alignment if retention is None else retention) // self.block_size
            # The kept tails touch each other: every block is stored.
            if self.need >= per:
                return None
            # Only the blocks of the last window before each retained boundary can serve a hit there.
            tail = per - self.need
            kept.update(b for b in range(max(start, shift), end) if (b - shift) % per >= tail)
        if retention is not None:
            for boundary in boundaries:
                # With a retention interval the ends of prompts are stored as well, because the next turn
                # continues there.
                last = boundary // alignment * alignment // self.block_size + shift
                kept.update(range(max(start, last - self.need), min(end, last)))
        return sorted(kept)


class ReplayedTable(WindowTable):
    """A window that is rebuilt by replay: its blocks are never stored or found.

    Source: ``SlidingWindowMLASpec`` with ``bounded_replay``, vLLM 0.32.
    """

    def cache(self, request: PoolRequest, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Store nothing."""

    def due(self, request: PoolRequest, start: int, end: int, boundaries: Sequence[int]) -> list[DueBlock]:
        return []


class RingTable(ReplayedTable):
    """One block, used as a ring buffer (``CircularBufferManager``, vLLM 0.32)."""

    def admission_cap(self, chunk_tokens_max: int) -> int | None:
        return 1

    def skipped_tokens(self, num_computed: int) -> int:
        return 0

    def blocks_to_admit(
        self, hit_blocks: list[int], hit: int, num_tokens: int, *, capped: bool, loaded_to: int = 0
    ) -> int:
        return 1

    def blocks_needed(self, request: PoolRequest, num_tokens: int) -> int:
        return 0 if request.tables[self.group_idx] else 1

    def allocate(self, request: PoolRequest, num_tokens: int) -> None:
        table = request.tables[self.group_idx]
        if not table:
            table += self.store.take(1)

    def quiet_to(self, before: int, now: int) -> int:
        return now


class ChunkedTable(GroupTable):
    """Chunked local attention: frees whole chunks behind the current one. As ``ChunkedLocalAttentionManager``
    of vLLM 0.32."""

    def __init__(self, spec: GroupSpec, parts: PoolParts) -> None:
        self.chunk = spec.attention_chunk_size or spec.block_size
        super().__init__(spec, parts)

    def admission_cap(self, chunk_tokens_max: int) -> int | None:
        return -(-(self.chunk + chunk_tokens_max) // self.block_size)

    def skipped_tokens(self, num_computed: int) -> int:
        # Tokens attend only to their own chunk, so whole earlier chunks are free.
        return num_computed // self.chunk * self.chunk

    def quiet_to(self, before: int, now: int) -> int:
        return min(super().quiet_to(before, now), (before // self.chunk + 1) * self.chunk)


def aligned_chunk(
    layout: PoolLayout, request: PoolRequest, start: int, num_tokens: int, chunk_tokens_max: int
) -> int:
    """Length of the next chunk, at most ``num_tokens``; 0 if the budget reaches no allowed end.

    Allowed ends of a prefill chunk when Mamba states are saved at chunk ends (mode "align").

    A state can only be stored at the end of a chunk. Chunks therefore end at block boundaries, at the last
    boundary of the prompt and at the end of a prefix that other prompts share. Source:
    ``Scheduler._mamba_block_aligned_split`` of vLLM 0.32.
    """
    # Decoding is not split: after the prompt (or, resumed after a preemption, all but the last token) every
    # end is allowed.
    prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    if start >= prefill_end:
        return num_tokens
    size = layout.chunk_align
    end = start + num_tokens
    if end < prefill_end:
        aligned = end // size * size
        # A chunk that reaches no boundary saves no state: the request waits for a larger budget, unless no
        # budget ever reaches the next boundary.
        if aligned > start or size <= chunk_tokens_max:
            end = aligned
    stops = _stops(layout, request, start, end)
    return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)


def _stops(layout: PoolLayout, request: PoolRequest, start: int, end: int) -> tuple[int, ...]:
    """Positions that no chunk may cross; 0 for those that do not apply."""
    size, eagle = layout.chunk_align, layout.uses_eagle
    block_end = (start // size + 1) * size if start % size else 0
    last_state = checkpoint_position(request.num_tokens, size, eagle=eagle)
    tail = 0
    if layout.partial_hits and layout.hash_block_size < layout.scheduler_block_size:
        tail = checkpoint_position(request.num_prompt_tokens, layout.hash_block_size, eagle=eagle)
        if not last_state < tail < request.num_prompt_tokens:
            tail = 0
    junction = request.shared_prefix_boundary
    shared = start + (junction - start) // size * size if start < junction < end else 0
    return (block_end, last_state, tail, shared)


class MambaTable(GroupTable):
    """Mamba, mode "all": one state per block, of which only the last is needed to continue."""

    def __init__(self, spec: GroupSpec, parts: PoolParts) -> None:
        super().__init__(spec, parts)
        self.stored_this_step: set[object] = set()

    def skipped_tokens(self, num_computed: int) -> int:
        # Only the last state is needed to continue.
        return max(num_computed - 1, 0)

    def blocks_to_admit(
        self, hit_blocks: list[int], hit: int, num_tokens: int, *, capped: bool, loaded_to: int = 0
    ) -> int:
        if self.is_unwritten(hit_blocks):
            # More than there is, so that the request waits for the next step: vLLM returns ``num_gpu_blocks +
            # 1`` in ``MambaManager.get_num_blocks_to_allocate``.
            return self.store.num_blocks
        return super().blocks_to_admit(hit_blocks, hit, num_tokens, capped=capped, loaded_to=loaded_to)

    def is_unwritten(self, hit_blocks: list[int]) -> bool:
        """Whether the hit's state was stored in this step: it is written only when the step ends."""
        # The forward pass of this step has not written the state yet.
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
            # Only the state at the end of the load is needed.
            hit_blocks = []
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
        # Skipped positions stay null: only the state at the end of the chunk is saved.
        return min(max(fresh, 0), 1) + partial

    def drop_skipped(self, request: PoolRequest, num_computed: int) -> None:
        super().drop_skipped(request, num_computed)
        idx = self.group_idx
        table = request.tables[idx]
        last = request.last_state.get(idx)
        # Allocated two steps ago: the current block gets its state from the one allocated in the step before
        # (``MambaManager.remove_skipped_blocks``, vLLM 0.32).
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
        # A running request keeps writing into its block, so the copy takes over the hash. A new request uses
        # the copy itself.
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
