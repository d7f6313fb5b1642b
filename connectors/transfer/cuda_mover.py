"""How the pieces of one part of a job are copied: by copy engine or, for small pieces of loads, by kernel.

Stores always go by copy engine: it takes nothing from the model that is computing meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from connectors.transfer.base import Direction
from connectors.transfer.calibrate import Calibration
from connectors.transfer.cuda_device import Device, StreamHandle
from connectors.transfer.driver import Driver
from connectors.transfer.plan import Pieces

_WORD_MASK = 7


@dataclass(slots=True)
class MoveCounts:
    """Totals since the start."""

    dma_pieces: int = 0
    kernel_pieces: int = 0


class Mover:
    """Enqueues copies on a stream, by what was measured at the start."""

    def __init__(self, device: Device, driver: Driver, calibration: Calibration) -> None:
        self._device = device
        self._driver = driver
        self._calibration = calibration
        self.counts = MoveCounts()

    def move(self, direction: Direction, pieces: Pieces, stream: StreamHandle) -> object:
        """Enqueue one part; what is returned must be kept until it has run. Raises DriverError."""
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
    """Cut the pieces that reach over a boundary of registered chunks: no copy may span two of them.

    ``host_side``: which of the arrays holds host addresses, 0 (source) or 1 (destination). Chunks lie one
    after another from ``base``. Order and bytes are kept.
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
