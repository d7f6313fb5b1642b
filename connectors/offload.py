"""``HybridOffloadConnector``: store blocks of every KV cache group in pinned host memory and reload them.

``--kv-transfer-config '{"kv_connector": "HybridOffloadConnector", "kv_connector_module_path":
"connectors.offload", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
"kv_connector_extra_config": {"host_bytes": "8GiB"}}'``; the settings are in ``connectors.settings``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import asdict

from connectors.compat import CacheHitSource, KVConnectorHandshakeMetadata, wait_for_ranks
from connectors.hits import HitResolver
from connectors.layout import row_bytes_from_config
from connectors.reports import EventPlace, KvEventLog
from connectors.scheduler.scheduler import OffloadScheduler
from connectors.settings import OffloadSettings
from connectors.tier.eviction import make_policy
from connectors.tier.host import HostTier
from connectors.tiered import EXTRA_CONFIG, TieredConnector
from connectors.worker.worker import EngineFactory, OffloadWorker, Replicas, make_engine, slots_of

log = logging.getLogger(__name__)

# ``ownership`` of this tier in KV events.
HOST_OWNERSHIP = "kvatlas-host"


@dataclass
class RowsOfRank(KVConnectorHandshakeMetadata):
    """Number of rows of a rank, sent to the scheduler half before the first request."""

    slots: int


class HybridOffloadConnector(TieredConnector):
    """Host memory as the second tier of one engine."""

    takes_pipelines = True
    _cache_hit_source = CacheHitSource.HOST
    _tier: HostTier | None = None

    def make_scheduler(self) -> OffloadScheduler:
        settings = self.settings()
        resolver = HitResolver.from_vllm_config(self._vllm_config, self._kv_cache_config)
        slots = self.slots(settings)
        policy = make_policy(
            settings.policy,
            slots=slots,
            shapes=resolver.group_shapes,
            hash_block_tokens=resolver.hash_block_tokens,
            boundary_tokens=resolver.scheduler_block_tokens,
            hint_share=settings.hint_share,
        )
        place = EventPlace(medium="CPU", locality="LOCAL", ownership=HOST_OWNERSHIP)
        self._tier = HostTier(slots, policy)
        return OffloadScheduler(
            self._tier,
            resolver,
            settings,
            world_size=self.world_size,
            step_tokens_max=int(self._vllm_config.scheduler_config.max_num_batched_tokens),
            event_log=KvEventLog(self._kv_cache_config, resolver.hash_block_tokens, place)
            if self.events_enabled
            else None,
        )

    def totals(self) -> dict[str, int]:
        if self._tier is None:
            return {}
        counters, hints = self._tier.counters, self._tier.hint_counters
        return {
            "tier/evictions": counters.evictions,
            "tier/dropped_for_room": counters.dropped_for_room,
            "tier/failed_loads": counters.failed_loads,
            "tier/failed_stores": counters.failed_stores,
            **({} if hints is None else {f"hinted_blocks/{name}": n for name, n in asdict(hints).items()}),
        }

    def gauges(self) -> dict[str, float]:
        if self._tier is None:
            return {}
        used, hinted = self._tier.slots - self._tier.free_slots, self._tier.num_hinted
        # Routers send hints only to engines that show rows/hinted (router/fleet/statement.py).
        own = {} if hinted is None else {"rows/hinted": hinted}
        return {**super().gauges(), "rows/all": self._tier.slots, "rows/used": used, **own}

    def make_worker(self) -> OffloadWorker:
        self.check_host_memory(self.settings().host_bytes)
        return OffloadWorker(self._kv_cache_config, self.engine_factory(), join_stores=True)

    def get_handshake_metadata(self) -> RowsOfRank | None:
        """The rank's number of rows; it differs between pipeline stages, which hold different layers."""
        if self._vllm_config.parallel_config.pipeline_parallel_size == 1:
            return None
        return RowsOfRank(self.slots(self.settings()))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        rows = [sent.slots for sent in metadata.values() if isinstance(sent, RowsOfRank)]
        if rows and self._tier is not None and min(rows) < self._tier.slots:
            log.info(
                "host memory holds %d rows, limited by the pipeline stage with the largest rows", min(rows)
            )
            self._tier.shrink(min(rows))

    def engine_factory(self) -> EngineFactory:
        """Factory of this rank's transfer engine."""
        settings = self.settings()
        return partial(
            make_engine,
            slots=self.slots(settings),
            row_bytes=row_bytes_from_config(self._kv_cache_config),
            replicas=self.replicas(settings),
            name=str(self._vllm_config.kv_transfer_config.engine_id),
            meet=wait_for_ranks,
        )

    def settings(self) -> OffloadSettings:
        return OffloadSettings.parse(self.extra_config, EXTRA_CONFIG)

    def slots(self, settings: OffloadSettings) -> int:
        """Rows of each rank, or of each group of ranks that shares them."""
        shares = self.world_size // self.replicas(settings).count
        return slots_of(self._kv_cache_config, settings.host_bytes, shares, f"{EXTRA_CONFIG}.host_bytes")

    def replicas(self, settings: OffloadSettings) -> Replicas:
        """The ranks that hold the same KV as this one."""
        if not settings.share_replicas:
            return Replicas()
        return Replicas.from_config(self._kv_cache_config, self._vllm_config.parallel_config)
