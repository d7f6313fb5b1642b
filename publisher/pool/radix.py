"""A pool whose cache is SGLang's radix tree: pages are found, kept and removed as SGLang 0.5.23 does.

A node is a run of pages that were inserted together; a look-up or an insertion that ends inside it splits it.
A request locks the path of its hit, computes into pages of its own, and inserts its whole pages after each
step of its prompt and at its end; pages that another request inserted in the meantime are freed. Unlocked
leaves are removed whole, the least recently used first. Events are those of ``KVCacheEventRecorder``:
adjacent ones of one chain are joined, a split has none. Each salt has a tree of its own. With EAGLE pages are
of token pairs (a scheme with a look-ahead of one).

Facts: srt/mem_cache/radix_cache.py and events.py of SGLang 0.5.23.

Invariant: every page is free, in the tree once, or a request's own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from publisher.block_hash import NO_EXTRAS, HashScheme, PromptExtras
from publisher.block_pool import IntegrityError, PoolRequest, Reach
from publisher.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    encode_tokens,
    to_block_hash,
)
from publisher.pool.store import WireHash

_GPU = "GPU"
_SIGN = 1 << 63


class _Node:
    """A run of pages below ``parent``: hash and tokens of each. ``locks`` counts the requests that use it."""

    __slots__ = ("children", "hashes", "locks", "pages", "parent", "salt", "used")

    def __init__(
        self, parent: _Node | None, pages: list[tuple[int, ...]], hashes: list[int], salt: str | None
    ) -> None:
        self.parent, self.pages, self.hashes, self.salt = parent, pages, hashes, salt
        self.children: dict[tuple[int, ...], _Node] = {}
        self.locks = 0
        self.used = 0

    def path(self) -> Iterator[_Node]:
        """Yield this node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def nodes(self) -> Iterator[_Node]:
        """Yield all nodes below this one."""
        for child in self.children.values():
            yield child
            yield from child.nodes()


class _Held:
    """Pages of one request: the end of its locked path, the pages of that path, and those of its own."""

    __slots__ = ("last", "locked", "own")

    def __init__(self, last: _Node, locked: int) -> None:
        self.last, self.locked, self.own = last, locked, 0


