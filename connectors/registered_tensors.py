"""Derivation of the layout from the tensors that vLLM registers.

vLLM 0.32 gives every layer a view ``[blocks, heads, states, bytes]`` into one allocation, for every order
in memory (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC). So the strides are sufficient: dimension 0 is the
block, all others are within it. Groups overlay each other in that allocation; the pages of a group come
from its own layers only. Mamba layers may be one tensor of bytes or a list of state tensors.

Invariants: row order is address order within a block, equal for layouts with layers outermost and with
blocks outermost. Other layouts raise LayoutError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvatlas.connectors.layout import (
    CacheView,
    GroupPages,
    LayoutError,
    Piece,
    group_pages,
    round_up_row,
    row_bytes_from_config,
    strided_pieces,
)

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
