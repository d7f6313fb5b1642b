"""Base class of the vLLM connectors, and ``HybridOffloadConnector``: blocks of every group in host memory.

``--kv-transfer-config '{"kv_connector": "HybridOffloadConnector", "kv_connector_module_path":
"kvatlas.connectors.offload", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
"kv_connector_extra_config": {"host_bytes": "8GiB"}}'``; the settings are in ``kvatlas.connectors.settings``.

vLLM makes one object per role, in different processes: the scheduler's holds an ``OffloadScheduler``, each
rank's an ``OffloadWorker``. They communicate only through step metadata. A subclass of ``TieredConnector``
chooses the tier and the transfer engine. Loads are always asynchronous, blocks are freed immediately, and
nothing here raises after setup.
"""

from __future__ import annotations

import abc
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import asdict

from kvatlas.connectors.compat import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    require_tested_vllm,
    share_vllm_log,
    wait_for_ranks,
)
from kvatlas.connectors.hits import HitResolver
from kvatlas.connectors.layout import row_bytes_from_config
from kvatlas.connectors.reports import EventPlace, KvEventLog, OffloadPromMetrics, OffloadStats
from kvatlas.connectors.scheduler.scheduler import OffloadScheduler
from kvatlas.connectors.settings import ConfigError, OffloadSettings, Options, layout_setting
from kvatlas.connectors.tier.eviction import make_policy
from kvatlas.connectors.tier.host import HostTier
from kvatlas.connectors.transfer.base import StepJobs, StepResults
from kvatlas.connectors.transfer.memory_limits import available_bytes
from kvatlas.connectors.worker.worker import EngineFactory, OffloadWorker, Replicas, make_engine, slots_of

log = logging.getLogger(__name__)

EXTRA_CONFIG = "kv_connector_extra_config"


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The jobs of one step, for the workers."""

    jobs: StepJobs


@dataclass
class WorkerResults(KVConnectorWorkerMetadata):
    """The ranks' results of one step."""

    results: StepResults

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerResults:
        return WorkerResults(self.results.merge(other.results))


class TieredConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector over one tier. Subclasses make the halves; the constructor calls them once."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ``ConfigError`` for an invalid setting, ``RuntimeError`` for an untested vLLM."""
        require_tested_vllm(type(self).__name__)
        share_vllm_log()
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_model(vllm_config.model_config)
        check_engine(vllm_config, kv_cache_config)
        self._reported: dict[str, int] = {}
        self._shown: dict[str, float] = {}
        self._scheduler: OffloadScheduler | None = None
        self._worker: OffloadWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            warn_about_failure_policy(vllm_config.kv_transfer_config.kv_load_failure_policy)
            self._scheduler = self.make_scheduler()
        else:
            self._worker = self.make_worker()

    @abc.abstractmethod
    def make_scheduler(self) -> OffloadScheduler:
        """Make the scheduler half; ``_vllm_config``, ``_kv_cache_config`` and ``extra_config`` are set."""

    @abc.abstractmethod
    def make_worker(self) -> OffloadWorker:
        """Make the half of one rank."""

    @property
    def extra_config(self) -> dict[str, Any]:
        return dict(self._kv_transfer_config.kv_connector_extra_config or {})

    @property
    def world_size(self) -> int:
        """Number of ranks of this engine."""
        return int(self._vllm_config.parallel_config.world_size)

    @property
    def events_enabled(self) -> bool:
        """Whether this engine publishes KV events."""
        events = self._vllm_config.kv_events_config
        return events is not None and bool(events.enable_kv_cache_events)

    @property
    def scheduler(self) -> OffloadScheduler:
        if self._scheduler is None:
            raise RuntimeError("this is a worker's connector; vLLM asked it for the scheduler's part")
        return self._scheduler

    @property
    def worker(self) -> OffloadWorker:
        if self._worker is None:
            raise RuntimeError("this is the scheduler's connector; vLLM asked it for a worker's part")
        return self._worker

    # -- class-level interface of vLLM -------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: the tier is a cache; missing blocks are recomputed."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """False: transfers were not tested with a KV cache that is unmapped and mapped again.

        vLLM 0.33 then refuses to start with sleep mode.
        """
        del kv_transfer_config
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """By default all layers of a block side by side, one long piece per block; ``layout`` overrides
        it."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        layout = layout_setting(Options(extra, EXTRA_CONFIG))
        return None if layout == "engine" else layout

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        return OffloadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def totals(self) -> dict[str, int]:
        """Further counters of this half since its start, by the names of ``kvatlas.connectors.reports``."""
        return {}

    def gauges(self) -> dict[str, float]:
        """Current values by the names of ``kvatlas.connectors.reports``; empty in a worker."""
        return {} if self._scheduler is None else self._scheduler.gauges()

    def get_kv_connector_stats(self) -> OffloadStats | None:
        half = self._scheduler if self._scheduler is not None else self._worker
        counts = half.counters.take() if half is not None else {}
        totals = self.totals()
        counts |= {name: total - self._reported.get(name, 0) for name, total in totals.items()}
        self._reported = totals
        counts = {name: count for name, count in counts.items() if count}
        gauges = self.gauges()
        counts |= {name: value for name, value in gauges.items() if self._shown.get(name) != value}
        self._shown = gauges
        return OffloadStats(data=counts) if counts else None

    def check_host_memory(self, host_bytes: int) -> None:
        """Raise ``ConfigError`` unless ``host_bytes`` of all ranks of this machine are available."""
        # Every rank calls it in its constructor; no rank allocates memory before all have checked.
        nodes = max(1, int(getattr(self._vllm_config.parallel_config, "nnodes_within_dp", 1)))
        available = available_bytes()
        wait_for_ranks()
        if host_bytes // nodes > available:
            raise ConfigError(
                f"{EXTRA_CONFIG}.host_bytes",
                host_bytes,
                f"the ranks on this machine together ask for {host_bytes // nodes} bytes and {available} are "
                "available: lower it, or give the machine or container more memory",
            )

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    # -- scheduler half ----------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.scheduler.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(self.scheduler.build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        answered = connector_output.kv_connector_worker_meta
        if isinstance(answered, WorkerResults):
            self.scheduler.update_connector_output(answered.results)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.request_finished_all_groups(request, block_ids)

    def take_events(self) -> list[Any]:
        return self.scheduler.take_events()

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_pending_push_work()

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.has_pending_block_frees()

    def reset_cache(self) -> bool:
        return self.scheduler.reset_cache()

    # -- worker half -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.bind(_jobs(connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        self.worker.start_load_kv(_jobs(self._connector_metadata))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: blocks are stored whole, after the step."""

    def wait_for_save(self) -> None:
        self.worker.wait_for_save(_jobs(self._connector_metadata))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        del finished_req_ids
        finished, failed = self.worker.poll()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerResults | None:
        results = self.worker.take_results()
        return None if results is None else WorkerResults(results)


