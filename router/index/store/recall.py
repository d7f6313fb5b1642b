"""What a look-up found, kept for the conversation's next turn: only what changed since is looked up again.

A look-up of a thousand blocks is a thousand misses of the processor's cache. Most of them say what they said
at the last turn. So every change of a block's row leaves a stamp, the number of look-ups so far, at a place
that follows from the block's hash; and a prompt's hashes carry the rows that were found of them, and when. A
row whose place has an older stamp is still right. Blocks that share a place only cost a look-up too many.

Always true: ``rows`` gives what a plain look-up would (tests/router/index/store/test_recall.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from publisher.block_hash import PromptHashes

_PLACES = 1 << 20
"""Of 4 bytes. Of a conversation that comes back after a million changes two thirds are looked up again."""
_LOOKUPS_MAX = (1 << 32) - 1
HASHES_MIN = 128
"""Of fewer, looking all of them up costs less."""

Numbers = npt.NDArray[np.int32]
Find = Callable[[Sequence[Any]], Numbers]


class Recalled(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The rows of a prompt's first hashes; opaque to who carries it."""

    numbers: Numbers
    of: Recall
    life: int
    at: int

    def first(self, num_hashes: int) -> Recalled:
        """The same of at most so many hashes."""
        if num_hashes >= len(self.numbers):
            return self
        return Recalled(self.numbers[:num_hashes], self.of, self.life, self.at)


class Recall:
    """The stamps of one index. Nothing is kept before the first look-up that could use it."""

    __slots__ = ("_life", "_view", "mask", "now", "stamps")

    def __init__(self) -> None:
        self._life = 0
        self.mask = 0
        self.stamps = array("I", (0,))
        """Whoever changes the row of a block writes ``now`` at ``hash & mask``."""
        self.now = 1
        """Look-ups so far, and one."""
        self._view = np.zeros(0, np.uint32)

    def begin(self) -> None:
        """Row numbers mean something else now: what was found before counts no longer."""
        self._life += 1
        self.now = 1
        if self.mask:
            self._view[:] = 0

    def rows(self, hashes: PromptHashes, find: Find) -> Numbers:
        """The row of each hash; ``find`` looks some of them up."""
        if not self.mask:
            self.mask, self.stamps = _PLACES - 1, array("I", bytes(4 * _PLACES))
            self._view = np.frombuffer(self.stamps, np.uint32)
        if self.now == _LOOKUPS_MAX:
            self.begin()
        found = hashes.found
        if not isinstance(found, Recalled) or found.of is not self or found.life != self._life:
            numbers = find(hashes)
        else:
            numbers = self._again(found, hashes, find)
        hashes.found = Recalled(numbers, self, self._life, self.now)
        self.now += 1
        return numbers

    def _again(self, found: Recalled, hashes: PromptHashes, find: Find) -> Numbers:
        numbers = found.numbers
        known = len(numbers)
        places = np.frombuffer(hashes, np.int64, known) & self.mask
        changed = (self._view.take(places) > found.at).nonzero()[0]
        if len(changed):
            numbers = numbers.copy()
            numbers[changed] = find([hashes[at] for at in changed.tolist()])
        if known < len(hashes):
            numbers = np.concatenate((numbers, find(hashes[known:])))
        return numbers
