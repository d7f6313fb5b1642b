"""The Prometheus page: every counter of every part, read when scraped.

Parts keep plain numbers in small structs and know nothing of Prometheus; ``RouterCollector`` turns them into
metric families. Names are ``kvatlas_<part>_<what>``, units at the end; labels are engine ids, models and
fixed words only, so the number of series is bounded by the fleet.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from router import __version__
from router.admission.gate import KeyGate
from router.api.admin.stats import AdminStats
from router.feeds.base import FeedState
from router.fleet.discovery import FleetSources
from router.fleet.status import Fleet
from router.http.server.stats import ListenStats
from router.index.models import Scopes
from router.observe.field_texts import field_texts
from router.observe.histogram import Histogram
from router.observe.receipts import ERROR_BUCKETS, EngineReceipts
from router.observe.requests import RequestTracker
from router.observe.traces import TraceStats
from router.placement.engine import Accounts, Engine
from router.prompts.stats import PromptStats
from router.proxy.aliases import Aliases
from router.proxy.stats import ProxyStats
from router.replication.service import SharedIndex

_GAUGES = frozenset(
    {
        "feed_held_batches",
        "feed_known_batches",
        "feed_waiting_batches",
        "feed_lag_s",
        "feed_last_batch_monotonic",
        "feed_last_seq",
        "feed_missing_batches",
        "flight_others",
        "inflight_blocks",
        "lease_held",
        "lease_replicas",
        "lease_wanted",
        "inflight_prompts",
        "prompts_context_bytes",
        "prompts_media_bytes",
        "prompts_prefix_bytes",
        "proxy_requests_active",
        "source_engines",
        "source_failing",
        "source_synced",
        "tenant_active",
    }
)
"""Numbers of the stats structs that may fall; every other one is a counter."""
_LABELS = {"prompts_reads": ["api", "how"]}
"""Labels of numbers that are counted by more than one word."""
_UNITS = {"_s": "_seconds", "_monotonic": "_monotonic_seconds"}
_NOT_NUMBERS = frozenset({"state", "reason"})


class Sources(msgspec.Struct):
    """Where the numbers are; all of them live objects."""

    fleet: Fleet[Engine]
    scopes: Scopes
    accounts: Accounts
    proxy: ProxyStats
    prompts: PromptStats
    listen: Callable[[], ListenStats | None]
    shared: SharedIndex | None = None
    origins: FleetSources | None = None
    """Where engines come from."""
    admin: AdminStats | None = None
    requests: RequestTracker | None = None
    gate: KeyGate | None = None
    """Clients' keys, where they need some."""
    aliases: Aliases | None = None
    """Other names of models."""
    traces: TraceStats | None = None


