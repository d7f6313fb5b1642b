"""``HostOffloadingSpec``: vLLM's own ``OffloadingConnector`` on this package's transfer engines.

``--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
"kv_connector_extra_config": {"spec_name": "HostOffloadingSpec", "spec_module_path":
"connectors.offload_spec", "host_bytes": "8GiB"}}'``

vLLM's connector chooses stores and loads, and its manager the chunks to hold. Host memory and copies are
those of ``connectors.transfer``, so it also runs on CPU engines. A chunk is ``blocks_per_chunk`` consecutive
rows; a row holds one block of any group.

vLLM's connector cannot handle a failed transfer: it asserts success, which ends the engine, and under
``python -O`` would accept wrong bytes. So a failed job is not reported; its blocks are copied again by
``RowOffloadingWorker``, row by row with torch, before the job is answered. Invariants: every job is reported
once, and only after its bytes arrived. If the second copy fails too, an exception ends the engine. Failed
jobs include stores that the transfer engine refused because its queue was full.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import vllm
from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.base import TransferResult as VllmResult

from connectors.compat import require_tested_vllm, share_vllm_log
from connectors.layout import CacheView, LayoutError, Piece, group_pages, round_up_row
from connectors.offload import EXTRA_CONFIG
from connectors.settings import ConfigError, size_bytes
from connectors.transfer.base import Direction, GroupMoves, TransferEngine, TransferJob, TransferResult
from connectors.transfer.host import PinnedHostPool
from connectors.worker.worker import open_rows

log = logging.getLogger(f"vllm.{__name__}")

# How long a step may wait for stores that still read blocks it will overwrite.
WAIT_TIMEOUT_S = 60.0


class RowOffloadingWorker(OffloadingWorker):
    """One rank's transfers. Owns the engine and the pool."""

    def __init__(
        self,
        engine: TransferEngine,
        pool: PinnedHostPool,
        kv_caches: Any,
        blocks_per_chunk: int,
    ) -> None:
        """``kv_caches``: the caches that vLLM registers."""
        # Jobs that failed once and were copied again here.
        self.jobs_repeated = 0
        self._engine = engine
        self._pool = pool
        self._kv_caches = kv_caches
        self._blocks_per_chunk = blocks_per_chunk
        self._jobs: dict[int, TransferJob] = {}
        self._ended: list[VllmResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, Direction.STORE, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Submit a load.

        ``expedited`` (vLLM 0.33, for loads that a step waits for) has no effect: its setting is refused, and
        loads always precede stores.
        """
        del expedited
        return self._submit(job_id, Direction.LOAD, dst_spec, src_spec)

    def get_finished(self) -> list[VllmResult]:
        """Results since the last call. ``RuntimeError`` for a job that failed twice."""
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended.

        ``RuntimeError`` if one failed twice, or on timeout: continuing would overwrite blocks that are being
        read.
        """
        asked = [job_id for job_id in job_ids if job_id in self._jobs]
        if not self._engine.wait(asked, WAIT_TIMEOUT_S):
            raise RuntimeError(f"transfer jobs {asked} did not end within {WAIT_TIMEOUT_S:.0f} s")
        self._collect()

    def shutdown(self) -> None:
        """Wait for running jobs and free all resources; may be called again."""
        if self._engine.close():
            self._pool.close()

    def _submit(self, job_id: int, direction: Direction, device: Any, host: Any) -> bool:
        groups = chunk_moves(
            device.block_ids, device.group_sizes, device.block_indices, host.block_ids, self._blocks_per_chunk
        )
        job = TransferJob(job_id, direction, groups)
        if groups:
            self._jobs[job_id] = job
            self._engine.submit(job)
        else:
            self._ended.append(VllmResult(job_id, True, 0, 0.0))
        return True

    def _collect(self) -> None:
        for result in self._engine.poll():
            job = self._jobs.pop(result.job_id)
            size = sum(result.bytes_by_group.values()) if result.ok else self._repeat(job, result)
            self._ended.append(VllmResult(job.job_id, True, size, result.seconds))

    def _repeat(self, job: TransferJob, failed: TransferResult) -> int:
        """Copy the job's rows synchronously; returns their bytes."""
        self.jobs_repeated += 1
        log.warning("%s job %d failed and is repeated: %s", job.direction.value, job.job_id, failed.error)
        try:
            return sum(self._copy_group(job.direction, moves) for moves in job.groups)
        except Exception as error:
            raise RuntimeError(
                f"{job.direction.value} job {job.job_id} failed ({failed.error}), and again when repeated "
                f"({error}); vLLM's connector cannot handle failed transfers, so the engine must end"
            ) from error

    def _copy_group(self, direction: Direction, moves: GroupMoves) -> int:
        size = 0
        for block_id, slot in zip(moves.block_ids.tolist(), moves.slots.tolist(), strict=True):
            row = torch.frombuffer(self._pool.row(slot), dtype=torch.int8)
            at = 0
            for ref in self._kv_caches.group_data_refs[moves.group_idx]:
                pages = self._kv_caches.tensors[ref.tensor_idx].tensor
                if not 0 < block_id < len(pages):
                    raise IndexError(f"block {block_id} is not in [1, {len(pages)})")
                page, kept = pages[block_id, : ref.page_size_bytes], row[at : at + ref.page_size_bytes]
                source, target = (page, kept) if direction is Direction.STORE else (kept, page)
                target.copy_(source)
                at += ref.page_size_bytes
            size += at
        return size


def check_canonical(kv_caches: Any) -> None:
    """Check that rows can be made of the caches. Raises ``LayoutError``.

    vLLM registers one int8 tensor of (blocks, bytes of a page) per piece of memory (``CanonicalKVCaches`` of
    vllm/v1/kv_offload/base.py, 0.32 and 0.33): page sizes count bytes, and a block is one run of them.
    """
    blocks = {int(one.tensor.shape[0]) for one in kv_caches.tensors if one.tensor.dim()}
    for idx, one in enumerate(kv_caches.tensors):
        tensor = one.tensor
        if tensor.dtype != torch.int8 or tensor.dim() != 2 or tensor.stride(1) != 1:
            raise LayoutError(
                f"KV cache tensor {idx} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}; HostOffloadingSpec takes int8 of (blocks, bytes) with a block's bytes "
                "side by side: use HybridOffloadConnector, and report this vLLM version"
            )
    if len(blocks) != 1:
        raise LayoutError(f"KV cache tensors have {sorted(blocks)} blocks; all of them must have as many")
    for group_idx, refs in enumerate(kv_caches.group_data_refs):
        for ref in refs:
            width = int(kv_caches.tensors[ref.tensor_idx].tensor.shape[1])
            if not 0 < ref.page_size_bytes <= width:
                raise LayoutError(
                    f"group {group_idx}: a page of {ref.page_size_bytes} bytes does not fit in blocks of "
                    f"{width} bytes (KV cache tensor {ref.tensor_idx})"
                )


def chunk_moves(
    block_ids: Any,
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    chunk_ids: Any,
    blocks_per_chunk: int,
) -> tuple[GroupMoves, ...]:
    """Blocks and rows of a job, from the form of vLLM's connector.

    ``group_sizes[g]`` of ``block_ids`` belong to group g; they are consecutive in their request, the first at
    index ``block_indices[g]``. ``chunk_ids`` are their chunks, in the same order. Null blocks are skipped.
    ``ValueError`` if the numbers do not match.
    """
    blocks = np.asarray(block_ids, np.int64)
    chunks = np.asarray(chunk_ids, np.int64)
    moves: list[GroupMoves] = []
    at_block = at_chunk = 0
    for group_idx, (count, first) in enumerate(zip(group_sizes, block_indices, strict=True)):
        if not count:
            continue
        places = first % blocks_per_chunk + np.arange(count, dtype=np.int64)
        used = int(places[-1]) // blocks_per_chunk + 1
        if at_block + count > len(blocks) or at_chunk + used > len(chunks):
            break
        ids = blocks[at_block : at_block + count]
        slots = chunks[at_chunk + places // blocks_per_chunk] * blocks_per_chunk + places % blocks_per_chunk
        at_block, at_chunk = at_block + count, at_chunk + used
        real = ids != 0
        if real.any():
            moves.append(GroupMoves(group_idx, ids[real], slots[real]))
    if at_block != sum(group_sizes) or at_block != len(blocks) or at_chunk != len(chunks):
        raise ValueError(
            f"{len(blocks)} blocks in groups of {list(group_sizes)} do not fit {len(chunks)} chunks of "
            f"{blocks_per_chunk}"
        )
    return tuple(moves)


try:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
except ImportError as error:
    raise RuntimeError(
        f"vLLM {vllm.__version__} lacks the offloading specs that kvatlas needs ({error}); use "
        "HybridOffloadConnector, which does not need them"
    ) from error

POLICIES = ("lru", "arc")
_OWN = ("host_bytes", "eviction_policy")
# Settings read by vLLM's connector.
_OF_VLLM = (
    "spec_name",
    "spec_module_path",
    "offload_prompt_only",
    "self_describing_kv_events",
    "blocks_per_chunk",
    "block_size",
)


class HostOffloadingSpec(OffloadingSpec):
    """Host memory of ``host_bytes`` (all ranks together) with ``eviction_policy`` lru or arc."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """The metrics of vLLM's manager."""
        definitions: dict[str, Any] = CPUOffloadingSpec.build_metric_definitions({})
        return definitions

    def __init__(self, config: Any) -> None:
        """Raises ``ConfigError`` for an unknown or invalid setting."""
        require_tested_vllm(type(self).__name__)
        share_vllm_log()
        super().__init__(config)
        _check_settings(self.extra_config)
        if config.canonical_layout:
            raise ConfigError(
                f"{EXTRA_CONFIG}.canonical_layout",
                True,
                "rows hold blocks as the engine has them; leave it out",
            )
        self.policy: str = self.extra_config.get("eviction_policy", "lru")
        self.row_bytes = round_up_row(config.worker_kv_bytes_per_block)
        self.num_chunks = self._count_chunks()
        self._manager: Any = None
        self._worker: RowOffloadingWorker | None = None

    def get_manager(self) -> Any:
        """vLLM's chunk manager, for the scheduler."""
        if self._manager is None:
            self._manager = CPUOffloadingManager(
                num_chunks=self.num_chunks,
                cache_policy=self.policy,
                enable_events=self.kv_events_config.enable_kv_cache_events,
            )
        return self._manager

    def get_worker(self, kv_caches: Any) -> RowOffloadingWorker:
        """Make the worker of this rank. ``LayoutError`` if a block does not fit in a row."""
        if self._worker is None:
            view = view_of(kv_caches)
            if view.row_bytes > self.row_bytes:
                raise LayoutError(
                    f"a block takes {view.row_bytes} bytes; its configuration says at most {self.row_bytes}"
                )
            device = str(kv_caches.tensors[0].tensor.device)
            rows = self.num_chunks * self.blocks_per_chunk
            engine, pool = open_rows(view, device, rows, view.row_bytes)
            self._worker = RowOffloadingWorker(engine, pool, kv_caches, self.blocks_per_chunk)
        return self._worker

    def _count_chunks(self) -> int:
        """Chunks in each rank's share: the same number in scheduler and workers."""
        host_bytes = size_bytes(self.extra_config["host_bytes"], f"{EXTRA_CONFIG}.host_bytes")
        if not self.row_bytes:
            raise ConfigError(
                EXTRA_CONFIG, "HostOffloadingSpec", "vLLM has no KV cache of one size per block"
            )
        world_size = self.config.parallel.world_size
        chunk_bytes = self.row_bytes * self.blocks_per_chunk
        chunks = int(host_bytes // world_size // chunk_bytes)
        if chunks < 2:
            raise ConfigError(
                f"{EXTRA_CONFIG}.host_bytes",
                host_bytes,
                f"a chunk takes {chunk_bytes} bytes of it; give {2 * world_size * chunk_bytes} or more",
            )
        return chunks


def view_of(kv_caches: Any) -> CacheView:
    """View of the cache that vLLM registers with a spec, in vLLM's order of groups."""
    # A row holds the pages of a group's layers consecutively. ``LayoutError`` if pages overlap or the caches
    # are not in vLLM's canonical form.
    check_canonical(kv_caches)
    num_blocks = int(kv_caches.tensors[0].tensor.shape[0])
    groups = []
    for group_idx, refs in enumerate(kv_caches.group_data_refs):
        pieces = []
        for ref in refs:
            tensor = kv_caches.tensors[ref.tensor_idx].tensor
            stride = int(tensor.stride(0)) * int(tensor.element_size())
            pieces.append(Piece(int(tensor.data_ptr()), stride, int(ref.page_size_bytes)))
        groups.append(group_pages(group_idx, pieces, num_blocks))
    row_bytes = round_up_row(max(group.row_bytes for group in groups))
    return CacheView(tuple(groups), num_blocks, row_bytes)


def _check_settings(extra: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        if key not in _OWN and key not in _OF_VLLM:
            names = ", ".join(sorted({*_OWN, *_OF_VLLM}))
            raise ConfigError(f"{EXTRA_CONFIG}.{key}", value, f"no such setting; there are: {names}")
    if "host_bytes" not in extra:
        raise ConfigError(f"{EXTRA_CONFIG}.host_bytes", None, 'say how much host memory to use, e.g. "8GiB"')
    policy = extra.get("eviction_policy", "lru")
    if policy not in POLICIES:
        raise ConfigError(f"{EXTRA_CONFIG}.eviction_policy", policy, f"choose one of: {', '.join(POLICIES)}")
