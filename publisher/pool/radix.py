"""A pool whose cache is SGLang's radix tree: pages are found, kept and removed as SGLang 0.5.23 does.

A node is a run of pages that were inserted together; a look-up or an insertion that ends inside it splits it.
A request locks the path of its hit, computes into pages of its own, and inserts its whole pages after each
step of its prompt and at its end; pages that another request inserted in the meantime are freed. Unlocked
leaves are removed whole, the least recently used first. Events are those of ``KVCacheEventRecorder``:
adjacent ones of one chain are joined, a split has none. Each salt has a tree of its own. With EAGLE pages are
of token pairs (a scheme with a look-ahead of one).

With host memory (hicache) a node may be on the device, in host memory, or both; those on the device are the
start of each path. Nodes are copied to host memory when they are inserted (``write_through``), inserted again
(``write_through_selective``) or evicted (``write_back``); the copy is published once it is complete. A hit
that ends in host memory is loaded first, which publishes the pages as stored on the device again.

Facts: srt/mem_cache/unified_radix_cache.py, unified_cache/ and events.py of SGLang 0.5.23; compared with
them by tests/support/real_radix.py.

Invariants: every page of the device is free, in the tree once, or a request's own; every page of host memory
is free or in the tree once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from kvatlas.publisher.block_hash import NO_EXTRAS, HashScheme, PromptExtras
from kvatlas.publisher.block_pool import IntegrityError, PoolRequest, Reach
from kvatlas.publisher.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    encode_tokens,
    to_block_hash,
)
from kvatlas.publisher.pool.store import WireHash

_GPU = "GPU"
_HOST = "CPU_PINNED"
# Loads of fewer tokens are not worth a transfer (``UnifiedRadixCache.load_back_threshold``).
LOAD_TOKENS_MIN = 10

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
"""SGLang's ``--hicache-write-policy``."""


