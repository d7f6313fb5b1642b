"""Metric families from plain numbers: columns of a table of objects, or the fields of stats structs.

Names are ``kvatlas_<part>_<what>``, units at the end. A number without value (None) has no sample; a number
kept by words (a dict) has one sample for each, under a label of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.observe.field_texts import field_texts

GAUGES = frozenset(
    {
        "epp_connections_open",
        "epp_streams_open",
        "feed_held_batches",
        "feed_unconfirmed",
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
        "config_waiting",
        "queue_waiting",
        "source_engines",
        "source_failing",
        "source_synced",
        "tenant_active",
    }
)
"""Numbers of the stats structs that may fall; every other one is a counter."""
_LABELS = {
    "admission_refused": ["priority"],
    "config_reloads": ["outcome"],
    "epp_picks": ["mode"],
    "prompts_reads": ["api", "how"],
    "slo_met": ["priority"],
    "slo_missed": ["priority"],
}
"""Labels of numbers that are counted by other words than a reason."""
_UNITS = {"_s": "_seconds", "_monotonic": "_monotonic_seconds"}
_NOT_NUMBERS = frozenset({"state", "reason"})

T = TypeVar("T")
Family = CounterMetricFamily | GaugeMetricFamily
Value = float | None | Mapping[str, float] | Mapping[tuple[str, str], float]
"""A number, none, or numbers by the values of further labels."""


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


def table(label: str, columns: Sequence[Column[T]], rows: Mapping[str, T]) -> Iterator[Metric]:
    """One family per column, with a sample for every row, whose key is the value of ``label``."""
    for column in columns:
        family = column.family(f"kvatlas_{column.name}", column.text, labels=[label, *column.labels])
        for key, row in rows.items():
            _add(family, [key], column.read(row))
        yield family


def of_stats(part: str, stats: msgspec.Struct) -> Iterator[Metric]:
    """One family per number of a stats struct; a dict becomes a ``reason`` label, or those of ``_LABELS``."""
    yield from _of_structs(part, [], {(): stats})


def of_each(label: str, part: str, stats_of: Mapping[str, msgspec.Struct]) -> Iterator[Metric]:
    """One family per number of several stats structs of one type, each with its value of ``label``."""
    yield from _of_structs(part, [label], {(key,): stats for key, stats in stats_of.items()})


def exported(part: str, name: str) -> str:
    """The metric of a number of a stats struct: its unit is spelled out."""
    spelled = re.sub(r"(_s|_monotonic)$", lambda unit: _UNITS[unit[1]], name)
    return f"kvatlas_{part}_{spelled}"


def _of_structs(
    part: str, labels: list[str], stats_of: Mapping[tuple[str, ...], msgspec.Struct]
) -> Iterator[Metric]:
    if not stats_of:
        return
    kind = type(next(iter(stats_of.values())))
    for name in kind.__struct_fields__:
        values = {key: getattr(stats, name) for key, stats in stats_of.items()}
        if name in _NOT_NUMBERS or any(isinstance(value, str) for value in values.values()):
            continue
        by_word = any(isinstance(value, dict) for value in values.values())
        more = _LABELS.get(f"{part}_{name}", ["reason"]) if by_word else []
        family = _family(part, kind, name, [*labels, *more])
        for key, value in values.items():
            _add(family, key, value)
        yield family


def _add(family: Family, labels: Iterable[str], value: Value) -> None:
    if isinstance(value, Mapping):
        for words, number in value.items():
            family.add_metric([*labels, *([words] if isinstance(words, str) else words)], float(number))
    elif value is not None:
        family.add_metric([*labels], float(value))


def _family(part: str, stats: type[msgspec.Struct], name: str, labels: list[str]) -> Family:
    kind = GaugeMetricFamily if f"{part}_{name}" in GAUGES else CounterMetricFamily
    text = field_texts(stats).get(name, f"{part}: {name.replace('_', ' ')}")
    return kind(exported(part, name), text, labels=labels)