class RadixPool:
    """The pool of one SGLang engine with full attention, an ``EnginePool``; it loads nothing from elsewhere.

    Block 0 is left out, as in vLLM, so that an engine of either kind has room for the same prompts.
    """

    def __init__(self, *, num_blocks: int, scheme: HashScheme, chunk_tokens_max: int) -> None:
        self._scheme, self._chunk_tokens_max = scheme, chunk_tokens_max
        self._page, self._ahead = scheme.hash_block_size, scheme.lookahead
        self._pages = self._free = num_blocks - 1
        # SGLang has one root; the salt is part of the key of its children (``RadixKey.child_key``).
        self._roots: dict[str | None, _Node] = {}
        self._held: dict[PoolRequest, _Held] = {}
        self._computed: list[PoolRequest] = []
        # Counts look-ups and insertions: one touches all nodes of its path at one time.
        self._clock = 0
        self._said: list[tuple[BlockStored | BlockRemoved, list[int]] | AllBlocksCleared] = []

    @property
    def usage(self) -> float:
        """Share of the pages in use, 0 to 1; pages that are only cached are not."""
        return 1.0 - (self._free + self._evictable()) / self._pages

    @property
    def num_free_blocks(self) -> int:
        return self._free + self._evictable()

    def resident(self, _group_idx: int) -> dict[WireHash, int]:
        """Number of copies per hash: one."""
        return {block: 1 for node in self._nodes() for block in node.hashes}

    def request(self, token_ids: Sequence[int], extras: PromptExtras = NO_EXTRAS) -> PoolRequest:
        """Make a request for this prompt. Raises ``ValueError`` if it is empty."""
        return PoolRequest(token_ids, extras, self._scheme, 1, hashes=None, int_hashes=True)

    def start(
        self,
        request: PoolRequest,
        budget_tokens: int | None = None,
        *,
        reach: Reach | None = None,
        loads_states: bool = False,
    ) -> int | None:
        """Take the hit and lock it; returns it in tokens, None if there are too few pages for a chunk."""
        last, hit = self._match(request, self._whole(request.num_tokens - 1))  # the last token is computed
        self._lock(last, 1)
        budget = self._chunk_tokens_max if budget_tokens is None else budget_tokens
        end = min(request.num_tokens, hit * self._page + budget)
        if end <= hit * self._page or self._pages_of(end) - hit > self.num_free_blocks:
            self._lock(last, -1)
            return None
        self._held[request] = _Held(last, hit)
        request.started, request.hit, request.num_computed = True, hit * self._page, hit * self._page
        return request.hit

    def next_chunk(self, request: PoolRequest, budget_tokens: int | None = None) -> int:
        """Return how many tokens are computed next, at most ``budget_tokens``; 0: none are left."""
        budget = self._chunk_tokens_max if budget_tokens is None else budget_tokens
        return max(0, min(request.num_tokens - request.num_computed, budget))

    def compute(self, request: PoolRequest, num_tokens: int) -> bool:
        """Compute the next tokens; False if there are no pages for them."""
        held, now = self._held[request], request.num_computed + num_tokens
        needed = self._pages_of(now) - held.locked - held.own
        if needed > self._free:
            self._evict(needed - self._free)
        if needed > self._free:
            return False
        self._free -= max(needed, 0)
        held.own += max(needed, 0)
        request.num_computed = now
        # Decoded tokens are inserted when the request ends.
        if now <= request.num_prompt_tokens:
            self._computed.append(request)
        return True

    def end_step(self) -> None:
        """Insert what the step computed of prompts (``cache_unfinished_req``)."""
        computed, self._computed = self._computed, []
        for request in computed:
            if request in self._held:
                self._insert(request)

    def finish(self, request: PoolRequest) -> None:
        """Insert all computed pages, and free the rest."""
        self.end_step()
        if request in self._held:
            self._insert(request)
            self._let(request)

    def preempt(self, request: PoolRequest) -> None:
        """Free the pages that are not in the tree (``retract_decode``)."""
        if request in self._held:
            self._let(request)

    def take_events(self) -> list[Event]:
        self.end_step()
        said, self._said = self._said, []
        events: list[Event] = []
        for entry in said:
            if isinstance(entry, tuple):
                event, tokens = entry
                if isinstance(event, BlockStored):
                    event.token_ids = encode_tokens(tokens)
                events.append(event)
            else:
                events.append(entry)
        return events

    def reset(self) -> bool:
        self.end_step()
        if self._held:
            return False
        self._roots.clear()
        self._free = self._pages
        self._said.append(AllBlocksCleared())
        return True

    def check_integrity(self) -> None:
        cached = sum(len(node.pages) for node in self._nodes())
        own = sum(held.own for held in self._held.values())
        if self._free + cached + own != self._pages:
            raise IntegrityError(f"{self._free} free, {cached} cached, {own} own, of {self._pages} pages")
        locks: dict[_Node, int] = {}
        for held in self._held.values():
            for node in held.last.path():
                locks[node] = locks.get(node, 0) + 1
        for node in self._nodes():
            if node.locks != locks.get(node, 0):
                raise IntegrityError(f"{node.locks} locks of a node that {locks.get(node, 0)} requests use")

    def _nodes(self) -> Iterator[_Node]:
        for root in self._roots.values():
            yield from root.nodes()

    def _evictable(self) -> int:
        return sum(len(node.pages) for node in self._nodes() if not node.locks)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page)

    def _split_into_pages(self, request: PoolRequest, count: int) -> list[tuple[int, ...]]:
        tokens, size = request.token_ids, self._page
        return [tuple(tokens[n * size : (n + 1) * size + self._ahead]) for n in range(count)]

    def _whole(self, num_tokens: int) -> int:
        """Whole pages of these tokens; with EAGLE the token behind a page must be among them."""
        return max(0, num_tokens - self._ahead) // self._page

    def _match(self, request: PoolRequest, count: int) -> tuple[_Node, int]:
        """Return the node at which the longest cached prefix of ``count`` pages ends, after a split there,
        and that prefix in pages.
        """
        self._clock += 1
        salt = request.extras.cache_salt
        node = self._roots.setdefault(salt, _Node(None, [], [], salt))
        pages, done = self._split_into_pages(request, count), 0
        while done < count and (child := node.children.get(pages[done])) is not None:
            child.used = self._clock
            same = 0
            for ours, theirs in zip(pages[done:], child.pages, strict=False):
                if ours != theirs:
                    break
                same += 1
            node = child if same == len(child.pages) else _split(node, child, same)
            done += same
        return node, done

    def _insert(self, request: PoolRequest) -> None:
        held, count = self._held[request], self._whole(request.num_computed)
        if count <= held.locked:
            return
        last, found = self._match(request, count)
        if found < count:
            pages = self._split_into_pages(request, count)[found:]
            hashes = [_signed(to_block_hash(block)) for block in request.hashes[found:count]]
            parent, last = last, _Node(last, pages, hashes, last.salt)
            parent.children[pages[0]] = last
            last.used = self._clock
            self._say_stored(last)
        # Pages found in the tree were computed twice: the request's own copies are freed.
        held.own -= count - held.locked
        self._free += found - held.locked
        self._lock(last, 1)
        self._lock(held.last, -1)
        held.last, held.locked = last, count

    def _let(self, request: PoolRequest) -> None:
        held = self._held.pop(request)
        self._free += held.own
        self._lock(held.last, -1)
        request.forget_blocks(1)

    def _lock(self, last: _Node, by: int) -> None:
        for node in last.path():
            node.locks += by

    def _evict(self, count: int) -> None:
        """Remove unlocked leaves until ``count`` pages are freed, or none is left."""
        leaves = [(n.used, id(n), n) for n in self._nodes() if not n.children and not n.locks]
        heapq.heapify(leaves)
        while count > 0 and leaves:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            if parent is None:
                continue
            del parent.children[node.pages[0]]
            self._free += len(node.pages)
            count -= len(node.pages)
            # The node above may be a leaf now, and older than the leaves that are left.
            if parent.parent is not None and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, id(parent), parent))
            self._say_removed(node)

    def _say_stored(self, node: _Node) -> None:
        parent = node.parent
        before = parent.hashes[-1] if parent is not None and parent.hashes else None
        size = self._page
        tokens = [token for page in node.pages for token in page[:size]]
        ahead = [list(page[size:]) for page in node.pages] if self._ahead else None
        last = self._said[-1] if self._said else None
        told = last[0] if isinstance(last, tuple) else None
        joins = isinstance(told, BlockStored) and told.cache_salt == node.salt
        if isinstance(last, tuple) and joins and before is not None and last[0].block_hashes[-1] == before:
            last[0].block_hashes += node.hashes
            last[1].extend(tokens)
            if isinstance(told, BlockStored) and told.lookahead_token_ids is not None:
                told.lookahead_token_ids += ahead or []
            return
        event = BlockStored(
            list(node.hashes),
            before,
            encode_tokens([]),
            self._page,
            medium=_GPU,
            lookahead_token_ids=ahead,
            cache_salt=node.salt,
        )
        self._said.append((event, tokens))

    def _say_removed(self, node: _Node) -> None:
        last = self._said[-1] if self._said else None
        if isinstance(last, tuple) and isinstance(last[0], BlockRemoved):
            last[0].block_hashes += node.hashes
            return
        self._said.append((BlockRemoved(list(node.hashes), _GPU), []))


def _split(parent: _Node, child: _Node, count: int) -> _Node:
    """Move the first pages of a node into a new one above it, which is returned."""
    upper = _Node(parent, child.pages[:count], child.hashes[:count], child.salt)
    parent.children[upper.pages[0]] = upper
    child.pages, child.hashes, child.parent = child.pages[count:], child.hashes[count:], upper
    upper.children[child.pages[0]] = child
    upper.locks, upper.used = child.locks, child.used
    return upper


def _signed(block: int) -> int:
    """Return a hash as SGLang's events have it (``hash_str_to_int64``)."""
    return block - (1 << 64) if block >= _SIGN else block
