"""Pins protect the GPU blocks that stores read from reuse, through the engine's reference counts.

The request of a pinned block may end; the block returns to the pool with its last pin. Invariants: every
pin is released exactly once, and at most ``blocks_max`` different blocks are pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


class SourcePins:
    """Pins on the blocks of one engine's pool. Call ``bind`` first."""

    def __init__(self, share_max: float) -> None:
        """``share_max``: largest share of the pool (0 to 1) that may be pinned; at least one block may."""
        self._share_max = share_max
        self._pool: Any = None
        self._pins: Counter[int] = Counter()
        self.blocks_max = 0

    def bind(self, pool: Any) -> None:
        """Use vLLM's ``BlockPool``."""
        self._pool = pool
        self.blocks_max = max(1, int(pool.num_gpu_blocks * self._share_max))

    @property
    def bound(self) -> bool:
        return self._pool is not None

    @property
    def count(self) -> int:
        """Number of different blocks pinned now."""
        return len(self._pins)

    @property
    def room(self) -> int:
        """Number of further blocks that may be pinned."""
        return self.blocks_max - len(self._pins)

    def pin(self, block_ids: Sequence[int]) -> None:
        """Pin these blocks, which belong to a request or to the prefix cache."""
        # The engine's own reference count: vLLM then neither reuses nor counts the block as free.
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self._pins.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Release one pin on each. RuntimeError for a block without a pin."""
        for block_id in block_ids:
            if self._pins[block_id] < 1:
                raise RuntimeError(f"cannot unpin block {block_id}: it is not pinned")
            self._pins[block_id] -= 1
            if not self._pins[block_id]:
                del self._pins[block_id]
        # The tail first: the pool reuses blocks in this order, and a prefix must outlive its extensions.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def frees_on_completion(self) -> bool:
        """Whether some pinned block has no other user, so that the end of its store frees it."""
        # Only then is it worth waiting for the store instead of preempting.
        return any(self._pool.blocks[block_id].ref_cnt <= pins for block_id, pins in self._pins.items())
