"""The writer's table of patterns: which code stands for the planes that hold a block of one engine.

Always true: a block's code names no plane that does not hold it. Blocks held in several media form many more
patterns than blocks of the GPU alone; once half of the scope's codes are allocated, new patterns are reduced
to their GPU part, so that what connectors hold never hides what the GPU holds. Where no codes are left, a
pattern is reduced to the known part with most of the GPU's planes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from publisher.events import BlockHash
from router.index.base import Plane
from router.index.media import GPU
from router.index.store.memory import MemoryIndex
from router.replication.redis.errors import ServerError
from router.replication.schema.codec import PLANES_MAX, codes_max
from router.replication.schema.registry import Registry, Scope

Codes = npt.NDArray[np.intp]


class PatternCodes:
    """The codes that one writer knows in one epoch."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._planes: list[Plane] = []
        self._gpu = 0
        """The planes of the GPU, as bits."""
        self._known: dict[int, int] = {0: 0}
        self.without_code = 0
        """Patterns shown only in part, for want of codes."""
        self.provisional = False
        """Whether the last codes were reduced because the server had no memory for new ones."""
        self.planes_left_out = 0
        """Planes beyond ``PLANES_MAX``: not shown at all."""

    def clear(self) -> None:
        """Another epoch has other codes."""
        self._known = {0: 0}

    async def of(
        self, scope: Scope, memory: MemoryIndex, engine_id: str, hashes: Sequence[BlockHash]
    ) -> Codes:
        """The code of what this engine holds of each block now. Raises ``IndexUnavailable``."""
        self._add_planes(memory.planes(engine_id))
        bits = memory.held_in(engine_id, self._planes, hashes)
        patterns, inverse = np.unique(bits, return_inverse=True)
        wanted: list[int] = patterns.tolist()
        if 2 * max(self._known.values()) > codes_max(scope.code_bytes):
            shown = [p if p in self._known else p & self._gpu for p in wanted]
            self.without_code += sum(a != b for a, b in zip(wanted, shown, strict=True))
            wanted = shown
        known = await self._allocate(scope, [pattern for pattern in wanted if pattern not in self._known])
        return np.array([known[pattern] for pattern in wanted], np.intp)[inverse]

    async def _allocate(self, scope: Scope, new: list[int]) -> dict[int, int]:
        """The code of every known and every new pattern."""
        self.provisional = False
        if not new:
            return self._known
        try:
            codes = await self._registry.codes(scope, [self._planes_in(pattern) for pattern in new])
        except ServerError as error:
            if error.reason != "OOM":
                raise
            self.provisional = True  # removals must be written though new codes cannot
            return self._known | {pattern: self._part_of(pattern) for pattern in new}
        for pattern, code in sorted(zip(new, codes, strict=True), key=lambda pair: not pair[1]):
            self._known[pattern] = code or self._part_of(pattern)
        return self._known

    def _add_planes(self, planes: Sequence[Plane]) -> None:
        new = sorted(plane for plane in planes if plane not in self._planes)
        new.sort(key=lambda plane: plane.medium != GPU)
        room = PLANES_MAX - len(self._planes)
        self._planes += new[:room]
        self._gpu = sum(1 << number for number, plane in enumerate(self._planes) if plane.medium == GPU)
        self.planes_left_out = max(self.planes_left_out, len(new) - room)

    def _planes_in(self, pattern: int) -> list[Plane]:
        return [plane for number, plane in enumerate(self._planes) if pattern >> number & 1]

    def _part_of(self, pattern: int) -> int:
        self.without_code += 1
        parts = [known for known in self._known if known & ~pattern == 0]
        return self._known[max(parts, key=lambda part: ((part & self._gpu).bit_count(), part.bit_count()))]
