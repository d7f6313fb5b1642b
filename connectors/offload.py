"""``HybridOffloadConnector``: keeps blocks of every KV cache group in pinned host memory and reloads them.

``--kv-transfer-config '{"kv_connector": "HybridOffloadConnector", "kv_connector_module_path":
"connectors.offload", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
"kv_connector_extra_config": {"host_bytes": "8GiB"}}'``; the settings are in ``connectors.settings``.
"""

from __future__ import annotations

from functools import partial

from connectors.compat import CacheHitSource
from connectors.hits.resolver import HitResolver
from connectors.layout.blocks import row_bytes_from_config
from connectors.scheduler.events import EventPlace, KvEventLog
from connectors.scheduler.scheduler import OffloadScheduler
from connectors.settings import OffloadSettings
from connectors.tier.eviction.policies import make_policy
from connectors.tier.host import HostTier
from connectors.tiered import EXTRA_CONFIG, TieredConnector
from connectors.worker.engines import make_engine, slots_of
from connectors.worker.worker import EngineFactory, OffloadWorker

HOST_OWNERSHIP = "kvatlas-host"
"""What KV events call this tier."""


class HybridOffloadConnector(TieredConnector):
    """Host memory as the second tier of one engine."""

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
        )
        place = EventPlace(medium="CPU", locality="LOCAL", ownership=HOST_OWNERSHIP)
        self._tier = HostTier(slots, policy)
        return OffloadScheduler(
            self._tier,
            resolver,
            settings,
            world_size=self.world_size,
            event_log=KvEventLog(self._kv_cache_config, resolver.hash_block_tokens, place)
            if self.events_enabled
            else None,
        )

    def totals(self) -> dict[str, int]:
        if self._tier is None:
            return {}
        counters = self._tier.counters
        return {"tier/evictions": counters.evictions, "tier/dropped_for_room": counters.dropped_for_room}

    def make_worker(self) -> OffloadWorker:
        return OffloadWorker(self._kv_cache_config, self.engine_factory(), join_stores=True)

    def engine_factory(self) -> EngineFactory:
        """How this rank's transfer engine is made."""
        row_bytes = row_bytes_from_config(self._kv_cache_config)
        return partial(make_engine, slots=self.slots(self.settings()), row_bytes=row_bytes)

    def settings(self) -> OffloadSettings:
        return OffloadSettings.parse(self.extra_config, EXTRA_CONFIG)

    def slots(self, settings: OffloadSettings) -> int:
        """Rows of each rank."""
        where = f"{EXTRA_CONFIG}.host_bytes"
        return slots_of(self._kv_cache_config, settings.host_bytes, self.world_size, where)
