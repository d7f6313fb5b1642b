"""A node of the radix tree over block hashes that prompts in flight are kept in (inflight.py).

It keeps a slice of one prompt's hash list (no copy), the number of open prompts of each engine that pass
through it, and the number of those that keep the prefix ending where the node ends. Always true: positions
are absolute in the prompt, and a child starts where its parent ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from publisher.events import BlockHash


class PrefixNode:
    """Hashes ``[start, end)`` of ``hashes``, shared by every prompt that passes through."""

    __slots__ = ("children", "end", "engines", "hashes", "keepers", "start")

    def __init__(self, hashes: Sequence[BlockHash], start: int, end: int) -> None:
        self.hashes = hashes
        self.start = start
        self.end = end
        self.children: dict[BlockHash, PrefixNode] = {}
        self.engines: dict[str, int] = {}
        self.keepers: dict[str, int] = {}

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """First position, after ``start``, where ``hashes`` leaves this node; ``end`` if it does not."""
        own, low, high = self.hashes, self.start + 1, min(self.end, len(hashes))
        if own[high - 1] == hashes[high - 1]:
            return high
        while low < high:
            middle = (low + high) // 2
            if own[middle] == hashes[middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def split(self, at: int) -> None:
        """Cut this node in two at position ``at``; the upper part stays this object."""
        lower = PrefixNode(self.hashes, at, self.end)
        lower.children, lower.engines, lower.keepers = self.children, self.engines.copy(), self.keepers
        self.end, self.keepers = at, {}
        self.children = {self.hashes[at]: lower}

    def join(self) -> None:
        """Take in an only child that the same prompts pass through: whatever ended here has gone."""
        while len(self.children) == 1 and not self.keepers:
            (child,) = self.children.values()
            if child.engines != self.engines:
                break
            self.hashes, self.end = child.hashes, child.end
            self.children, self.keepers = child.children, child.keepers
