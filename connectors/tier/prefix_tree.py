"""Tree of the prefixes whose blocks a tier holds; its nodes end at boundaries.

A node is one segment of a prompt (from one boundary to the next), named by the block hash at its end, which
identifies the whole prefix. Its keys are the blocks of all groups that end in the segment.

Invariants: a node is *cut* exactly when a full-attention block of it or of an ancestor is missing, so that no
hit can reach it. A node without keys and children exists only while a chain below it is being stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvatlas.connectors.group_shapes import GroupKind, GroupShape
from kvatlas.connectors.tier.base import block_hashes_of, group_of


@dataclass(slots=True, eq=False)
class Node:
    """One segment. ``stamp``: last use of it, or of a dropped descendant."""

    name: bytes
    parent: Node | None = None
    children: set[Node] = field(default_factory=set)
    keys: dict[bytes, int] = field(default_factory=dict)
    """Key -> group index."""
    full_blocks: int = 0
    cut: bool = False
    loose: bool = False
    """Its position in a prompt is unknown; it is ranked by age only."""
    stamp: int = 0
    branched: bool = False
    """It has had more than one continuation."""
    loads: int = 0
    doomed: bool = False
    pending: bool = False
    """A chain being stored may add keys here."""

    def up(self) -> Iterator[Node]:
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class PrefixTree:
    """Nodes by name, and the node of every key. Methods return the nodes whose ``cut`` they changed."""

    def __init__(
        self, shapes: Sequence[GroupShape], hash_block_tokens: int, boundary_tokens: int, nodes_max: int
    ) -> None:
        if boundary_tokens % hash_block_tokens:
            raise ValueError(
                f"boundaries ({boundary_tokens}) must be multiples of {hash_block_tokens} tokens"
            )
        self._full = {shape.group_idx for shape in shapes if shape.kind is GroupKind.FULL}
        self._full_blocks = sum(
            boundary_tokens // s.block_tokens for s in shapes if s.group_idx in self._full
        )
        self._hashes_per_node = boundary_tokens // hash_block_tokens
        self._nodes_max = nodes_max
        self._nodes: dict[bytes, Node] = {}
        self.node_of: dict[bytes, Node] = {}
        # Chains without room for their prefix: their keys are ranked by age only.
        self.unplaced_chains = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def place(self, chain: Sequence[bytes], lineage: Sequence[bytes]) -> tuple[list[Node], list[Node]]:
        """Node of each key of ``chain``, and the nodes made or linked on its path, from the root down.

        New nodes have no keys: ``add`` keys to them, then ``prune`` those without any.
        """
        hashes = block_hashes_of(chain)
        index = _positions(hashes, lineage)
        ends = {h: (i // self._hashes_per_node + 1) * self._hashes_per_node - 1 for h, i in index.items()}
        last = len(lineage) // self._hashes_per_node * self._hashes_per_node - 1
        deepest = min(max(ends.values(), default=-1), last)
        made = self._make_path(lineage, deepest)
        nodes: dict[bytes, Node] = {}
        for h in dict.fromkeys(hashes):
            end = min(ends.get(h, -1), last)
            node = self._nodes.get(lineage[end]) if end >= 0 else None
            if node is None:
                node = self._nodes.get(h)
            if node is None:
                node = self._nodes[h] = Node(h, loose=True)
            nodes[h] = node
        return [nodes[h] for h in hashes], made

    def add(self, keys: Iterable[bytes], node_of: Mapping[bytes, Node]) -> list[Node]:
        """Add keys to the nodes returned by ``place``. Returns the nodes that are no longer cut."""
        completed: list[Node] = []
        for key in keys:
            node = self.node_of[key] = node_of[key]
            group_idx = node.keys[key] = group_of(key)
            if group_idx in self._full:
                node.full_blocks += 1
                if node.full_blocks == self._full_blocks:
                    completed.append(node)
        changed: list[Node] = []
        for node in completed:
            if node.cut:
                changed += self._spread(node)
        return changed

    def remove(self, key: bytes) -> tuple[Node, list[Node]]:
        """Remove a key. Returns its node and the nodes that became cut. Call ``prune`` afterwards."""
        node = self.node_of.pop(key)
        if node.keys.pop(key) not in self._full:
            return node, []
        node.full_blocks -= 1
        return node, self._spread(node)

    def prune(self, node: Node) -> tuple[list[Node], Node | None]:
        """Drop the node and its ancestors while they are empty; also returns the node that lost a child."""
        dropped: list[Node] = []
        while self._nodes.get(node.name) is node and not (node.keys or node.children or node.pending):
            del self._nodes[node.name]
            dropped.append(node)
            if node.parent is None:
                return dropped, None
            node.parent.children.discard(node)
            node.parent.stamp = max(node.parent.stamp, node.stamp)
            node = node.parent
        return dropped, node if dropped else None

    def _make_path(self, lineage: Sequence[bytes], deepest: int) -> list[Node]:
        """Make and link the missing nodes of the path to the one that ends at this index of the lineage."""
        missing: list[bytes] = []
        above: Node | None = None
        for end in range(deepest, -1, -self._hashes_per_node):
            name = lineage[end]
            above = self._nodes.get(name)
            if above is not None and not above.loose:
                break
            above = None
            missing.append(name)
        if len(self._nodes) + len(missing) > self._nodes_max:
            self.unplaced_chains += 1
            return []
        made: list[Node] = []
        for name in reversed(missing):
            node = self._nodes.setdefault(name, Node(name, above))
            if above is not None:
                if above.children:
                    above.branched = True
                above.children.add(node)
            node.loose, node.parent = False, above
            node.cut = node.full_blocks < self._full_blocks or (above is not None and above.cut)
            made.append(node)
            above = node
        return made

    def _must_be_cut(self, node: Node) -> bool:
        if node.loose:
            return False
        above = node.parent is not None and node.parent.cut
        return above or node.full_blocks < self._full_blocks

    def _spread(self, top: Node) -> list[Node]:
        """Update ``cut`` in this node and its descendants; returns the changed nodes."""
        changed: list[Node] = []
        work = [top]
        while work:
            node = work.pop()
            cut = self._must_be_cut(node)
            if cut != node.cut:
                node.cut = cut
                changed.append(node)
                work.extend(node.children)
        return changed


def _positions(hashes: Iterable[bytes], lineage: Sequence[bytes]) -> dict[bytes, int]:
    """Hash -> its index in the lineage; hashes that are not in it are omitted."""
    wanted = set(hashes)
    found: dict[bytes, int] = {}
    at = len(lineage)
    while wanted and at:
        at -= 1
        if (block_hash := lineage[at]) in wanted:
            found[block_hash] = at
            wanted.remove(block_hash)
    return found
