"""The metrics of engines and models, as tables: one column per metric, one row per engine or model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Generic, NamedTuple, TypeVar, get_origin, get_type_hints

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvatlas.router.feeds.base import FeedState
from kvatlas.router.index.base import IndexStats
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.observe.field_texts import field_texts
from kvatlas.router.observe.receipts import EngineReceipts
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.first_token import FirstTokenErrors
from kvatlas.router.placement.others import OthersLoad, others_at

# Metric families from plain numbers: columns of a table of objects, or the fields of stats structs. None
# gives no sample; a dict gives one sample per key, under a label of its own.

_METRIC = re.compile(r"kvatlas_(?P<name>[a-z0-9_*]+?)(?P<counter>_total)?(\{(?P<labels>[a-z_,]+)\})?")

T = TypeVar("T")
M = TypeVar("M", bound=Metric)
Family = CounterMetricFamily | GaugeMetricFamily
# A number, None, or numbers by the values of further labels.
Value = float | None | Mapping[str, float] | Mapping[tuple[str, str], float]
# Making and writing these many samples takes less than 1 ms; so does reading these many rows, which may have
# none (``python -m benchmarks.scale``).
PART_SAMPLES = 128
PART_ROWS = 512


class Column(NamedTuple, Generic[T]):
    """One metric of a table: ``read`` gives a row's value, ``labels`` name those of a mapping."""

    family: type[Family]
    name: str
    text: str
    read: Callable[[T], Value]
    labels: tuple[str, ...] = ()


def counter(name: str, text: str, read: Callable[[T], Value], *labels: str) -> Column[T]:
    return Column(CounterMetricFamily, name, text, read, labels)


def gauge(name: str, text: str, read: Callable[[T], Value], *labels: str) -> Column[T]:
    return Column(GaugeMetricFamily, name, text, read, labels)


def in_parts(make: Callable[[], M], rows: Iterable[T], add: Callable[[M, T], None]) -> Iterator[M]:
    """One family in parts of about ``PART_SAMPLES`` samples of at most ``PART_ROWS`` rows, so that a page can
    be made in short steps.

    The parts follow each other and have the same name; ``add`` enters the samples of one row.
    """
    family, read = make(), 0
    # Rows may be added or removed between two parts.
    for row in list(rows):
        if len(family.samples) >= PART_SAMPLES or read >= PART_ROWS:
            yield family
            family, read = make(), 0
        add(family, row)
        read += 1
    yield family


def table(label: str, columns: Sequence[Column[T]], rows: Mapping[str, T]) -> Iterator[Metric]:
    """Yield one family per column, in parts, with a sample per row; its key is the value of ``label``."""
    for column in columns:

        def add(family: Family, row: tuple[str, T], column: Column[T] = column) -> None:
            _add(family, [row[0]], column.read(row[1]))

        name, labels = f"kvatlas_{column.name}", [label, *column.labels]
        make: Callable[[], Family] = partial(column.family, name, column.text, labels=labels)
        yield from in_parts(make, rows.items(), add)


class StatsMetric(NamedTuple):
    """The metric of one field of a stats struct."""

    field: str
    name: str
    family: type[Family]
    labels: tuple[str, ...]
    text: str


@cache
def metrics_of(stats: type[msgspec.Struct], part: str = "") -> tuple[StatsMetric, ...]:
    """The metrics of a stats struct, in the order of its fields.

    A field names its metric in its annotation: ``Annotated[int, "kvatlas_proxy_retries_total"]``. A name that
    ends with ``_total`` is a counter, any other one a gauge; ``{label}`` names the label of a dict's keys;
    ``*`` stands for ``part``, in structs that several parts share. A field without a name is not exported.
    """
    found = []
    texts = field_texts(stats)
    for field, hint in get_type_hints(stats, include_extras=True).items():
        if get_origin(hint) is Annotated:
            metric = _METRIC.fullmatch(hint.__metadata__[0])
            if metric is None:
                raise TypeError(f"{stats.__name__}.{field}: not the name of a metric: {hint.__metadata__[0]}")
            name = f"kvatlas_{metric['name'].replace('*', part)}"
            family = CounterMetricFamily if metric["counter"] else GaugeMetricFamily
            labels = tuple(metric["labels"].split(",")) if metric["labels"] else ()
            found.append(StatsMetric(field, name, family, labels, texts.get(field, name)))
    return tuple(found)


