"""A record is found whole under its key, or not at all, whichever worker writes meanwhile or dies."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.shared_records import MEMORY_BYTES_MIN, SharedRecords, make_memory

SLOTS = 2
KEYS = st.sampled_from([0, 1, 7, 7 + 64, 2**64 - 1, 0x9E3779B97F4A7C15])
PUTS = st.tuples(
    st.integers(0, SLOTS - 1),
    st.lists(KEYS, min_size=1, max_size=4),
    st.binary(min_size=1, max_size=8) | st.integers(1, 7000).map(lambda size: b"\xab" * size),
)


def memory(size: int = MEMORY_BYTES_MIN) -> mmap.mmap:
    made = make_memory(size)
    assert made is not None
    return made


def workers(shared: mmap.mmap, count: int = SLOTS) -> list[SharedRecords]:
    return [SharedRecords(shared, slot, count, PromptStats()) for slot in range(count)]


def found_by(one: SharedRecords, key: int) -> bytes | None:
    found = one.find(key)
    return None if found is None else bytes(found)


@pytest.mark.parametrize("size", [0, 1, MEMORY_BYTES_MIN - 1])
def test_too_little_memory_is_none(size: int) -> None:
    assert make_memory(size) is None


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [MEMORY_BYTES_MIN, MEMORY_BYTES_MIN + 4097, 1 << 20])
def test_every_worker_finds_what_any_wrote_and_their_rings_do_not_meet(count: int, size: int) -> None:
    every = workers(memory(size), count)
    largest = every[0].ring_bytes // 4
    for slot, one in enumerate(every):
        assert one.put([1000 + slot], bytes([slot]) * largest)
    for one in every:
        for slot in range(count):
            assert one.find(1000 + slot) == bytes([slot]) * largest
        assert one.find(5) is None


@given(st.lists(PUTS, max_size=60))
def test_the_last_record_of_a_key_is_found_until_it_is_overwritten(puts: list[Any]) -> None:
    shared = memory()
    every = workers(shared)
    ring = every[0].ring_bytes
    last: dict[int, tuple[int, bytes]] = {}
    written = [0] * SLOTS
    for number, (slot, keys, data) in enumerate(puts):
        record = number.to_bytes(2, "big") + data
        assert every[slot].put(keys, record)
        written[slot] += len(record)
        last |= dict.fromkeys(keys, (slot, record))
    for key, (_, record) in last.items():
        found = [found_by(one, key) for one in every]
        assert found[0] == found[1]
        assert found[0] in {record, None}
        if max(written) <= ring // 2:  # nothing can have been overwritten, and no bucket has five keys
            assert found[0] == record
    if puts:
        slot, keys, _ = puts[-1]
        assert all(every[0].find(key) == last[key][1] for key in keys)
    for slot, one in enumerate(workers(shared)):  # as their successors count them
        stats = one._stats
        assert stats.shared_bytes <= every[slot]._stats.shared_bytes <= ring
        assert stats.shared_entries <= every[slot]._stats.shared_entries
    for one in every:
        stats = one._stats
        assert stats.shared_written - stats.shared_overwritten == stats.shared_entries
        assert stats.shared_torn == 0


def test_a_record_above_a_quarter_of_a_ring_is_refused() -> None:
    one = workers(memory())[0]
    assert not one.put([1], bytes(one.ring_bytes // 4 + 1))
    assert one.find(1) is None
    assert (one._stats.shared_refused, one._stats.shared_written) == (1, 0)


@given(st.data())
def test_no_change_of_the_memory_makes_another_record(data: st.DataObject) -> None:
    """Torn writes leave any bytes: of a slot, of a ring, or of an end."""
    shared = memory()
    every = workers(shared)
    records = {key: random.Random(key).randbytes(50 + key) for key in range(40)}
    for key, record in records.items():
        every[key % SLOTS].put([key], record)
    places = st.integers(8, len(shared) - 64) | st.integers(8, 8 + 8 * SLOTS + 128 * 8)
    for _ in range(data.draw(st.integers(1, 20))):
        at = data.draw(places)
        if data.draw(st.booleans()):
            torn = data.draw(st.binary(min_size=1, max_size=64))
        else:  # of another place, as a slot is that two workers write at once
            begin = data.draw(places)
            torn = shared[begin : begin + data.draw(st.integers(1, 64))]
        shared[at : at + len(torn)] = torn
    every = workers(shared)  # it must not even harm a successor
    for key, record in records.items():
        assert found_by(every[0], key) in {record, None}
    for key in range(100, 140):
        assert every[0].find(key) is None
    for number in range(60):
        every[1].put([number + 200], b"next" * number)
        assert found_by(every[0], number + 200) in {b"next" * number, None}


WRITER = """
import mmap, sys
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.shared_records import SharedRecords
one = SharedRecords(mmap.mmap(int(sys.argv[1]), 0), 1, 2, PromptStats())
number = 0
while True:
    one.put([number % 50], bytes([number % 50]) * (1000 + number % 3000))
    number += 1
    if number == 200:
        print("full", flush=True)
"""


@pytest.mark.real
@pytest.mark.process
def test_workers_killed_while_they_write_leave_whole_records_or_none() -> None:
    file = os.memfd_create("test")
    os.truncate(file, MEMORY_BYTES_MIN)
    shared = mmap.mmap(file, 0)
    reader = workers(shared)[0]

    def is_whole(key: int) -> bool:
        record = reader.find(key)
        assert record is None or record == bytes([key]) * len(record)
        return record is not None

    for _ in range(2):
        words = [sys.executable, "-c", WRITER, str(file)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=[file]) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"full\n"
            for number in range(2000):  # while it writes
                is_whole(number % 50)
            child.kill()
        assert any([is_whole(key) for key in range(50)])  # noqa: C419  # each
    os.close(file)
    successor = SharedRecords(shared, 1, SLOTS, PromptStats())
    assert successor._stats.shared_entries > 0
    assert successor.put([5], b"of the successor")
    assert reader.find(5) == b"of the successor"


@pytest.mark.parametrize("step", range(4))
def test_a_worker_that_ends_within_a_write_harms_no_other(step: int) -> None:
    """Each step of a write is the last one: the end, the bytes, the half of them, the half of a slot."""
    shared = memory()
    reader, writer = workers(shared)
    for number in range(30):
        writer.put([number], bytes([number]) * 3000)
    before = bytes(shared)
    writer.put([77], b"x" * 3000)
    after = bytes(shared)
    changed = [at for at in range(len(before)) if before[at] != after[at]]
    ends = [at for at in changed if at < 8 * (1 + SLOTS)]
    slots = [at for at in changed if ends[-1] < at < writer._rings]
    data = [at for at in changed if at >= writer._rings]
    done = [ends, ends + data[: len(data) // 2], ends + data, ends + data + slots[: len(slots) // 2]][step]
    shared[:] = before
    for at in done:
        shared[at] = after[at]
    assert reader.find(77) is None
    successor = SharedRecords(shared, 1, SLOTS, PromptStats())
    for number in range(60):
        assert successor.put([100 + number], bytes([number]) * 3000)
        assert reader.find(100 + number) == bytes([number]) * 3000
        for key in range(30):
            assert found_by(reader, key) in {None, bytes([key]) * 3000}
