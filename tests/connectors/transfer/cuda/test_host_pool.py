"""The host pool on real memory; registration through a driver that only keeps the books."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvatlas.connectors.transfer import host, system_memory
from kvatlas.connectors.transfer.host import HUGE_PAGE_BYTES, HostMemoryError, PinnedHostPool
from kvatlas.connectors.transfer.memory_limits import available_bytes
from tests.connectors.transfer.cuda.fakes import FakeDevice, FakeDriver

MIB = 1 << 20


def test_rows_are_packed_from_an_aligned_address() -> None:
    pool = PinnedHostPool(3 * MIB, 192 * 1000)
    assert pool.address % HUGE_PAGE_BYTES == 0
    assert (pool.num_rows, pool.size_bytes) == (16, 16 * 192_000)
    for slot in range(pool.num_rows):
        pool.row(slot)[:] = bytes([slot]) * pool.row_bytes
    for slot in range(pool.num_rows):
        row = pool.row(slot)
        assert np.frombuffer(row, np.uint8).ctypes.data == pool.address + slot * pool.row_bytes
        assert set(bytes(row)) == {slot}
    assert not pool.pinned
    assert "not pinned" in pool.notes
    pool.close()


@pytest.mark.parametrize("slot", [-1, 16])
def test_there_are_no_other_rows(slot: int) -> None:
    pool = PinnedHostPool(3 * MIB, 192_000)
    with pytest.raises(IndexError, match="not in"):
        pool.row(slot)
    pool.close()


def test_a_row_that_is_still_held_outlives_the_pool() -> None:
    pool = PinnedHostPool(MIB, 4096)
    row = pool.row(3)
    pool.close()
    pool.close()
    row[:4] = b"safe"
    assert bytes(row[:4]) == b"safe"
    with pytest.raises(ValueError, match="closed"):
        pool.row(3)


def test_memory_is_registered_in_chunks_of_whole_rows_and_pages_and_given_back() -> None:
    driver = FakeDriver(FakeDevice())
    row = 64 * 3
    pool = PinnedHostPool(MIB, row, driver=driver, register_chunk_bytes=100_000)
    chunks = sorted(driver.registered.items())
    assert pool.pinned
    assert pool.chunk_bytes == 100_000 // (4096 * 3) * 4096 * 3
    assert sum(size for _, size in chunks) == pool.size_bytes
    for index, (address, size) in enumerate(chunks):
        assert address == pool.address + index * pool.chunk_bytes
        assert (address % mmap.PAGESIZE, (address - pool.address) % row) == (0, 0)
        assert size <= pool.chunk_bytes
    assert f"pinned in {len(chunks)} chunks" in pool.notes
    pool.close()
    assert driver.registered == {}
    assert not pool.pinned


def test_memory_that_cannot_be_pinned_names_the_setting_and_leaves_nothing_behind() -> None:
    driver = FakeDriver(FakeDevice())
    driver.register_limit_bytes = 50_000  # only the last, short chunk would do
    with pytest.raises(HostMemoryError, match=r"host_bytes.*CUDA_ERROR_OUT_OF_MEMORY"):
        PinnedHostPool(MIB, 4096, driver=driver, register_chunk_bytes=100_000)
    assert driver.registered == {}


def test_more_than_there_is_names_the_setting_and_what_is_there() -> None:
    with pytest.raises(
        HostMemoryError, match=r"host_bytes asks for 1048576\.00 GiB.*[0-9.]+ GiB are available"
    ):
        PinnedHostPool(1 << 50, 4096)


def test_less_than_a_row_is_refused() -> None:
    with pytest.raises(HostMemoryError, match="less than one row"):
        PinnedHostPool(4095, 4096)


def test_where_no_node_is_named_the_pool_works_and_says_so() -> None:
    driver = FakeDriver(FakeDevice())
    driver.bus_id = "ffff:ff:1f.7"
    pool = PinnedHostPool(MIB, 4096, driver=driver)
    assert any("names none" in note for note in pool.notes)
    pool.close()


def test_a_node_that_the_system_refuses_is_reported() -> None:
    pool = PinnedHostPool(MIB, 4096, numa_node=900)
    assert any("not bound to memory node 900" in note for note in pool.notes)
    pool.row(0)[:] = bytes(4096)
    pool.close()


def test_a_node_that_cannot_be_asked_for_is_had_by_its_processors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container's default rules: mbind is refused, CPU affinity is allowed."""
    mine = frozenset(list(os.sched_getaffinity(0))[:1])
    populated: list[set[int]] = []
    touch = system_memory._populate
    monkeypatch.setattr(logging.getLogger("connectors"), "propagate", True)
    monkeypatch.setattr(host, "prefer_node", lambda address, size, node: "mbind: not permitted")
    monkeypatch.setattr(host, "cpus_of_node", lambda node: mine)

    def seen(address: int, size_bytes: int) -> None:
        populated.append(os.sched_getaffinity(0))
        touch(address, size_bytes)

    monkeypatch.setattr(system_memory, "_populate", seen)
    before = os.sched_getaffinity(0)
    pool = PinnedHostPool(MIB, 4096, numa_node=1)
    assert populated == [mine]
    assert os.sched_getaffinity(0) == before
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "on memory node 1 by the processors that touch it first (mbind: not permitted)" in caplog.text
    pool.close()