def _jobs(metadata: KVConnectorMetadata | None) -> StepJobs:
    return metadata.jobs if isinstance(metadata, StepMetadata) else StepJobs()


def check_model(model_config: Any) -> None:
    """Raise ``ConfigError`` for models that vLLM itself refuses by an assertion only."""
    if model_config.is_encoder_decoder:
        remedy = "what the encoder left would not be loaded; serve this model without a connector"
        raise ConfigError("model_config.is_encoder_decoder", True, remedy)


def warn_about_failure_policy(policy: str) -> None:
    """Warn about vLLM's default, under which a block lost by a store fails a request."""
    if policy != "recompute":
        log.warning(
            "kv_load_failure_policy = %r: a request whose load fails (for example, because a store "
            'evicted its blocks) ends with an error; set it to "recompute" beside kv_connector',
            policy,
        )


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ``ConfigError`` for engines whose blocks these connectors cannot store."""
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise ConfigError("kv_role", role, 'this connector stores and loads; use "kv_both"')
    parallel = vllm_config.parallel_config
    for name, what in (
        ("pipeline_parallel_size", "what a stage stores would depend on how the layers are divided"),
        ("decode_context_parallel_size", "a block's tokens would lie on several ranks"),
        ("prefill_context_parallel_size", "a block's tokens would lie on several ranks"),
    ):
        if getattr(parallel, name) != 1:
            raise ConfigError(name, getattr(parallel, name), f"{what}; use tensor parallelism instead")
    for group in kv_cache_config.kv_cache_groups:
        for spec in _layer_specs(group.kv_cache_spec):
            mode = getattr(spec, "mamba_cache_mode", "align")
            if mode != "align":
                raise ConfigError(
                    "mamba_cache_mode", mode, 'only states at block boundaries can be kept; use "align"'
                )


def _layer_specs(spec: Any) -> list[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [spec]


# ``ownership`` of this tier in KV events.
HOST_OWNERSHIP = "kvatlas-host"


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
            hint_share=settings.hint_share,
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
        # Routers send hints only to engines that show rows/hinted (router/fleet/engine_metrics.py).
        own = {} if hinted is None else {"rows/hinted": hinted}
        return {**super().gauges(), "rows/all": self._tier.slots, "rows/used": used, **own}

    def make_worker(self) -> OffloadWorker:
        self.check_host_memory(self.settings().host_bytes)
        return OffloadWorker(self._kv_cache_config, self.engine_factory(), join_stores=True)

    def engine_factory(self) -> EngineFactory:
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