class _Node:
    """A run of pages below ``parent``: hash and tokens of each. ``locks`` counts the requests and transfers
    that use it, ``host_locks`` the loads that end in it. ``copying`` and ``loading``: the
    transfer under way that writes it to or reads it from host memory."""

    __slots__ = (
        "children",
        "copying",
        "hashes",
        "hits",
        "host_locks",
        "in_host",
        "loading",
        "locks",
        "on_device",
        "pages",
        "parent",
        "salt",
        "used",
    )

    def __init__(
        self, parent: _Node | None, pages: list[tuple[int, ...]], hashes: list[int], salt: str | None
    ) -> None:
        self.parent, self.pages, self.hashes, self.salt = parent, pages, hashes, salt
        self.children: dict[tuple[int, ...], _Node] = {}
        self.locks = self.host_locks = self.hits = self.used = 0
        self.on_device, self.in_host = True, False
        self.copying: _Transfer | None = None
        self.loading: _Transfer | None = None

    @property
    def is_device_leaf(self) -> bool:
        """Whether it may be evicted from the device."""
        held = any(child.on_device for child in self.children.values())
        return self.parent is not None and self.on_device and not self.locks and not held

    @property
    def is_host_leaf(self) -> bool:
        """Whether it may be evicted from host memory: it is nowhere else."""
        used = self.locks or self.host_locks or self.children
        return self.parent is not None and self.in_host and not self.on_device and not used

    def path(self) -> Iterator[_Node]:
        """Yield this node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def nodes(self) -> Iterator[_Node]:
        for child in self.children.values():
            yield child
            yield from child.nodes()


class _Transfer:
    """A copy to host memory, or a load from it: the end of the path that it locks (None: none), and the nodes
    into which its last node was split since."""

    __slots__ = ("locked", "parts")

    def __init__(self, last: _Node, *, locks: bool = True) -> None:
        self.parts, self.locked = [last], last if locks else None


class _Match(NamedTuple):
    """The longest cached prefix: where its part on the device ends, where all of it, and both in pages."""

    on_device: _Node
    device_pages: int
    last: _Node
    pages: int


class _Held:
    """Pages of one request: the end of its locked path, the pages of that path, those of its own, and how
    many it has inserted."""

    __slots__ = ("inserted", "last", "locked", "own")

    def __init__(self, last: _Node, locked: int) -> None:
        self.last, self.locked, self.own, self.inserted = last, locked, 0, 0


class RadixPool:
    """The pool of one SGLang engine with full attention, an ``EnginePool``, with ``host_pages`` pages of host
    memory.

    Block 0 is left out, as in vLLM, so that an engine of either kind has room for the same prompts.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        scheme: HashScheme,
        chunk_tokens_max: int,
        host_pages: int = 0,
        write_policy: WritePolicy = "write_through",
    ) -> None:
        self._scheme, self._chunk_tokens_max = scheme, chunk_tokens_max
        self._page, self._ahead = scheme.hash_block_size, scheme.lookahead
        self._pages = self._free = num_blocks - 1
        self._host_pages = self._host_free = host_pages
        self._writes_back = bool(host_pages) and write_policy == "write_back"
        # Insertions after which a node is copied (``write_through_threshold``).
        self._copied_at = 1 if write_policy == "write_through" else 2
        self._copies: list[_Transfer] = []
        self._loads: list[_Transfer] = []
        # Nodes that were on the device and in host memory, in the order in which they came to be; some are
        # not any more (``full_host_duplicates``).
        self._twice: dict[_Node, None] = {}
        # SGLang has one root; the salt is part of the key of its children (``RadixKey.child_key``).
        self._roots: dict[str | None, _Node] = {}
        self._held: dict[PoolRequest, _Held] = {}
        self._computed: list[PoolRequest] = []
        # Counts uses of nodes.
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
        return {block: 1 for node in self._nodes() if node.on_device for block in node.hashes}

    def in_host(self) -> set[int]:
        """Hashes of the pages in host memory, without those of copies under way."""
        held = (node for node in self._nodes() if node.in_host and node.copying is None)
        return {block for node in held for block in node.hashes}

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
        """Take the hit, load what of it is in host memory, and lock it; returns it in tokens, None if there
        are too few pages for a chunk."""
        # The last token is computed.
        match = self._match(request, self._whole(request.num_tokens - 1))
        budget = self._chunk_tokens_max if budget_tokens is None else budget_tokens
        end = min(request.num_tokens, match.pages * self._page + budget)
        self._lock(match.last, 1)
        fits = self._pages_of(end) - match.device_pages <= self.num_free_blocks
        self._lock(match.last, -1)
        if end <= match.pages * self._page or not fits:
            return None
        last, hit = match.last, match.pages
        if match.pages > match.device_pages and not self._load(match):
            last, hit = match.on_device, match.device_pages
        self._lock(last, 1)
        self._held[request] = _Held(last, hit)
        request.started, request.hit, request.num_computed = True, hit * self._page, hit * self._page
        request.host_hit = (hit - match.device_pages) * self._page
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
            self._evict(needed)
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
        """Return the events since the last call, after the transfers that are under way."""
        self.end_step()
        self._end_transfers()
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
        self._free, self._host_free = self._pages, self._host_pages
        self._copies, self._loads, self._twice = [], [], {}
        self._said.append(AllBlocksCleared())
        return True

    def check_integrity(self) -> None:
        cached = sum(len(node.pages) for node in self._nodes() if node.on_device)
        own = sum(held.own for held in self._held.values())
        if self._free + cached + own != self._pages:
            raise IntegrityError(f"{self._free} free, {cached} cached, {own} own, of {self._pages} pages")
        copied = sum(len(node.pages) for node in self._nodes() if node.in_host)
        if self._host_free + copied != self._host_pages:
            raise IntegrityError(f"{self._host_free} free, {copied} cached, of {self._host_pages} host pages")
        locks: dict[_Node, int] = {}
        ends = [held.last for held in self._held.values()]
        for last in ends + [one.locked for one in self._copies + self._loads if one.locked is not None]:
            for node in last.path():
                locks[node] = locks.get(node, 0) + 1
        for node in self._nodes():
            if node.locks != locks.get(node, 0):
                raise IntegrityError(f"{node.locks} locks of a node that {locks.get(node, 0)} users have")
            above = node.parent
            if not (node.on_device or node.in_host) or (node.on_device and above and not above.on_device):
                raise IntegrityError("a node is nowhere, or on the device without the one above it")

    def _nodes(self) -> Iterator[_Node]:
        for root in self._roots.values():
            yield from root.nodes()

    def _evictable(self) -> int:
        return sum(len(node.pages) for node in self._nodes() if node.on_device and not node.locks)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page)

    def _split_into_pages(self, request: PoolRequest, count: int) -> list[tuple[int, ...]]:
        tokens, size = request.token_ids, self._page
        return [tuple(tokens[n * size : (n + 1) * size + self._ahead]) for n in range(count)]

    def _whole(self, num_tokens: int) -> int:
        """Whole pages of these tokens; with EAGLE the token behind a page must be among them."""
        return max(0, num_tokens - self._ahead) // self._page

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.used = self._clock

    def _root(self, salt: str | None) -> _Node:
        return self._roots.setdefault(salt, _Node(None, [], [], salt))

    def _match(self, request: PoolRequest, count: int) -> _Match:
        """Find the longest cached prefix of ``count`` pages, and split the node inside which it ends."""
        node = on_device = self._root(request.extras.cache_salt)
        pages, done, device_pages = self._split_into_pages(request, count), 0, 0
        while done < count and (child := node.children.get(pages[done])) is not None:
            node, same = self._descend(node, child, pages[done:])
            done += same
            if node.on_device:
                on_device, device_pages = node, done
        for used in reversed(list(node.path())):
            self._touch(used)
        return _Match(on_device, device_pages, node, done)

    def _descend(self, node: _Node, child: _Node, pages: list[tuple[int, ...]]) -> tuple[_Node, int]:
        """Return the part of ``child`` that holds the same pages, and their number."""
        same = 0
        for ours, theirs in zip(pages, child.pages, strict=False):
            if ours != theirs:
                break
            same += 1
        return (child if same == len(child.pages) else self._split(node, child, same)), same

    def _split(self, parent: _Node, child: _Node, count: int) -> _Node:
        """Move the first pages of a node into a new one above it, which is returned."""
        upper = _Node(parent, child.pages[:count], child.hashes[:count], child.salt)
        parent.children[upper.pages[0]] = upper
        child.pages, child.hashes, child.parent = child.pages[count:], child.hashes[count:], upper
        upper.children[child.pages[0]] = child
        upper.locks, upper.host_locks, upper.hits = child.locks, child.host_locks, child.hits
        upper.on_device, upper.in_host = child.on_device, child.in_host
        upper.copying, upper.loading = child.copying, child.loading
        for transfer in self._copies + self._loads:
            if child in transfer.parts:
                transfer.parts.insert(transfer.parts.index(child), upper)
        self._touch(upper)
        self._touch(child)
        self._note_twice(upper)
        return upper

    def _insert(self, request: PoolRequest) -> None:
        held, count = self._held[request], self._whole(request.num_computed)
        node, pages, done = self._root(request.extras.cache_salt), self._split_into_pages(request, count), 0
        while done < count and (child := node.children.get(pages[done])) is not None:
            self._touch(child)
            node, same = self._descend(node, child, pages[done:])
            done += same
            if not node.on_device:
                # The request's own pages take the place of those that were evicted.
                node.on_device = True
                self._note_twice(node)
                self._say_stored(node, _GPU)
            elif done > held.locked:
                # Pages found in the tree were computed twice: the request's own copies are freed.
                self._free += same
            self._count(node, done > held.inserted)
        if done < count:
            # Hashes are signed in SGLang's events (``hash_str_to_int64``).
            found = map(to_block_hash, request.hashes[done:count])
            hashes = [block - (block >> 63 << 64) for block in found]
            above, node = node, _Node(node, pages[done:], hashes, node.salt)
            above.children[pages[done]] = node
            self._touch(node)
            self._say_stored(node, _GPU)
            self._count(node, True)
        held.own -= count - held.locked
        held.inserted = max(held.inserted, count)
        self._lock(node, 1)
        self._lock(held.last, -1)
        held.last, held.locked = node, count

    def _count(self, node: _Node, new: bool) -> None:
        """Count an insertion of a node that is ``new`` to its request, and copy it when it is due."""
        if not new or not self._host_pages or self._writes_back:
            return
        node.hits += 1
        if node.in_host or node.hits < self._copied_at:
            return
        missing = [node]
        while (above := missing[-1].parent) is not None and above.parent is not None and not above.in_host:
            missing.append(above)
        for due in reversed(missing):
            if not self._copy(due, locks=True):
                break

    def _copy(self, node: _Node, *, locks: bool) -> bool:
        """Begin to copy a node to host memory; False if there is no room for it."""
        needed = len(node.pages) - self._host_free
        if needed > 0 and not self._make_room_in_host(needed):
            return False
        self._host_free -= len(node.pages)
        node.in_host, node.copying = True, _Transfer(node, locks=locks)
        self._copies.append(node.copying)
        if locks:
            self._lock(node, 1)
        return True

    def _load(self, match: _Match) -> bool:
        """Load the part of a match that is in host memory; False if it is too short or has no room."""
        needed = match.pages - match.device_pages
        if needed * self._page < LOAD_TOKENS_MIN:
            return False
        match.last.host_locks += 1
        self._lock(match.last, 1)
        if needed > self._free:
            self._evict(needed)
        if needed > self._free:
            self._lock(match.last, -1)
            match.last.host_locks -= 1
            return False
        self._free -= needed
        # Both locks are kept until the load is complete.
        load = _Transfer(match.last)
        self._loads.append(load)
        for node in reversed([node for node in match.last.path() if not node.on_device]):
            node.on_device, node.loading = True, load
            self._say_stored(node, _GPU)
        return True

    def _end_transfers(self) -> None:
        self._end_copies()
        loads, self._loads = self._loads, []
        for load in loads:
            for node in load.parts:
                node.host_locks -= 1
            last = load.parts[-1]
            self._lock(last, -1)
            for node in last.path():
                if node.loading is load:
                    node.loading = None
                    self._note_twice(node)

    def _end_copies(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            for node in copy.parts:
                node.copying = None
                self._note_twice(node)
                self._say_stored(node, _HOST)
            if copy.locked is not None:
                self._lock(copy.locked, -1)

    def _note_twice(self, node: _Node) -> None:
        """Note a node that came to be on the device and in host memory."""
        if self._writes_back and self._is_twice(node):
            self._twice.setdefault(node)
        else:
            self._twice.pop(node, None)

    def _is_twice(self, node: _Node) -> bool:
        return node.on_device and node.in_host and node.copying is None and node.loading is None

    def _let(self, request: PoolRequest) -> None:
        held = self._held.pop(request)
        self._free += held.own
        self._lock(held.last, -1)
        request.forget_blocks(1)

    def _lock(self, last: _Node, by: int) -> None:
        for node in last.path():
            node.locks += by

    def _evict(self, wanted: int) -> None:
        """Evict unlocked leaves from the device until ``wanted`` pages are free, or no leaf is left."""
        self._evict_leaves(
            lambda node: node.is_device_leaf, self._evict_from_device, lambda: self._free >= wanted
        )

    def _evict_from_device(self, node: _Node) -> None:
        """Evict a leaf of the device, after a copy under ``write_back``; without one it is removed, unless
        requests use what is below it in host memory."""
        kept = node.in_host or (self._writes_back and self._copy(node, locks=False))
        # A copy that found no room has removed all of host memory that is not in use.
        if not kept and node.children:
            return
        if self._writes_back:
            self._end_copies()  # eviction waits for its copy
        node.on_device = False
        self._free += len(node.pages)
        self._say_removed(node, _GPU)
        if not kept:
            self._remove(node)

    def _make_room_in_host(self, wanted: int) -> bool:
        """Free ``wanted`` pages of host memory; False if there are not as many. Under ``write_back`` those
        that are on the device too go first, and of them leaves last (``_reclaim_full_host_duplicates``)."""
        target = self._host_free + wanted
        for spares_leaves in (True, False) if self._writes_back else ():
            for node in list(self._twice):
                if self._host_free >= target:
                    break
                spared = node.host_locks or (spares_leaves and node.is_device_leaf)
                if not (node.on_device and node.in_host):
                    del self._twice[node]
                elif self._is_twice(node) and not spared:
                    del self._twice[node]
                    self._leave_host(node)
        self._evict_leaves(
            lambda node: node.is_host_leaf, self._evict_from_host, lambda: self._host_free >= target
        )
        return self._host_free >= target

    def _evict_from_host(self, node: _Node) -> None:
        """Remove a node that is in host memory only."""
        self._leave_host(node)
        self._remove(node)

    def _leave_host(self, node: _Node) -> None:
        node.in_host = False
        self._host_free += len(node.pages)
        self._say_removed(node, _HOST)

    def _remove(self, node: _Node) -> None:
        if node.parent is not None:
            del node.parent.children[node.pages[0]]
        self._twice.pop(node, None)

    def _evict_leaves(
        self, is_leaf: Callable[[_Node], bool], evict: Callable[[_Node], None], enough: Callable[[], bool]
    ) -> None:
        """Evict leaves, the least recently used first, until there is enough."""
        leaves = [(node.used, node) for node in self._nodes() if is_leaf(node)]
        heapq.heapify(leaves)
        while leaves and not enough():
            _, node = heapq.heappop(leaves)
            if not is_leaf(node):
                continue
            parent = node.parent
            evict(node)
            # The node above may be a leaf now, and older than the leaves that are left.
            if parent is not None and is_leaf(parent):
                heapq.heappush(leaves, (parent.used, parent))

    def _say_stored(self, node: _Node, medium: str) -> None:
        parent = node.parent
        before = parent.hashes[-1] if parent is not None and parent.hashes else None
        size = self._page
        tokens = [token for page in node.pages for token in page[:size]]
        ahead = [list(page[size:]) for page in node.pages] if self._ahead else None
        last = self._said[-1] if self._said else None
        told = last[0] if isinstance(last, tuple) else None
        joins = isinstance(told, BlockStored) and (told.cache_salt, told.medium) == (node.salt, medium)
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
            medium=medium,
            lookahead_token_ids=ahead,
            cache_salt=node.salt,
        )
        self._said.append((event, tokens))

    def _say_removed(self, node: _Node, medium: str) -> None:
        last = self._said[-1] if self._said else None
        if isinstance(last, tuple) and isinstance(last[0], BlockRemoved) and last[0].medium == medium:
            last[0].block_hashes += node.hashes
            return
        self._said.append((BlockRemoved(list(node.hashes), medium), []))