class RouterCollector:
    """A ``prometheus_client`` collector over ``Sources``."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """All families, in a fixed order."""
        s = self._sources
        yield from _build()
        if s.requests is not None:
            yield from _requests(s.requests)
        yield from self._engines()
        yield from _by_engine("feed", {e.engine_id: e.feed for e in s.fleet if e.feed is not None})
        yield from self._residency()
        yield from self._removals()
        yield from self._receipts()
        yield from self._load()
        yield from _numbers("proxy", s.proxy)
        listen = s.listen()
        if listen is not None:
            yield from _numbers("listen", listen)
        yield from _numbers("prompts", s.prompts)
        yield from _numbers("inflight", s.accounts.inflight.stats)
        yield from _numbers("affinity", s.accounts.affinity.stats)
        yield from _numbers("shadow", s.accounts.shadow_stats)
        if s.accounts.access is not None:
            yield from _numbers("access_log", s.accounts.access.stats)
        if s.shared is not None:
            yield from _numbers("lease", s.shared.lease_manager.stats)
            yield from _numbers("look", s.shared.lookup.stats)
            yield from _numbers("flight", s.shared.inflight.gossip_stats)
            yield from _by_label("model", "mirror", s.shared.mirror_stats())
        if s.origins is not None:
            yield from _by_label("source", "source", s.origins.stats)
        if s.admin is not None:
            yield from _numbers("admin", s.admin)
        if s.traces is not None:
            yield from _numbers("traces", s.traces)
        if s.gate is not None:
            yield from _numbers("keys", s.gate.stats)
            yield from _by_label("tenant", "tenant", s.gate.tenants())

    def _engines(self) -> Iterator[Metric]:
        s = self._sources
        up = GaugeMetricFamily(
            "kvatlas_engine_up", "1 if the engine answers GET /v1/models with a model", labels=["engine"]
        )
        held = GaugeMetricFamily(
            "kvatlas_engine_held",
            "1 if it gets no new requests (drained, not ready, leaving)",
            labels=["engine"],
        )
        opened = GaugeMetricFamily(
            "kvatlas_engine_breaker_open",
            "1 if the engine gets no requests because its latest ones failed (circuit breaker)",
            labels=["engine"],
        )
        usage = GaugeMetricFamily(
            "kvatlas_engine_kv_usage_ratio",
            "Share of its KV blocks that the engine says running requests use (0 to 1)",
            labels=["engine"],
        )
        states = GaugeMetricFamily(
            "kvatlas_feed_state",
            "1 for the state that the feed of the engine's KV events is in",
            labels=["engine", "state"],
        )
        now = s.accounts.now()
        for status in s.fleet:
            up.add_metric([status.engine_id], float(status.up))
            held.add_metric([status.engine_id], float(bool(status.held)))
            opened.add_metric([status.engine_id], float(not status.breaker.allows(now)))
            if status.kv_usage is not None:
                usage.add_metric([status.engine_id], status.kv_usage)
            stats = status.feed
            for state in FeedState if stats is not None else ():
                states.add_metric(
                    [status.engine_id, str(state)], float(stats is not None and stats.state == state)
                )
        yield from (up, held, opened, usage, states)

    def _residency(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "kvatlas_index_blocks",
            "Distinct KV blocks (by hash) that the engines of a model hold",
            labels=["model"],
        )
        held = GaugeMetricFamily(
            "kvatlas_index_residencies",
            "Entries of the index: one per block, engine, medium and group of layers",
            labels=["model"],
        )
        extra = GaugeMetricFamily(
            "kvatlas_index_extra_copies",
            "Further copies of blocks that an engine holds more than once",
            labels=["model"],
        )
        rows = GaugeMetricFamily(
            "kvatlas_index_patterns",
            "Distinct sets of places that blocks are held in, which rows of the index share",
            labels=["model"],
        )
        unknown = CounterMetricFamily(
            "kvatlas_index_unknown_removals",
            "Removal events of blocks that were not known to be held",
            labels=["model"],
        )
        rejected = CounterMetricFamily(
            "kvatlas_index_rejected_events",
            "Events that the index skipped because they were inconsistent, by reason",
            labels=["engine", "reason"],
        )
        mode = GaugeMetricFamily(
            "kvatlas_index_mode",
            "1 for the way in which block hashes of prompts are found: native, learned, or not yet",
            labels=["engine", "mode"],
        )
        for model, scope in self._sources.scopes.models().items():
            stats = scope.stats()
            blocks.add_metric([model], stats.blocks)
            held.add_metric([model], stats.residencies)
            extra.add_metric([model], stats.extra_copies)
            rows.add_metric([model], stats.patterns)
            unknown.add_metric([model], stats.unknown_removals)
        for status in self._sources.fleet:
            engine = None if status.residency is None else status.residency.writer
            if engine is not None:
                mode.add_metric([status.engine_id, engine.mode], 1.0)
                for reason, count in engine.rejected.items():
                    rejected.add_metric([status.engine_id, reason], count)
        yield from (blocks, held, extra, rows, unknown, rejected, mode)

    def _removals(self) -> Iterator[Metric]:
        """How each publisher's removals are read (``router.index.learn.removals``), and by what evidence."""
        read = GaugeMetricFamily(
            "kvatlas_index_removals",
            "1 for what a removal event of the engine takes: one copy, the last copy, or the number it tells",
            labels=["engine", "semantics"],
        )
        evidence = CounterMetricFamily(
            "kvatlas_index_removal_evidence",
            "Evidence for it since the engine's start: removed_again (blocks), told_counts (events), "
            "phantoms (audits that found more copies than blocks)",
            labels=["engine", "evidence"],
        )
        again = GaugeMetricFamily(
            "kvatlas_index_re_reports_suspected",
            "1 if stored events seem to repeat earlier ones",
            labels=["engine"],
        )
        for status in self._sources.fleet:
            engine = None if status.residency is None else status.residency.writer
            if engine is not None:
                removals = engine.removals
                read.add_metric([status.engine_id, str(removals.semantics)], 1.0)
                for name in ("removed_again", "told_counts", "phantoms"):
                    evidence.add_metric([status.engine_id, name], float(getattr(removals, name)))
                again.add_metric([status.engine_id], float(removals.re_reports_suspected))
        yield from (read, evidence, again)

    def _receipts(self) -> Iterator[Metric]:
        outcomes = CounterMetricFamily(
            "kvatlas_receipts",
            "Predictions compared with what the engine reported, by outcome",
            labels=["engine", "outcome"],
        )
        predicted = CounterMetricFamily(
            "kvatlas_predicted_hit_tokens",
            "Predicted hit tokens of requests whose hit the engine reported",
            labels=["engine"],
        )
        by_medium = CounterMetricFamily(
            "kvatlas_predicted_hit_medium_tokens",
            "Predicted hit tokens of requests whose hit the engine reported, by the medium they lie in",
            labels=["engine", "medium"],
        )
        farthest = CounterMetricFamily(
            "kvatlas_predictions_compared",
            "Compared receipts by the farthest medium that the prediction rests on, and outcome",
            labels=["engine", "medium", "outcome"],
        )
        actual = CounterMetricFamily(
            "kvatlas_reported_hit_tokens",
            "Hit tokens (cached_tokens) that the engine reported, of requests with a prediction",
            labels=["engine"],
        )
        lengths = CounterMetricFamily(
            "kvatlas_prompt_mismatches",
            "Prompts whose token count the engine reports differently: tokenizer or template differ",
            labels=["engine"],
        )
        drifting = GaugeMetricFamily(
            "kvatlas_prediction_drifting",
            "1 if more than a quarter of the latest predictions for the engine were wrong",
            labels=["engine"],
        )
        errors = HistogramMetricFamily(
            "kvatlas_prediction_error_tokens",
            "Predicted minus reported hit tokens, per request",
            labels=["engine"],
        )
        for status in self._sources.fleet:
            engine_id, sums = status.engine_id, status.receipts
            if not sums.outcomes:
                continue
            for outcome, count in sums.outcomes.items():
                outcomes.add_metric([engine_id, outcome], count)
            predicted.add_metric([engine_id], sums.predicted_tokens)
            for medium, tokens in sums.predicted_by_medium.items():
                by_medium.add_metric([engine_id, medium], tokens)
            for (medium, outcome), count in sums.by_medium.items():
                farthest.add_metric([engine_id, medium, outcome], count)
            actual.add_metric([engine_id], sums.actual_tokens)
            lengths.add_metric([engine_id], sums.prompt_mismatches)
            drifting.add_metric([engine_id], float(sums.drifting))
            errors.add_metric([engine_id], _buckets(sums), sums.predicted_tokens - sums.actual_tokens)
        yield from (outcomes, farthest, predicted, by_medium, actual, lengths, drifting, errors)

    def _load(self) -> Iterator[Metric]:
        queue = GaugeMetricFamily(
            "kvatlas_queue_ahead_seconds",
            "Prefill work queued at the engine, by the router's account",
            labels=["engine"],
        )
        rate = GaugeMetricFamily(
            "kvatlas_prefill_seconds_per_token",
            "Seconds the engine needs per prompt token that it computes, learned from its first tokens",
            labels=["engine"],
        )
        now = self._sources.accounts.now()
        for status in self._sources.fleet:
            queue.add_metric([status.engine_id], status.load.queue_ahead_s(now))
            rate.add_metric([status.engine_id], status.rates.prefill_s_per_token(now))
        yield from (queue, rate)
        yield from _numbers("load", self._sources.accounts.load_stats)


