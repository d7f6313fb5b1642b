"""Memory layout of blocks on the device, per group.

A block of a group is a fixed list of *pieces* (address, size): the pages of the group's layers, neighbours
merged. A *row* is those pieces packed consecutively in canonical order: regions in order, within a region the
pieces in order. Everything here is plain integers, so a view can be built by hand and used without torch.
``view_of_tensors`` derives it from the tensors that vLLM registers.

Invariants: no two pieces of one group share a byte, for any two blocks. Block 0 (vLLM's null block) is never
part of a transfer. Different groups may overlay each other: a block belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


# Derivation of the layout from the tensors that vLLM registers.
#
# vLLM 0.32 gives every layer a view ``[blocks, heads, states, bytes]`` into one allocation, for every order
# in memory (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC). So the strides are sufficient: dimension 0 is the
# block, all others are within it. Groups overlay each other in that allocation; the pages of a group come
# from its own layers only. Mamba layers may be one tensor of bytes or a list of state tensors.
#
# Invariants: row order is address order within a block, equal for layouts with layers outermost and with
# blocks outermost. Other layouts raise LayoutError.


BRIDGED_PADDING_BYTES_MAX = 4096
# Padding of up to an eighth of the preceding piece is copied too: cheaper than one more piece.
BRIDGED_PADDING_SHARE = 8


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of a layer: its pieces in address order, and their format."""

    storage: int
    pieces: tuple[Piece, ...]
    content: str


def view_of_tensors(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> CacheView:
    """View of the groups that are cached by hash.

    ``kv_caches`` as vLLM registers them: layer name -> tensor, or list of state tensors. LayoutError if a
    layer is missing, or has a layout that cannot be copied safely.
    """
    if kv_cache_config.hisparse_host_num_blocks is not None or any(
        group.host_resident for group in kv_cache_config.kv_cache_groups
    ):
        raise LayoutError("HiSparse keeps KV in host blocks of its own: switch it off to use this connector")
    num_blocks = kv_cache_config.num_blocks
    groups = tuple(
        _group(group_idx, kv_cache_config.kv_cache_groups[group_idx].layer_names, kv_caches, num_blocks)
        for group_idx in kv_cache_config.prefix_cacheable_group_ids
    )
    row_bytes = row_bytes_from_config(kv_cache_config)
    for group in groups:
        if round_up_row(group.row_bytes) > row_bytes:
            raise LayoutError(
                f"group {group.group_idx}: a block takes {group.row_bytes} bytes, the configuration allows "
                f"{row_bytes}: its tensors are not the ones that were registered"
            )
    return CacheView(groups, num_blocks, row_bytes)


def _group(group_idx: int, layers: list[str], kv_caches: Mapping[str, Any], num_blocks: int) -> GroupPages:
    storages: dict[int, int] = {}
    parts: dict[tuple[Piece, ...], _Part] = {}
    for layer in layers:
        if layer not in kv_caches:
            raise LayoutError(f"group {group_idx}: no tensor was registered for layer {layer!r}")
        registered = kv_caches[layer]
        tensors = registered if isinstance(registered, list | tuple) else [registered]
        for number, tensor in enumerate(tensors):
            storage = storages.setdefault(tensor.untyped_storage().data_ptr(), len(storages))
            part = _part(f"{layer}/{number}" if len(tensors) > 1 else layer, storage, tensor, num_blocks)
            # A layer that shares another layer's cache has the same bytes.
            parts.setdefault(part.pieces, part)
    ordered = [(part, place) for part in parts.values() for place in range(len(part.pieces))]
    ordered.sort(key=lambda entry: (entry[0].storage, entry[0].pieces[entry[1]].address))
    bridged = _bridge_padding(ordered)
    pieces = [part.pieces[place] for part, place in bridged]
    return group_pages(group_idx, pieces, num_blocks, _row_format(bridged))


def _bridge_padding(ordered: list[tuple[_Part, int]]) -> list[tuple[_Part, int]]:
    """Add small gaps between pieces as pieces, so that all merge into one."""
    # Only if a block is one window of its stride: then the gaps belong to the block and are never read.
    pieces = [part.pieces[place] for part, place in ordered]
    strides = {(part.storage, part.pieces[place].block_stride_bytes) for part, place in ordered}
    if len(strides) != 1:
        return ordered
    stride = pieces[0].block_stride_bytes
    if pieces[-1].address + pieces[-1].size_bytes - pieces[0].address > stride:
        return ordered
    bridged = ordered[:1]
    for before, piece, entry in zip(pieces[:-1], pieces[1:], ordered[1:], strict=True):
        end = before.address + before.size_bytes
        gap = piece.address - end
        if 0 < gap <= min(BRIDGED_PADDING_BYTES_MAX, before.size_bytes // BRIDGED_PADDING_SHARE):
            bridged.append((_Part(entry[0].storage, (Piece(end, stride, gap),), f"padding:{gap}"), 0))
        bridged.append(entry)
    return bridged


def _part(layer: str, storage: int, tensor: Any, num_blocks: int) -> _Part:
    if tensor.dim() < 1 or tensor.shape[0] % num_blocks or not tensor.numel():
        raise LayoutError(
            f"layer {layer!r}: shape {tuple(tensor.shape)} does not hold {num_blocks} blocks in dimension 0"
        )
    element_bytes = tensor.element_size()
    # Kernels may see a block as several smaller ones, a constant stride apart.
    kernel_blocks = tensor.shape[0] // num_blocks
    kernel_stride = tensor.stride(0) * element_bytes
    dims = [(kernel_blocks, kernel_stride, "K")] + [
        (size, stride * element_bytes, name)
        for size, stride, name in zip(
            tensor.shape[1:], tensor.stride()[1:], _names(tensor.dim()), strict=True
        )
    ]
    try:
        pieces = strided_pieces(
            tensor.data_ptr(), kernel_blocks * kernel_stride, [d[:2] for d in dims], element_bytes
        )
    except LayoutError as error:
        raise LayoutError(f"layer {layer!r}: {error}") from None
    inner = "".join(f"{name}{size}" for size, _, name in sorted(dims, key=lambda d: -d[1]) if size > 1)
    return _Part(storage, tuple(pieces), f"{layer}:{str(tensor.dtype).removeprefix('torch.')}:{inner}")


def _names(dimensions: int) -> list[str]:
    """Names of the dimensions within a block: vLLM's letters for vLLM's shape, else numbers."""
    return ["H", "N", "C"] if dimensions == 4 else [f"d{i}_" for i in range(1, dimensions)]


def _row_format(ordered: list[tuple[_Part, int]]) -> tuple[str, ...]:
    """One entry per layer if its bytes are contiguous and in order, else one per piece."""
    lines: list[str] = []
    at = 0
    while at < len(ordered):
        part, place = ordered[at]
        count = len(part.pieces)
        if place == 0 and ordered[at : at + count] == [(part, i) for i in range(count)]:
            lines.append(part.content)
            at += count
        else:
            lines.append(f"{part.content}[{place}/{count}]")
            at += 1
    return tuple(lines)
