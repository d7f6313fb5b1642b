"""Ranks that hold the same KV keep one copy of it: each of them writes a share of it, and all read it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvatlas.connectors.layout import CacheView, Piece, group_pages
from kvatlas.connectors.settings import ConfigError
from kvatlas.connectors.transfer.base import Direction, GroupMoves, TransferEngine, TransferJob
from kvatlas.connectors.transfer.host import HostMemoryError, PinnedHostPool, SharedMapping
from kvatlas.connectors.worker import worker
from kvatlas.connectors.worker.worker import Replicas, make_engine, slots_of
from tests.support.waiting import HANG_S

BLOCKS, BLOCK_BYTES, RANKS = 20, 4096, 2
NAMED = np.arange(1, 13, dtype=np.int64)


def view_of(cache: np.ndarray[Any, Any]) -> CacheView:
    piece = Piece(int(cache.ctypes.data), BLOCK_BYTES, BLOCK_BYTES)
    return CacheView((group_pages(0, [piece], BLOCKS),), BLOCKS, BLOCK_BYTES)


def job(number: int, direction: Direction, count: int = len(NAMED)) -> TransferJob:
    keys = tuple(bytes([block]) * 36 for block in NAMED[:count])
    return TransferJob(number, direction, (GroupMoves(0, NAMED[:count], NAMED[:count] - 1, keys),))


def run(engine: TransferEngine, work: TransferJob) -> int:
    """Bytes that a rank moved for a job that went well."""
    engine.submit(work)
    assert engine.wait([work.job_id], HANG_S)
    (result,) = engine.poll()
    assert (result.job_id, result.ok, result.error) == (work.job_id, True, "")
    return sum(result.bytes_by_group.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(worker, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_one_copy_does_for_all(folder: Path) -> None:
    """Rank 1 loads what rank 0 stored, and the other way round; their caches hold the same, as vLLM says."""
    content = np.random.default_rng(1).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)
    caches = [content.copy() for _ in range(RANKS)]
    meeting = threading.Barrier(RANKS)

    def make(rank: int) -> TransferEngine:
        return make_engine(
            view_of(caches[rank]),
            "cpu",
            slots=BLOCKS,
            row_bytes=BLOCK_BYTES,
            replicas=Replicas(RANKS, rank),
            name="engine",
            meet=lambda: meeting.wait(HANG_S) >= 0,
        )

    with ThreadPoolExecutor(RANKS) as ranks:
        made = list(ranks.map(make, range(RANKS)))
    assert not list(folder.iterdir()), "the name of the memory must be gone before anything can crash"
    stored = [run(engine, job(1, Direction.STORE)) for engine in made]
    assert stored == [len(NAMED) // RANKS * BLOCK_BYTES] * RANKS
    for cache, engine in zip(caches, made, strict=True):
        cache[1:] = 0
        assert run(engine, job(2, Direction.LOAD)) == len(NAMED) * BLOCK_BYTES
        assert np.array_equal(cache[NAMED], content[NAMED])
    assert sorted(run(engine, job(3, Direction.STORE, 1)) for engine in made) == [0, BLOCK_BYTES]
    assert all(engine.close() for engine in made)


def test_ranks_that_cannot_meet_do_not_start(folder: Path) -> None:
    """Each would have memory of its own, and load what it never stored."""
    cache = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    with pytest.raises(HostMemoryError, match=r"share_replicas: ranks that share .* must meet"):
        make_engine(
            view_of(cache),
            "cpu",
            slots=BLOCKS,
            row_bytes=BLOCK_BYTES,
            replicas=Replicas(RANKS, 0),
            name="engine",
            meet=lambda: False,
        )
    assert not list(folder.iterdir())


def test_shared_memory_that_is_not_there_names_the_remedies(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match=r"--shm-size.*share_replicas to false"):
        PinnedHostPool(1 << 20, 4096, shared=SharedMapping(tmp_path / "no folder" / "rows", first=True))
    with pytest.raises(HostMemoryError, match="lower host_bytes"):
        PinnedHostPool(1 << 50, 4096, shared=SharedMapping(tmp_path / "rows", first=True))


@pytest.mark.parametrize("share", ["by_slot", "by_key"])
def test_every_block_is_stored_by_one_replica(share: str) -> None:
    (moves,) = job(1, Direction.STORE).groups
    shares = [getattr(Replicas(3, index), share)(moves) for index in range(3)]
    assert (np.sum(shares, axis=0) == 1).all()


@pytest.mark.parametrize(
    ("replicas", "nodes", "rank", "found"),
    [
        (1, 1, 3, Replicas()),
        (8, 1, 3, Replicas(8, 3, 0)),
        (8, 1, 11, Replicas(8, 3, 1)),  # the second stage of a pipeline
        (2, 1, 5, Replicas(2, 1, 2)),
        (8, 2, 3, Replicas()),
    ],
)
def test_vllm_says_which_ranks_are_replicas(replicas: int, nodes: int, rank: int, found: Replicas) -> None:
    parallel = SimpleNamespace(rank=rank, tensor_parallel_size=8, nnodes_within_dp=nodes)
    assert Replicas.from_config(SimpleNamespace(kv_tp_replicas=replicas), parallel) == found
    assert Replicas.from_config(SimpleNamespace(), parallel) == Replicas(), "an older vLLM"


def test_host_memory_holds_as_many_more_rows() -> None:
    config = SimpleNamespace(
        kv_cache_tensors=[SimpleNamespace(size=100 * 6400, host_resident=False)], num_blocks=100
    )
    alone, shared = (slots_of(config, 1 << 20, shares, "host_bytes") for shares in (8, 1))
    assert (alone, shared) == ((1 << 20) // 8 // 6400, (1 << 20) // 6400)
    with pytest.raises(ConfigError, match="a block takes 6400 bytes of it; give 25600 or more"):
        slots_of(config, 25_599, 2, "host_bytes")
    assert slots_of(config, 25_600, 2, "host_bytes") == 2
