"""Eviction policies of a tier.

``lru`` evicts by recency; ``boundary`` evicts blocks first that can no longer serve a hit;
``hinted`` keeps blocks for which a router expects another turn.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count, islice
from typing import Protocol

from kvatlas.connectors.group_shapes import GroupKind, GroupShape
from kvatlas.connectors.tier.prefix_tree import Node, PrefixTree
from kvatlas.publisher.pool.retention_order import OWNER_SHARE, HintCounters, RetentionHint, RetentionOrder

Spared = Callable[[bytes], bool]
"""Whether a key must not be evicted now."""


class EvictionPolicy(Protocol):
    """Chooses the keys to evict; it is notified of every key from its reservation to its end. No call blocks.

    A policy knows keys only; the tier excludes keys from eviction that are being stored or loaded, or were
    just used.
    """

    def begin_chain(self, chain: Sequence[bytes], lineage: Sequence[bytes]) -> None:
        """Begin the store of a request's keys (``Tier.begin_store``); keys already held count as used."""

    def end_chain(self, added: Sequence[bytes]) -> None:
        """End ``begin_chain``: these keys of the chain got a slot, in prompt order."""

    def use(self, keys: Sequence[bytes]) -> None:
        """Mark these held keys as used: they are loaded for one request."""

    def remove(self, key: bytes) -> None:
        """Remove a key that was dropped for another reason than ``victims``."""

    def victims(self, count: int, spared: Spared) -> list[bytes]:
        """Choose and remove up to ``count`` keys; fewer if the remaining ones are spared."""


