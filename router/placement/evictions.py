"""Forecast of the blocks that an engine evicts for the prompts in flight there, before the next look-up.

The index says what an engine holds now. vLLM looks a prompt up when it schedules it, and takes blocks for the
prompts ahead of it first: from the front of its free queue, where the least recently freed block stands
(``BlockPool.get_new_blocks``, ``free_blocks``, ``touch``, vLLM 0.32). Events show which blocks exist; the
router's own requests show when blocks are hit and freed, and in which order prompts wait. From both the free
queue is modelled here, and simulated over the prompts in flight (``_Projection``), first come, first served.
A forecast only lowers a hit.

Valid for layouts of one full-attention group and pools of at most ``POOL_BLOCKS_MAX`` blocks; others have no
forecast. Requests of others are known only by the events of their blocks.

Invariants: queued blocks and blocks in use are disjoint; no more are queued than the pool has."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.router.placement.others import NEWS

# Blocks of a modelled pool, about 150 bytes each. Larger pools are rarely short, and each request pays for
# the model: 0.1 ms at 3,200 tokens (docs/decisions/016-evictions-ahead.md).
POOL_BLOCKS_MAX: Final = 4_096
# Blocks of waiting prompts that are simulated; with more in flight there is no forecast.
PROMPTS_BLOCKS_MAX: Final = 8_192
# Assumed length of an answer, until answers were seen.
_ANSWER_TOKENS: Final = 64


class PooledPrompt(msgspec.Struct, eq=False, gc=False):
    """A prompt in flight on one engine, and its use of the pool."""

    hashes: Sequence[BlockHash]
    """Hashes of its full blocks."""
    tokens: int
    blocks: int
    """Blocks of the whole prompt, including a last partial one."""
    hit_max: int
    """Blocks that can be hit: the last token is always computed."""
    answer_tokens: int
    """Expected length of the answer."""
    answer_tokens_max: int
    """Limit of the answer; 0: unknown."""
    answered_tokens: int = 0
    """Tokens of the answer so far."""
    generated: list[BlockHash] = []
    """Full blocks of the answer, by the engine's events."""
    started: bool = False


