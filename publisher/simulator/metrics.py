"""Counters of a simulated engine, and its pages ``/metrics`` as vLLM and SGLang write them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvatlas.publisher.simulator.kv_messages import Observed, TransferStats, histogram

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

TTFT_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)


class EngineStats(msgspec.Struct):
    """Counters of a simulated engine since its start, in tokens unless named otherwise.

    The scheduler counts in ``EngineStats``; ``render`` writes the text exposition format at scrape time.
    Names, labels and buckets are those of vLLM 0.32 (``vllm/v1/metrics``).
    """

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    ttft: Observed = msgspec.field(default_factory=lambda: Observed([0] * (len(TTFT_BUCKETS_S) + 1)))
    finished: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Labels of ``vllm:cache_config_info`` that the router or tools read; values as vLLM writes them."""

    block_size: int
    num_gpu_blocks: int
    prefix_caching_hash_algo: str
    prefix_cache_retention_interval: int | None
    mamba_cache_mode: str = "none"
    mamba_block_size: int | None = None
    effective_attention_block_size: int | None = None
    enable_prefix_caching: bool = True

    def labels(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in self.__struct_fields__}


class Gauges(msgspec.Struct, frozen=True):
    """Current state of the engine."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float


class _Scrape(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


# Counters shown under vLLM's names, in the order of its page; the second are those of connectors.
_COUNTERS = {"prefix_cache_queries": "Queried tokens.", "prefix_cache_hits": "Cached tokens."}
_EXTERNAL_COUNTERS = {
    "external_prefix_cache_queries": "Tokens requested from other engines.",
    "external_prefix_cache_hits": "Tokens other engines have.",
}
_TOKEN_COUNTERS = {
    "prompt_tokens": "Prefill tokens processed.",
    "prompt_tokens_cached": "Cached prompt tokens.",
    "generation_tokens": "Generation tokens processed.",
    "num_preemptions": "Preemptions.",
}
_GAUGES = {
    "num_running": ("num_requests_running", "Requests in execution batches."),
    "num_waiting": ("num_requests_waiting", "Requests waiting to be processed."),
    "kv_cache_usage": ("kv_cache_usage_perc", "KV cache usage, 1 is full."),
}


def _families(
    stats: EngineStats,
    gauges: Gauges,
    cache: CacheConfig,
    labels: dict[str, str],
    transfers: TransferStats | None,
    *,
    drafts: bool,
    started_s: float,
) -> Iterator[Metric]:
    names, values = list(labels), list(labels.values())

    def counters(texts: dict[str, str]) -> Iterator[Metric]:
        for name, text in texts.items():
            family = CounterMetricFamily(f"vllm:{name}", text, labels=names)
            family.add_metric(values, getattr(stats, name, 0))
            yield family

    config = {**cache.labels(), "engine": labels["engine"]}
    info = GaugeMetricFamily("vllm:cache_config_info", "Cache configuration.", labels=list(config))
    info.add_metric(list(config.values()), 1.0)
    yield info
    for field, (name, text) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=names)
        gauge.add_metric(values, getattr(gauges, field))
        yield gauge
    yield from counters(_COUNTERS)
    if drafts:
        yield from counters({"spec_decode_num_drafts": "Number of spec decoding drafts."})
    if transfers is not None:
        yield from counters(_EXTERNAL_COUNTERS)
        yield from transfers.families(tuple(names), tuple(values))
    yield from counters(_TOKEN_COUNTERS)
    success = CounterMetricFamily(
        "vllm:request_success", "Finished requests.", labels=[*names, "finished_reason"]
    )
    for reason, count in stats.finished.items():
        success.add_metric([*values, reason], count)
    yield success
    name = "vllm:time_to_first_token_seconds"
    yield histogram(name, "Time to first token.", labels, stats.ttft, TTFT_BUCKETS_S)
    # Of prometheus_client's ProcessCollector, of which routers read this one.
    started = GaugeMetricFamily(
        "process_start_time_seconds", "Start of the process, seconds since the epoch."
    )
    started.add_metric([], started_s)
    yield started


def render(
    stats: EngineStats,
    gauges: Gauges,
    cache: CacheConfig,
    *,
    model: str,
    dp_rank: int,
    transfers: TransferStats | None = None,
    drafts: bool = False,
    started_s: float = 1.0,
    only: Collection[str] = (),
) -> bytes:
    """The body of ``GET /metrics``.

    ``only``: names of samples; families without one of these are left out (none given: all are there).
    ``started_s``: start of the process, seconds since the epoch. ``transfers`` is None for an engine without
    a connector. ``drafts``: the engine has a drafter's layers (which draft nothing here).
    """
    registry = CollectorRegistry()
    labels = {"model_name": model, "engine": str(dp_rank)}
    families = _families(stats, gauges, cache, labels, transfers, drafts=drafts, started_s=started_s)
    wanted = [one for one in families if not only or any(sample.name in only for sample in one.samples)]
    registry.register(_Scrape(wanted))
    return generate_latest(registry)


def render_sglang(gauges: Gauges, cache: CacheConfig, *, model: str, dp_rank: int) -> bytes:
    """The body of SGLang's ``GET /metrics``: its gauges (srt/observability/metrics_collector.py, 0.5.23)."""
    registry = CollectorRegistry()
    labels = {"dp_rank": str(dp_rank), "engine_type": "unified", "model_name": model, "tp_rank": "0"}
    values = {
        "num_running_reqs": gauges.num_running,
        "num_queue_reqs": gauges.num_waiting,
        "token_usage": gauges.kv_cache_usage,
        "num_pages": cache.num_gpu_blocks,
    }
    for name, value in values.items():
        gauge = Gauge(f"sglang:{name}", name, list(labels), registry=registry)
        gauge.labels(**labels).set(value)
    return generate_latest(registry)
