"""Memory layout of blocks on the device, per group.

A block of a group is a fixed list of *pieces* (address, size): the pages of the group's layers, neighbours
merged. A *row* is those pieces packed consecutively in canonical order: regions in order, within a region the
pieces in order. Everything here is plain integers, so a view can be built by hand and used without torch.
``view_of_tensors`` derives it from the tensors that vLLM registers.

Invariants: no two pieces of one group share a byte, for any two blocks. Block 0 (vLLM's null block) is never
part of a transfer. Different groups may overlay each other: a block belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

ROW_ALIGNMENT_BYTES = 64
# Most pieces of one block of one group; with more, copies would be too slow.
PIECES_PER_BLOCK_MAX = 65_536


class LayoutError(Exception):
    """The KV cache has a layout that this version cannot copy safely; the message has layout and reason."""


@dataclass(frozen=True, slots=True)
class Region:
    """Pieces of equal size at the same offsets from every block's start.

    Piece ``j`` of block ``b`` starts at ``base_address + b * block_stride_bytes + piece_offsets[j]``. Offsets
    may exceed the stride: if layers or heads are the outer dimensions, a block's pieces are far apart.
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
    """The pieces of one block of a group. ``row_bytes``: its bytes in a row, without large padding.

    ``row_format`` describes the bytes in row order (layer, element type, inner order): rows of two caches are
    interchangeable only if it is equal. Empty for views built by hand.
    """

    group_idx: int
    regions: tuple[Region, ...]
    row_bytes: int
    row_format: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheView:
    """Every group of one rank's KV cache that may be transferred.

    ``num_blocks`` counts the null block. ``row_bytes``: size of a host row, enough for any group.
    """

    groups: tuple[GroupPages, ...]
    num_blocks: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range in block 0, repeated every ``block_stride_bytes`` for the following blocks."""

    address: int
    block_stride_bytes: int
    size_bytes: int


def strided_pieces(
    address: int, block_stride_bytes: int, dims: Iterable[tuple[int, int]], element_bytes: int
) -> list[Piece]:
    """The contiguous ranges of one block of a strided array, by ascending address.

    ``dims``: (size, stride in bytes) of every dimension within the block, in any order. LayoutError: elements
    of the block share bytes.
    """
    run = element_bytes
    outer: list[tuple[int, int]] = []
    for size, stride in sorted((d for d in dims if d[0] != 1), key=lambda d: d[1]):
        reach = outer[-1][0] * outer[-1][1] if outer else run
        if stride < reach or not size:
            raise LayoutError(
                f"a dimension of {size} x {stride} bytes overlaps what lies within it ({reach})"
            )
        if outer or stride != run:
            outer.append((size, stride))
        else:
            run *= size
    count = 1
    for size, _ in outer:
        count *= size
    if count > PIECES_PER_BLOCK_MAX:
        raise LayoutError(
            f"one block is scattered over {count} pieces, at most {PIECES_PER_BLOCK_MAX} are copied"
        )
    places = product(*([i * stride for i in range(size)] for size, stride in reversed(outer)))
    return [Piece(address + sum(place), block_stride_bytes, run) for place in places]


def group_pages(
    group_idx: int, pieces: Sequence[Piece], num_blocks: int, row_format: tuple[str, ...] = ()
) -> GroupPages:
    """Merge neighbours and gather equal pieces into regions; ``pieces`` in row order.

    LayoutError: pieces overlap, within a block or between blocks.
    """
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.block_stride_bytes == piece.block_stride_bytes
            and last.address + last.size_bytes == piece.address
            and last.size_bytes + piece.size_bytes <= piece.block_stride_bytes
        ):
            merged[-1] = Piece(last.address, last.block_stride_bytes, last.size_bytes + piece.size_bytes)
        else:
            merged.append(piece)
    if len(merged) > PIECES_PER_BLOCK_MAX:
        raise LayoutError(
            f"group {group_idx}: one block is scattered over {len(merged)} pieces, "
            f"at most {PIECES_PER_BLOCK_MAX} are copied"
        )
    _check_disjoint(group_idx, merged, num_blocks)
    row_bytes = sum(piece.size_bytes for piece in merged)
    return GroupPages(group_idx, _regions(merged), row_bytes, row_format)


def _regions(pieces: Sequence[Piece]) -> tuple[Region, ...]:
    runs: list[list[Piece]] = []
    for piece in pieces:
        first = runs[-1][0] if runs else None
        if first is not None and (first.block_stride_bytes, first.size_bytes) == (
            piece.block_stride_bytes,
            piece.size_bytes,
        ):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return tuple(
        Region(
            run[0].address,
            run[0].block_stride_bytes,
            tuple(piece.address - run[0].address for piece in run),
            run[0].size_bytes,
        )
        for run in runs
    )


def _check_disjoint(group_idx: int, pieces: Sequence[Piece], num_blocks: int) -> None:
    """Pieces whose ranges over all blocks overlap must interleave: same stride, disjoint within it."""
    cluster: list[Piece] = []
    end = 0
    for piece in sorted(pieces, key=lambda p: p.address):
        if piece.size_bytes < 1 or piece.size_bytes > piece.block_stride_bytes:
            raise LayoutError(
                f"group {group_idx}: a piece of {piece.size_bytes} bytes recurs every "
                f"{piece.block_stride_bytes} bytes, so blocks overlap"
            )
        if piece.address >= end:
            _check_interleaved(group_idx, cluster)
            cluster = []
        cluster.append(piece)
        end = max(end, piece.address + (num_blocks - 1) * piece.block_stride_bytes + piece.size_bytes)
    _check_interleaved(group_idx, cluster)


def _check_interleaved(group_idx: int, cluster: Sequence[Piece]) -> None:
    if len(cluster) < 2:
        return
    stride = cluster[0].block_stride_bytes
    if any(piece.block_stride_bytes != stride for piece in cluster):
        raise LayoutError(f"group {group_idx}: layers with different block strides lie across each other")
    start = cluster[0].address
    phases = sorted(((p.address - start) % stride, p.size_bytes) for p in cluster)
    for (phase, size), (following, _) in zip(phases, [*phases[1:], (stride, 0)], strict=True):
        if phase + size > following:
            raise LayoutError(f"group {group_idx}: layers overlap at byte {following} of every {stride}")


def round_up_row(size_bytes: int) -> int:
    """Size of a host row for this many bytes."""
    return max(-(-size_bytes // ROW_ALIGNMENT_BYTES), 1) * ROW_ALIGNMENT_BYTES


def row_bytes_from_config(kv_cache_config: Any) -> int:
    """Size of a host row in bytes, from vLLM's KVCacheConfig alone: equal in scheduler and worker.

    LayoutError if nothing is cached or sizes contradict each other.
    """
    # A block of the pool is as large as the largest group's block, and every allocation has its total size.
    # Group specs are not sufficient: for a group with different layers, the scheduler's copy of the
    # configuration keeps one layer's spec.
    sizes = {t.size for t in kv_cache_config.kv_cache_tensors if not t.host_resident}
    if not sizes:
        raise LayoutError("this model caches nothing: there are no KV cache tensors to transfer")
    if len(sizes) > 1:
        raise LayoutError(
            f"KV cache tensors of several allocations ({sorted(sizes)} bytes) are not supported"
        )
    return round_up_row(-(-sizes.pop() // kv_cache_config.num_blocks))
