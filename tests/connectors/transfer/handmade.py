"""KV caches made by hand, without torch or vLLM: the same byte arrangements that vLLM's layouts give.

Strides are computed here from the meaning of the layout letters, on their own, so that tests can compare what
an engine moved with what a layer's logical array [block, head, state, byte] held.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvatlas.connectors.layout import CacheView, GroupPages, Piece, group_pages, round_up_row, strided_pieces

Bytes = npt.NDArray[np.uint8]

LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC"]


@dataclass(frozen=True)
class Layer:
    """One layer's page: heads x states x bytes, padded to ``page_bytes`` (0: no padding)."""

    heads: int
    states: int
    content_bytes: int
    padded_bytes: int = 0

    @property
    def page_bytes(self) -> int:
        return max(self.heads * self.states * self.content_bytes, self.padded_bytes)


ATTENTION = Layer(heads=2, states=4, content_bytes=24)
MAMBA = Layer(heads=1, states=1, content_bytes=170, padded_bytes=192)
LATENT = Layer(heads=1, states=8, content_bytes=36)
LATENT_WINDOW = Layer(heads=1, states=4, content_bytes=36, padded_bytes=160)
INDEXER = Layer(heads=1, states=8, content_bytes=12, padded_bytes=128)

UNIFORM = {
    "one full group": ((ATTENTION,) * 3,),
    "sliding windows and one full group": ((ATTENTION,) * 2, (ATTENTION,) * 2, (ATTENTION,) * 3),
}
"""Shapes that every layout can express."""

PADDED = {"mamba and full": ((ATTENTION,) * 2, (MAMBA,) * 2)}
"""Padded pages need the layout to keep a page together."""

MIXED = {
    "latent, indexer and window packed": ((LATENT, INDEXER, LATENT, INDEXER), (LATENT_WINDOW,) * 3),
    "mixed page sizes": ((ATTENTION, Layer(2, 4, 56)), (Layer(4, 4, 24),)),
}
"""Mixed page sizes over several groups need the block outermost."""

CASES = (
    [(layout, name) for layout in LAYOUTS for name in UNIFORM]
    + [(layout, name) for layout in LAYOUTS if layout != "LHBNC" for name in PADDED]
    + [(layout, name) for layout in LAYOUTS if layout.startswith("B") for name in MIXED]
)
SHAPES = {**UNIFORM, **PADDED, **MIXED}


@dataclass(frozen=True)
class Placed:
    """A layer in the allocation: byte offset of block 0, and strides of block, head and state."""

    layer: Layer
    offset: int
    strides: tuple[int, int, int]

    def array(self, memory: Bytes, num_blocks: int) -> Bytes:
        """The layer's logical array over ``memory``: [block, head, state, byte]."""
        shape = (num_blocks, self.layer.heads, self.layer.states, self.layer.content_bytes)
        return np.lib.stride_tricks.as_strided(memory[self.offset :], shape, (*self.strides, 1))


class HandmadeCache:
    """Where every layer of every group lies, for one layout."""

    def __init__(self, layout: str, groups: tuple[tuple[Layer, ...], ...], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = max(sum(layer.page_bytes for layer in group) for group in groups)
        self.size_bytes = self.block_bytes * num_blocks
        self.groups = [self._place(layout, group) for group in groups]

    def _place(self, layout: str, group: tuple[Layer, ...]) -> list[Placed]:
        placed = []
        offset = 0
        for layer in group:
            heads_first = layout[-3:] == "HNC" or layout == "LHBNC"
            head = layer.states * layer.content_bytes if heads_first else layer.content_bytes
            state = layer.content_bytes if heads_first else layer.heads * layer.content_bytes
            if layout == "LHBNC":
                placed.append(Placed(layer, offset, (head, head * self.num_blocks, state)))
            else:
                block = self.block_bytes if layout.startswith("B") else layer.page_bytes
                placed.append(Placed(layer, offset, (block, head, state)))
            offset += layer.page_bytes * (1 if layout.startswith("B") else self.num_blocks)
        return placed

    def view(self, base_address: int) -> CacheView:
        """The canonical view of this cache at an address."""
        groups = tuple(self._pages(index, group, base_address) for index, group in enumerate(self.groups))
        return CacheView(groups, self.num_blocks, round_up_row(self.block_bytes))

    def _pages(self, index: int, group: list[Placed], base_address: int) -> GroupPages:
        pieces: list[Piece] = []
        for placed in group:
            block, head, state = placed.strides
            dims = [(placed.layer.heads, head), (placed.layer.states, state), (placed.layer.content_bytes, 1)]
            pieces += strided_pieces(base_address + placed.offset, block, dims, 1)
        return group_pages(index, pieces, self.num_blocks)

    def blocks(self, memory: Bytes, group_idx: int, block_ids: npt.NDArray[np.int64]) -> list[Bytes]:
        """Copies of what these blocks hold, layer by layer."""
        return [p.array(memory, self.num_blocks)[block_ids].copy() for p in self.groups[group_idx]]

    def fill(self, memory: Bytes, group_idx: int, block_ids: npt.NDArray[np.int64], value: int) -> None:
        """Overwrite every byte of these blocks' pages (padding excepted)."""
        for placed in self.groups[group_idx]:
            placed.array(memory, self.num_blocks)[block_ids] = value
