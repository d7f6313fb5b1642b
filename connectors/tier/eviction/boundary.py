"""Eviction that keeps whole prefixes usable: what can no longer serve a hit goes first.

A hit needs every full-attention block of its prefix and, of each window or state group, only the tail at its
boundary. So in this order: (1) keys below a missing full-attention block; (2) tails at boundaries where no
request is expected to resume, because the prompt simply went on there; (3) the least recently used end of a
prompt, with all its groups' tails and the full blocks that only it uses, up to where another prompt leaves
or a boundary above can still be resumed. Heads of prefixes thus live longest, and groups go together. A
boundary counts as an end where nothing follows, where prompts part, or where loads ended more than once.

What always holds: every key added is in exactly one node; a key is chosen at most once; the work per choice
is bounded by the longest window, in boundaries, amortised.

What it brings: ``python -m tests.connectors.tier.eviction_simulation`` (5 window groups, 1 full group, shared
system prompts, conversations and one-off prompts, seeded), share of prompt tokens that could be loaded::

    slots          lru       arc  boundary
    2000         0.351     0.449     0.498
    4000         0.490     0.498     0.614
    8000         0.610     0.613     0.627
    16000        0.631     0.631     0.641
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

from connectors.hits.group_shapes import GroupKind, GroupShape
from connectors.tier.eviction.base import Spared
from connectors.tier.eviction.prefix_tree import Node, PrefixTree

_SCAN_MAX = 64
"""Spared keys looked at in a queue before another queue is asked."""


class BoundaryPolicy:
    """An ``EvictionPolicy`` over the tree of prefixes. ``nodes_max`` bounds the tree."""

    def __init__(
        self, shapes: Sequence[GroupShape], hash_block_tokens: int, boundary_tokens: int, nodes_max: int
    ) -> None:
        self.tree = PrefixTree(shapes, hash_block_tokens, boundary_tokens, nodes_max)
        self._boundary_tokens = boundary_tokens
        self._tails = {s.group_idx: s for s in shapes if s.kind is not GroupKind.FULL}
        self._span = {g: -(-s.span_tokens // boundary_tokens) for g, s in self._tails.items()}
        self._span_max = max(self._span.values(), default=0)
        self._clock = 0
        self._order = count()
        self._placed: dict[bytes, Node] = {}
        self._made: list[Node] = []
        # Ordered dicts: the head of a plain one is found slowly once many before it are gone.
        self._cut_keys: OrderedDict[bytes, None] = OrderedDict()
        self._doomed: OrderedDict[bytes, None] = OrderedDict()
        self._passed: OrderedDict[Node, None] = OrderedDict()
        """Boundaries the prompt went on from, not yet looked at for tails to drop."""
        self._leaves: list[tuple[int, int, Node]] = []

    def begin_chain(self, chain: Sequence[bytes], lineage: Sequence[bytes]) -> None:
        self._clock += 1
        placed, self._made = self.tree.place(chain, lineage)
        self._placed = dict(zip(chain, placed, strict=True))
        self._recut(self._made)
        for node in (*placed, *self._made):
            node.pending = True
        above = [node.parent for node in self._made if node.parent is not None]
        for node in dict.fromkeys([*placed, *self._made, *above]):
            self._touch(node)
        for key in chain:
            self._doomed.pop(key, None)

    def end_chain(self, added: Sequence[bytes]) -> None:
        for key in added:
            node = self._placed[key]
            self._recut(self.tree.add(key, node))
            if node.cut:
                self._cut_keys[key] = None
        if self._made:
            self._pass_by(self._made)
        nodes = dict.fromkeys([*self._placed.values(), *self._made])
        for node in nodes:
            node.pending = False
        for node in reversed(nodes):
            self._prune(node)
        for node in nodes:
            self._settle(node)
        self._placed = {}
        self._made = []

    def use(self, keys: Sequence[bytes]) -> None:
        self._clock += 1
        nodes = dict.fromkeys(self.tree.node_of[key] for key in keys)
        for node in nodes:
            self._touch(node)
            if not node.children & nodes.keys():
                node.loads += 1
        for key in keys:
            self._doomed.pop(key, None)
        for node in nodes:
            self._settle(node)

    def remove(self, key: bytes) -> None:
        self._cut_keys.pop(key, None)
        self._doomed.pop(key, None)
        node, cut = self.tree.remove(key)
        self._recut(cut)
        self._prune(node)

    def victim(self, spared: Spared) -> bytes | None:
        while True:
            for queue in (self._cut_keys, self._doomed):
                key = _next(queue, spared)
                if key is not None:
                    self.remove(key)
                    return key
            if not self._doom_more():
                return None

    # -- choosing ----------------------------------------------------------------------------------------

    def _doom_more(self) -> bool:
        """Put more keys where ``victim`` finds them; False where nothing else may go."""
        while self._passed:
            node, _ = self._passed.popitem(last=False)
            if self._doom_tails(node):
                return True
        while self._leaves:
            stamp, _, leaf = heapq.heappop(self._leaves)
            if leaf.children or leaf.doomed or not leaf.keys or leaf.stamp != stamp:
                continue
            if stamp == self._clock:
                self._offer(leaf)
                return False
            self._doom_run(leaf)
            return True
        return False

    def _doom_tails(self, node: Node) -> bool:
        """Doom the tails in a node that no end below it needs."""
        tails = [(key, self._span[group]) for key, group in node.keys.items() if group in self._span]
        if not tails:
            return False  # most nodes of a long prompt: the way down is long, and there is nothing to drop
        distance, below = 0, node
        while not below.is_end and distance < self._span_max:
            (below,) = below.children
            distance += 1
        if not distance:
            return False
        spare = [key for key, span in tails if distance >= span]
        for key in spare:
            self._doomed[key] = None
        return bool(spare)

    def _doom_run(self, leaf: Node) -> None:
        """Doom an end of a prompt and all that only leads to it."""
        for node in leaf.up():
            in_use = node.stamp == self._clock
            if node is not leaf and (in_use or len(node.children) > 1 or self._can_resume(node)):
                return
            node.doomed = True
            for key in sorted(node.keys, key=lambda k: node.keys[k] not in self._span):
                self._doomed[key] = None

    def _can_resume(self, node: Node) -> bool:
        """Every group's tail at this boundary is here, and the prefix is."""
        if node.cut or len(node.keys) - node.full_blocks < len(self._tails):
            return False  # every tail has a key in the node itself
        for group, shape in self._tails.items():
            left = shape.span_tokens
            if shape.kind is GroupKind.STATE:
                left = min(left, shape.block_tokens)
            for above in node.up():
                needed = -(-min(left, self._boundary_tokens) // shape.block_tokens)
                if sum(g == group for g in above.keys.values()) < needed:
                    return False
                left -= self._boundary_tokens
                if left <= 0:
                    break
        return True

    # -- keeping the queues right ------------------------------------------------------------------------

    def _touch(self, node: Node) -> None:
        node.stamp = self._clock
        for above in node.up():
            if not above.doomed:
                return
            above.doomed = False
            for key in above.keys:
                self._doomed.pop(key, None)

    def _settle(self, node: Node) -> None:
        """Put a node that was just used back where it is found when room is needed."""
        self._offer(node)
        self._passed.pop(node, None)
        if node.keys and node.children and self._tails:
            self._passed[node] = None

    def _offer(self, node: Node) -> None:
        """Let a leaf be found by its age."""
        if node.children or not node.keys or node.doomed:
            return
        heapq.heappush(self._leaves, (node.stamp, next(self._order), node))
        if len(self._leaves) > 4 * len(self.tree) + 64:
            self._leaves = [e for e in self._leaves if e[0] == e[2].stamp and not e[2].children and e[2].keys]
            heapq.heapify(self._leaves)

    def _pass_by(self, made: Sequence[Node]) -> None:
        """A prompt went on over these nodes: tails in them, and just above them, may have become spare."""
        if not self._tails:
            return
        above = made[0].parent
        if above is not None:
            for _, node in zip(range(self._span_max + 1), above.up(), strict=False):
                self._passed[node] = None
        for node in made:
            if node.children:
                self._passed[node] = None

    def _prune(self, node: Node) -> None:
        dropped, parent = self.tree.prune(node)
        for gone in dropped:
            self._passed.pop(gone, None)
        if parent is not None:
            self._offer(parent)

    def _recut(self, changed: Iterable[Node]) -> None:
        for node in changed:
            for key in node.keys:
                if node.cut:
                    self._cut_keys[key] = None
                else:
                    self._cut_keys.pop(key, None)


def _next(queue: OrderedDict[bytes, None], spared: Spared) -> bytes | None:
    """The oldest key that may go; those that may not move to the end."""
    for _ in range(min(_SCAN_MAX, len(queue))):
        key = next(iter(queue))
        if not spared(key):
            return key
        queue.move_to_end(key)
    return None
