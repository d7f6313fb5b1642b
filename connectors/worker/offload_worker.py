"""The worker of vLLM's ``OffloadingConnector`` over a ``TransferEngine``; it maps chunks to rows.

vLLM's connector cannot handle a failed transfer: it asserts success, which ends the engine, and under
``python -O`` would accept wrong bytes. So a failed job is not reported; its blocks are copied again here, row
by row with torch, before the job is answered.

Invariants: every job is reported once, and only after its bytes arrived. If the second copy fails too, an
exception ends the engine. Failed jobs include stores that the transfer engine refused because its queue was
full.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.base import TransferResult as VllmResult

from connectors.layout import LayoutError
from connectors.transfer.base import Direction, GroupMoves, TransferEngine, TransferJob, TransferResult
from connectors.transfer.host_memory import PinnedHostPool

log = logging.getLogger(f"vllm.{__name__}")

WAIT_TIMEOUT_S = 60.0
"""How long a step may wait for stores that still read blocks it will overwrite."""


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
