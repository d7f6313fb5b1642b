"""vLLM's own ``OffloadingConnector`` on CPU engines, for which vLLM has no worker: copies by torch."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class TorchWorker(OffloadingWorker):
    """One rank's copies; a chunk is ``blocks_per_chunk`` rows, and a row holds one block of any group."""

    def __init__(self, kv_caches: Any, rows: int, row_bytes: int, blocks_per_chunk: int) -> None:
        self._kv_caches = kv_caches
        self._rows = torch.zeros(rows, row_bytes, dtype=torch.int8)
        self._per_chunk = blocks_per_chunk
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Every job has ended when it is submitted."""

    def shutdown(self) -> None: ...

    def _copy(self, job_id: int, device: Any, host: Any, *, store: bool) -> bool:
        blocks, chunks = iter(device.block_ids), iter(host.block_ids)
        for group, (count, first) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            chunk = -1
            for place in range(first % self._per_chunk, first % self._per_chunk + count):
                if chunk < 0 or place % self._per_chunk == 0:
                    chunk = int(next(chunks))
                row = self._rows[chunk * self._per_chunk + place % self._per_chunk]
                if block := int(next(blocks)):
                    self._copy_block(group, block, row, store=store)
        self._ended.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def _copy_block(self, group: int, block: int, row: torch.Tensor, *, store: bool) -> None:
        at = 0
        for ref in self._kv_caches.group_data_refs[group]:
            page = self._kv_caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes]
            kept = row[at : at + ref.page_size_bytes]
            (kept if store else page).copy_(page if store else kept)
            at += ref.page_size_bytes


class TorchOffloadingSpec(CPUOffloadingSpec):
    BLOCK_SIZE_ALIGNMENT = 1

    def get_worker(self, kv_caches: Any) -> TorchWorker:
        rows = self.num_chunks * self.blocks_per_chunk
        return TorchWorker(kv_caches, rows, self.config.worker_kv_bytes_per_block, self.blocks_per_chunk)
