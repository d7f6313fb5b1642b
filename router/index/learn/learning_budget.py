"""Limits how many blocks are examined to learn an engine's hashes.

Learning takes some 3 us a block, counting less than 1 us (measured), so an engine with an undetectable hash
scheme would take a whole core at 200,000 blocks/s. At most ``BLOCKS_BURST`` blocks at once and
``BLOCKS_PER_S`` per second are examined; each skipped one is counted. A skipped block counts as held like any
other; only its position in prompts stays unknown.
"""

from __future__ import annotations

# 131,072 tokens/s in blocks of 16, more than an engine computes; about 3 % of a core (measured).
BLOCKS_PER_S = 8192
# 4 million tokens in blocks of 16, more than an engine holds: a complete replay is learned.
BLOCKS_BURST = 1 << 18


class LearningBudget:
    """Token bucket of one engine, kept over its restarts. Without ``refill`` (no clock) nothing is
    skipped.
    """

    def __init__(self) -> None:
        # Number of skipped blocks.
        self.skipped = 0
        self._left = float(BLOCKS_BURST)
        self._at_s: float | None = None

    def take(self, blocks: int) -> bool:
        """Whether an event with this number of blocks may be examined."""
        if self._at_s is None:
            return True
        if self._left < blocks:
            self.skipped += blocks
            return False
        self._left -= blocks
        return True

    def refill(self, now_s: float) -> None:
        """Add budget for the time passed; call it several times a second with a monotonic time."""
        if self._at_s is not None:
            self._left = min(BLOCKS_BURST, self._left + BLOCKS_PER_S * max(0.0, now_s - self._at_s))
        self._at_s = now_s
