"""When loads go by kernel: with made-up speeds and a clock that only copies move."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvatlas.connectors.transfer.base import Indices
from kvatlas.connectors.transfer.calibrate import PIECE_BYTES, Calibration, calibrate, choose
from tests.connectors.transfer.cuda.fakes import FakeDevice, FakeDriver

Seconds = Callable[[int, int], float]


class Machine:
    """A probe and its clock: a copy takes what the formula says."""

    def __init__(self, dma: Seconds, kernel: Seconds) -> None:
        self._ways = {False: dma, True: kernel}
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def __call__(self, kernel: bool, piece_bytes: int, pieces: int) -> None:
        self.now += self._ways[kernel](piece_bytes, pieces)


def dma(piece_bytes: int, pieces: int) -> float:
    """A copy engine: 1 us per piece, 50 GB/s."""
    return pieces * max(1e-6, piece_bytes / 50e9)


def kernel(piece_bytes: int, pieces: int) -> float:
    """A kernel: 20 us per launch, 40 GB/s."""
    return 20e-6 + pieces * piece_bytes / 40e9


def test_the_kernel_is_chosen_up_to_where_it_stops_being_clearly_faster() -> None:
    machine = Machine(dma, kernel)
    found = choose(machine, clock=machine.clock)
    assert found.kernel_max_piece_bytes == 24 << 10
    assert found.kernel_min_pieces == 256
    assert found.seconds == machine.now
    assert [point.piece_bytes for point in found.points[:5]] == list(PIECE_BYTES[:5])
    assert found.points[0].dma_rate == pytest.approx(4096 / 1e-6)
    assert "24576 bytes by kernel" in found.describe()


def test_a_cheap_launch_serves_few_pieces() -> None:
    machine = Machine(dma, lambda size, pieces: pieces * size / 45e9 + 1e-7)
    assert choose(machine, clock=machine.clock).kernel_min_pieces == 4


def test_a_kernel_that_is_no_faster_is_never_used() -> None:
    machine = Machine(dma, dma)
    found = choose(machine, clock=machine.clock)
    assert found.kernel_max_piece_bytes == 0
    assert "as fast" in found.describe()


def test_measuring_stops_at_its_time() -> None:
    machine = Machine(lambda size, pieces: 0.1, lambda size, pieces: 0.01)
    found = choose(machine, clock=machine.clock, budget_s=0.5)
    # A comparison takes 0.33 s here: two are made, and of what comes after nothing is assumed.
    assert len(found.points) == 2
    assert found.kernel_max_piece_bytes == PIECE_BYTES[1]
    assert found.kernel_min_pieces == 1024


def test_measuring_on_a_device_takes_scratch_memory_and_gives_it_back() -> None:
    device = FakeDevice()
    driver = FakeDriver(device)
    found = calibrate(device, driver)
    assert found.points
    assert driver.registered == {}
    assert device.violations == []


def test_without_mapped_host_memory_there_is_no_kernel() -> None:
    device = FakeDevice()
    found = calibrate(device, FakeDriver(device, mapped=False))
    assert (found.kernel_max_piece_bytes, found.points) == (0, ())
    assert "by its address" in found.note


@pytest.mark.parametrize("failing", ["kernel_copy", "scratch"])
def test_a_kernel_that_cannot_be_run_or_tried_costs_only_speed(failing: str) -> None:
    device = FakeDevice()
    device.failing.add(failing)
    driver = FakeDriver(device)
    found = calibrate(device, driver)
    assert found.kernel_max_piece_bytes == 0
    assert "cannot be run: RuntimeError" in found.note
    assert driver.registered == {}


def test_a_kernel_that_copies_wrongly_is_found_out() -> None:
    def lose_the_last(src: Indices, dst: Indices, sizes: Indices) -> None:
        del src, dst, sizes

    device = FakeDevice(mover=lose_the_last)
    found = calibrate(device, FakeDriver(device))
    assert found.kernel_max_piece_bytes == 0
    assert "not copy correctly" in found.note


def test_nothing_measured_is_no_kernel() -> None:
    assert Calibration().kernel_max_piece_bytes == 0
    assert "not measured" in Calibration().describe()