def of_stats(stats: msgspec.Struct, part: str = "") -> Iterator[Metric]:
    """One family per metric of a stats struct."""
    yield from _of_structs(type(stats), [], {(): stats}, part)


def of_each(label: str, stats_of: Mapping[str, msgspec.Struct]) -> Iterator[Metric]:
    """One family per metric of several stats structs of one type, each with its value of ``label``."""
    if stats_of:
        kind = type(next(iter(stats_of.values())))
        yield from _of_structs(kind, [label], {(key,): stats for key, stats in stats_of.items()})


def _of_structs(
    kind: type[msgspec.Struct],
    labels: list[str],
    stats_of: Mapping[tuple[str, ...], msgspec.Struct],
    part: str = "",
) -> Iterator[Metric]:
    for metric in metrics_of(kind, part):

        def add(
            family: Family, row: tuple[tuple[str, ...], msgspec.Struct], field: str = metric.field
        ) -> None:
            _add(family, row[0], getattr(row[1], field))

        names = [*labels, *metric.labels]
        make: Callable[[], Family] = partial(metric.family, metric.name, metric.text, labels=names)
        yield from in_parts(make, stats_of.items(), add)


def _add(family: Family, labels: Iterable[str], value: Value) -> None:
    if isinstance(value, Mapping):
        for words, number in value.items():
            family.add_metric([*labels, *([words] if isinstance(words, str) else words)], float(number))
    elif value is not None:
        family.add_metric([*labels], float(value))


def engine_columns(now: float, others: Mapping[str, OthersLoad] | None) -> tuple[Column[Engine], ...]:
    """State of every engine. ``others``: in-flight load of siblings and replicas."""
    return (
        gauge("engine_up", "1 if the engine answers GET /v1/models with a model", lambda e: e.up),
        gauge(
            "engine_silent",
            "1 if the engine is down since polls timed out, and for no other reason; requests go to it while "
            "no engine of its model is up",
            lambda e: e.silent,
        ),
        gauge(
            "engine_on_hold",
            "1 if it gets no new requests (drained, not ready, leaving)",
            lambda e: bool(e.held),
        ),
        gauge(
            "engine_breaker_open",
            "1 if the engine gets no requests because its latest ones failed (circuit breaker)",
            lambda e: not e.breaker.allows(now),
        ),
        gauge(
            "engine_kv_usage_ratio",
            "Share of its KV blocks that the engine says running requests use (0 to 1)",
            lambda e: e.kv_usage,
        ),
        counter(
            "engine_transfers_wrong",
            "What the engine's NIXL connector counts of KV transfers that went wrong: failed_transfers, "
            "failed_notifications, kv_expired_reqs (prefills not fetched in time), and "
            "notifications_after_expiry (blocks were read after they had been given up: answers may be "
            "wrong)",
            lambda e: e.transfers or None,
            "kind",
        ),
        gauge(
            "feed_state",
            "1 for the state that the feed of the engine's KV events is in",
            _feed_states,
            "state",
        ),
        gauge(
            "feed_unusable_events",
            "Latest events of the engine in a row that could not be used (rejected, or of unknown types), "
            "where that is all that came or many; 0 where its events can be used",
            lambda e: e.unusable_events if e.publishes_events else None,
        ),
        gauge(
            "queue_ahead_seconds",
            "Prefill work queued at the engine, by the router's account",
            lambda e: e.load.current(now, others_at(e.engine_id, others)).queue_s,
        ),
        gauge(
            "cache_worth_seconds_per_minute",
            "Prefill work per minute of the last minutes that only this engine's cache could save: hits "
            "beyond the longest of any other engine",
            lambda e: e.receipts.worth.per_minute(now),
        ),
        gauge(
            "prefill_seconds_per_token",
            "Seconds the engine needs per prompt token that it computes, learned from its first tokens",
            lambda e: e.rates.prefill_s_per_token(now),
        ),
    )


def _feed_states(engine: Engine) -> dict[str, float] | None:
    feed = engine.feed
    return None if feed is None else {str(state): feed.state == state for state in FeedState}


