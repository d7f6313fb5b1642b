"""Metric families from plain numbers: columns of a table of objects, or the fields of stats structs. None
gives no sample; a dict gives one sample per key, under a label of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Generic, NamedTuple, TypeVar, get_origin, get_type_hints

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvatlas.router.observe.field_texts import field_texts

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
