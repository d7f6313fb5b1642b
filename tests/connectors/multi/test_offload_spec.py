"""The spec for vLLM's OffloadingConnector: bytes come back, failed copies are made good, settings checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch; make test-connectors runs it")
pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadPolicy,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from connectors.layout import LayoutError
from connectors.offload import HybridOffloadConnector
from connectors.offload_spec import HostOffloadingSpec, RowOffloadingWorker, chunk_moves, view_of
from connectors.settings import ConfigError
from connectors.shared_store import SharedStoreConnector
from connectors.transfer.base import TransferJob
from connectors.transfer.host import HostTransferEngine, PinnedHostPool

BLOCKS = 12
PAGES = (96, 96, 40)
"""Bytes of three layers' pages; group 0 has the first two, group 1 the third."""
BLOCK_BYTES = 256

Fault = Callable[[TransferJob, Callable[[], None]], None]


def config_of(
    *, world_size: int = 1, blocks_per_chunk: int = 1, bytes_per_block: int = 192, **extra: Any
) -> Any:
    settings = {"spec_name": "HostOffloadingSpec", "spec_module_path": "connectors.offload_spec", **extra}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("a", "b"), 0), OffloadingGroupConfig(16, ("c",), 1)),
        worker_kv_bytes_per_block=bytes_per_block,
        enable_kv_cache_events=True,
        extra_config=settings,
        engine_id="engine",
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(16, blocks_per_chunk),
        parallel=OffloadingParallelConfig(0, world_size, world_size, 1, 1, 1, 0, 1, None, False),
        canonical_layout=bool(extra.get("canonical_layout")),
    )


def caches() -> tuple[Any, Any]:
    """(What vLLM registers, all its bytes): a block's pages lie side by side, with a gap at its end."""
    rng = np.random.default_rng(5)
    storage = torch.from_numpy(rng.integers(-128, 128, BLOCKS * BLOCK_BYTES, dtype=np.int8))
    tensors, at = [], 0
    for page in PAGES:
        view = torch.as_strided(storage, (BLOCKS, page), (BLOCK_BYTES, 1), at)
        tensors.append(CanonicalKVCacheTensor(view, page))
        at += page
    refs = [[CanonicalKVCacheRef(0, 96), CanonicalKVCacheRef(1, 96)], [CanonicalKVCacheRef(2, 40)]]
    return CanonicalKVCaches(tensors, refs), storage


class Rank:
    """A worker over hand-made caches, with a fault of one's choice in its transfer engine."""

    def __init__(
        self, fault: Fault | None = None, blocks_per_chunk: int = 1, queued_stores_max: int = 64
    ) -> None:
        self.caches, self.storage = caches()
        view = view_of(self.caches)
        self.pool = PinnedHostPool(16 * view.row_bytes, view.row_bytes)
        engine = HostTransferEngine(view, self.pool, fault=fault, queued_stores_max=queued_stores_max)
        self.worker = RowOffloadingWorker(engine, self.pool, self.caches, blocks_per_chunk)

    def store(
        self, job_id: int, sizes: list[int], firsts: list[int], blocks: list[int], chunks: list[int]
    ) -> None:
        device = GPULoadStoreSpec(blocks, sizes, firsts)
        assert self.worker.submit_store(job_id, device, CPULoadStoreSpec(chunks))

    def load(
        self, job_id: int, sizes: list[int], firsts: list[int], blocks: list[int], chunks: list[int]
    ) -> None:
        device = GPULoadStoreSpec(blocks, sizes, firsts)
        assert self.worker.submit_load(job_id, CPULoadStoreSpec(chunks), device)

    def block(self, group: int, block_id: int) -> bytes:
        refs = self.caches.group_data_refs[group]
        pages = [self.caches.tensors[ref.tensor_idx].tensor[block_id] for ref in refs]
        return b"".join(page.numpy().tobytes() for page in pages)


@pytest.fixture
def ranks() -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(*args: Any, **kwargs: Any) -> Rank:
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.worker.shutdown()
        rank.worker.shutdown()


def fails(times: int) -> Fault:
    """The first jobs copy something and then fail."""
    left = [times]

    def fault(job: TransferJob, copy: Callable[[], None]) -> None:
        copy()
        if left[0]:
            left[0] -= 1
            raise OSError("the link is down")

    return fault


