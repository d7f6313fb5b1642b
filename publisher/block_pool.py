"""A hybrid KV block pool that allocates, stores, evicts and finds hits as vLLM 0.32 does, without vLLM.

It holds no KV, only the books: which block carries which prefix, in every group of the model. For the same
requests in the same steps it finds the hits that vLLM's scheduler finds and emits its events, equal in every
field. ``events=False`` makes it a shadow of an engine that publishes none: no event is built, and with
hashes supplied no token is looked at.

A request lives: ``request`` -> ``start`` (takes the hit) -> ``compute`` per chunk and per decoded token,
``append`` per generated token -> ``finish``. ``preempt`` takes it back to before ``start``. A scheduler step
is everything between two ``end_step`` calls; ``finish`` and ``take_events`` end a step too, because the
engine does both only after one.

With a connector behind the pool, ``start`` may begin a load, which ``loaded`` ends, and ``due`` says what
would be copied out (``publisher.pool.host_tier`` keeps it), ``pin`` holds it meanwhile.

Always true: between calls every block is free or counted by its users, and what is free stays findable until
it is handed out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from publisher.block_hash import NO_EXTRAS, HashChain, HashScheme, PromptExtras
from publisher.events import AllBlocksCleared, Event, Family, GroupSpec
from publisher.pool.hits import Hit, HitFinder
from publisher.pool.layout import pool_layout
from publisher.pool.mamba import AlignedMambaTable, MambaTable
from publisher.pool.store import BlockStore, EventWriter, IntegrityError, PoolRequest, WireHash, first_copy
from publisher.pool.tables import (
    ChunkedTable,
    DueBlock,
    FullTable,
    GroupTable,
    PoolParts,
    ReplayedTable,
    RingTable,
    WindowTable,
    aligned_chunk,
)

__all__ = ["HybridBlockPool", "IntegrityError", "PoolRequest"]

Reach = Callable[[PoolRequest, int], int]
"""(request, its hit in tokens) -> tokens that hit and load together give."""

_IN_PROMPT_ORDER = itemgetter(0, 1)


class HybridBlockPool:
    """The block pool of one engine.

    ``num_blocks`` counts the null block, as vLLM's ``num_gpu_blocks`` does. ``retention_interval`` is 0
    (vLLM's default), a multiple of the scheduler block size, or None (dense). ``dcp_world_size``: ranks of
    decode context parallelism, over all of which blocks of full attention reach. ``chunk_tokens_max`` is the
    engine's ``max_num_batched_tokens``: it bounds a chunk, and what a window group must have free to admit
    a request. ``lora_ids`` maps adapter names to the ids the engine gave them. Raises ``ValueError`` for
    groups that vLLM would not run with prefix caching.
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
        """Copies per hash that a group holds, hashes as they stand in events."""
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
        """A request of this prompt. ``hashes`` saves hashing it: a chain that covers a prefix of it (it is
        extended here), or the hashes of the prompt and of every token that will be generated; then the
        tokens themselves matter only for events. Raises ``ValueError`` if the prompt is empty or the
        hashes do not reach its end."""
        if not token_ids:
            raise ValueError("a request needs at least one token")
        return PoolRequest(
            token_ids, extras, self.scheme, len(self._tables), hashes=hashes, int_hashes=self._int_hashes
        )

    def find_hit(self, request: PoolRequest) -> int:
        """Tokens the engine would take from its cache if it looked now; changes nothing."""
        return self._used(self._finder.find(request.known_hashes(), request.num_tokens - 1)).length

    def find_prefix(self, request: PoolRequest) -> tuple[int, int]:
        """The hit, and the longest prefix that any lookup class alone could serve (full attention, where
        the model has it), both in tokens; changes nothing."""
        found = self._finder.find(request.known_hashes(), request.num_tokens - 1)
        return self._used(found).length, max(found.length, found.boundary)

    def start(
        self,
        request: PoolRequest,
        budget_tokens: int | None = None,
        *,
        reach: Reach | None = None,
        loads_states: bool = False,
        reserved_blocks: int = 0,
    ) -> int | None:
        """Take the hit of a waiting request and hold its blocks; returns its length in tokens. What of it has
        to be computed again (bounded replay) is not computed yet.

        None, with nothing changed, if the whole request or its first chunk of at most ``budget_tokens``
        (default: ``chunk_tokens_max``) does not fit now, or if it must wait for the next step.

        ``reach`` tells how far a connector would load the prompt, given the hit. Where that is further, the
        request holds the blocks of the load too, ``loading_to`` is set, and ``loaded`` must follow before
        anything is computed; a load leaves ``reserved_blocks`` free for the prompts that are under way. With
        ``loads_states`` it brings the states of Mamba groups, whatever of them is here.
        """
        if request.started:
            raise ValueError("the request has been started already")
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
        if end > max(hit.length, self.layout.replay):
            return self._start_load(request, hit, end, reserved_blocks)
        hit = self._used(hit)
        chunk = self._chunk(
            request,
            self._resumed(hit.length),
            self.chunk_tokens_max if budget_tokens is None else budget_tokens,
        )
        if chunk <= 0:
            return None
        blocks = [[first_copy(copies) for copies in column] for column in hit.columns]
        reached = max(hit.length, self._resumed(hit.length) + chunk)
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
        """The load that ``start`` began has ended: what it filled is stored, computing goes on behind it, or
        with the last token again where nothing is left: the next one comes from it.
        Raises ``ValueError`` where none was begun."""
        if not request.loading_to:
            raise ValueError("the request loads nothing")
        self._cache(request, request.loading_to)
        request.num_computed = min(self._resumed(request.loading_to), request.num_tokens - 1)
        request.loading_to = 0

    def due(self, request: PoolRequest) -> list[DueBlock]:
        """What a connector would copy out now: the blocks in use that became full since the last call, or
        were hit, and can serve a hit; in prompt order."""
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
        """Keep blocks from being reused while they are copied, whatever becomes of their requests."""
        self._store.touch(blocks)
        self._pinned.update(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Give back one pin on each, the last block first. Raises ``ValueError`` where there is none."""
        if any(count > self._pinned[block] for block, count in Counter(blocks).items()):
            raise ValueError("a block is given back that was not pinned")
        self._pinned -= Counter(blocks)
        self._store.free(blocks[::-1])

    def writes(self, blocks: Sequence[int]) -> list[int]:
        """How often each block has been handed out for new content."""
        return [self._store.writes[block] for block in blocks]

    def blocks_to_finish(self, request: PoolRequest) -> int:
        """Free blocks that the rest of a started prompt will take."""
        num_tokens = request.num_tokens
        return sum([table.blocks_to_finish(request, num_tokens) for table in self._tables])

    def next_chunk(self, request: PoolRequest, budget_tokens: int | None = None) -> int:
        """How many tokens of a started request the engine would compute next, at most ``budget_tokens``.
        0: none are left, or an align-mode Mamba prefill reaches no allowed end within the budget."""
        budget = self.chunk_tokens_max if budget_tokens is None else budget_tokens
        return self._chunk(request, request.num_computed, budget)

    def compute(self, request: PoolRequest, num_tokens: int) -> bool:
        """Compute the next ``num_tokens`` tokens: allocate their blocks and store those that become full.

        False if the pool is out of blocks: then the request stands where it stood (blocks behind its
        window are free already, as in the engine). Raises ``ValueError`` for a request that is not
        started or has not that many tokens.
        """
        before = request.num_computed
        now = before + num_tokens
        if num_tokens <= 0 or now > len(request.token_ids) or not request.started or request.loading_to:
            raise ValueError(f"cannot compute {num_tokens} of {len(request.token_ids) - before} tokens")
        if now <= request.quiet_to:
            request.num_computed = now
            return True
        tables = self._tables
        for table in tables:
            table.drop_skipped(request, before)
        reached = max(now, request.hit)  # the blocks of a hit are held while its end is computed again
        if sum([table.blocks_needed(request, reached) for table in tables]) > self._store.num_free:
            return False
        for table in tables:
            table.allocate(request, reached)
        self._cache(request, now)
        request.num_computed = now
        if self._quiet:
            request.quiet_to = min([table.quiet_to(before, now) for table in tables])
        return True

    def append(self, request: PoolRequest, token_id: int) -> None:
        """A generated token; it has KV only once it is computed."""
        request.append(token_id)

    def extend(self, request: PoolRequest, token_ids: Sequence[int]) -> None:
        """Several generated tokens at once."""
        request.extend(token_ids)

    def finish(self, request: PoolRequest) -> None:
        """Free the request's blocks; they stay findable until reused. Nothing happens if it holds none."""
        self.end_step()
        self._release(request)

    def preempt(self, request: PoolRequest) -> None:
        """Free its blocks in the middle of a step; it can be started again with all tokens it has."""
        self._release(request)

    def end_step(self) -> None:
        """A scheduler step is over: copied blocks are let go, and what it stored can be hit."""
        copied = [block for table in self._tables for pair in table.copies for block in pair]
        for table in self._tables:
            table.copies.clear()
            table.end_step()
        if copied:
            self._store.free(copied)

    def take_events(self) -> list[Event]:
        """The events since the last call, in order: what the engine would publish as the batch of a step."""
        self.end_step()
        events = self._store.events
        if events is None:
            return []
        self._store.events = []
        return events

    def reset(self) -> bool:
        """Forget all content; False, and nothing done, while a request holds blocks."""
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

    def _chunk(self, request: PoolRequest, start: int, budget_tokens: int) -> int:
        num_tokens = min(request.num_tokens - start, budget_tokens)
        if num_tokens <= 0 or not self.layout.aligned_mamba:
            return max(num_tokens, 0)
        return aligned_chunk(self.layout, request, start, num_tokens, self.chunk_tokens_max)

    def _start_load(self, request: PoolRequest, hit: Hit, end: int, reserved_blocks: int) -> int | None:
        """``start`` of a request that a connector loads up to ``end``, as vLLM admits one."""
        whole = self.layout.scheduler_block_size
        local = hit.length // whole * whole  # what is hit inside a block is loaded with the block
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
        for table in self._tables:  # after all hits are held, or a load could evict another group's
            table.allocate(request, end)
        request.loading_to = end
        self._started(request, local)
        return local

    def _used(self, hit: Hit) -> Hit:
        """None of a hit that would be computed again as a whole (``Scheduler.schedule``, vLLM 0.32)."""
        if not 0 < hit.length <= self.layout.replay:
            return hit
        return hit._replace(length=0, columns=[[] for _ in hit.columns])

    def _resumed(self, hit: int) -> int:
        """Where computing goes on behind a hit: with bounded replay a window before its end."""
        return max(hit - self.layout.replay, 0)

    def _started(self, request: PoolRequest, hit: int) -> None:
        request.started = True
        request.hit = hit
        request.num_computed = self._resumed(hit)
        request.quiet_to = -1
        self._live[id(request)] = request

    def _boundaries(self, request: PoolRequest) -> tuple[int, ...]:
        """Where prompts are expected to go on from this one."""
        boundaries = self.layout.replay_boundaries(request.num_prompt_tokens)
        if request.shared_prefix_boundary:
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
