"""The parts of an SGLang engine's cache of which no event tells, by its own rules: windows, or Mamba states.

Its events show pages of full attention. Which of them have their windows or states too follows from its rules
and from what happens to the tree: where prompts end, what is looked up, and how much room there is. So its
tree is kept here beside its events, and with the requests that this router sends there:

- A look-up splits the node inside which it ends and refreshes what it takes; an insertion ends where stored
  pages end, or in pages that are there already, of which no event tells: those are the router's requests.
- Windows lie in nodes whole: an insertion has them for the last window and a page, and cuts its leaf there.
  Room for the pages of a prompt is made by the least recently used nodes that no request uses.
- A state lies at the end of an insertion: at the last whole step of the prompt, or, where pages reach further
  than the last state, at the end of the common part. Room is made as for windows.

Requests of other clients are known by the pages that they store only, so these rules may be wrong:
receipts decide whether they count (``partial_hits.py``). Sizes are in pages unless named otherwise; without
host memory and storage, whose parts no event tells either.

Facts: ``unified_radix_cache.py``, ``unified_tree_core.py``, ``components/swa.py``, ``components/mamba.py``,
``free_swa_out_of_window_slots`` and ``_mamba_radix_cache_v2_req_prepare_for_extend`` of SGLang 0.5.23;
compared with its classes by ``tests/support/real_parts.py``.

Invariants: a page is in one node at most; ``held`` is the sum of what nodes hold.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.router.fleet.statement import PartPools

# Pages of a tree that is followed, some 150 bytes each; beyond them a tree is not followed.
PAGES_MAX: Final = 262_144
# Requests in flight that are followed, and latest ones whose answers are awaited.
SENT_MAX: Final = 1_024
# Tokens of an answer that leave the window before its pages are freed (``SGLANG_SWA_EVICTION_INTERVAL``).
_FREED_TOKENS: Final = 128
# Assumed length of answers that are in no node yet.
_ANSWER_TOKENS: Final = 64


class TreePool(msgspec.Struct, frozen=True):
    """The pages of a tree: tokens of each, how many there are, and tokens of a prompt that are computed at a
    time (0: all)."""

    page_tokens: int
    pages: int
    chunk_tokens: int = 0


class PartsSpec(msgspec.Struct, frozen=True):
    """Sizes with which an engine's tree is followed: its pages, and either windows or states."""

    tree: TreePool
    room: int
    window_tokens: int = 0
    request_states: int = 0

    def make(self) -> RadixParts:
        """Return an empty tree."""
        if self.window_tokens:
            return Windows(self.tree, self.room, self.window_tokens)
        return States(self.tree, self.room, self.request_states)


