"""Contract tests of every kind of store."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvatlas.connectors.store.frame import FRAME_BYTES, FrameFault, find_fault, seal
from tests.connectors.store.store_kit import Shared
from tests.support.waiting import HANG_S

NAMESPACE = b"n" * 16


def key(number: int) -> bytes:
    return NAMESPACE + number.to_bytes(32, "big") + (3).to_bytes(4, "big")


class Rows:
    """Registered memory, cut into values."""

    def __init__(self, store: Any, count: int, value_bytes: int) -> None:
        self._memory = bytearray(count * value_bytes)
        self._value_bytes = value_bytes
        store.register_buffer(memoryview(self._memory))

    def __getitem__(self, row: int) -> memoryview:
        return memoryview(self._memory)[row * self._value_bytes : (row + 1) * self._value_bytes]


def framed(buffer: memoryview, block: bytes) -> bytes:
    """Random bytes with a frame, in place; returned too."""
    buffer[:] = os.urandom(buffer.nbytes)
    seal(buffer, NAMESPACE, block)
    return bytes(buffer)


@pytest.mark.parametrize("value_bytes", [FRAME_BYTES + 1, 5000, 300_000])
def test_one_engine_gets_the_blocks_of_another(shared: Shared, value_bytes: int) -> None:
    writer, reader = shared.open(), shared.open()
    source, target = Rows(writer, 7, value_bytes), Rows(reader, 7, value_bytes)
    values = [framed(source[i], key(i)) for i in range(7)]
    assert writer.put([(key(i), source[i]) for i in range(5)], HANG_S) == [True] * 5
    assert reader.exists([key(i) for i in range(7)], HANG_S) == [True] * 5 + [False] * 2
    order = [6, 2, 0, 5, 4, 1, 3]
    got = reader.get_into([(key(i), target[i]) for i in order], HANG_S)
    assert got == [i < 5 for i in order]
    for i in range(5):
        assert bytes(target[i]) == values[i]
        assert find_fault(target[i], NAMESPACE, key(i)) is None
    assert reader.counters()["absent"] == 2


def test_empty_batches_are_answered(shared: Shared) -> None:
    store = shared.open()
    assert store.exists([], HANG_S) == []
    assert store.put([], HANG_S) == []
    assert store.get_into([], HANG_S) == []
    store.remove([], HANG_S)


def test_a_batch_larger_than_a_pipeline_keeps_its_order(shared: Shared) -> None:
    store = shared.open()
    count = 1500
    rows = Rows(store, count, 9000)
    values = [framed(rows[i], key(i)) for i in range(count)]
    assert store.put([(key(i), rows[i]) for i in range(0, count, 2)], HANG_S) == [True] * (count // 2)
    assert store.exists([key(i) for i in range(count)], HANG_S) == [i % 2 == 0 for i in range(count)]
    for i in range(count):
        rows[i][:16] = bytes(16)
    assert store.get_into([(key(i), rows[i]) for i in range(count)], HANG_S) == [
        i % 2 == 0 for i in range(count)
    ]
    assert all(bytes(rows[i]) == values[i] for i in range(0, count, 2))


def test_putting_again_leaves_an_equal_value(shared: Shared) -> None:
    store = shared.open()
    rows = Rows(store, 1, 500)
    value = framed(rows[0], key(1))
    assert store.put([(key(1), rows[0])], HANG_S) == [True]
    assert store.put([(key(1), rows[0])], HANG_S) == [True]
    rows[0][:8] = bytes(8)
    assert store.get_into([(key(1), rows[0])], HANG_S) == [True]
    assert bytes(rows[0]) == value


def test_a_value_that_vanished_between_asking_and_getting_is_a_miss(shared: Shared) -> None:
    store, other = shared.open(), shared.open()
    rows = Rows(store, 2, 500)
    for i in range(2):
        framed(rows[i], key(i))
    store.put([(key(i), rows[i]) for i in range(2)], HANG_S)
    assert store.exists([key(0), key(1)], HANG_S) == [True, True]
    other.remove([key(0), key(9)], HANG_S)
    assert store.get_into([(key(0), rows[0]), (key(1), rows[1])], HANG_S) == [False, True]
    assert store.exists([key(0), key(1)], HANG_S) == [False, True]


@pytest.mark.parametrize("length", [0, 1, 499, 501, 100_000])
def test_a_value_of_another_length_is_a_counted_miss_and_spoils_no_other(shared: Shared, length: int) -> None:
    store = shared.open()
    rows = Rows(store, 3, 500)
    values = [framed(rows[i], key(i)) for i in range(3)]
    store.put([(key(i), rows[i]) for i in range(3)], HANG_S)
    shared.overwrite(key(1), os.urandom(length))
    got = store.get_into([(key(i), rows[i]) for i in range(3)], HANG_S)
    assert got == [True, False, True]
    assert store.counters()["length"] == 1
    assert [bytes(rows[i]) for i in (0, 2)] == [values[0], values[2]]
    store.remove([key(1)], HANG_S)
    rows[1][:] = values[1]
    assert store.put([(key(1), rows[1])], HANG_S) == [True]
    assert store.get_into([(key(1), rows[1])], HANG_S) == [True]


@pytest.mark.parametrize("at", [0, 200, 500 - FRAME_BYTES, 499 - 8])
def test_a_value_whose_bytes_changed_does_not_pass_its_frame(shared: Shared, at: int) -> None:
    store = shared.open()
    rows = Rows(store, 1, 500)
    value = bytearray(framed(rows[0], key(1)))
    store.put([(key(1), rows[0])], HANG_S)
    value[at] ^= 1
    shared.overwrite(key(1), bytes(value))
    assert store.get_into([(key(1), rows[0])], HANG_S) == [True]
    assert isinstance(find_fault(rows[0], NAMESPACE, key(1)), FrameFault)


def test_many_writers_of_the_same_keys_never_show_a_mixture(shared: Shared) -> None:
    writers, keys = 4, 6
    stores = [shared.open() for _ in range(writers)]
    rows = [Rows(store, keys, 40_000) for store in stores]
    for mine in rows:
        for i in range(keys):
            framed(mine[i], key(i))
    reader = shared.open()
    seen = Rows(reader, keys, 40_000)
    start = threading.Barrier(writers + 1)

    def write(at: int) -> bool:
        start.wait()
        return all(
            all(stores[at].put([(key(i), rows[at][i]) for i in range(keys)], HANG_S)) for _ in range(8)
        )

    with ThreadPoolExecutor(writers) as pool:
        running = [pool.submit(write, at) for at in range(writers)]
        start.wait()
        whole = 0
        while not all(done.done() for done in running) or not whole:
            got = reader.get_into([(key(i), seen[i]) for i in range(keys)], HANG_S)
            for i in range(keys):
                if got[i]:
                    assert find_fault(seen[i], NAMESPACE, key(i)) is None
                    whole += 1
        assert all(done.result() for done in running)


def test_one_store_serves_concurrent_threads(shared: Shared) -> None:
    store = shared.open()
    threads, keys = 6, 5
    rows = Rows(store, threads * keys, 20_000)

    def work(thread: int) -> None:
        mine = range(thread * keys, (thread + 1) * keys)
        for _ in range(5):
            values = {i: framed(rows[i], key(i)) for i in mine}
            store.remove([key(i) for i in mine], HANG_S)
            assert all(store.put([(key(i), rows[i]) for i in mine], HANG_S))
            for i in mine:
                rows[i][:] = bytes(20_000)
            assert all(store.get_into([(key(i), rows[i]) for i in mine], HANG_S))
            assert all(bytes(rows[i]) == values[i] for i in mine)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, thread) for thread in range(threads)]:
            done.result()
