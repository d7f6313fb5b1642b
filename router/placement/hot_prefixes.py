"""Most frequent prompt prefixes: a bounded tree of block hashes with decaying counts.

Of one prompt in ``EVERY``, the hashes at ``FIRST_TOKENS`` tokens, twice that, four times, ... enter the
tree, each below the previous one. Hashes reveal no text. Invariants: at most ``NODES_MAX`` nodes, the least
recently used one is evicted first; a count halves every ``HALF_LIFE_S``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.router.placement.retention import GAP_S_MAX, Reuse

_REPEATS_MIN = 3


EVERY = 4
FIRST_TOKENS = 256
NODES_MAX = 4096
HALF_LIFE_S = 600.0


def decayed(rate: float, seen_s: float, now: float) -> float:
    """Return a count of ``seen_s`` as it is now: it halves every ``HALF_LIFE_S``."""
    return rate * math.exp2((seen_s - now) / HALF_LIFE_S)


class HotPrefix(msgspec.Struct, gc=False):
    """One prefix. ``parent``: hash of the next shorter one; ``rate`` decays."""

    tokens: int
    parent: BlockHash | None
    model: str
    rate: float
    seen_s: float

    def current_rate(self, now: float) -> float:
        """Return the current rate, in prompts of the last minutes."""
        return decayed(self.rate, self.seen_s, now)


class HotPrefixes:
    """The tree of one router; ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[BlockHash, HotPrefix] = OrderedDict()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, model: str, hashes: Sequence[BlockHash], block_tokens: int, now: float) -> None:
        """Count a placed prompt with these block hashes."""
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
                node.rate, node.seen_s = node.current_rate(now) + EVERY, now
                self._nodes.move_to_end(node_hash)
            parent, blocks = node_hash, blocks * 2
        while len(self._nodes) > NODES_MAX:
            self._nodes.popitem(last=False)

    def longest(self, hashes: Sequence[BlockHash], block_tokens: int, above_tokens: int = 0) -> int:
        """Return the tokens of the longest prefix in the tree that a prompt of these block hashes has.

        Returns 0 if it is not longer than ``above_tokens``.
        """
        found, blocks = 0, FIRST_TOKENS // block_tokens or 1
        while blocks * block_tokens <= above_tokens:
            blocks *= 2
        while blocks <= len(hashes) and hashes[blocks - 1] in self._nodes:
            found, blocks = blocks * block_tokens, blocks * 2
        return found

    def reuse(self, hashes: Sequence[BlockHash], block_tokens: int, now: float) -> Reuse | None:
        """Predict the next prompt with the longest prefix of these block hashes that is counted often.

        Returns None without one that ``_REPEATS_MIN`` counted prompts had.
        """
        found: Reuse | None = None
        blocks = max(1, FIRST_TOKENS // block_tokens)
        while blocks <= len(hashes) and (node := self._nodes.get(hashes[blocks - 1])) is not None:
            rate = node.current_rate(now)
            if rate < _REPEATS_MIN * EVERY:
                break
            # A steady stream of r prompts per second has a decaying count of r * HALF_LIFE_S / ln 2. Of its
            # gaps, exp(-3) = 5 % are longer than three mean ones.
            ttl_s = 3 * HALF_LIFE_S / math.log(2) / rate
            found = Reuse(min(ttl_s, GAP_S_MAX), 0.95, node.tokens)
            blocks *= 2
        return found

    def hottest(self, count: int, now: float) -> list[tuple[BlockHash, HotPrefix]]:
        """Return the ``count`` prefixes with the highest rates and their ancestors; parents first."""
        ranked = sorted(self._nodes, key=lambda key: -self._nodes[key].current_rate(now))[:count]
        wanted: dict[BlockHash, HotPrefix] = {}
        for key in ranked:
            at: BlockHash | None = key
            while at is not None and at not in wanted and (node := self._nodes.get(at)) is not None:
                wanted[at] = node
                at = node.parent
        return sorted(wanted.items(), key=lambda pair: pair[1].tokens)