# Metrics of a model's index.
INDEX: tuple[Column[IndexStats], ...] = (
    gauge(
        "index_blocks", "Distinct KV blocks (by hash) that the engines of a model hold", lambda i: i.blocks
    ),
    gauge(
        "index_residencies",
        "Entries of the index: one per block, engine, medium and group of layers",
        lambda i: i.residencies,
    ),
    gauge(
        "index_extra_copies",
        "Further copies of blocks that an engine holds more than once",
        lambda i: i.extra_copies,
    ),
    gauge(
        "index_patterns",
        "Distinct sets of places that blocks are held in, which rows of the index share",
        lambda i: i.patterns,
    ),
    counter(
        "index_unknown_removals",
        "Removal events of blocks that were not known to be held",
        lambda i: i.unknown_removals,
    ),
)

# Facts that the index learned from an engine's events.
RESIDENCY: tuple[Column[EngineResidency], ...] = (
    counter(
        "index_rejected_events",
        "Events that the index skipped because they were inconsistent, by reason",
        lambda r: r.rejected,
        "reason",
    ),
    counter(
        "index_learning_skipped_blocks",
        "Blocks that were counted but not learned from, because the engine sent too many in that time",
        lambda r: r.budget.skipped,
    ),
    counter(
        "index_unlearned_blocks",
        "Blocks whose prefix is not known although hashes are learned from events: unplaced (no event shows "
        "their position), ambiguous (one prefix has two hashes), forgotten (the bound)",
        lambda r: {} if r.learned is None else r.learned.left_out,
        "reason",
    ),
    gauge(
        "index_mode",
        "1 for the way in which block hashes of prompts are found: native, learned, or not yet",
        lambda r: {r.mode: 1.0},
        "mode",
    ),
    gauge(
        "index_removals",
        "1 for what a removal event of the engine takes: one copy, the last copy, or the number it tells",
        lambda r: {str(r.removals.semantics): 1.0},
        "semantics",
    ),
    counter(
        "index_removal_evidence",
        "Evidence for it since the engine's start: removed_again (blocks), told_counts (events), "
        "phantoms (audits that found more copies than blocks)",
        lambda r: {n: getattr(r.removals, n) for n in ("removed_again", "told_counts", "phantoms")},
        "evidence",
    ),
    gauge(
        "index_re_reports_suspected",
        "1 if stored events seem to repeat earlier ones",
        lambda r: r.removals.re_reports_suspected,
    ),
)

# Predictions for an engine compared with its reports.
RECEIPTS: tuple[Column[EngineReceipts], ...] = (
    counter(
        "receipts",
        "Predictions compared with what the engine reported, by outcome",
        lambda r: r.outcomes,
        "outcome",
    ),
    counter(
        "predictions_compared",
        "Compared receipts by the farthest medium that the prediction rests on, and outcome",
        lambda r: r.by_medium,
        "medium",
        "outcome",
    ),
    counter(
        "predicted_hit_tokens",
        "Predicted hit tokens of requests whose hit the engine reported",
        lambda r: r.predicted_tokens,
    ),
    counter(
        "predicted_hit_medium_tokens",
        "Predicted hit tokens of requests whose hit the engine reported, by the medium they lie in",
        lambda r: r.predicted_by_medium,
        "medium",
    ),
    counter(
        "reported_hit_tokens",
        "Hit tokens (cached_tokens) that the engine reported, of requests with a prediction",
        lambda r: r.actual_tokens,
    ),
    counter(
        "prompt_mismatches",
        "Prompts whose token count the engine reports differently: tokenizer or template differ",
        lambda r: r.prompt_mismatches,
    ),
    counter(
        "cache_report_contradictions",
        "Reported cached tokens that contradict the engine's own events: more, fewer, or impossible",
        lambda r: r.contradictions,
        "kind",
    ),
    gauge(
        "cache_reports_doubtful",
        "1 if more than a quarter of the latest cached tokens the engine reported contradict its events",
        lambda r: bool(r.contradicting),
    ),
    gauge(
        "prediction_drifting",
        "1 if more than a quarter of the latest predictions for the engine were wrong",
        lambda r: r.drifting,
    ),
)

# Times to first token, predicted and measured.
FIRST_TOKENS: tuple[Column[FirstTokenErrors], ...] = (
    counter(
        "time_to_first_token_predictions",
        "Predicted times to first token, measured from asking the engine, by outcome: held (within 50 ms or "
        "10 % of the prediction, whichever is more), late, early",
        lambda r: r.outcomes if any(r.outcomes.values()) else None,
        "outcome",
    ),
    gauge(
        "time_to_first_token_margin_seconds",
        "Seconds on top of a predicted time to first token within which 95 of the latest 100 came",
        lambda r: r.margin_s,
    ),
)