def test_the_processors_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3, 8, 9})
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("2-3,8,12-15\n")
    assert system_memory.cpus_of_node(1, tmp_path) == {2, 3, 8}
    assert system_memory.cpus_of_node(0, tmp_path) == frozenset()


def device_tree(root: Path, node: str, nodes: int) -> None:
    place = root / "bus/pci/devices/0000:1b:00.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text(node)
    for index in range(nodes):
        (root / f"devices/system/node/node{index}").mkdir(parents=True)


@pytest.mark.parametrize(("node", "nodes", "found"), [("1\n", 2, 1), ("-1\n", 1, None), ("3\n", 2, None)])
def test_the_node_of_a_device(tmp_path: Path, node: str, nodes: int, found: int | None) -> None:
    device_tree(tmp_path, node, nodes)
    assert system_memory.numa_node_of("0000:1B:00.0", tmp_path) == found
    assert system_memory.numa_node_of("0000:77:00.0", tmp_path) is None


def test_available_memory_is_the_least_of_machine_and_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert available_bytes(proc, groups) == 8_000 * 1024
    (proc / "self/cgroup").write_text("0::/outer/inner\n")
    inner = groups / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5\n")
    assert available_bytes(proc, groups) == 8_000 * 1024
    (inner.parent / "memory.max").write_text("5000000\n")
    (inner.parent / "memory.current").write_text("3000000\n")
    (inner.parent / "memory.stat").write_text("anon 7\ninactive_file 1000000\n")
    assert available_bytes(proc, groups) == 3_000_000


def test_the_limits_of_older_control_groups_count(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemAvailable: 8000 kB\n")
    (proc / "self/cgroup").write_text("5:cpu,memory:/box\n3:pids:/box\n0::/\n")
    box = groups / "memory" / "box"
    box.mkdir(parents=True)
    (box / "memory.limit_in_bytes").write_text("5000000\n")
    (box / "memory.usage_in_bytes").write_text("3000000\n")
    (box / "memory.stat").write_text("inactive_file 3\ntotal_inactive_file 1000000\n")
    assert available_bytes(proc, groups) == 3_000_000
    (box.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (box.parent / "memory.usage_in_bytes").write_text("3000000\n")
    assert available_bytes(proc, groups) == 3_000_000


def test_touching_changes_nothing() -> None:
    memory = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    view = np.frombuffer(memory, np.uint8)
    view[:] = 7
    system_memory.touch(int(view.ctypes.data), len(view))
    assert set(view.tolist()) == {7}


def test_an_old_kernel_has_its_pages_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = []
    monkeypatch.setattr(system_memory, "_MADV_POPULATE_WRITE", 12345)
    monkeypatch.setattr(system_memory, "touch", lambda address, size: touched.append(size))
    pool = PinnedHostPool(3 * MIB, 4096)
    assert sum(touched) == 3 * MIB
    pool.close()


def test_memory_that_cannot_be_populated_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, size_bytes: int, cpus: frozenset[int]) -> None:
        raise MemoryError("Cannot allocate memory")

    monkeypatch.setattr(host, "populate", refuse)
    with pytest.raises(HostMemoryError, match="host_bytes asks for"):
        PinnedHostPool(MIB, 4096)
