"""Tables of groups that give blocks back while a request runs: sliding window and chunked local attention.

Facts: ``SlidingWindowManager`` and ``ChunkedLocalAttentionManager`` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from publisher.groups import GroupSpec
from publisher.pool.hits import window_blocks
from publisher.pool.tables import GroupTable, PoolParts


class WindowTable(GroupTable):
    """Sliding window: blocks behind it are given back; stored is what a hit at a kept boundary needs."""

    def __init__(self, spec: GroupSpec, parts: PoolParts) -> None:
        self.window = spec.sliding_window or 1
        super().__init__(spec, parts)
        self.shift = int(spec.group_idx in parts.layout.eagle)
        self.need = window_blocks(spec) + self.shift

    def admission_cap(self, chunk_tokens_max: int) -> int | None:
        return -(-(self.window - 1 + chunk_tokens_max) // self.block_size) + 1

    def skipped_tokens(self, num_computed: int) -> int:
        return num_computed - self.window + 1

    def quiet_to(self, before: int, now: int) -> int:
        dropped = max(self.skipped_tokens(before), 0) // self.block_size
        return min(super().quiet_to(before, now), (dropped + 1) * self.block_size + self.window - 1)

    def kept_blocks(self, start: int, end: int, boundaries: Sequence[int]) -> Iterable[int] | None:
        alignment, retention, shift = self.layout.alignment, self.layout.retention, self.shift
        kept: set[int] = set()
        if retention != 0:
            per = (alignment if retention is None else retention) // self.block_size
            if self.need >= per:
                return None
            tail = per - self.need
            kept.update(b for b in range(max(start, shift), end) if (b - shift) % per >= tail)
        if retention is not None:
            for boundary in boundaries:
                last = boundary // alignment * alignment // self.block_size + shift
                kept.update(range(max(start, last - self.need), min(end, last)))
        return sorted(kept)


class ChunkedTable(GroupTable):
    """Chunked local attention: whole chunks behind the current one are given back."""

    def __init__(self, spec: GroupSpec, parts: PoolParts) -> None:
        self.chunk = spec.attention_chunk_size or spec.block_size
        super().__init__(spec, parts)

    def admission_cap(self, chunk_tokens_max: int) -> int | None:
        return -(-(self.chunk + chunk_tokens_max) // self.block_size)

    def skipped_tokens(self, num_computed: int) -> int:
        return num_computed // self.chunk * self.chunk

    def quiet_to(self, before: int, now: int) -> int:
        return min(super().quiet_to(before, now), (before // self.chunk + 1) * self.chunk)
