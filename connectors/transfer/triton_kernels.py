"""A kernel that copies many small pieces between addresses, for loads whose pieces are too small for DMA.

Below about ten KiB per piece a copy engine spends most of its time on starting pieces. A kernel that reads
mapped host memory keeps enough reads in flight to fill the link. It occupies multiprocessors, so few programs
run, each moving a tile of several pieces at once. Addresses are plain integers, so one launch serves any
number of tensors.

With TRITON_INTERPRET=1 in the environment the same code runs on the CPU, for tests. Importing this module
imports torch and triton, and touches no device.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvatlas.connectors.transfer.base import Indices

WORD_BYTES = 8
# Programs per launch: enough to fill a PCIe link, few enough to leave most of the device to the model.
PROGRAMS_MAX = 12
# Minimum capacity of a launch's descriptor buffer.
DESCRIPTORS_MIN = 1024
# (longest piece in words, pieces in a tile, words in a tile): 32 KiB in flight in every program, so that 12
# programs cover a PCIe link's latency. Few shapes, so that all are compiled before the first load.
_TILES = ((1024, 8, 512), (2048, 2, 2048), (None, 1, 4096))


# Triton reads the signature when it compiles; its constexpr is the only annotation that it supports.
@triton.jit(do_not_specialize=["count", "words_max"])  # type: ignore[untyped-decorator,unused-ignore]
def _move_kernel(  # type: ignore[no-untyped-def]
    descriptors, count, words_max, pieces_in_tile: tl.constexpr, words_in_tile: tl.constexpr
):
    """``descriptors``: int64 [3, count] = source addresses, target addresses, words."""
    programs = tl.num_programs(0)
    columns = tl.arange(0, words_in_tile)
    for first in range(tl.program_id(0) * pieces_in_tile, count, programs * pieces_in_tile):
        rows = first + tl.arange(0, pieces_in_tile)
        live = rows < count
        source = tl.load(descriptors + rows, mask=live, other=0).to(tl.pointer_type(tl.int64))
        target = tl.load(descriptors + count + rows, mask=live, other=0).to(tl.pointer_type(tl.int64))
        words = tl.load(descriptors + 2 * count + rows, mask=live, other=0)
        for start in range(0, words_max, words_in_tile):
            offsets = start + columns
            inside = live[:, None] & (offsets[None, :] < words[:, None])
            value = tl.load(source[:, None] + offsets[None, :], mask=inside)
            tl.store(target[:, None] + offsets[None, :], value, mask=inside)


def fits_kernel(src: Indices, dst: Indices, sizes: Indices) -> bool:
    """Whether every address and size is a multiple of a word."""
    return not bool(((src | dst | sizes) & (WORD_BYTES - 1)).any())


class DescriptorPool:
    """Reusable buffers for the descriptors of launches, in pinned host memory and on the device.

    Allocating pinned memory for each launch costs more than filling it. ``take`` returns a buffer that goes
    back to the pool when its last reference is dropped; the caller keeps it until the kernel has run.
    Thread-safe.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._free: dict[int, deque[tuple[Any, Any]]] = {}
        self.made = 0

    def take(self, count: int) -> DescriptorLoan:
        """Take a buffer for ``count`` descriptors."""
        capacity = max(DESCRIPTORS_MIN, 1 << (count - 1).bit_length())
        free = self._free.setdefault(capacity, deque())
        try:
            memory = free.pop()
        except IndexError:
            self.made += 1
            host = torch.empty(3 * capacity, dtype=torch.int64)
            if self._device.type == "cuda":
                host = host.pin_memory()
            memory = host, torch.empty(3 * capacity, dtype=torch.int64, device=self._device)
        return DescriptorLoan(memory, free)


class DescriptorLoan:
    """Memory for one launch's descriptors."""

    def __init__(self, memory: tuple[Any, Any], free: deque[tuple[Any, Any]]) -> None:
        self._memory, self._free = memory, free

    def fill(self, src: Indices, dst: Indices, sizes: Indices) -> Any:
        """Write the descriptors and enqueue their copy to the device; returns the device tensor."""
        host, on_device = self._memory
        count = len(src)
        rows = host.numpy()[: 3 * count].reshape(3, count)
        rows[0], rows[1] = src, dst
        np.floor_divide(sizes, WORD_BYTES, out=rows[2])
        on_device[: 3 * count].copy_(host[: 3 * count], non_blocking=True)
        return on_device

    def __del__(self) -> None:
        self._free.append(self._memory)


def move_pieces(
    src: Indices,
    dst: Indices,
    sizes: Indices,
    *,
    device: Any,
    pool: DescriptorPool | None = None,
    programs_max: int = PROGRAMS_MAX,
) -> object:
    """Copy ``sizes[i]`` bytes from ``src[i]`` to ``dst[i]`` on the current stream of ``device``.

    Returns an object to keep until the kernel has run. Raises ValueError unless ``fits_kernel``.
    """
    if not fits_kernel(src, dst, sizes):
        msg = f"addresses and sizes must be multiples of {WORD_BYTES} bytes"
        raise ValueError(msg)
    count = len(src)
    if count == 0:
        return None
    # The caller keeps it until the kernel has run: the copy to the device is asynchronous too.
    loan = (pool or DescriptorPool(device)).take(count)
    descriptors = loan.fill(src, dst, sizes)
    words_max = int(sizes.max()) // WORD_BYTES
    pieces_in_tile, words_in_tile = next(
        (pieces, words) for longest, pieces, words in _TILES if longest is None or words_max <= longest
    )
    programs = min(programs_max, triton.cdiv(count, pieces_in_tile))
    _move_kernel[(programs,)](
        descriptors,
        count,
        words_max,
        pieces_in_tile=pieces_in_tile,
        words_in_tile=words_in_tile,
        num_warps=16,
    )
    return loan
