"""A hybrid KV block pool that allocates, stores, evicts and finds hits as vLLM 0.32 does, without vLLM.

It holds no KV, only the metadata: which block carries which prefix, in every group of the model. For the same
requests in the same steps it finds the same hits as vLLM's scheduler and emits the same events, equal in
every field. With ``events=False`` no event is built, for an engine that publishes none; with hashes supplied,
no token is read either.

Life cycle of a request: ``request`` -> ``start`` (takes the hit) -> ``compute`` per chunk and per decoded
token, ``PoolRequest.append`` per generated token -> ``finish``. ``preempt`` returns it to the state before
``start``. A scheduler step is everything between two ``end_step`` calls; ``finish`` and ``take_events`` end a
step too, because the engine does both only after one.

With a connector behind the pool, ``start`` may begin a load, which ``loaded`` ends. ``due`` lists the blocks
to copy out (``kvatlas.publisher.pool.host_tier`` stores them); ``pin`` protects them during the copy.

Invariant: between calls every block is free or counted by its users; a free block stays findable until it is
allocated again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Protocol

from kvatlas.publisher.block_hash import NO_EXTRAS, HashChain, HashScheme, PromptExtras
from kvatlas.publisher.events import AllBlocksCleared, Event
from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.publisher.pool.hits import Hit, HitFinder
from kvatlas.publisher.pool.layout import pool_layout
from kvatlas.publisher.pool.store import (
    BlockStore,
    EventWriter,
    IntegrityError,
    PoolRequest,
    WireHash,
    first_copy,
)
from kvatlas.publisher.pool.tables import (
    AlignedMambaTable,
    ChunkedTable,
    DueBlock,
    FullTable,
    GroupTable,
    MambaTable,
    PoolParts,
    ReplayedTable,
    RingTable,
    WindowTable,
    aligned_chunk,
)

__all__ = ["EnginePool", "HybridBlockPool", "IntegrityError", "PoolRequest"]

Reach = Callable[[PoolRequest, int], int]
"""(request, its hit in tokens) -> tokens covered by the hit and the load together."""

_IN_PROMPT_ORDER = itemgetter(0, 1)


class EnginePool(Protocol):
    """The pool of one engine as its scheduler uses it; ``HybridBlockPool`` describes the methods."""

    @property
    def usage(self) -> float: ...

    def request(self, token_ids: Sequence[int], extras: PromptExtras = NO_EXTRAS) -> PoolRequest: ...

    def start(
        self,
        request: PoolRequest,
        budget_tokens: int | None = None,
        *,
        reach: Reach | None = None,
        loads_states: bool = False,
    ) -> int | None: ...

    def next_chunk(self, request: PoolRequest, budget_tokens: int | None = None) -> int: ...

    def compute(self, request: PoolRequest, num_tokens: int) -> bool: ...

    def finish(self, request: PoolRequest) -> None: ...

    def preempt(self, request: PoolRequest) -> None: ...

    def end_step(self) -> None: ...

    def take_events(self) -> list[Event]: ...

    def reset(self) -> bool: ...


class HybridBlockPool:
    """The block pool of one engine.

    ``num_blocks`` counts the null block, as vLLM's ``num_gpu_blocks`` does. ``retention_interval`` is 0
    (vLLM's default), a multiple of the scheduler block size, or None (dense). ``dcp_world_size`` is the
    number of decode context parallel ranks; a full-attention block spans all of them. ``chunk_tokens_max`` is
    the engine's ``max_num_batched_tokens``: it bounds a chunk, and the free blocks a window group needs to
    admit a request. ``lora_ids`` maps adapter names to the engine's ids. Raises ``ValueError`` for groups
    that vLLM would not run with prefix caching.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        *,
        num_blocks: int,
        scheme: HashScheme,
        retention_interval: int | None = 0,
        dcp_world_size: int = 1,
        int_hashes: bool = True,
        chunk_tokens_max: int = 8192,
        events: bool = True,
        lora_ids: Mapping[str, int] | None = None,
    ) -> None:
        self.layout = pool_layout(groups, scheme, retention_interval, dcp_world_size)
        self.scheme = scheme
        self.chunk_tokens_max = chunk_tokens_max
        self._int_hashes = int_hashes
        self._store = BlockStore(num_blocks, len(groups), events=events)
        self._finder = HitFinder(self.layout, self._store.maps)
        writer = EventWriter(self._store, scheme.hash_block_size, dict(lora_ids or {}))
        parts = PoolParts(self.layout, self._store, writer, chunk_tokens_max)
        self._tables = [_table(group, parts) for group in groups]
        self._live: dict[int, PoolRequest] = {}
        self._pinned: Counter[int] = Counter()
        self._quiet = self.layout.has_quiet_decodes

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self._store.num_free / (self._store.num_blocks - 1)

    @property
    def num_free_blocks(self) -> int:
        return self._store.num_free

    def resident(self, group_idx: int) -> dict[WireHash, int]:
        """Number of copies per hash in a group; hashes in their wire form."""
        return {
            block_hash: 1 if isinstance(copies, int) else len(copies)
            for block_hash, copies in self._store.maps[group_idx].items()
        }

    def request(
        self,
        token_ids: Sequence[int],
        extras: PromptExtras = NO_EXTRAS,
        *,
        hashes: HashChain | Sequence[WireHash] | None = None,
    ) -> PoolRequest:
        """Make a request for this prompt.

        ``hashes`` avoids hashing it here: a chain that covers a prefix of it (extended here), or the hashes
        of the prompt and of every token that will be generated. In the second case only events use the
        tokens. Raises ``ValueError`` if the prompt is empty or the hashes do not reach its end.
        """
        return PoolRequest(
            token_ids, extras, self.scheme, len(self._tables), hashes=hashes, int_hashes=self._int_hashes
        )

    def find_hit(self, request: PoolRequest) -> int:
        """Tokens that a lookup now would take from the cache; changes nothing."""
        return self._used_length(self._finder.find(request.known_hashes(), request.num_tokens - 1).length)

    def find_prefix(self, request: PoolRequest) -> tuple[int, int]:
        """The hit, and the longest prefix that a single lookup class could serve (full attention if the
        model has it), both in tokens; changes nothing."""
        found = self._finder.find(request.known_hashes(), request.num_tokens - 1)
        return self._used_length(found.length), max(found.length, found.boundary)

    def find_prefix_of(self, hashes: Sequence[WireHash], num_tokens: int) -> tuple[int, int]:
        """The same for a prompt of this length, by its hashes, which may go on beyond its end."""
        size = self.scheme.hash_block_size
        if len(hashes) > num_tokens // size:
            hashes = hashes[: num_tokens // size]
        length, boundary = self._finder.find_lengths(hashes, num_tokens - 1)
        return self._used_length(length), max(length, boundary)

    def start(
        self,
        request: PoolRequest,
        budget_tokens: int | None = None,
        *,
        reach: Reach | None = None,
        loads_states: bool = False,
        reserved_blocks: int = 0,
    ) -> int | None:
        """Take the hit of a waiting request and hold its blocks; returns its length in tokens.

        The part that bounded replay recomputes is not computed yet. Returns None, with nothing changed, if
        the whole request or its first chunk of at most ``budget_tokens`` (default: ``chunk_tokens_max``) does
        not fit now, or if it must wait for the next step.

        ``reach`` returns how far a connector would load the prompt, given the hit. If that is further, the
        request holds the blocks of the load too, ``loading_to`` is set, and ``loaded`` must be called before
        ``compute``. A load leaves ``reserved_blocks`` free for running prompts. With ``loads_states`` it also
        loads the states of Mamba groups, even if some are cached here.
        """
        if request.started:
            raise ValueError("the request has been started already")
        # vLLM offers the connector the hit of full attention alone, since the states come with the load
        # (``get_computed_blocks_for_connector``).
        if loads_states and reach is not None:
            part = self._finder.find_of_full(request.known_hashes(), request.num_tokens - 1)
            end = reach(request, part.length)
            if end > part.length:
                request.shared_prefix_boundary = part.boundary
                return self._start_load(request, part, end, reserved_blocks)
            reach = None
        hit = self._finder.find(request.known_hashes(), request.num_tokens - 1)
        request.shared_prefix_boundary = hit.boundary
        end = hit.length if reach is None else reach(request, hit.length)
        # A load that ends within the replayed part would be computed again entirely.
        if end > max(hit.length, self.layout.replay):
            return self._start_load(request, hit, end, reserved_blocks)
        hit = self._used(hit)
        budget = self.chunk_tokens_max if budget_tokens is None else budget_tokens
        chunk = self._chunk(request, self._resumed(hit.length), budget, hit.length)
        if chunk <= 0:
            return None
        blocks = [[first_copy(copies) for copies in column] for column in hit.columns]
        reached = max(hit.length, self._resumed(hit.length) + chunk)
        # The whole request must fit (``scheduler_reserve_full_isl``, vLLM 0.32), with the cap of window
        # groups; then its first chunk, without it.
        for num_tokens, capped in ((request.num_tokens, True), (reached, False)):
            needed = sum(
                table.blocks_to_admit(column, hit.length, num_tokens, capped=capped)
                for table, column in zip(self._tables, blocks, strict=True)
            )
            if needed > self._store.num_free:
                return None
        for table, column in zip(self._tables, blocks, strict=True):
            table.adopt(request, column, hit.length)
        self._started(request, hit.length)
        return hit.length

    def loaded(self, request: PoolRequest) -> None:
        """End the load that ``start`` began: store its blocks and continue computing after it. Raises
        ``ValueError`` if no load was begun."""
        # If nothing is left to compute, the last token is computed again to produce the next one.
        if not request.loading_to:
            raise ValueError("the request loads nothing")
        self._cache(request, request.loading_to)
        # The last token is always computed: its logits give the next token.
        request.num_computed = min(self._resumed(request.loading_to), request.num_tokens - 1)
        request.loading_to = 0

    def due(self, request: PoolRequest) -> list[DueBlock]:
        """Blocks that a connector would copy out now, in prompt order.

        These are blocks in use that became full since the last call, or were hit, and can serve a hit.
        """
        start, now, unit = request.offered, request.num_computed, self.layout.hash_block_size
        if now // unit <= start // unit:
            return []
        request.offered = now
        boundaries, tokens = self._boundaries(request), self.layout.cacheable_tokens
        found: list[DueBlock] = []
        for idx, table in enumerate(self._tables):
            found += table.due(request, tokens(start, idx), tokens(now, idx), boundaries)
        return sorted(found, key=_IN_PROMPT_ORDER)

    def pin(self, blocks: Sequence[int]) -> None:
        """Protect blocks from reuse while they are copied, even after their requests end."""
        # A second user: the copy reads the block after its request may have ended.
        self._store.touch(blocks)
        self._pinned.update(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Remove one pin from each, the last block first. Raises ``ValueError`` for a block without a pin."""
        if any(count > self._pinned[block] for block, count in Counter(blocks).items()):
            raise ValueError("cannot unpin a block that is not pinned")
        self._pinned -= Counter(blocks)
        # The last block first, as at the end of a request: the start of the prefix is evicted later.
        self._store.free(blocks[::-1])

    def writes(self, blocks: Sequence[int]) -> list[int]:
        """How often each block has been allocated for new content."""
        return [self._store.writes[block] for block in blocks]

    def blocks_to_finish(self, request: PoolRequest) -> int:
        """Free blocks that the rest of a started prompt needs."""
        num_tokens = request.num_tokens
        return sum([table.blocks_to_finish(request, num_tokens) for table in self._tables])

    def next_chunk(self, request: PoolRequest, budget_tokens: int | None = None) -> int:
        """How many tokens of a started request the engine would compute next, at most ``budget_tokens``.

        0 if none are left, or if an align-mode Mamba prefill reaches no allowed end within the budget.
        """
        budget = self.chunk_tokens_max if budget_tokens is None else budget_tokens
        start = request.num_computed
        first = start == self._resumed(request.hit)
        return self._chunk(request, start, budget, request.hit if first else start)

    def compute(self, request: PoolRequest, num_tokens: int) -> bool:
        """Compute the next ``num_tokens`` tokens: allocate their blocks and store the full ones.

        False if the pool is out of blocks: the request keeps its position (blocks behind its window are
        already free, as in the engine). Raises ``ValueError`` for a request that is not started or has fewer
        tokens.
        """
        before = request.num_computed
        now = before + num_tokens
        if num_tokens <= 0 or now > len(request.token_ids) or not request.started or request.loading_to:
            raise ValueError(f"cannot compute {num_tokens} of {len(request.token_ids) - before} tokens")
        # A decoded token inside a block changes nothing in any group: most calls end here.
        if now <= request.quiet_to:
            request.num_computed = now
            return True
        tables = self._tables
        for table in tables:
            # Before counting: blocks that fall out of the window may serve this very chunk, as in
            # ``KVCacheManager.allocate_slots``.
            table.drop_skipped(request, before)
        # With bounded replay the blocks of a hit stay held while its end is recomputed.
        reached = max(now, request.hit)
        # All groups are counted before any allocates: a failure must leave nothing allocated.
        if sum([table.blocks_needed(request, reached) for table in tables]) > self._store.num_free:
            return False
        for table in tables:
            table.allocate(request, reached)
        self._cache(request, now)
        request.num_computed = now
        if self._quiet:
            request.quiet_to = min([table.quiet_to(before, now) for table in tables])
        return True

    def extend(self, request: PoolRequest, token_ids: Sequence[int]) -> None:
        request.extend(token_ids)

    def finish(self, request: PoolRequest) -> None:
        """Free the request's blocks; they stay findable until reused. No effect if it holds none."""
        self.end_step()
        self._release(request)

    def preempt(self, request: PoolRequest) -> None:
        """Free its blocks in the middle of a step; it can be started again with all its tokens."""
        self._release(request)

    def end_step(self) -> None:
        """End a scheduler step: free copied blocks and make the blocks it stored findable."""
        # Both blocks of a copy were in use until now, so that nothing overwrites them before the forward
        # pass.
        copied = [block for table in self._tables for pair in table.copies for block in pair]
        for table in self._tables:
            table.copies.clear()
            table.end_step()
        if copied:
            self._store.free(copied)

    def take_events(self) -> list[Event]:
        """The events since the last call, in order: the batch that the engine would publish for a step."""
        self.end_step()
        events = self._store.events
        if events is None:
            return []
        self._store.events = []
        return events

    def reset(self) -> bool:
        """Remove all content. Returns False, with nothing changed, while a request holds blocks."""
        self.end_step()
        if not self._store.reset():
            return False
        if self._store.events is not None:
            self._store.events.append(AllBlocksCleared())
        return True

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` unless every block is accounted for (O(blocks))."""
        uses = [self._pinned[block] for block in range(self._store.num_blocks)]
        for request in self._live.values():
            for table in request.tables:
                for block in table:
                    uses[block] += 1
        for group in self._tables:
            for pair in group.copies:
                for block in pair:
                    uses[block] += 1
        uses[0] = 0
        self._store.check_integrity(uses)

    def _chunk(self, request: PoolRequest, start: int, budget_tokens: int, split_at: int) -> int:
        num_tokens = min(request.num_tokens - start, budget_tokens)
        if num_tokens <= 0 or not self.layout.aligned_mamba:
            return max(num_tokens, 0)
        # The first chunk is split as if it began behind the hit, although bounded replay begins earlier:
        # ``Scheduler.schedule`` passes the hit to ``_mamba_block_aligned_split`` (vLLM 0.32, 0.33).
        return aligned_chunk(self.layout, request, split_at, num_tokens, self.chunk_tokens_max)

    def _start_load(self, request: PoolRequest, hit: Hit, end: int, reserved_blocks: int) -> int | None:
        """Start a request that a connector loads up to ``end``, as vLLM admits one."""
        whole = self.layout.scheduler_block_size
        # A hit that ends inside a block is cut: the load brings that block whole.
        local = hit.length // whole * whole
        columns = [
            [first_copy(copies) for copies in column[: local // table.block_size]]
            for table, column in zip(self._tables, hit.columns, strict=True)
        ]
        for num_tokens, capped in ((request.num_tokens, True), (end, False)):
            needed = sum(
                table.blocks_to_admit(column, local, num_tokens, capped=capped, loaded_to=end)
                for table, column in zip(self._tables, columns, strict=True)
            )
            if needed > self._store.num_free - (0 if capped else reserved_blocks):
                return None
        for table, column in zip(self._tables, columns, strict=True):
            table.adopt(request, column, local, end)
        # Allocate only after all hits are held: otherwise one group's load could evict another group's hit.
        for table in self._tables:
            table.allocate(request, end)
        request.loading_to = end
        self._started(request, local)
        return local

    def _used_length(self, length: int) -> int:
        """The length of a hit, or 0 if bounded replay would recompute all of it.

        Source: ``Scheduler.schedule``, vLLM 0.32.
        """
        # A hit shorter than the replayed window would be computed again entirely, so vLLM ignores it.
        return 0 if length <= self.layout.replay else length

    def _used(self, hit: Hit) -> Hit:
        """The hit, or an empty one where ``_used_length`` is 0."""
        if self._used_length(hit.length) == hit.length:
            return hit
        return hit._replace(length=0, columns=[[] for _ in hit.columns])

    def _resumed(self, hit: int) -> int:
        """Position at which computing continues after a hit: with bounded replay, one window before its
        end."""
        return max(hit - self.layout.replay, 0)

    def _started(self, request: PoolRequest, hit: int) -> None:
        request.started = True
        request.hit = hit
        request.num_computed = self._resumed(hit)
        request.quiet_to = -1
        self._live[id(request)] = request

    def _boundaries(self, request: PoolRequest) -> tuple[int, ...]:
        """Positions at which later prompts are expected to continue from this one."""
        boundaries = self.layout.replay_boundaries(request.num_prompt_tokens)
        if request.shared_prefix_boundary:
            # Another prompt has shown that prompts branch here: storing its end lets the third one hit.
            boundaries += (request.shared_prefix_boundary,)
        return boundaries

    def _cache(self, request: PoolRequest, num_tokens: int) -> None:
        boundaries = self._boundaries(request)
        for group_idx, table in enumerate(self._tables):
            table.cache(request, self.layout.cacheable_tokens(num_tokens, group_idx), boundaries)

    def _release(self, request: PoolRequest) -> None:
        if self._live.pop(id(request), None) is None:
            return
        for table in self._tables:
            table.release(request)
        request.forget_blocks(len(self._tables))


def _table(group: GroupSpec, parts: PoolParts) -> GroupTable:
    if group.family is Family.WINDOW and not group.cacheable:
        return ReplayedTable(group, parts)
    kinds: dict[Family, type[GroupTable]] = {
        Family.FULL: FullTable,
        Family.WINDOW: WindowTable,
        Family.CHUNKED: ChunkedTable,
        Family.MAMBA: AlignedMambaTable if group.mamba_cache_mode == "align" else MambaTable,
        Family.RING: RingTable,
    }
    return kinds[group.family](group, parts)
