"""The Prometheus page: every counter of every part, read when scraped.

Parts keep plain numbers in small structs without knowledge of Prometheus; ``RouterCollector`` converts them
to metric families. Labels are engine ids, models and fixed words only, so the size of the fleet bounds the
number of series. A page is made in steps (``page_steps``): that of a thousand engines would block the event
loop for too long.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvatlas import __version__
from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.tenants import TenantStats
from kvatlas.router.api.admin_auth import AdminStats
from kvatlas.router.api.metric_families import in_parts, metrics_of, of_each, of_stats, table
from kvatlas.router.api.metrics_tables import FIRST_TOKENS, INDEX, RECEIPTS, RESIDENCY, engine_columns
from kvatlas.router.feeds.base import FeedStats
from kvatlas.router.feeds.stores import StoreFeeds, StoreStats
from kvatlas.router.fleet.engines import SourceStats
from kvatlas.router.fleet.sources import FleetSources
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.http.h2_connection import H2Stats
from kvatlas.router.http.settings import ListenStats
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.observe.cache_funnel import CacheFunnel
from kvatlas.router.observe.findings import FindingLog
from kvatlas.router.observe.histogram import Histogram
from kvatlas.router.observe.history import HistoryLog
from kvatlas.router.observe.receipts import EngineReceipts
from kvatlas.router.observe.requests import RequestTracker
from kvatlas.router.observe.traces import TraceStats
from kvatlas.router.observe.usage import UsageLog
from kvatlas.router.pd.settings import PdStats
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.placement.first_token import FirstTokenErrors
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.placement.own_pulls import Pulls
from kvatlas.router.placement.probing import ProbeStats
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.tokenizer_finder import ModelOrigin
from kvatlas.router.proxy.aliases import Aliases
from kvatlas.router.proxy.settings import ProxyStats

if TYPE_CHECKING:
    from kvatlas.router.replication.service import SharedState


class ReloadStats(msgspec.Struct):
    """Results of configuration reloads. Here, because the page is below the package that reloads."""

    reloads: Annotated[dict[str, int], "kvatlas_config_reloads_total{outcome}"] = msgspec.field(
        default_factory=lambda: dict.fromkeys(("applied", "unchanged", "refused"), 0)
    )
    """Reloads of the configuration (SIGHUP), by outcome."""
    waiting: Annotated[int, "kvatlas_config_waiting"] = 0
    """Settings that differ in the configuration file and take effect only after a restart."""


# Counters that a page may have only after the start, and their part (``metrics_of``).
_LATER = (
    (FeedStats, ""),
    (StoreStats, ""),
    (SourceStats, ""),
    (PdStats, ""),
    (TenantStats, ""),
    (ListenStats, "listen"),
)


class Sources(msgspec.Struct):
    """Live objects that the metrics are read from."""

    fleet: Fleet[Engine]
    scopes: ModelIndexes
    accounts: Accounts
    proxy: ProxyStats
    prompts: PromptStats
    listen: Callable[[], ListenStats | None]
    requests: RequestTracker
    history: HistoryLog
    """The last five minutes."""
    shared: SharedState | None = None
    origins: FleetSources | None = None
    """Sources of engines."""
    admin: AdminStats | None = None
    gate: KeyGate | None = None
    """Clients' keys, if they are required."""
    aliases: Aliases | None = None
    """Other names of models."""
    traces: TraceStats | None = None
    usage: UsageLog | None = None
    reloads: ReloadStats | None = None
    """Reloads of the configuration, if it can be reloaded."""
    epp: H2Stats | None = None
    """Counters of the endpoint picker, on top of those of its connections."""
    pd: PdStats | None = None
    pulls: Pulls | None = None
    stores: StoreFeeds | None = None
    """Stores that are followed."""
    probes: ProbeStats | None = None
    """Probes of engines, if they are switched on."""
    others: Callable[[], Mapping[str, OthersLoad] | None] = dict
    """In-flight load of siblings and replicas, by engine; None: unknown."""
    tokenizers: Callable[[], Mapping[str, str]] = dict
    """Tokenizer library by configured or served model."""
    tokenizer_origins: Callable[[], Mapping[str, ModelOrigin]] = dict
    """How prompts of each served model are read."""
    unused: Callable[[], Sequence[str]] = tuple
    """Settings that have no effect, with the reason."""
    findings: FindingLog = msgspec.field(default_factory=FindingLog)
    """Problems that hold now (``router/api/findings.py``)."""
    more: Callable[[], Iterable[Metric]] = tuple
    """Further families: those of one of several workers."""


