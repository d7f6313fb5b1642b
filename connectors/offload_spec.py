"""``HostOffloadingSpec``: vLLM's own ``OffloadingConnector`` on this package's transfer engines.

``--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
"kv_connector_extra_config": {"spec_name": "HostOffloadingSpec", "spec_module_path":
"connectors.offload_spec", "host_bytes": "8GiB"}}'``

vLLM's connector chooses stores and loads, and its manager the chunks to hold. Host memory and copies are
those of ``connectors.transfer``, so it also runs on CPU engines. A chunk is ``blocks_per_chunk`` consecutive
rows; a row holds one block of any group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import vllm

from connectors.compat import require_tested_vllm, share_vllm_log
from connectors.layout import CacheView, LayoutError, Piece, group_pages, round_up_row
from connectors.settings import ConfigError, size_bytes
from connectors.tiered import EXTRA_CONFIG
from connectors.worker.offload_worker import RowOffloadingWorker, check_canonical
from connectors.worker.worker import open_rows

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
    """View of the cache that vLLM registers with a spec, in vLLM's order of groups.

    A row holds the pages of a group's layers consecutively. ``LayoutError`` if pages overlap or the caches
    are not in vLLM's canonical form.
    """
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
