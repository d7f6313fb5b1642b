"""Keeps the GPU blocks that stores read from being given to other requests, by the engine's own ref counts.

A pinned block may lose its request; it returns to the pool with its last pin. What always holds: every pin is
taken back exactly once, and no more than ``blocks_max`` different blocks are pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


class SourcePins:
    """Pins on the blocks of one engine's pool. ``bind`` comes before anything else."""

    def __init__(self, share_max: float) -> None:
        """``share_max``: part of the pool (0 to 1) that may be pinned; at least one block may."""
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
        """Different blocks that are pinned now."""
        return len(self._pins)

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self.blocks_max - len(self._pins)

    def pin(self, block_ids: Sequence[int]) -> None:
        """Hold these blocks, which now belong to a request or to the prefix cache."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self._pins.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give back one pin on each. RuntimeError: there is none."""
        for block_id in block_ids:
            if self._pins[block_id] < 1:
                raise RuntimeError(f"block {block_id} is given back without being pinned")
            self._pins[block_id] -= 1
            if not self._pins[block_id]:
                del self._pins[block_id]
        # The tail first: the pool reuses in this order, and a prefix outlives what builds on it.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def frees_on_completion(self) -> bool:
        """Some pinned block has no other holder: the pool grows when its store ends."""
        return any(self._pool.blocks[block_id].ref_cnt <= pins for block_id, pins in self._pins.items())