def render_metrics(sources: Sources) -> bytes:
    """The page in Prometheus text format."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(RouterCollector(sources))
    return generate_latest(registry)


def _build() -> Iterator[Metric]:
    build = GaugeMetricFamily(
        "kvatlas_build_info",
        "1; the version of kvatlas and of Python as labels",
        labels=["version", "python"],
    )
    build.add_metric([__version__, platform.python_version()], 1.0)
    yield build


_TIMES = {
    "first_token": "kvatlas_time_to_first_token_seconds",
    "between": "kvatlas_inter_token_seconds",
    "whole": "kvatlas_request_duration_seconds",
    "overhead": "kvatlas_router_overhead_seconds",
}
_TIME_TEXTS = {
    "first_token": "From the head of a streamed completion request until the engine's first token, retries "
    "included",
    "between": "Time between two pieces of a streamed completion as they come from the engine; a piece is "
    "one token, or several that came together",
    "whole": "From the head of a completion request until the end of its answer, of those answered with 2xx",
    "overhead": "The router's own time before a completion request goes to its first engine: parsing, "
    "tokenizing, looking up, choosing",
}


def _requests(book: RequestTracker) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "kvatlas_requests",
        "Proxied requests that ended, by model (empty: no engine was asked), engine of the last attempt and "
        "status as the client got it; client_gone: the client left before the end, broken_stream: the engine "
        "broke off in the middle of its answer",
        labels=["model", "engine", "status"],
    )
    for key, count in book.counts.items():
        ended.add_metric(list(key), count)
    yield ended
    for name, metric in _TIMES.items():
        family = HistogramMetricFamily(metric, _TIME_TEXTS[name], labels=["model"])
        for model, times in book.models.items():
            histogram: Histogram = getattr(times, name)
            family.add_metric([model], histogram.buckets(), histogram.total)
        yield family


def _buckets(sums: EngineReceipts) -> list[tuple[str, float]]:
    buckets, running = [], 0
    for bound, count in zip((*ERROR_BUCKETS, "+Inf"), sums.errors, strict=True):
        running += count
        buckets.append((str(bound), float(running)))
    return buckets


def _numbers(part: str, stats: msgspec.Struct) -> Iterator[Metric]:
    """One family per number of a stats struct; a dict becomes a ``reason`` label, or those of ``_LABELS``."""
    for name in stats.__struct_fields__:
        value = getattr(stats, name)
        labels = _LABELS.get(f"{part}_{name}", ["reason"]) if isinstance(value, dict) else []
        family = _family(part, type(stats), name, labels)
        for key, number in value.items() if isinstance(value, dict) else [((), value)]:
            family.add_metric(list(key) if isinstance(key, tuple) else [str(key)], float(number))
        yield family


def _by_engine(part: str, stats_of: Mapping[str, msgspec.Struct]) -> Iterator[Metric]:
    """One family per number over several engines' stats structs of one type."""
    return _by_label("engine", part, stats_of)


