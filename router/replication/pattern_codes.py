"""The writer's table of patterns: the code of each set of planes that hold a block of one engine. A block's
code names no plane that does not hold it. Blocks held in several media form many more patterns than blocks
of the GPU alone; once half of the scope's codes are allocated, new patterns are reduced to their GPU part,
so that offloaded blocks never hide GPU blocks. Without free codes, a pattern is reduced to the known subset
with most GPU planes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Plane
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.places import GPU
from kvatlas.router.replication.codec import PLANES_MAX, codes_max
from kvatlas.router.replication.redis_connection import ServerError
from kvatlas.router.replication.registry import Registry, Scope

Codes = npt.NDArray[np.intp]


class PatternCodes:
    """Codes that one writer knows in one epoch."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._planes: list[Plane] = []
        # Bit set of the GPU planes.
        self._gpu = 0
        self._known: dict[int, int] = {0: 0}
        # Patterns written only in part, because no code was free.
        self.without_code = 0
        # Whether the last codes were reduced because the server had no memory for new ones.
        self.provisional = False
        # Planes beyond ``PLANES_MAX``: not shown at all.
        self.planes_left_out = 0

    def clear(self) -> None:
        """Forget all codes: another epoch has different ones."""
        self._known = {0: 0}

    async def codes_of(
        self, scope: Scope, memory: MemoryIndex, engine_id: str, hashes: Sequence[BlockHash]
    ) -> Codes:
        """Return the code of the planes in which this engine holds each block now.

        Raises ``IndexUnavailable``.
        """
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
        """Return the code of every known and every new pattern."""
        self.provisional = False
        if not new:
            return self._known
        try:
            codes = await self._registry.codes(scope, [self._planes_in(pattern) for pattern in new])
        except ServerError as error:
            if error.reason != "OOM":
                raise
            # Removals must be written although new codes cannot.
            self.provisional = True
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
