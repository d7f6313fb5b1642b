"""The ctypes driver against C functions with CUDA's signatures."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.connectors.transfer.base import Direction
from kvatlas.connectors.transfer.cuda_driver import CopyAttributes, CudaDriver, DriverError
from tests.connectors.transfer.cuda.fake_libcuda import FakeLibcuda

STREAM = 0x51


def copied(driver: CudaDriver, sizes: list[int], direction: Direction = Direction.STORE) -> bool:
    """Copy pieces with gaps between them, backwards; whether exactly they arrived."""
    lengths = np.array(sizes, np.int64)
    starts = np.cumsum(lengths + 3) - lengths - 3
    source = np.random.default_rng(1).integers(1, 256, int((lengths + 3).sum()) + 1, np.uint8)
    target, wanted = np.zeros_like(source), np.zeros_like(source)
    for start, length in zip(starts, lengths, strict=True):
        wanted[start : start + length] = source[start : start + length]
    order = np.arange(len(sizes))[::-1]
    driver.copy(
        direction,
        (source.ctypes.data + starts)[order],
        (target.ctypes.data + starts)[order],
        lengths[order],
        STREAM,
    )
    return bool((target == wanted).all())


def test_the_attributes_have_the_size_and_places_that_the_driver_reads() -> None:
    assert ctypes.sizeof(CopyAttributes) == 24
    assert CopyAttributes.flags.offset == 20
    assert CopyAttributes.dst_location.offset == 12


@given(st.lists(st.integers(1, 200), max_size=40), st.booleans())
def test_pieces_are_copied_by_batch_and_one_by_one(sizes: list[int], batched: bool) -> None:
    assert copied(CudaDriver(library=FakeLibcuda(), allow_batched=batched), sizes)


def test_the_batch_is_one_call_and_asked_for_by_its_version() -> None:
    library = FakeLibcuda()
    driver = CudaDriver(library=library)
    assert driver.batched
    assert copied(driver, [5, 6, 7])
    assert ("resolve", b"cuMemcpyBatchAsync", 12080) in library.calls
    [batch] = [call for call in library.calls if call[0] == "batch"]
    assert batch == ("batch", 3, (1, 0, 0, 0, 0, 0), 1, 0, STREAM)


@pytest.mark.parametrize(("direction", "order"), [(Direction.STORE, 1), (Direction.LOAD, 3)])
def test_stores_read_in_stream_order_and_loads_at_any_time(direction: Direction, order: int) -> None:
    library = FakeLibcuda()
    copied(CudaDriver(library=library), [5], direction)
    assert library.calls[-1][2][0] == order


@pytest.mark.parametrize("since", [None, 13000])
def test_without_batched_copies_every_piece_is_a_call(since: int | None) -> None:
    library = FakeLibcuda(batch_since=since)
    driver = CudaDriver(library=library)
    assert not driver.batched
    assert copied(driver, [5, 6, 7])
    assert [call for call in library.calls if call[0] == "copy"] == [
        ("copy", size, STREAM) for size in (7, 6, 5)
    ]


def test_nothing_to_copy_is_no_call() -> None:
    library = FakeLibcuda()
    driver = CudaDriver(library=library)
    before = len(library.calls)
    assert copied(driver, [])
    assert len(library.calls) == before


@pytest.mark.parametrize("since", [None, 12080])
def test_a_failing_piece_is_named_with_cudas_word_for_it(since: int | None) -> None:
    driver = CudaDriver(library=FakeLibcuda(batch_since=since, fail_piece=2))
    with pytest.raises(DriverError, match=r"CUDA_ERROR_INVALID_VALUE \(no luck, piece 2 of 4\)") as raised:
        copied(driver, [8, 8, 8, 8])
    assert raised.value.name == "CUDA_ERROR_INVALID_VALUE"


def test_a_failure_of_the_whole_batch_names_no_piece() -> None:
    driver = CudaDriver(library=FakeLibcuda(fail_piece=2**64 - 1))
    with pytest.raises(DriverError, match="the batch"):
        copied(driver, [8])


def test_descriptors_of_different_lengths_are_refused() -> None:
    driver = CudaDriver(library=FakeLibcuda())
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="descriptors differ in length"):
        driver.copy(Direction.LOAD, one, two, one, STREAM)


def test_registering_maps_memory_and_reports_a_failure() -> None:
    library = FakeLibcuda()
    driver = CudaDriver(1, library=library)
    driver.register_host(1 << 21, 4096)
    driver.unregister_host(1 << 21)
    assert library.calls[-2:] == [("register", 1 << 21, 4096, 3), ("unregister", 1 << 21)]
    assert driver.maps_same_address(1 << 21)
    assert driver.pci_bus_id() == "0000:41:00.0"
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        CudaDriver(library=FakeLibcuda(register_code=2)).register_host(1 << 21, 4096)


def test_threads_get_the_devices_own_context() -> None:
    library = FakeLibcuda()
    CudaDriver(library=library).bind_thread()
    assert [call for call in library.calls if call[0] == "context"] == [("context", 0xC0DE)] * 2


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(DriverError, match="cuDeviceGet: CUDA_ERROR_NO_DEVICE"):
        CudaDriver(7, library=FakeLibcuda())


def test_a_library_without_the_calls_is_too_old() -> None:
    with pytest.raises(DriverError, match="CUDA 12 or later"):
        CudaDriver(library=object())


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DriverError, match="no NVIDIA machine"):
        CudaDriver()