class RouterCollector:
    """A ``prometheus_client`` collector over ``Sources``."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Yield all families in a fixed order."""
        s = self._sources
        yield from build_info()
        yield _tokenizers(s.tokenizers())
        yield from of_requests(s.requests)
        engines: dict[str, Engine] = {engine.engine_id: engine for engine in s.fleet}
        yield from table("engine", engine_columns(s.accounts.now(), s.others()), engines)
        yield from of_each("engine", {e: one.feed for e, one in engines.items() if one.feed is not None})
        yield from table("model", INDEX, {name: model.stats() for name, model in s.scopes.models().items()})
        writers = {e: one.residency.writer for e, one in engines.items() if one.residency is not None}
        yield from table("engine", RESIDENCY, writers)
        receipts = {e: one.receipts for e, one in engines.items() if one.receipts.outcomes}
        yield from table("engine", RECEIPTS, receipts)
        yield from _prediction_errors(receipts)
        compared = {engine_id: engines[engine_id].first_tokens for engine_id in receipts}
        yield from table("engine", FIRST_TOKENS, compared)
        yield from _first_token_errors(compared)
        yield from _funnel(s.accounts.receipts.funnel)
        yield from of_stats(s.requests.sessions.stats)
        yield from of_stats(s.accounts.load_stats)
        yield from of_stats(s.accounts.books.stats)
        yield from of_stats(s.accounts.admission_stats)
        yield from of_stats(s.accounts.slo_stats)
        yield from of_stats(s.accounts.retention.stats)
        yield from of_stats(s.proxy)
        listen = s.listen()
        if listen is not None:
            yield from of_stats(listen, "listen")
        yield from of_stats(s.prompts)
        yield from of_stats(s.accounts.inflight.stats)
        yield from of_stats(s.accounts.affinity.stats)
        yield from of_stats(s.accounts.shadow_stats)
        if s.usage is not None:
            yield from of_stats(s.usage.stats)
            yield from of_stats(s.usage.export_stats)
        yield from self._options()
        yield from s.more()

    def _options(self) -> Iterator[Metric]:
        """Yield the families of optional parts."""
        s = self._sources
        if s.shared is not None:
            yield from of_stats(s.shared.lease_manager.stats)
            yield from of_stats(s.shared.lookup.stats)
            yield from of_stats(s.shared.inflight.gossip_stats)
            if s.shared.limits is not None:
                yield from of_stats(s.shared.limits.stats)
            yield from of_each("model", s.shared.mirror_stats)
        if s.origins is not None:
            yield from of_each("source", s.origins.stats)
        if s.stores is not None:
            yield from of_each("store", s.stores.stats)
        if s.epp is not None:
            yield from of_stats(s.epp, "epp")
        for stats in (
            s.admin,
            s.pd if s.fleet.has_roles else None,
            s.pulls.stats if s.pulls is not None and s.pulls.enabled else None,
            s.probes,
            s.traces,
            s.reloads,
            None if s.accounts.room is None else s.accounts.room.stats,
            None if s.gate is None else s.gate.stats,
        ):
            if stats is not None:
                yield from of_stats(stats)
        if s.gate is not None:
            yield from of_each("tenant", s.gate.tenants())
            yield from of_stats(s.accounts.group_prefixes.stats)


def families(sources: Sources) -> Iterator[Metric]:
    """Return all families of the page: the process and the router's counters."""
    yield from ProcessCollector(registry=None).collect()
    yield from RouterCollector(sources).collect()


def prepare(sources: Sources) -> None:
    """Read names and texts of all metrics from the sources of their structs. The first page would do it in
    steps of up to 10 ms (``python -m benchmarks.scale``)."""
    for kind, part in _LATER:
        metrics_of(kind, part)
    for _ in families(sources):
        pass


def build_info() -> Iterator[Metric]:
    build = GaugeMetricFamily(
        "kvatlas_build_info",
        "1; the version of kvatlas and of Python as labels",
        labels=["version", "python"],
    )
    build.add_metric([__version__, platform.python_version()], 1.0)
    yield build


def _tokenizers(libraries: Mapping[str, str]) -> Metric:
    found = GaugeMetricFamily(
        "kvatlas_tokenizer_info",
        "1 for each configured model whose prompts are tokenized here; model `*` is any not named",
        labels=["model", "library"],
    )
    for model, library in libraries.items():
        found.add_metric([model, library], 1.0)
    return found


