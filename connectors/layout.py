"""Where the bytes of one block lie in device memory, group by group.

A block of a group is a fixed list of *pieces* (address, size): the pages of the group's layers, neighbours
merged. A *row* is those pieces packed one after another in canonical order: regions in order, within a region
the pieces in order. Everything here is plain integers, so a view can be built by hand and used without torch.

Always holds: pieces of one block do not overlap, and block 0 (vLLM's null block) is never part of a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass


class LayoutError(Exception):
    """The KV cache is laid out in a way this version cannot copy safely; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Region:
    """Pieces of equal size at the same offsets within every block of one stretch of memory.

    Piece ``j`` of block ``b`` starts at ``base_address + b * block_stride_bytes + piece_offsets[j]``.
    """

    base_address: int
    block_stride_bytes: int
    piece_offsets: tuple[int, ...]
    piece_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes that one block of this region takes in a row."""
        return len(self.piece_offsets) * self.piece_bytes


@dataclass(frozen=True, slots=True)
class GroupPages:
    """All that one block of a group consists of. ``row_bytes``: its bytes in a row, padding left out.

    ``row_format`` says what the bytes mean, in row order (element type, inner order): two groups whose rows
    are as long but mean different things must not share rows.
    """

    group_idx: int
    regions: tuple[Region, ...]
    row_bytes: int
    row_format: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheView:
    """Every group of one rank's KV cache. ``row_bytes``: size of a host row, enough for any group."""

    groups: tuple[GroupPages, ...]
    num_blocks: int
    row_bytes: int