class LruPolicy:
    """Least recently used first; of keys used together, the last in the prompt first."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def begin_chain(self, chain: Sequence[bytes], lineage: Sequence[bytes]) -> None:
        self.use([key for key in chain if key in self._order])

    def end_chain(self, added: Sequence[bytes]) -> None:
        for key in reversed(added):
            self._order[key] = None

    def use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        del self._order[key]

    def victims(self, count: int, spared: Spared) -> list[bytes]:
        chosen = list(islice((key for key in self._order if not spared(key)), count))
        for key in chosen:
            del self._order[key]
        return chosen


class HintedPolicy:
    """``lru``, but keys with a live retention hint go last, within the share of the hint's owner."""

    def __init__(self, slots: int, owner_share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._order: RetentionOrder[bytes] = RetentionOrder(slots, owner_share)
        self._held: set[bytes] = set()
        self._clock = clock

    @property
    def counters(self) -> HintCounters:
        return self._order.counters

    @property
    def num_hinted(self) -> int:
        return self._order.num_hinted

    def begin_chain(self, chain: Sequence[bytes], lineage: Sequence[bytes]) -> None:
        self.use([key for key in chain if key in self._held])

    def end_chain(self, added: Sequence[bytes]) -> None:
        self._held.update(added)
        self._order.add(added)

    def use(self, keys: Sequence[bytes]) -> None:
        self._order.use(keys, self._clock())

    def retain(self, keys: Iterable[bytes], hint: RetentionHint) -> None:
        """Apply a hint to the held ones of these keys, which were just added or used, in prompt order."""
        self._order.retain([key for key in dict.fromkeys(keys) if key in self._held], hint, self._clock())

    def remove(self, key: bytes) -> None:
        self._held.remove(key)
        self._order.remove(key)

    def victims(self, count: int, spared: Spared) -> list[bytes]:
        chosen = self._order.take_oldest(count, spared, self._clock())
        self._held.difference_update(chosen)
        return chosen


# Most spared keys visited in one queue before the next queue is used.
_SCAN_MAX = 64
# Most nodes evicted at a time: a very long prompt is evicted in parts, as rows are needed.
_RUN_MAX = 256


class BoundaryPolicy:
    """The policy ``boundary`` over a tree of prefixes. ``nodes_max`` bounds the tree.

    Eviction that keeps whole prefixes usable: blocks that can no longer serve a hit go first.

    A hit needs every full-attention block of its prefix but, of each window or state group, only the tail at
    its boundary. So keys are evicted in this order: (1) keys below a missing full-attention block; (2) tails
    at boundaries where no request is expected to resume, because the prompt continued there; (3) the least
    recently used end of a prompt, with the tails of all its groups and the full blocks that only it uses, up
    to a branch of another prompt or a boundary above that can still be resumed. So heads of prefixes live
    longest, and groups are evicted together. A boundary is an end if nothing follows, if prompts branch
    there, or if loads ended there more than once.

    Invariants: every added key is in exactly one node; a key is chosen at most once. The amortised work per
    choice is bounded by the longest window in boundaries, and that of a step by the blocks it stores.

    Measured by ``python -m tests.connectors.tier.eviction_simulation`` (5 window groups, 1 full group, shared
    system prompts, conversations and one-off prompts, seeded): share of prompt tokens that can be loaded::

        slots          lru  boundary
        2000         0.351     0.498
        4000         0.490     0.614
        8000         0.610     0.627
        16000        0.631     0.641
    """

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
        # Chain being stored: the node of each key, the nodes made for it, and the union of both.
        self._named: dict[Node, None] = {}
        # Ordered dicts: finding the head of a plain dict is slow after many deletions before it.
        self._cut_keys: OrderedDict[bytes, None] = OrderedDict()
        self._doomed: OrderedDict[bytes, None] = OrderedDict()
        # Boundaries that prompts continued from, not yet checked for tails to drop.
        self._passed: OrderedDict[Node, None] = OrderedDict()
        self._leaves: list[tuple[int, int, Node]] = []

    def begin_chain(self, chain: Sequence[bytes], lineage: Sequence[bytes]) -> None:
        self._clock += 1
        placed, self._made = self.tree.place(chain, lineage)
        self._placed = dict(zip(chain, placed, strict=True))
        self._named = dict.fromkeys([*placed, *self._made])
        self._recut(self._made)
        self._touch(self._named)
        for node in self._named:
            node.pending = True
        if self._made and (above := self._made[0].parent) is not None:
            self._touch([above])
        self._keep(chain)

    def end_chain(self, added: Sequence[bytes]) -> None:
        self._recut(self.tree.add(added, self._placed))
        for key in added:
            if self._placed[key].cut:
                self._cut_keys[key] = None
        self._pass_by(self._made)
        for node in reversed(self._named):
            node.pending = False
            self._prune(node)
        self._settle(self._named)
        self._placed, self._made, self._named = {}, [], {}

    def use(self, keys: Sequence[bytes]) -> None:
        self._clock += 1
        nodes = dict.fromkeys(self.tree.node_of[key] for key in keys)
        self._touch(nodes)
        for node in nodes:
            if not node.children & nodes.keys():
                node.loads += 1
        self._keep(keys)
        self._settle(nodes)

    def remove(self, key: bytes) -> None:
        self._cut_keys.pop(key, None)
        self._doomed.pop(key, None)
        node, cut = self.tree.remove(key)
        self._recut(cut)
        self._prune(node)

    def victims(self, count: int, spared: Spared) -> list[bytes]:
        chosen: list[bytes] = []
        while (missing := count - len(chosen)) > 0:
            going = _oldest(self._cut_keys, missing, spared) or _oldest(self._doomed, missing, spared)
            for key in going:
                self.remove(key)
            chosen += going
            if not going and not self._doom_more():
                break
        return chosen

    # -- choosing ----------------------------------------------------------------------------------------

    def _doom_more(self) -> bool:
        """Mark more keys for eviction; False if no others may be evicted."""
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
        distance, below, span_max = 0, node, self._span_max
        # Descend to an end, where requests are expected to resume.
        while distance < span_max and not (below.branched or below.loads > 1 or not below.children):
            (below,) = below.children
            distance += 1
        if not distance:
            return False
        spare = [key for key, span in tails if distance >= span]
        for key in spare:
            self._doomed[key] = None
        return bool(spare)

    def _doom_run(self, leaf: Node) -> None:
        """Doom an end of a prompt and the nodes that lead only to it, at most ``_RUN_MAX`` at a time."""
        # The remaining ones end in a leaf after these are evicted.
        doomed, tails, lacking = self._doomed, len(self._tails), 0
        for at, node in enumerate(leaf.up()):
            if at:
                if at >= _RUN_MAX or node.stamp == self._clock or len(node.children) > 1:
                    return
                # Every resumable tail has a key in the node itself.
                if at > lacking and not node.cut and len(node.keys) - node.full_blocks >= tails:
                    distance = self._to_missing_tail(node)
                    if distance is None:
                        return
                    lacking = at + distance
            node.doomed = True
            if len(node.keys) > node.full_blocks:
                for key, group in node.keys.items():
                    if group in self._span:
                        doomed[key] = None
            for key in node.keys:
                doomed[key] = None

    def _to_missing_tail(self, node: Node) -> int | None:
        """Distance in nodes to the nearest ancestor without a tail that a hit here needs.

        No boundary up to there can be resumed either. None if every group's tail at this boundary is held.
        """
        for group, shape in self._tails.items():
            left = shape.span_tokens
            if shape.kind is GroupKind.STATE:
                left = min(left, shape.block_tokens)
            for distance, above in enumerate(node.up()):
                needed = -(-min(left, self._boundary_tokens) // shape.block_tokens)
                if list(above.keys.values()).count(group) < needed:
                    return distance
                left -= self._boundary_tokens
                if left <= 0:
                    break
        return None

    # -- maintaining the queues --------------------------------------------------------------------------

    def _touch(self, nodes: Iterable[Node]) -> None:
        clock = self._clock
        for node in nodes:
            node.stamp = clock
            above: Node | None = node
            while above is not None and above.doomed:
                above.doomed = False
                self._keep(above.keys)
                above = above.parent

    def _keep(self, keys: Iterable[bytes]) -> None:
        if self._doomed:
            for key in keys:
                self._doomed.pop(key, None)

    def _settle(self, nodes: Iterable[Node]) -> None:
        """Queue nodes again that were just used."""
        passed = self._passed
        for node in nodes:
            if not node.children:
                self._offer(node)
            elif len(node.keys) > node.full_blocks:
                passed[node] = None
                passed.move_to_end(node)

    def _offer(self, node: Node) -> None:
        """Queue a leaf by its age."""
        if node.children or not node.keys or node.doomed:
            return
        heapq.heappush(self._leaves, (node.stamp, next(self._order), node))
        if len(self._leaves) > 4 * len(self.tree) + 64:
            self._leaves = [e for e in self._leaves if e[0] == e[2].stamp and not e[2].children and e[2].keys]
            heapq.heapify(self._leaves)

    def _pass_by(self, made: Sequence[Node]) -> None:
        """Note a prompt that continued over these nodes: tails just above them may be unneeded now."""
        if not made or made[0].parent is None:
            return
        for _, node in zip(range(self._span_max + 1), made[0].parent.up(), strict=False):
            if len(node.keys) > node.full_blocks:
                self._passed[node] = None

    def _prune(self, node: Node) -> None:
        dropped, parent = self.tree.prune(node)
        for gone in dropped:
            self._passed.pop(gone, None)
        if parent is not None and not parent.doomed:
            self._offer(parent)

    def _recut(self, changed: Iterable[Node]) -> None:
        for node in changed:
            if node.cut:
                for key in node.keys:
                    self._cut_keys[key] = None
            elif self._cut_keys:
                for key in node.keys:
                    self._cut_keys.pop(key, None)


def _oldest(queue: OrderedDict[bytes, None], count: int, spared: Spared) -> list[bytes]:
    """Remove the oldest evictable keys, up to ``count``; spared keys move to the end."""
    found: list[bytes] = []
    for _ in range(min(count + _SCAN_MAX, len(queue))):
        key, _none = queue.popitem(last=False)
        if spared(key):
            queue[key] = None
            continue
        found.append(key)
        if len(found) == count:
            break
    return found


POLICY_NAMES = ("lru", "boundary", "hinted")


def make_policy(
    name: str,
    *,
    slots: int,
    shapes: Sequence[GroupShape],
    hash_block_tokens: int,
    boundary_tokens: int,
    hint_share: float = OWNER_SHARE,
) -> EvictionPolicy:
    """Make the policy of this name for a tier of ``slots`` rows.

    ``shapes``, ``hash_block_tokens`` and ``boundary_tokens`` (the engine's scheduler block) as in
    ``HitResolver``; only ``boundary`` uses them. ``hint_share``: the largest share of the rows that one
    owner's hints cover, for ``hinted``. ValueError for an unknown name.
    """
    if name == "lru":
        return LruPolicy()
    if name == "hinted":
        return HintedPolicy(slots, hint_share)
    if name == "boundary":
        return BoundaryPolicy(shapes, hash_block_tokens, boundary_tokens, nodes_max=4 * slots + 1024)
    raise ValueError(f"no eviction policy {name!r}; there are {', '.join(POLICY_NAMES)}")