# Under OpenTelemetry's names too, where these mean the same (semantic conventions 0.66: ``gen_ai.server.*``).
_TIMES = (
    ("first_token", "kvatlas_time_to_first_token_seconds", "model"),
    ("first_token", "gen_ai_server_time_to_first_token_seconds", "gen_ai_request_model"),
    ("between", "kvatlas_inter_token_seconds", "model"),
    ("whole", "kvatlas_request_duration_seconds", "model"),
    ("whole", "gen_ai_server_request_duration_seconds", "gen_ai_request_model"),
    ("overhead", "kvatlas_router_overhead_seconds", "model"),
)
_TIME_TEXTS = {
    "first_token": "From the head of a streamed completion request until the engine's first token, retries "
    "included",
    "between": "Time between two pieces of a streamed completion as they come from the engine; a piece is "
    "one token, or several that came together",
    "whole": "From the head of a completion request until the end of its answer, of those answered with 2xx",
    "overhead": "Time that the router adds before a completion request goes to its first engine: "
    "parsing, tokenizing, lookup, choosing",
}


def of_requests(requests: RequestTracker) -> Iterator[Metric]:
    """Yield the families of ended requests and their times."""
    ended = partial(
        CounterMetricFamily,
        "kvatlas_requests",
        "Proxied requests that ended, by model (empty: no engine was asked), engine of the last attempt and "
        "status as the client got it; client_gone: the client left before the end, broken_stream: the engine "
        "broke off in the middle of its answer, unseen: a gateway passed the answer on without showing it",
        labels=["model", "engine", "status"],
    )
    yield from in_parts(
        ended, requests.counts.items(), lambda family, row: family.add_metric(list(row[0]), row[1])
    )
    for name, metric, label in _TIMES:
        family = HistogramMetricFamily(metric, _TIME_TEXTS[name], labels=[label])
        for model, times in requests.models.items():
            histogram: Histogram = getattr(times, name)
            family.add_metric([model], histogram.buckets(), histogram.total)
        yield family


def _prediction_errors(receipts: Mapping[str, EngineReceipts]) -> Iterator[Metric]:
    def add(errors: HistogramMetricFamily, row: tuple[str, EngineReceipts]) -> None:
        engine_id, sums = row
        errors.add_metric([engine_id], sums.errors.buckets(), sums.predicted_tokens - sums.actual_tokens)

    errors = partial(
        HistogramMetricFamily,
        "kvatlas_prediction_error_tokens",
        "Predicted minus reported hit tokens, per request",
        labels=["engine"],
    )
    return in_parts(errors, receipts.items(), add)


def _first_token_errors(compared: Mapping[str, FirstTokenErrors]) -> Iterator[Metric]:
    def add(errors: HistogramMetricFamily, row: tuple[str, FirstTokenErrors]) -> None:
        engine_id, found = row
        for model, histogram in found.by_model.items():
            errors.add_metric([model, engine_id], histogram.buckets(), histogram.total)

    errors = partial(
        HistogramMetricFamily,
        "kvatlas_time_to_first_token_error_seconds",
        "Measured minus predicted time to first token of streams, from asking the engine; below 0: early",
        labels=["model", "engine"],
    )
    return in_parts(errors, compared.items(), add)


def _funnel(funnel: CacheFunnel) -> Iterator[Metric]:
    labels = ["model", "tenant"]
    tokens = CounterMetricFamily(
        "kvatlas_cache_tokens",
        "Prompt tokens of requests whose hit was predicted and reported, by stage: prompt (all), held (by "
        "the engine that holds most), chosen (held by the engine chosen), delivered (as it reported)",
        labels=[*labels, "stage"],
    )
    missed = CounterMetricFamily(
        "kvatlas_cache_missed_tokens",
        "Prompt tokens that no cache delivered, by reason (glossary: the cache funnel)",
        labels=[*labels, "reason"],
    )
    seconds = CounterMetricFamily(
        "kvatlas_cache_elsewhere_seconds",
        "Seconds of prefill spent on prompt tokens that another engine than the chosen one held",
        labels=labels,
    )
    for key, counts in funnel.counts.items():
        for stage in ("prompt", "held", "chosen", "delivered"):
            tokens.add_metric([*key, stage], getattr(counts, stage))
        for reason, count in counts.missed.items():
            missed.add_metric([*key, reason], count)
        seconds.add_metric([*key], counts.elsewhere_s)
    yield from (tokens, missed, seconds)