def _by_label(label: str, part: str, stats_of: Mapping[str, msgspec.Struct]) -> Iterator[Metric]:
    """One family per number over several stats structs of one type, each with its value of ``label``."""
    if not stats_of:
        return
    kind = type(next(iter(stats_of.values())))
    for name in kind.__struct_fields__:
        values = {engine: getattr(stats, name) for engine, stats in stats_of.items()}
        if name in _NOT_NUMBERS or any(isinstance(v, str) for v in values.values()):
            continue
        by_reason = any(isinstance(v, dict) for v in values.values())
        family = _family(part, kind, name, [label, "reason"] if by_reason else [label])
        for engine, value in values.items():
            for labels, number in _labelled(engine, value):
                family.add_metric(labels, number)
        yield family


def _labelled(engine: str, value: object) -> Iterable[tuple[list[str], float]]:
    if isinstance(value, dict):
        return [([engine, str(reason)], float(number)) for reason, number in value.items()]
    return [([engine], float(value))] if isinstance(value, int | float) else []


def _family(
    part: str, stats: type[msgspec.Struct], name: str, labels: list[str]
) -> CounterMetricFamily | GaugeMetricFamily:
    kind = GaugeMetricFamily if f"{part}_{name}" in _GAUGES else CounterMetricFamily
    text = field_texts(stats).get(name, f"{part}: {name.replace('_', ' ')}")
    return kind(exported(part, name), text, labels=labels)


def exported(part: str, name: str) -> str:
    """The metric of a number of a stats struct: its unit is spelled out."""
    spelled = re.sub(r"(_s|_monotonic)$", lambda unit: _UNITS[unit[1]], name)
    return f"kvatlas_{part}_{spelled}"