@pytest.mark.parametrize("faults", [0, 1, 2], ids=["well", "store repeated", "both repeated"])
def test_what_was_stored_is_what_is_loaded(ranks: Callable[..., Rank], faults: int) -> None:
    """Into other blocks; all else, the null block too, keeps its bytes."""
    rank = ranks(fails(faults))
    wanted = [rank.block(0, 3), rank.block(0, 5), rank.block(1, 7)]
    rank.store(1, [2, 1], [0, 4], [3, 5, 7], [9, 0, 4])
    rank.worker.wait({1})
    rank.storage[3 * BLOCK_BYTES : 8 * BLOCK_BYTES] = 0
    before = rank.storage.clone()
    rank.load(2, [2, 1], [0, 4], [8, 9, 10], [9, 0, 4])
    rank.worker.wait({2, 77})
    assert [rank.block(0, 8), rank.block(0, 9), rank.block(1, 10)] == wanted
    for block_id, low, high in ((8, 0, 192), (9, 0, 192), (10, 192, 232)):
        at = block_id * BLOCK_BYTES
        before[at + low : at + high] = rank.storage[at + low : at + high]
    assert torch.equal(rank.storage, before)
    ended = rank.worker.get_finished()
    assert [(one.job_id, one.success, one.transfer_size) for one in ended] == [(1, True, 424), (2, True, 424)]
    assert rank.worker.jobs_repeated == faults
    assert rank.worker.get_finished() == []


def test_a_fence_waits_until_a_failed_store_was_repeated(ranks: Callable[..., Rank]) -> None:
    """Its source is overwritten right after."""
    going = threading.Event()

    def fault(job: TransferJob, copy: Callable[[], None]) -> None:
        assert going.wait(30)
        raise OSError("the link is down")

    rank = ranks(fault)
    wanted = rank.block(0, 3)
    rank.store(1, [1, 0], [0, 0], [3], [6])
    going.set()
    rank.worker.wait({1})
    rank.storage[3 * BLOCK_BYTES : 4 * BLOCK_BYTES] = 0
    assert bytes(rank.pool.row(6)[: len(wanted)]) == wanted


def test_stores_that_the_engine_refuses_are_made_all_the_same(ranks: Callable[..., Rank]) -> None:
    going = threading.Event()

    def fault(job: TransferJob, copy: Callable[[], None]) -> None:
        assert going.wait(30)
        copy()

    rank = ranks(fault, queued_stores_max=1)
    for number in range(1, 9):
        rank.store(number, [1, 0], [0, 0], [number], [number])
    going.set()
    rank.worker.wait(set(range(1, 9)))
    assert {one.job_id for one in rank.worker.get_finished()} == set(range(1, 9))
    assert rank.worker.jobs_repeated >= 6
    for number in range(1, 9):
        assert bytes(rank.pool.row(number)[:192]) == rank.block(0, number)


def test_what_can_be_copied_in_no_way_stops_the_engine(ranks: Callable[..., Rank]) -> None:
    rank = ranks()
    rank.store(1, [1, 0], [0, 0], [BLOCKS], [0])
    with pytest.raises(RuntimeError, match=r"store job 1 failed .* and again when repeated"):
        rank.worker.get_finished()


def naive_moves(
    blocks: list[int], sizes: list[int], firsts: list[int], chunks: list[int], per_chunk: int
) -> dict[int, list[tuple[int, int]]]:
    """Walk through the request's blocks one by one."""
    moves: dict[int, list[tuple[int, int]]] = {}
    todo, left = iter(blocks), iter(chunks)
    for group, (count, first) in enumerate(zip(sizes, firsts, strict=True)):
        chunk = None
        for place in range(first, first + count):
            if chunk is None or place % per_chunk == 0:
                chunk = next(left)
            block = next(todo)
            if block:
                moves.setdefault(group, []).append((block, chunk * per_chunk + place % per_chunk))
    return moves


