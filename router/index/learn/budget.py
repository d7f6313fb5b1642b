"""How much of an engine's events is looked at to learn its hashes.

Learning takes some 3 us a block, against less than 1 us to count it (measured), so an engine whose hashes are
of no scheme that can be found would take a whole core at 200,000 blocks/s. Always true: no more than
``BLOCKS_BURST`` blocks at once and ``BLOCKS_PER_S`` a second are looked at, and each one skipped is counted.
A skipped block is counted as held like any other; only its place in prompts stays unknown.
"""

from __future__ import annotations

BLOCKS_PER_S = 8192
"""131,072 tokens/s in blocks of 16, more than an engine computes; about 3 % of a core."""
BLOCKS_BURST = 1 << 18
"""4 million tokens in blocks of 16, more than an engine holds: a replay's history is learned."""


class LearningBudget:
    """Of one engine, over its restarts. Without a clock (``refill`` is never called) nothing is skipped."""

    def __init__(self) -> None:
        self.skipped = 0
        """Blocks not looked at."""
        self._left = float(BLOCKS_BURST)
        self._at_s: float | None = None

    def take(self, blocks: int) -> bool:
        """Whether an event of so many blocks may be looked at."""
        if self._at_s is None:
            return True
        if self._left < blocks:
            self.skipped += blocks
            return False
        self._left -= blocks
        return True

    def refill(self, now_s: float) -> None:
        """Time has passed; call it several times a second. Monotonic clock."""
        if self._at_s is not None:
            self._left = min(BLOCKS_BURST, self._left + BLOCKS_PER_S * max(0.0, now_s - self._at_s))
        self._at_s = now_s
