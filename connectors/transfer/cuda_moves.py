"""The copy of one part of a job: by copy engine or, for small pieces of loads, by kernel.

Stores always use the copy engine, which takes no compute from the running model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvatlas.connectors.transfer.base import (
    Direction,
    Pieces,
)
from kvatlas.connectors.transfer.calibrate import Calibration
from kvatlas.connectors.transfer.cuda_driver import CudaDriver, StreamHandle, TorchDevice

_WORD_MASK = 7


@dataclass(slots=True)
class MoveCounts:
    """Totals since the start."""

    dma_pieces: int = 0
    kernel_pieces: int = 0


class Mover:
    """Enqueue copies on a stream with the method chosen by the calibration."""

    def __init__(self, device: TorchDevice, driver: CudaDriver, calibration: Calibration) -> None:
        self._device = device
        self._driver = driver
        self._calibration = calibration
        self.counts = MoveCounts()

    def move(self, direction: Direction, pieces: Pieces, stream: StreamHandle) -> object:
        """Enqueue one part; keep the returned object until it has run. Raises DriverError."""
        src, dst, sizes = pieces
        kept: object = None
        if direction is Direction.LOAD and self._calibration.kernel_max_piece_bytes:
            small = (sizes <= self._calibration.kernel_max_piece_bytes) & (
                ((src | dst | sizes) & _WORD_MASK) == 0
            )
            by_kernel = int(np.count_nonzero(small))
            if by_kernel >= self._calibration.kernel_min_pieces:
                kept = self._device.kernel_copy(src[small], dst[small], sizes[small], stream)
                self.counts.kernel_pieces += by_kernel
                src, dst, sizes = src[~small], dst[~small], sizes[~small]
        if len(sizes):
            self._driver.copy(direction, src, dst, sizes, self._device.raw(stream))
            self.counts.dma_pieces += len(sizes)
        return kept


def cut_at_chunks(pieces: Pieces, host_side: int, base: int, chunk_bytes: int) -> Pieces:
    """Cut pieces at boundaries of registered chunks: no copy may span two chunks.

    ``host_side``: index of the array with host addresses, 0 (source) or 1 (destination). Chunks are
    consecutive from ``base`` on. The result copies the same bytes in the same order.
    """
    sizes = pieces[2]
    if not len(sizes):
        return pieces
    offsets = pieces[host_side] - base
    first = offsets // chunk_bytes
    parts = (offsets + sizes - 1) // chunk_bytes - first + 1
    if int(parts.max()) == 1:
        return pieces
    whole = np.repeat(np.arange(len(sizes)), parts)
    chunk = first[whole] + np.arange(len(whole)) - (np.cumsum(parts) - parts)[whole]
    starts = np.maximum(chunk * chunk_bytes, offsets[whole])
    ends = np.minimum((chunk + 1) * chunk_bytes, (offsets + sizes)[whole])
    inside = starts - offsets[whole]
    return pieces[0][whole] + inside, pieces[1][whole] + inside, ends - starts