def parts_spec(pools: PartPools | None, page_tokens: int, window_tokens: int | None) -> PartsSpec | None:
    """Return how an engine of these pools is followed; ``window_tokens`` of its model; None: it is not."""
    if pools is None or not page_tokens or pools.tokens // page_tokens > PAGES_MAX:
        return None
    tree = TreePool(page_tokens, pools.tokens // page_tokens, pools.prefill_tokens)
    if pools.states:
        return PartsSpec(tree, pools.states, request_states=pools.request_states)
    if not window_tokens:
        return None
    return PartsSpec(tree, pools.window_tokens // page_tokens, window_tokens=window_tokens)


class SentPrompt(msgspec.Struct, eq=False, gc=False):
    """A prompt in flight: its page hashes, tokens, hit by these rules, and pages of it that were there."""

    hashes: Sequence[BlockHash]
    tokens: int
    hit: int
    full: int
    done: int
    """Pages up to which it is in the tree: its hit, then where its insertions ended."""
    admitted: bool = False
    """It was computed, as far as is known."""
    locked: tuple[_Node, int] | None = None
    """End of the path that it keeps, and where that path begins."""


class _Node:
    """A run of pages behind ``start`` others: whether it has its part, and when that was last used."""

    __slots__ = ("children", "hashes", "held", "locks", "parent", "start", "used")

    def __init__(self, parent: _Node | None, hashes: list[BlockHash], start: int) -> None:
        self.parent, self.hashes, self.start = parent, hashes, start
        self.children: dict[BlockHash, _Node] = {}
        self.held, self.locks, self.used = False, 0, 0

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)

    def up(self) -> Iterator[_Node]:
        """Yield this node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixParts(ABC):
    """The tree of one engine, with ``room`` for the part, in pages or states."""

    def __init__(self, pool: TreePool, room: int) -> None:
        self.page_tokens, self.pages, self.room = pool.page_tokens, pool.pages, room
        self._chunk_tokens = pool.chunk_tokens
        self.clear()

    def clear(self) -> None:
        """Forget the tree and the prompts in flight: the cache was emptied."""
        self._root = _Node(None, [], 0)
        self._where: dict[BlockHash, _Node] = {}
        self._sent: dict[SentPrompt, None] = {}
        # Tokens of prompts by the last page that they inserted, behind which their answers are stored.
        self._answered: dict[BlockHash, int] = {}
        self._old: list[tuple[int, int, int, _Node]] = []
        self._stamp = self._pushed = self.held = 0

    def stored(self, hashes: Sequence[BlockHash], parent: BlockHash | None) -> None:
        """Apply an event of stored pages. What is behind unknown pages is left out: no look-up reaches it."""
        above: _Node | None = self._root
        if parent is not None and (above := self._where.get(parent)) is not None:
            above = self._split(above, above.hashes.index(parent) + 1)
        if above is None or len(self._where) + len(hashes) > PAGES_MAX:
            return
        node, done = self._descend(above, hashes, 0)
        if done == len(hashes):
            return
        leaf = _Node(node, list(hashes[done:]), node.end)
        node.children[leaf.hashes[0]] = leaf
        self._where.update(dict.fromkeys(leaf.hashes, leaf))
        self._told(leaf)

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        """Apply an event of removed pages."""
        for block in hashes:
            if (node := self._where.get(block)) is not None:
                if at := node.hashes.index(block):
                    self._split(node, at)
                if node.held and not node.locks and self._has_pages():
                    # Removed for its part: those used before it went first, and no event tells.
                    self._evict(lambda: not node.held)
                self._drop(node)

    def find(self, hashes: Sequence[BlockHash], tokens: int) -> tuple[int, int]:
        """Return the pages that a look-up of a prompt takes, and those of full attention that are there."""
        count, node, done = min(self._whole(tokens - 1), len(hashes)), self._root, 0
        path: list[tuple[_Node, int]] = []
        while done < count and (child := node.children.get(hashes[done])) is not None:
            same = _common(child.hashes, hashes, done, count)
            path.append((child, same))
            done += same
            node = child
            if same < len(child.hashes):
                break
        return self._valid(path), done

    def sent(self, hashes: Sequence[BlockHash], tokens: int) -> SentPrompt | None:
        """Note a prompt that is sent there, as its look-up; None if too many are in flight."""
        if len(self._sent) >= SENT_MAX:
            return None
        hit, full = self.find(hashes, tokens)
        prompt = SentPrompt(hashes, tokens, hit, full, hit)
        self._sent[prompt] = None
        self._descend(self._root, hashes[:full], 0)
        if hit:
            node = self._where[hashes[hit - 1]]
            self._refresh(node)
            self._lock(prompt, node)
        return prompt

    def started(self, prompt: SentPrompt) -> None:
        """Note the first token of a prompt: it was inserted, also where no event tells."""
        if prompt not in self._sent:
            return
        for end, tokens in self._insertions(prompt):
            if not self._insert_silently(prompt, end, tokens):
                return  # its event is yet to come
        if not prompt.admitted:
            prompt.admitted = True
            self._make_room(0)

    def ended(self, prompt: SentPrompt, answer_tokens: int | None, *, computed: bool) -> None:
        """Note the end of a prompt's answer. ``computed``: the engine answered."""
        if prompt not in self._sent:
            return
        if computed:
            self.started(prompt)
        self._unlock(prompt)
        del self._sent[prompt]
        if computed and prompt.done:
            self._ended(prompt, answer_tokens or 0)

    def check_integrity(self) -> list[str]:
        """Return one sentence per contradiction."""
        nodes = {id(node): node for node in self._where.values()}.values()
        problems: list[str] = []
        if sum(self._size(node) for node in nodes if node.held) != self.held:
            problems.append(f"parts held, {self.held}, are not their sum")
        if sum(len(node.hashes) for node in nodes) != len(self._where):
            problems.append("a page is in two nodes")
        if any(node.parent is None or node.start != node.parent.end for node in nodes):
            problems.append("a node does not begin where the one above it ends")
        return problems

    @abstractmethod
    def _valid(self, path: Sequence[tuple[_Node, int]]) -> int:
        """Return where the longest hit on a path ends, with the pages of each node that are common."""

    @abstractmethod
    def _size(self, node: _Node) -> int:
        """Room that the part of a node takes."""

    @abstractmethod
    def _refresh(self, node: _Node) -> None:
        """Note a use of the part at the end of a node."""

    @abstractmethod
    def _split_part(self, upper: _Node, lower: _Node) -> None:
        """Divide the part of a node that was split."""

    @abstractmethod
    def _taken(self, pages: int, *, answer: bool) -> int:
        """Room that is taken to insert these pages, of a prompt or an answer."""

    @abstractmethod
    def _in_use(self) -> int:
        """Room that requests in flight use beside what nodes hold."""

    @abstractmethod
    def _publish(self, node: _Node, begin: int, tokens: int, *, fresh: bool) -> None:
        """Add the part of an insertion that ends with this node and began behind ``begin`` pages; 0 tokens:
        it is not known how many were computed."""

    @abstractmethod
    def _inserted_end(self, prompt: SentPrompt, begin: int, end: int) -> int:
        """Page at which the insertion ends after these tokens of a prompt were computed; 0: there is none."""

    @abstractmethod
    def _lock_start(self, node: _Node) -> int:
        """Where the path begins of which a request that ends with this node keeps the part."""

    @abstractmethod
    def _ended(self, prompt: SentPrompt, answer_tokens: int) -> None:
        """Note the insertion at the end of a request."""

    def _whole(self, tokens: int) -> int:
        return max(0, tokens) // self.page_tokens

    def _descend(self, node: _Node, hashes: Sequence[BlockHash], done: int) -> tuple[_Node, int]:
        """Walk down as an insertion does, which splits the node inside which the pages end."""
        while done < len(hashes) and (child := node.children.get(hashes[done])) is not None:
            same = _common(child.hashes, hashes, done, len(hashes))
            node = self._split(child, same)
            done += same
        return node, done

    def _split(self, node: _Node, count: int) -> _Node:
        """Move the first pages of a node into a new one above it; returns what has these pages."""
        if count == len(node.hashes):
            return node
        above = node.parent
        upper = _Node(above, node.hashes[:count], node.start)
        if above is not None:
            above.children[upper.hashes[0]] = upper
        node.hashes, node.start, node.parent = node.hashes[count:], node.start + count, upper
        upper.children[node.hashes[0]] = node
        upper.used = node.used
        self._where.update(dict.fromkeys(upper.hashes, upper))
        self._split_part(upper, node)
        if upper.held:
            self._push(upper)
        return upper

    def _drop(self, node: _Node) -> None:
        if node.parent is not None:
            node.parent.children.pop(node.hashes[0], None)
        dropped = [node]
        while dropped:
            one = dropped.pop()
            dropped += one.children.values()
            self._release(one)
            for block in one.hashes:
                del self._where[block]

    def _release(self, node: _Node) -> None:
        if node.held:
            node.held = False
            self.held -= self._size(node)

    def _hold(self, node: _Node) -> None:
        if not node.held:
            node.held = True
            self.held += self._size(node)

    def _insertions(self, prompt: SentPrompt) -> list[tuple[int, int]]:
        """Where the insertions of a prompt end, in pages, and how many tokens were computed by then."""
        found, begin = [], prompt.hit * self.page_tokens
        while begin < prompt.tokens:
            end = min(prompt.tokens, begin + (self._chunk_tokens or prompt.tokens))
            if inserted := self._inserted_end(prompt, begin, end):
                found.append((inserted, end))
            begin = end
        return found

    def _insert_silently(self, prompt: SentPrompt, end: int, tokens: int) -> bool:
        """Apply an insertion of which no event tells, as all its pages are there; False if they are not."""
        if end <= prompt.done:
            return True
        node = self._where.get(prompt.hashes[end - 1]) if end <= len(prompt.hashes) else None
        if node is not None:
            node = self._split(node, node.hashes.index(prompt.hashes[end - 1]) + 1)
            self._inserted(node, prompt, tokens, fresh=False)
        return node is not None

    def _told(self, leaf: _Node) -> None:
        """Apply the insertion that an event tells of."""
        end, last = leaf.end, leaf.hashes[-1]
        for prompt in self._sent:
            if len(prompt.hashes) >= end and prompt.hashes[end - 1] == last:
                tokens = end * self.page_tokens
                for before, computed in self._insertions(prompt):
                    if before <= leaf.start:
                        self._insert_silently(prompt, before, computed)
                    elif before == end:
                        tokens = computed
                self._inserted(leaf, prompt, tokens, fresh=True)
                return
        self._inserted(leaf, None, 0, fresh=True)

    def _inserted(self, node: _Node, prompt: SentPrompt | None, tokens: int, *, fresh: bool) -> None:
        """Apply an insertion that ended with this node, of a prompt of which ``tokens`` were computed, or
        (None) of an answer or another client's. ``fresh``: the node is new."""
        if prompt is not None:
            prompt.admitted = True
            begin = min(prompt.done, node.end)
        else:
            path = [(one, len(one.hashes)) for one in reversed(list(node.up()))]
            begin = self._valid(path[:-1])
        self._make_room(self._taken(node.end - begin, answer=prompt is None))
        self._publish(node, begin, tokens, fresh=fresh)
        if prompt is not None:
            self._unlock(prompt)
            self._lock(prompt, node)
            prompt.done = max(prompt.done, node.end)
            self._answered[node.hashes[-1]] = prompt.tokens
            if len(self._answered) > SENT_MAX:
                del self._answered[next(iter(self._answered))]

    def _has_pages(self) -> bool:
        """Whether there are free pages of full attention for the prompt that is computed next."""
        waiting = next((one for one in self._sent if not one.admitted), None)
        wanted = 1 if waiting is None else -(-waiting.tokens // self.page_tokens) - waiting.hit
        own = sum(one.admitted for one in self._sent) * (1 + _ANSWER_TOKENS // self.page_tokens)
        return len(self._where) + own + wanted <= self.pages

    def _make_room(self, needed: int) -> None:
        needed += self._in_use()
        self._evict(lambda: self.held + needed <= self.room)

    def _evict(self, done: Callable[[], bool]) -> None:
        """Evict the least recently used parts that no request uses, of those used together the upper first,
        until it is done."""
        locked: list[tuple[int, int, int, _Node]] = []
        while not done() and self._old:
            entry = heappop(self._old)
            used, end, _, node = entry
            if not node.held or node.used != used or node.end != end:
                continue
            if node.locks:
                locked.append(entry)
            else:
                self._release(node)
        for entry in locked:
            heappush(self._old, entry)

    def _push(self, node: _Node) -> None:
        self._pushed += 1
        heappush(self._old, (node.used, node.end, self._pushed, node))
        if len(self._old) > 64 + 4 * len(self._where):
            nodes = {id(entry[3]): entry[3] for entry in self._old if entry[3].held}.values()
            self._old = sorted((one.used, one.end, at, one) for at, one in enumerate(nodes))

    def _lock(self, prompt: SentPrompt, node: _Node) -> None:
        start = self._lock_start(node)
        for one in node.up():
            if one.end <= start:
                break
            one.locks += 1
        prompt.locked = node, start

    def _unlock(self, prompt: SentPrompt) -> None:
        if prompt.locked is None:
            return
        node, start = prompt.locked
        for one in node.up():
            if one.end <= start:
                break
            one.locks -= 1
        prompt.locked = None


class Windows(RadixParts):
    """Sliding windows: pages of their own pool, ``room`` of them."""

    def __init__(self, pool: TreePool, room: int, window_tokens: int) -> None:
        self._window = -(-window_tokens // pool.page_tokens)
        self._window_tokens = window_tokens
        super().__init__(pool, room)

    def _valid(self, path: Sequence[tuple[_Node, int]]) -> int:
        covered, found, end = math.inf, 0, 0
        for node, same in path:
            covered = covered + same if node.held else 0
            end += same
            if node.held and covered * self.page_tokens >= self._window_tokens:
                found = end
        return found

    def _size(self, node: _Node) -> int:
        return len(node.hashes)

    def _refresh(self, node: _Node) -> None:
        self._stamp += 1
        start = node.end - (self._window_tokens + self.page_tokens) / self.page_tokens
        for one in node.up():
            if one.end <= start:
                break
            if one.held:
                one.used = self._stamp
                self._push(one)

    def _split_part(self, upper: _Node, lower: _Node) -> None:
        upper.held, upper.locks = lower.held, lower.locks

    def _taken(self, pages: int, *, answer: bool) -> int:
        return pages

    def _in_use(self) -> int:
        # A page of each, for the tokens behind its whole pages.
        return 0 if self.page_tokens == 1 else sum(one.admitted for one in self._sent)

    def _publish(self, node: _Node, begin: int, tokens: int, *, fresh: bool) -> None:
        live = max(begin, self._freed_before(tokens) if tokens else self._freed_by_answer(node))
        if fresh and not node.held:
            if node.start < live < node.end:
                self._split(node, live - node.start)
            if len(node.hashes) > self._window:
                self._hold(self._split(node, len(node.hashes) - self._window))
        for one in node.up():
            if one.end <= live:
                break
            if not one.held and one.start < live:
                self._split(one, live - one.start)
            self._hold(one)
        self._refresh(node)

    def _freed_by_answer(self, node: _Node) -> int:
        """Pages without windows of a request whose answer was stored, or of another client's."""
        page, above = self.page_tokens, node.parent
        answered = None if above is None or not above.hashes else self._answered.get(above.hashes[-1])
        if answered is None:
            # Few prompts end with a page.
            return self._freed_before(node.end * page + (page > 1))
        # A request frees pages only when ``_FREED_TOKENS`` or more have left its window.
        freed = self._freed_before(answered)
        while (tokens := freed * page + _FREED_TOKENS + self._window_tokens) < node.end * page:
            freed = max(freed + 1, self._freed_before(tokens + 1))
        return freed

    def _freed_before(self, tokens: int) -> int:
        """Pages of which a request of ``tokens`` needs no windows."""
        return max(0, (tokens - 1) // self.page_tokens - self._window)

    def _inserted_end(self, prompt: SentPrompt, begin: int, end: int) -> int:
        return self._whole(end)

    def _lock_start(self, node: _Node) -> int:
        least = node.end - self._window
        return min((one.start for one in node.up() if one.end > least), default=0)

    def _ended(self, prompt: SentPrompt, answer_tokens: int) -> None:
        # Its last token has no KV. An event tells the pages of its answer.
        if self._whole(prompt.tokens + max(0, answer_tokens - 1)) == prompt.done and (
            node := self._where.get(prompt.hashes[prompt.done - 1])
        ):
            self._refresh(node)


class States(RadixParts):
    """Mamba states, at the ends of nodes: ``room`` slots, of which each request in flight has
    ``request_slots``."""

    def __init__(self, pool: TreePool, room: int, request_slots: int) -> None:
        self._request_slots = request_slots
        # Distance of states from each other in pages: what all known ones are multiples of.
        self.step = 0
        super().__init__(pool, room)

    def _valid(self, path: Sequence[tuple[_Node, int]]) -> int:
        found, end = 0, 0
        for node, same in path:
            end += same
            if node.held and same == len(node.hashes):
                found = end
        return found

    def _size(self, node: _Node) -> int:
        return 1

    def _refresh(self, node: _Node) -> None:
        if node.held:
            self._stamp += 1
            node.used = self._stamp
            self._push(node)

    def _split_part(self, upper: _Node, lower: _Node) -> None:
        """The state is at the end of the lower one."""

    def _taken(self, pages: int, *, answer: bool) -> int:
        return 0 if answer else 1  # at its end a request gives a slot that it has

    def _in_use(self) -> int:
        return self._request_slots * sum(one.admitted for one in self._sent)

    def _publish(self, node: _Node, begin: int, tokens: int, *, fresh: bool) -> None:
        if fresh:
            self.step = math.gcd(self.step, node.end)
        self._hold(node)
        self._refresh(node)

    def _inserted_end(self, prompt: SentPrompt, begin: int, end: int) -> int:
        step = self.step * self.page_tokens
        if step <= 1:
            return end * step  # without a grid there is the state of the last token
        last = begin + (end - begin) // step * step
        branch = prompt.full * self.page_tokens // step * step
        if last > begin and max(begin, prompt.hit * self.page_tokens) < branch < end:
            last = branch
        return last // self.page_tokens if last > begin else 0

    def _lock_start(self, node: _Node) -> int:
        return node.end - 1

    def _ended(self, prompt: SentPrompt, answer_tokens: int) -> None:
        """Events tell the states of answers."""


def _common(pages: Sequence[BlockHash], hashes: Sequence[BlockHash], done: int, count: int) -> int:
    """Number of pages of a node that are equal to ``hashes`` from ``done`` on, up to ``count``: a hash covers
    all pages before it, so equal ones come first."""
    low, high = 1, min(len(pages), count - done)
    if pages[high - 1] == hashes[done + high - 1]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pages[middle - 1] == hashes[done + middle - 1] else (low, middle)
    return low