class EvictionForecast:
    """The free queue of one engine's pool, from events and the router's own requests."""

    __slots__ = (
        "_answer_blocks",
        "_answer_tokens",
        "_copies",
        "_endangered",
        "_limited",
        "_projected",
        "_prompts",
        "_queue",
        "_records",
        "_stamp",
        "_started",
        "_tails",
        "_unstored",
        "_used",
        "_waiting_blocks",
        "block_size",
        "blocks",
        "crowded",
        "touched",
    )

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks of the pool without the null block; 0: no forecast."""
        self.crowded = False
        """Prompts in flight may take more blocks than are empty: one check for every engine and decision."""
        self.touched: Callable[[], None] = lambda: None
        """Called when ``crowded`` has changed."""
        self.block_size = 1
        """Tokens of a block."""
        # Until the layout shows that no forecast is possible.
        self._records = True
        self._queue: dict[BlockHash, int] = {}
        """Free cached blocks in the order of eviction, with the stamp of their release."""
        self._stamp = 0
        self._copies: dict[BlockHash, int] = {}
        """Further copies of blocks: vLLM does not merge equal ones."""
        self._used: dict[BlockHash, int] = {}
        """Blocks of started prompts -> number of users."""
        self._unstored: set[BlockHash] = set()
        """Of those, the blocks whose events have not arrived yet."""
        self._prompts: dict[PooledPrompt, None] = {}
        """All prompts in flight, in the order in which they were sent."""
        self._started = 0
        self._waiting_blocks = 0
        self._answer_blocks = 0  # upper bound for answers in flight
        self._tails: dict[BlockHash, PooledPrompt] = {}
        """Last hash of a prompt and its answer so far: the parent of its next block."""
        self._answer_tokens = 0.0  # mean length of answers
        # Share of answers that ended at their limit.
        self._limited = 1.0
        self._projected: _Projection | None = None  # valid until something changes
        # The last stamp that may be evicted; likewise.
        self._endangered: float | None = None

    def configure(self, pool_blocks: int, groups: Sequence[GroupSpec], *, vllm: bool = True) -> None:
        """Set the size of the pool, the null block included, and the layout; 0 or no groups: unknown.

        SGLang (``vllm`` False) is not modelled: it evicts whole leaves of its radix tree.
        """
        if not pool_blocks or not groups:
            return
        one = len(groups) == 1 and groups[0].family is Family.FULL
        modelled = vllm and one and pool_blocks <= POOL_BLOCKS_MAX
        blocks, size = (pool_blocks - 1, groups[0].block_size) if modelled else (0, 1)
        if (blocks, size) != (self.blocks, self.block_size):
            self._records = modelled
            self.blocks, self.block_size = blocks, size
            if not modelled:
                self.clear()

    def stored(self, hashes: Sequence[BlockHash], parent: BlockHash | None) -> None:
        """Add blocks that events report as stored; ``parent`` is the block before them."""
        if not self._records or not hashes:
            return
        # A block stored behind a prompt's last one is of its answer: the only sign of generated blocks.
        owner = None if parent is None else self._tails.get(parent)
        if owner is not None and parent is not None:
            self._start(owner)
            del self._tails[parent]
            self._tails[hashes[-1]] = owner
            owner.generated.extend(hashes)
            self._use(hashes)
        queue, used, unstored, copies = self._queue, self._used, self._unstored, self._copies
        for block in hashes:
            if block in unstored:
                unstored.remove(block)
            # vLLM does not merge equal blocks: a prompt computed while its twin is in flight stores a second
            # copy.
            elif block in queue or block in used:
                copies[block] = copies.get(block, 0) + 1
            else:
                self._stamp += 1
                queue[block] = self._stamp
        owner = self._tails.get(hashes[-1])
        if owner is not None:  # all of the prompt is computed
            self._start(owner)
        # Lost or unordered events must not let the queue grow beyond the pool.
        limit = self.blocks or POOL_BLOCKS_MAX
        while len(queue) > limit:
            del queue[next(iter(queue))]
        while len(copies) > limit:
            del copies[next(iter(copies))]
        self._changed()

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        """Remove blocks that events report as evicted."""
        if not self._records:
            return
        copies = self._copies
        for block in hashes:
            more = copies.pop(block, 0)
            if more > 1:
                copies[block] = more - 1
            elif not more:
                # Only free blocks are evicted, so a block in use that is gone was preempted with its prompt.
                if block in self._used:
                    self._preempted(block)
                self._queue.pop(block, None)
        self._changed()

    def clear(self) -> None:
        """Drop the contents and the prompts in flight: the engine restarted or its pool was reset."""
        self._queue.clear()
        self._copies.clear()
        self._used.clear()
        self._unstored.clear()
        self._tails.clear()
        self._prompts.clear()
        self._started = self._waiting_blocks = self._answer_blocks = 0
        self._changed()

    def admit(
        self, hashes: Sequence[BlockHash], tokens: int, answer_tokens_max: int = 0
    ) -> PooledPrompt | None:
        """Add a prompt that is sent; None if there is no forecast.

        ``answer_tokens_max`` is the limit of its answer, 0 if unknown.
        """
        if not self.blocks or not tokens:
            return None
        size = self.block_size
        full = min(len(hashes), tokens // size)
        answer_tokens = self.expected_tokens(answer_tokens_max)
        prompt = PooledPrompt(
            hashes[:full],
            tokens,
            -(-tokens // size),
            min(full, (tokens - 1) // size),
            answer_tokens,
            answer_tokens_max,
        )
        self._prompts[prompt] = None
        self._waiting_blocks += prompt.blocks
        self._answer_blocks += answer_tokens // size + 1
        self._set_tail(prompt)
        self._changed()
        return prompt

    def expected_tokens(self, answer_tokens_max: int) -> int:
        """Return the expected length of an answer with this limit, 0 if unknown."""
        expected = round(self._answer_tokens) or _ANSWER_TOKENS
        # If most answers end at their limit, the limit is the better estimate than the mean.
        if answer_tokens_max and (self._limited > 0.5 or expected > answer_tokens_max):
            return answer_tokens_max
        return expected

    def start(self, prompt: PooledPrompt) -> None:
        """Note a first token: the prompt uses all its blocks."""
        if prompt in self._prompts and not prompt.started:
            self._start(prompt)
            self._changed()

    def end(self, prompt: PooledPrompt, answer_tokens: int | None = None, *, computed: bool = True) -> None:
        """Remove a prompt whose answer ended; its blocks are freed.

        ``answer_tokens``: length of the answer, if known. ``computed``: the engine answered.
        """
        if prompt not in self._prompts:
            return
        if computed:
            self._start(prompt)
        self._unset_tail(prompt)
        del self._prompts[prompt]
        self._answer_blocks -= prompt.answer_tokens // self.block_size + 1
        if prompt.started:
            self._started -= 1
            self._release(prompt)
        else:
            self._waiting_blocks -= prompt.blocks
        if answer_tokens:
            news = NEWS if self._answer_tokens else 1.0
            self._answer_tokens += news * (answer_tokens - self._answer_tokens)
            if prompt.answer_tokens_max:
                self._limited += NEWS * ((answer_tokens >= prompt.answer_tokens_max) - self._limited)
        self._changed()

    def at_lookup(self, hashes: Sequence[BlockHash], tokens: int, held: int, coming: int) -> int:
        """Return how many blocks of a prompt sent now the engine will hit when it looks the prompt up.

        ``held``: its leading blocks there now; ``coming``: those left by prompts ahead of it.
        """
        depth = max(coming, held)
        # Most hits need no simulation: the last block of a hit is its first to be evicted, so a hit is safe
        # if that block stands behind all that the prompts in flight can take.
        if not self.crowded or not depth or depth > len(hashes) or self._is_safe(hashes[depth - 1]):
            return depth
        last = hashes[depth - 1]
        if depth == held and last not in self._queue and last not in self._used:
            # Stored before the router followed the engine: its age is unknown.
            return depth
        projected = self._project()
        if projected is None:
            return depth
        blocks = -(-tokens // self.block_size)
        return projected.hit_with_room(PooledPrompt(hashes, tokens, blocks, depth, 0, 0))

    @property
    def _empty(self) -> int:
        """Empty blocks; each started prompt has one block in use beyond its full ones."""
        cached = len(self._queue) + len(self._used) + len(self._copies)
        return max(0, self.blocks - cached - self._started)

    def _changed(self) -> None:
        self._projected = self._endangered = None
        crowded = bool(self._prompts) and self._waiting_blocks + self._answer_blocks > self._empty
        if crowded is not self.crowded:
            self.crowded = crowded
            self.touched()

    def _is_safe(self, block: BlockHash) -> bool:
        """Whether the prompts in flight cannot take enough blocks to reach this one."""
        endangered = self._endangered
        if endangered is None:
            endangered = self._endangered = self._find_endangered()
        # Blocks in use or yet to be computed are freed behind all that stand in the queue now.
        return self._queue.get(block, self._stamp + 1) > endangered

    def _find_endangered(self) -> float:
        """Return the stamp of the last block that the prompts in flight can evict."""
        queue = self._queue
        taken = self._waiting_blocks + self._answer_blocks - self._empty
        if taken >= len(queue):
            return math.inf
        return next(islice(queue.values(), taken, None)) if taken > 0 else 0

    def _project(self) -> _Projection | None:
        """Simulate the pool until all prompts in flight have started; None if too much is in flight."""
        # One simulation serves all decisions until something changes.
        if self._projected is None and self._waiting_blocks <= PROMPTS_BLOCKS_MAX:
            started = [prompt for prompt in self._prompts if prompt.started]
            projected = _Projection(self._queue, self._used, self._empty, self.block_size)
            for prompt in started:
                projected.resume(prompt)
            for prompt in self._prompts:
                if not prompt.started:
                    projected.start(prompt)
            self._projected = projected
        return self._projected

    def _start(self, prompt: PooledPrompt) -> None:
        if prompt.started:
            return
        prompt.started = True
        self._started += 1
        self._waiting_blocks -= prompt.blocks
        self._use(prompt.hashes)

    def _use(self, blocks: Sequence[BlockHash]) -> None:
        used, leave = self._used, self._queue.pop
        for block in blocks:
            if block in used:
                used[block] += 1
            else:
                used[block] = 1
                if leave(block, 0) == 0:
                    self._unstored.add(block)

    def _release(self, prompt: PooledPrompt) -> None:
        """Free its blocks, the last one first (``KVCacheManager.free``, vLLM 0.32)."""
        queue, used, unstored, stamp = self._queue, self._used, self._unstored, self._stamp
        for blocks in (prompt.generated, prompt.hashes):
            for block in reversed(blocks):
                users = used.pop(block)
                if users > 1:
                    used[block] = users - 1
                elif unstored and block in unstored:
                    unstored.remove(block)
                else:
                    stamp += 1
                    queue[block] = stamp
        self._stamp = stamp

    def _preempted(self, block: BlockHash) -> None:
        """Put back the newest started prompt with this block: only blocks that are not in use are evicted."""
        for prompt in reversed(self._prompts):
            if prompt.started and (block in prompt.hashes or block in prompt.generated):
                self._unset_tail(prompt)
                self._release(prompt)
                prompt.started, prompt.generated = False, []
                self._started -= 1
                self._waiting_blocks += prompt.blocks
                self._set_tail(prompt)
                return

    def _set_tail(self, prompt: PooledPrompt) -> None:
        if prompt.hashes:
            self._tails[prompt.hashes[-1]] = prompt

    def _unset_tail(self, prompt: PooledPrompt) -> None:
        blocks = prompt.generated or prompt.hashes
        if blocks and self._tails.get(blocks[-1]) is prompt:
            del self._tails[blocks[-1]]

    def check_integrity(self) -> list[str]:
        """Return one sentence per contradiction."""
        problems: list[str] = []
        if self._queue.keys() & self._used.keys():
            problems.append("blocks are both free and in use")
        if self._waiting_blocks != sum(p.blocks for p in self._prompts if not p.started):
            problems.append(f"blocks of waiting prompts, {self._waiting_blocks}, are not their sum")
        uses = sum(len(p.hashes) + len(p.generated) for p in self._prompts if p.started)
        if uses != sum(self._used.values()):
            problems.append("blocks in use are not those of the started prompts")
        if not all(prompt in self._prompts for prompt in self._tails.values()):
            problems.append("a prompt that ended is waited for")
        return problems


class _Running(msgspec.Struct, order=True, gc=False):
    """A started prompt: ends at ``end``, counted in tokens that each running prompt generates from now on."""

    end: int
    order: int
    held: int
    """Number of its blocks."""
    prompt: PooledPrompt


class _Projection:
    """The simulated pool, as differences to the queue that it started from."""

    __slots__ = (
        "_empty",
        "_free",
        "_front",
        "_left",
        "_moment",
        "_names",
        "_queue",
        "_running",
        "_size",
        "_tail",
        "_used",
    )

    def __init__(
        self, queue: dict[BlockHash, int], used: dict[BlockHash, int], empty: int, block_size: int
    ) -> None:
        self._queue = queue
        self._front: Iterator[BlockHash] = iter(queue)
        self._left: set[BlockHash] = set()
        """Blocks no longer in ``_queue``: evicted, in use, or in ``_tail``."""
        self._tail: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks freed since."""
        self._used = used.copy()
        self._empty = empty
        self._free = empty + len(queue)
        self._size = block_size
        self._running: list[_Running] = []  # a heap
        self._moment = 0
        # Of blocks whose hashes are unknown yet: negative.
        self._names = 0

    def resume(self, prompt: PooledPrompt) -> None:
        """Add a started prompt."""
        left = prompt.answer_tokens - prompt.answered_tokens
        held = len(prompt.hashes) + len(prompt.generated) + 1
        self._run(prompt, held, max(left, 1))

    def start(self, prompt: PooledPrompt) -> None:
        """Start the next prompt when there is room."""
        hit = self._make_room(prompt)
        used, hashes = self._used, prompt.hashes
        # Cached blocks leave the free queue (``BlockPool.touch``), the rest is taken from its front.
        for block in hashes[:hit]:
            if block not in used:
                self._unqueue(block)
                self._free -= 1
            used[block] = used.get(block, 0) + 1
        self._take(prompt.blocks - hit)
        for block in hashes[hit:]:
            if block not in used:
                self._unqueue(block)
            used[block] = used.get(block, 0) + 1
        self._run(prompt, prompt.blocks, max(1, prompt.answer_tokens - prompt.answered_tokens))

    def hit_with_room(self, prompt: PooledPrompt) -> int:
        """Return the leading blocks that a prompt hits once there is room for it; changes nothing."""
        hit, need = self._need(prompt)
        if need <= self._free or not self._running:
            return hit
        # A copy: the projection is shared by the following decisions.
        later = _Projection(self._queue, self._used, self._empty, self._size)
        later._left, later._tail = self._left.copy(), self._tail.copy()
        later._free, later._moment, later._names = self._free, self._moment, self._names
        later._running = [_Running(r.end, r.order, r.held, r.prompt) for r in self._running]
        return later._make_room(prompt)

    def _run(self, prompt: PooledPrompt, held: int, tokens: int) -> None:
        self._names += 1
        heapq.heappush(self._running, _Running(self._moment + tokens, self._names, held, prompt))

    def _make_room(self, prompt: PooledPrompt) -> int:
        """End running prompts until this one fits; return its hit in blocks."""
        hit, need = self._need(prompt)
        # vLLM starts a prompt only when free blocks cover all of it, its cached free blocks included
        # (``scheduler_reserve_full_isl``, vLLM 0.32). Until then running prompts end, the one with the fewest
        # tokens left first.
        while need > self._free and self._running:
            self._end_next()
            hit, need = self._need(prompt)
        return hit

    def _need(self, prompt: PooledPrompt) -> tuple[int, int]:
        """Return the hit, and the free blocks that starting takes, including free ones of the hit."""
        # A block is never evicted before a later one of the same prefix.
        hit, used = bisect_left(prompt.hashes, True, 0, prompt.hit_max, key=self._lacks), self._used
        return hit, prompt.blocks - sum([block in used for block in prompt.hashes[:hit]])

    def _lacks(self, block: BlockHash) -> bool:
        return not (
            block in self._used or block in self._tail or (block in self._queue and block not in self._left)
        )

    def _end_next(self) -> None:
        """Advance until the next running prompt ends; all grow until then."""
        ending = heapq.heappop(self._running)
        self._moment = ending.end
        self._grow(ending)
        for running in self._running:
            self._grow(running)
        prompt, used, tail = ending.prompt, self._used, self._tail
        generated = list(prompt.generated)
        full = (prompt.tokens + prompt.answer_tokens - 1) // self._size
        for _ in range(min(full, ending.held) - len(prompt.hashes) - len(generated)):
            self._names += 1
            name = BlockHash(-self._names)
            generated.append(name)
            used[name] = 1
        empty = max(0, ending.held - len(prompt.hashes) - len(generated))
        self._free += empty
        self._empty += empty
        for blocks in (generated, prompt.hashes):
            for block in reversed(blocks):
                users = used[block] - 1
                if users:
                    used[block] = users
                else:
                    del used[block]
                    tail[block] = None
                    self._free += 1

    def _grow(self, running: _Running) -> None:
        """Take the blocks of the tokens generated by now; the last token has no KV yet."""
        prompt = running.prompt
        tokens = prompt.tokens + prompt.answer_tokens - max(0, running.end - self._moment) - 1
        more = min(-(-tokens // self._size) - running.held, self._free)
        if more > 0:
            running.held += more
            self._take(more)

    def _unqueue(self, block: BlockHash) -> None:
        if block in self._tail:
            del self._tail[block]
        elif block in self._queue:
            self._left.add(block)

    def _take(self, count: int) -> None:
        """Take free blocks: empty ones first, then the front of the queue, which is evicted."""
        self._free -= count
        empty = count if count < self._empty else self._empty  # noqa: FURB136
        self._empty -= empty
        count -= empty
        left = self._left
        while count > 0:
            block = next(self._front, None)
            if block is None:
                break
            if block not in left:
                left.add(block)
                count -= 1
        for _ in range(min(count, len(self._tail))):
            self._tail.popitem(last=False)
