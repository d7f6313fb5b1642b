"""The prefixes that most prompts begin with: a bounded tree of block hashes with decaying counts.

Of one prompt in ``EVERY``, the hashes at ``FIRST_TOKENS`` tokens, twice that, four times, ... enter the tree,
each below the one before. Hashes say nothing of the text. Always true: at most ``NODES_MAX`` nodes, the one
that was longest unused goes first; a count halves every ``HALF_LIFE_S``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from publisher.events import BlockHash

EVERY = 4
FIRST_TOKENS = 256
NODES_MAX = 4096
HALF_LIFE_S = 600.0


class HotPrefix(msgspec.Struct, gc=False):
    """One prefix. ``parent`` is the next shorter one's hash; ``rate`` decays."""

    tokens: int
    parent: BlockHash | None
    model: str
    rate: float
    seen_s: float

    def at(self, now: float) -> float:
        """Its rate now, in prompts of the last minutes."""
        return self.rate * math.exp2((self.seen_s - now) / HALF_LIFE_S)


class HotPrefixes:
    """``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[BlockHash, HotPrefix] = OrderedDict()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, model: str, hashes: Sequence[BlockHash], block_tokens: int, now: float) -> None:
        """A prompt with these block hashes was placed."""
        self._turn += 1
        if self._turn % EVERY:
            return
        parent: BlockHash | None = None
        blocks = max(1, FIRST_TOKENS // block_tokens)
        while blocks <= len(hashes):
            node_hash = hashes[blocks - 1]
            node = self._nodes.get(node_hash)
            if node is None:
                self._nodes[node_hash] = HotPrefix(blocks * block_tokens, parent, model, EVERY, now)
            else:
                node.rate, node.seen_s = node.at(now) + EVERY, now
                self._nodes.move_to_end(node_hash)
            parent, blocks = node_hash, blocks * 2
        while len(self._nodes) > NODES_MAX:
            self._nodes.popitem(last=False)

    def longest(self, hashes: Sequence[BlockHash], block_tokens: int, above_tokens: int = 0) -> int:
        """Return the tokens of the longest prefix in the tree that a prompt of these block hashes has.

        0 where it is no longer than ``above_tokens``.
        """
        found, blocks = 0, max(1, FIRST_TOKENS // block_tokens)
        while blocks * block_tokens <= above_tokens:
            blocks *= 2
        while blocks <= len(hashes) and hashes[blocks - 1] in self._nodes:
            found, blocks = blocks * block_tokens, blocks * 2
        return found

    def hottest(self, count: int, now: float) -> list[tuple[BlockHash, HotPrefix]]:
        """The ``count`` with the highest rates, and what they lie below; parents first."""
        ranked = sorted(self._nodes, key=lambda key: -self._nodes[key].at(now))[:count]
        wanted: dict[BlockHash, HotPrefix] = {}
        for key in ranked:
            at: BlockHash | None = key
            while at is not None and at not in wanted and (node := self._nodes.get(at)) is not None:
                wanted[at] = node
                at = node.parent
        return sorted(wanted.items(), key=lambda pair: pair[1].tokens)
