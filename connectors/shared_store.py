"""``SharedStoreConnector``: store blocks of every KV cache group in a store that several engines share.

``--kv-transfer-config '{"kv_connector": "SharedStoreConnector", "kv_connector_module_path":
"kvatlas.connectors.shared_store", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
"kv_connector_extra_config": {"host_bytes": "1GiB", "store": {"kind": "file", "path": "/dev/shm/blocks"}}}'``;
the settings are in ``kvatlas.connectors.store.open``, a store's own in its module. Engines with equal
namespaces share blocks (``kvatlas.connectors.store.base``); each logs its namespace at start."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from typing import Any

from kvatlas.connectors.compat import CacheHitSource, KVConnectorRole, require_tested_vllm
from kvatlas.connectors.hits import HitResolver
from kvatlas.connectors.layout import CacheView, LayoutError, row_bytes_from_config
from kvatlas.connectors.offload import EXTRA_CONFIG, TieredConnector
from kvatlas.connectors.reports import EventPlace, KvEventLog
from kvatlas.connectors.scheduler.scheduler import OffloadScheduler
from kvatlas.connectors.settings import ConfigError
from kvatlas.connectors.store.base import close_within, namespace_of
from kvatlas.connectors.store.open import SharedSettings, open_store
from kvatlas.connectors.tier.store import StoreTier
from kvatlas.connectors.transfer.base import TransferEngine
from kvatlas.connectors.worker.staged import StagedTransfers, staging_row_bytes
from kvatlas.connectors.worker.worker import OffloadWorker, Replicas, ShareOfStores, open_rows

# A child of vLLM's logger: only those reach the engine's log.
log = logging.getLogger(f"vllm.{__name__}")

_ROWS_MIN = 4
_STORE_CLOSE_S = 5.0


class SharedStoreConnector(TieredConnector):
    """A shared store as the second tier of every engine that uses it."""

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        require_tested_vllm(type(self).__name__)
        self._settings = SharedSettings.parse(
            vllm_config.kv_transfer_config.kv_connector_extra_config or {}, EXTRA_CONFIG
        )
        self._replicas = (
            Replicas.from_config(kv_cache_config, vllm_config.parallel_config)
            if self._settings.offload.share_replicas
            else Replicas()
        )
        self._namespace = namespace_of(
            vllm_config, kv_cache_config, label=self._settings.label, replicas=self._replicas.count
        )
        self._tier: StoreTier | None = None
        self._staged: StagedTransfers | None = None
        super().__init__(vllm_config, role, kv_cache_config)

    def make_scheduler(self) -> OffloadScheduler:
        settings = self._settings
        store = open_store(settings.store, where=f"{EXTRA_CONFIG}.store", lookup_only=True)
        log.info("sharing blocks through store %s in namespace %s", store.name, self._namespace.describe())
        if self._namespace.private_reason:
            log.warning("%s", self._namespace.private_reason)
        self._store = store
        self._tier = StoreTier(store, self._namespace, settings.tier)
        resolver = HitResolver.from_vllm_config(self._vllm_config, self._kv_cache_config)
        place = EventPlace(medium="STORAGE", locality="REMOTE", ownership=store.name)
        return OffloadScheduler(
            self._tier,
            resolver,
            settings.offload,
            world_size=self.world_size,
            event_log=KvEventLog(self._kv_cache_config, resolver.hash_block_tokens, place)
            if self.events_enabled
            else None,
        )

    def make_worker(self) -> OffloadWorker:
        self._staging_rows()
        self.check_host_memory(self._settings.offload.host_bytes)
        return OffloadWorker(self._kv_cache_config, self._make_engine)

    def totals(self) -> dict[str, int]:
        return {f"store/{reason}": count for reason, count in self._store_counters().items()}

    def shutdown(self) -> None:
        super().shutdown()
        if self._tier is not None:
            self._tier.close()
            close_within(self._store, _STORE_CLOSE_S)

    def _store_counters(self) -> dict[str, int]:
        if self._staged is not None:
            return self._staged.counters()
        if self._tier is None:
            return {}
        return {f"lookup_{name}": count for name, count in self._store.counters().items()} | {
            f"tier_{name}": count for name, count in self._tier.counters.items()
        }

    def _staging_rows(self) -> int:
        """Number of rows of this rank. ConfigError if they are too few for a useful speed."""
        row_bytes = staging_row_bytes(row_bytes_from_config(self._kv_cache_config))
        host_bytes = self._settings.offload.host_bytes
        rows = host_bytes // self.world_size // row_bytes
        if rows < _ROWS_MIN:
            need = _ROWS_MIN * self.world_size * row_bytes
            raise ConfigError(
                f"{EXTRA_CONFIG}.host_bytes",
                host_bytes,
                f"a block takes {row_bytes} bytes; give {need} or more",
            )
        return rows

    def _make_engine(self, view: CacheView, device: str) -> TransferEngine:
        """Make this rank's staging rows, an engine that copies to and from them, and the store."""
        rows = self._staging_rows()
        row_bytes = staging_row_bytes(view.row_bytes)
        if row_bytes > staging_row_bytes(row_bytes_from_config(self._kv_cache_config)):
            raise LayoutError(f"a block takes {view.row_bytes} bytes, more than its configuration says")
        copies, pool = open_rows(view, device, rows, row_bytes)
        store = open_store(self._settings.store, where=f"{EXTRA_CONFIG}.store")
        memory = (ctypes.c_ubyte * pool.size_bytes).from_address(pool.address)
        store.register_buffer(memoryview(memory).cast("B"))
        rank = int(self._vllm_config.parallel_config.rank)
        log.info("rank %d stages %d rows of %d bytes for store %s", rank, rows, row_bytes, store.name)
        self._staged = StagedTransfers(
            view, copies, pool, store, self._namespace, rank, replace(self._settings.staging, rows=rows)
        )
        return (
            self._staged if self._replicas.count == 1 else ShareOfStores(self._staged, self._replicas.by_key)
        )