@given(data=st.data(), per_chunk=st.integers(1, 4), groups=st.integers(1, 4))
def test_blocks_find_their_rows(data: st.DataObject, per_chunk: int, groups: int) -> None:
    sizes = [data.draw(st.integers(0, 7)) for _ in range(groups)]
    firsts = [data.draw(st.integers(0, 9)) for _ in range(groups)]
    blocks = [data.draw(st.integers(0, 99)) for _ in range(sum(sizes))]
    needed = sum(
        -(-(first % per_chunk + size) // per_chunk) for size, first in zip(sizes, firsts, strict=True) if size
    )
    chunks = data.draw(st.permutations(range(needed)))
    moves = chunk_moves(blocks, sizes, firsts, chunks, per_chunk)
    found = {m.group_idx: list(zip(m.block_ids.tolist(), m.slots.tolist(), strict=True)) for m in moves}
    assert found == naive_moves(blocks, sizes, firsts, chunks, per_chunk)
    for wrong in (chunks[:-1] if chunks else [0], [*chunks, needed]):
        with pytest.raises(ValueError, match="do not fit"):
            chunk_moves(blocks, sizes, firsts, wrong, per_chunk)


def test_the_spec_brings_a_manager_and_a_worker_for_as_many_chunks() -> None:
    spec = OffloadingSpecFactory.create_spec(config_of(host_bytes=192 * 2 * 5, blocks_per_chunk=2))
    assert isinstance(spec, HostOffloadingSpec)
    assert spec.num_chunks == 5
    manager = spec.get_manager()
    assert manager is spec.get_manager()
    context = ReqContext("r")
    assert manager.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(5)]
    stored = manager.prepare_store(keys, context)
    assert stored is not None
    assert sorted(stored.store_spec.block_ids.tolist()) == list(range(5))
    registered, _ = caches()
    worker = spec.get_worker(registered)
    assert worker is spec.get_worker(registered)
    worker.submit_store(1, GPULoadStoreSpec([2, 3], [2, 0], [0, 0]), CPULoadStoreSpec([4]))
    worker.wait({1})
    assert [one.success for one in worker.get_finished()] == [True]
    worker.shutdown()


def test_ranks_share_the_host_memory() -> None:
    assert HostOffloadingSpec(config_of(host_bytes=192 * 40)).num_chunks == 40
    assert HostOffloadingSpec(config_of(host_bytes=192 * 40, world_size=4)).num_chunks == 10
    assert HostOffloadingSpec(config_of(host_bytes="1MiB", bytes_per_block=1000)).num_chunks == 1024


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "host_bytes"),
        ({"host_bytes": 0}, "host_bytes"),
        ({"host_bytes": 383}, "give 384 or more"),
        ({"host_bytes": "1GiB", "cpu_bytes_to_use": 1}, "cpu_bytes_to_use"),
        ({"host_bytes": "1GiB", "eviction_policy": "boundary"}, "lru, arc"),
        ({"host_bytes": "1GiB", "canonical_layout": True}, "canonical_layout"),
    ],
)
def test_bad_settings_are_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        HostOffloadingSpec(config_of(**extra))


def test_a_cache_with_larger_blocks_than_announced_is_refused() -> None:
    registered, _ = caches()
    with pytest.raises(LayoutError, match="a block takes 192 bytes"):
        HostOffloadingSpec(config_of(host_bytes="1MiB", bytes_per_block=128)).get_worker(registered)


def test_metrics_of_the_manager_are_declared() -> None:
    spec = HostOffloadingSpec(config_of(host_bytes="1MiB"))
    spec.get_manager().prepare_store([make_offload_key(b"x" * 32, 0)], ReqContext("r"))
    stats = spec.get_manager().get_stats()
    declared = HostOffloadingSpec.build_metric_definitions({})
    assert set(stats.data["data"]) <= set(declared)


def changed(caches: Any, tensor: torch.Tensor) -> Any:
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, 96), *caches.tensors[1:]], caches.group_data_refs
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda pages: pages.view(torch.uint8), "torch.uint8"),
        (lambda pages: torch.zeros(len(pages), 96, dtype=torch.float16), "torch.float16"),
        (lambda pages: pages.reshape(len(pages), 2, -1), "int8 of (blocks, bytes)"),
        (lambda pages: torch.zeros(96, len(pages), dtype=torch.int8).T, "side by side"),
        (lambda pages: pages[:-1], "as many"),
        (lambda pages: pages[:, :50], "does not fit in blocks of 50 bytes"),
    ],
)
def test_caches_that_are_not_canonical_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], told: str
) -> None:
    """Rows would hold other bytes than the blocks, without a sign."""
    good, _ = caches()
    view_of(good)
    with pytest.raises(LayoutError) as error:
        view_of(changed(good, change(good.tensors[0].tensor)))
    assert told in str(error.value)


def test_no_connector_of_ours_claims_sleep_mode() -> None:
    for connector in (HybridOffloadConnector, SharedStoreConnector):
        assert connector.supports_sleep_mode(None) is False
