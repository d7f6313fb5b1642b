from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.connectors.store.frame import FRAME_BYTES, FrameFault, find_fault, seal

NAMESPACE, KEY = b"n" * 16, b"hash" * 8 + b"\0\0\0\1"


def sealed(row: bytes) -> bytearray:
    value = bytearray(row + bytes(FRAME_BYTES))
    seal(memoryview(value), NAMESPACE, KEY)
    return value


def fault(value: bytes | bytearray, namespace: bytes = NAMESPACE, key: bytes = KEY) -> FrameFault | None:
    return find_fault(memoryview(value), namespace, key)


@given(st.binary(max_size=300))
def test_the_row_is_untouched_and_passes(row: bytes) -> None:
    value = sealed(row)
    assert value[: len(row)] == row
    assert fault(value) is None


@given(st.binary(min_size=1, max_size=200), st.data())
def test_no_changed_bit_passes(row: bytes, data: st.DataObject) -> None:
    value = sealed(row)
    bit = data.draw(st.integers(0, (len(value) - 10) * 8 - 1))
    value[bit // 8] ^= 1 << bit % 8
    # Two bytes of padding behind the version say nothing.
    assert fault(value) is not None or bit // 8 - len(row) in {6, 7}


@given(st.binary(max_size=200), st.integers(1, 264))
def test_no_shortened_value_passes(row: bytes, cut: int) -> None:
    value = sealed(row)
    assert fault(value[: max(0, len(value) - cut)]) is not None


def test_each_difference_has_its_reason() -> None:
    row = bytes(range(100))
    value = sealed(row)
    assert fault(value, namespace=b"m" * 16) is FrameFault.NAMESPACE
    assert fault(value, key=KEY[:-1] + b"\2") is FrameFault.KEY
    assert fault(value[:63]) is FrameFault.SHORT
    assert fault(value[1:]) is FrameFault.LENGTH
    assert fault(bytes(164)) is FrameFault.MAGIC
    changed = bytearray(value)
    changed[5] ^= 1
    assert fault(changed) is FrameFault.CHECKSUM
    later = bytearray(value)
    struct.pack_into("<H", later, 104, 2)
    assert fault(later) is FrameFault.VERSION


@pytest.mark.parametrize(("size", "namespace"), [(FRAME_BYTES - 1, NAMESPACE), (100, b"short")])
def test_a_frame_needs_room_and_a_namespace(size: int, namespace: bytes) -> None:
    with pytest.raises(ValueError, match="cannot frame"):
        seal(memoryview(bytearray(size)), namespace, KEY)
