"""Calibration at engine start: choose between the copy engine and a kernel for loads of small pieces.

A copy engine has a cost per piece. A kernel has a cost per launch and takes multiprocessors from the model.
The crossover depends on the device, the link and the driver. Both are timed on scratch memory for a few piece
sizes; then, at the largest size with a gain, for a few numbers of pieces. The kernel is chosen only if it is
clearly faster.

Invariants: measuring stops at its time budget; unmeasured cases use the copy engine. A kernel that does not
copy correctly here is never used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvatlas.connectors.transfer.base import Direction, Indices
from kvatlas.connectors.transfer.cuda_driver import CudaDriver, TorchDevice
from kvatlas.connectors.transfer.host import PinnedHostPool

log = logging.getLogger(__name__)

PIECE_BYTES = (4 << 10, 8 << 10, 16 << 10, 24 << 10, 32 << 10, 64 << 10)
PIECE_COUNTS = (256, 64, 16, 4)
SCRATCH_BYTES = 16 << 20
ROUNDS = 3
# Minimum speedup of the kernel that justifies the multiprocessors it takes.
KERNEL_GAIN_MIN = 1.25
BUDGET_S = 0.8
CHECKED_PIECES = 21


@dataclass(frozen=True, slots=True)
class CalibrationPoint:
    """One comparison: ``pieces`` pieces of ``piece_bytes``, in bytes per second."""

    piece_bytes: int
    pieces: int
    dma_rate: float
    kernel_rate: float

    @property
    def kernel_wins(self) -> bool:
        return self.kernel_rate >= KERNEL_GAIN_MIN * self.dma_rate


@dataclass(frozen=True, slots=True)
class Calibration:
    """Loads of at least ``kernel_min_pieces`` pieces of at most ``kernel_max_piece_bytes`` bytes use the
    kernel.

    ``kernel_max_piece_bytes`` 0: the kernel is never used, for the reason in ``note``.
    """

    kernel_max_piece_bytes: int = 0
    kernel_min_pieces: int = 1
    points: tuple[CalibrationPoint, ...] = ()
    seconds: float = 0.0
    note: str = "not measured"

    def describe(self) -> str:
        """One line for the log."""
        if not self.kernel_max_piece_bytes:
            return f"loads by copy engine only: {self.note}"
        return (
            f"loads of {self.kernel_min_pieces} or more pieces up to {self.kernel_max_piece_bytes} bytes by "
            f"kernel, others by copy engine ({len(self.points)} measurements in {self.seconds:.2f} s)"
        )


class Probe(Protocol):
    """Copies ``pieces`` pieces of ``piece_bytes`` by one of the two methods and waits for them."""

    def __call__(self, kernel: bool, piece_bytes: int, pieces: int) -> None: ...


def calibrate(device: TorchDevice, driver: CudaDriver) -> Calibration:
    """Measure on scratch memory (16 MiB on either side, freed afterwards). If the kernel cannot
    run, the calibration has the reason. Raises DriverError, HostMemoryError."""
    # Compiling the kernel, at a machine's first start, is not part of the time budget.
    if not driver.batched:
        log.info("this CUDA driver has no batched copies (12.8 has): pieces are copied one call each")
    host = PinnedHostPool(SCRATCH_BYTES, SCRATCH_BYTES, driver=driver)
    try:
        if not driver.maps_same_address(host.address):
            return Calibration(note="kernels cannot read host memory by its address here")
        try:
            probe = _ScratchProbe(device, driver, host)
            if not probe.kernel_copies_correctly():
                log.error("the copy kernel is not used: it does not copy correctly on %s", device.name)
                return Calibration(note="the kernel does not copy correctly here")
        except (
            Exception
        ) as error:  # triton, its compiler or scratch memory may be missing: it costs only speed
            log.warning("the copy kernel is not used: it cannot be run", exc_info=True)
            return Calibration(note=f"the kernel cannot be run: {type(error).__name__}: {error}")
        return choose(probe)
    finally:
        host.close()


def choose(
    probe: Probe, *, clock: Callable[[], float] = time.perf_counter, budget_s: float = BUDGET_S
) -> Calibration:
    """Find the largest piece size, then the smallest number of pieces, up to which the kernel is faster."""
    started = clock()
    points: list[CalibrationPoint] = []

    def finish(largest: int, fewest: int, note: str) -> Calibration:
        return Calibration(largest, fewest, tuple(points), clock() - started, note)

    def kernel_wins(piece_bytes: int, pieces: int) -> bool | None:
        """Measure one case; None if no time is left."""
        if clock() - started >= budget_s:
            return None
        total = piece_bytes * pieces
        dma, kernel = (
            _best_seconds(probe, by_kernel, piece_bytes, pieces, clock) for by_kernel in (False, True)
        )
        points.append(CalibrationPoint(piece_bytes, pieces, total / dma, total / kernel))
        return points[-1].kernel_wins

    largest = 0
    for piece_bytes in PIECE_BYTES:
        if not kernel_wins(piece_bytes, min(1024, SCRATCH_BYTES // piece_bytes)):
            break
        largest = piece_bytes
    if not largest:
        return finish(0, 1, "the copy engine is as fast with the smallest pieces")
    fewest = min(1024, SCRATCH_BYTES // largest)
    for pieces in PIECE_COUNTS:
        if pieces >= fewest:
            continue
        if not kernel_wins(largest, pieces):
            break
        fewest = pieces
    return finish(largest, fewest, "")


def _best_seconds(
    probe: Probe, kernel: bool, piece_bytes: int, pieces: int, clock: Callable[[], float]
) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        before = clock()
        probe(kernel, piece_bytes, pieces)
        best = min(best, clock() - before)
    return max(best, 1e-9)


class _ScratchProbe:
    """Scattered pieces of pinned scratch memory, into scratch memory of the device."""

    def __init__(self, device: TorchDevice, driver: CudaDriver, host: PinnedHostPool) -> None:
        self._device = device
        self._driver = driver
        self._host = host
        self._target, self._kept = device.scratch(SCRATCH_BYTES)
        self._stream = device.low_priority_stream()
        # The allocator may reuse memory of work still running on the current stream.
        allocated = device.new_event()
        device.record(allocated, device.current_stream())
        device.wait(self._stream, allocated)

    def kernel_copies_correctly(self) -> bool:
        """Whether random bytes are copied correctly by every form of the kernel; compiles them all."""
        memory = np.frombuffer(self._host.row(0), np.uint8)
        half = SCRATCH_BYTES // 2
        for seed, piece_bytes in enumerate(PIECE_BYTES):
            src, dst, sizes = self._pieces(piece_bytes, CHECKED_PIECES)
            total = int(sizes.sum())
            memory[:total] = np.random.default_rng(seed).integers(0, 256, total, np.uint8)
            memory[half : half + total] = 0
            self(True, piece_bytes, CHECKED_PIECES)
            self._driver.copy(Direction.STORE, dst, src + half, sizes, self._device.raw(self._stream))
            self._device.synchronize(self._stream)
            if not np.array_equal(memory[:total], memory[half : half + total]):
                return False
        return True

    def __call__(self, kernel: bool, piece_bytes: int, pieces: int) -> None:
        src, dst, sizes = self._pieces(piece_bytes, pieces)
        kept: object = None
        if kernel:
            kept = self._device.kernel_copy(src, dst, sizes, self._stream)
        else:
            self._driver.copy(Direction.LOAD, src, dst, sizes, self._device.raw(self._stream))
        self._device.synchronize(self._stream)
        del kept

    def _pieces(self, piece_bytes: int, pieces: int) -> tuple[Indices, Indices, Indices]:
        order = np.arange(pieces, dtype=np.int64)
        # Neighbours in the list are not neighbours in memory, so that no lower layer can join them.
        shuffled = np.random.default_rng(0).permutation(order)
        sizes = np.full(pieces, piece_bytes, np.int64)
        return self._host.address + shuffled * piece_bytes, self._target + order[::-1] * piece_bytes, sizes


def without_kernel(calibration: Calibration, note: str) -> Calibration:
    """The same measurements, with the kernel ruled out."""
    return replace(calibration, kernel_max_piece_bytes=0, note=note)
