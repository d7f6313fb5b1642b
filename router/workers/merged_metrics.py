"""Merges the metrics pages of several workers into one.

Counts of a worker's own requests are summed. Values that all workers observe alike (engines, feeds, the
index, sources) are not summed: the largest one is shown. Invariant: a sum never falls. The last known
counts of a dead worker, or of one that does not answer in time, remain in the sum, and survive the merging
worker (``CounterStore``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

# Name prefixes of families that are equal at every worker.
_ALIKE = (
    "kvatlas_build_info",
    "kvatlas_tokenizer_info",
    "kvatlas_engine_",
    "kvatlas_feed_",
    "kvatlas_index_",
    "kvatlas_source_",
    "kvatlas_queue_ahead_seconds",
    "kvatlas_prefill_seconds_per_token",
    "kvatlas_prediction_drifting",
    "kvatlas_cache_reports_doubtful",
    "kvatlas_time_to_first_token_margin_seconds",
    "kvatlas_inflight_prompts",
    "kvatlas_inflight_blocks",
    "kvatlas_lease_replicas",
    "kvatlas_lease_wanted",
    "process_max_fds",
    "process_start_time_seconds",
)
# With a shared index these are divided between the workers.
_DIVIDED = ("kvatlas_index_blocks", "kvatlas_index_residencies", "kvatlas_index_extra_copies")
# Kinds of families whose counts outlive the worker, with the suffixes of their samples.
_ENDS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}

Labels = tuple[tuple[str, str], ...]
# A sample's name and labels.
Key = tuple[str, Labels]


class WorkerFamily(msgspec.Struct, array_like=True):
    """A metric family as sent to another worker."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, Labels, float]]


class WorkerPage(msgspec.Struct, array_like=True):
    """All families of one worker process."""

    slot: int
    life: int
    families: list[WorkerFamily]


class _SentPage(msgspec.Struct, array_like=True):
    """The same with encoded families, each encoded and decoded by itself: those of a thousand engines would
    hold the interpreter for 30 ms and longer."""

    slot: int
    life: int
    families: list[msgspec.Raw]


_SENT = msgspec.msgpack.Decoder(_SentPage)
_FAMILY = msgspec.msgpack.Decoder(WorkerFamily)


def encoded_family(family: Metric) -> msgspec.Raw:
    """Convert and encode a family for ``encoded_page``."""
    return msgspec.Raw(msgspec.msgpack.encode(family_of(family)))


def encoded_page(slot: int, life: int, families: list[msgspec.Raw]) -> bytes:
    """Return a worker's page of encoded families, for ``decoded_page``."""
    return msgspec.msgpack.encode(_SentPage(slot, life, families))


def decoded_page(data: bytes) -> WorkerPage:
    """Return the page of an ``encoded_page``. Raises ``msgspec.MsgspecError``."""
    sent = _SENT.decode(data)
    return WorkerPage(sent.slot, sent.life, [_FAMILY.decode(family) for family in sent.families])


def family_of(family: Metric) -> WorkerFamily:
    """Convert a family for sending."""
    samples = [(s.name, tuple(s.labels.items()), float(s.value)) for s in family.samples]
    return WorkerFamily(family.name, family.documentation, family.type, samples)


def is_alike(name: str, *, shared_index: bool) -> bool:
    """Whether this family is equal at every worker, so that it must not be summed."""
    if shared_index and name in _DIVIDED:
        return False
    return name.startswith(_ALIKE)


class CounterStore:
    """Last reported counters of every worker. ``file``: descriptor of a file that outlives this process."""

    def __init__(self, file: int | None = None) -> None:
        self._file = file
        # Sum of the counts of ended worker processes.
        self._ended: dict[Key, float] = {}
        # Slot -> (life, counts).
        self._last: dict[int, tuple[int, dict[Key, float]]] = {}
        if file is not None:
            self._load(file)

    def update(self, slot: int, life: int, counts: dict[Key, float]) -> None:
        """Store the counts reported by a worker."""
        known = self._last.get(slot)
        if known is not None and known[0] != life:
            for key, value in known[1].items():
                self._ended[key] = self._ended.get(key, 0.0) + value
        self._last[slot] = life, counts

    def total(self) -> dict[Key, float]:
        """Return the counts summed over all worker processes, including ended ones."""
        total = dict(self._ended)
        for _, counts in self._last.values():
            for key, value in counts.items():
                total[key] = total.get(key, 0.0) + value
        return total

    def save(self) -> None:
        """Write the counters to the file, for the process that replaces this one."""
        if self._file is None:
            return
        body = msgspec.msgpack.encode(
            (list(self._ended.items()), [(s, life, list(c.items())) for s, (life, c) in self._last.items()])
        )
        os.pwrite(self._file, len(body).to_bytes(8, "little") + body, 0)

    def _load(self, file: int) -> None:
        size = int.from_bytes(os.pread(file, 8, 0), "little")
        if not size:
            return
        try:
            ended, last = msgspec.msgpack.decode(
                os.pread(file, size, 8),
                type=tuple[list[tuple[Key, float]], list[tuple[int, int, list[tuple[Key, float]]]]],
            )
        except msgspec.MsgspecError:
            # The writer died while writing: its counts are lost.
            return
        self._ended = dict(ended)
        self._last = {slot: (life, dict(counts)) for slot, life, counts in last}


def merged(pages: Iterable[WorkerPage], counters: CounterStore, *, shared_index: bool) -> list[Metric]:
    """Merge pages into one set of families, in the order of the first page."""
    families: dict[str, WorkerFamily] = {}
    values: dict[str, dict[Key, float]] = {}
    for page in pages:
        counts: dict[Key, float] = {}
        for family in page.families:
            families.setdefault(family.name, family)
            into = values.setdefault(family.name, {})
            alike = is_alike(family.name, shared_index=shared_index)
            for name, labels, value in family.samples:
                key = name, labels
                if alike:
                    into[key] = max(into.get(key, value), value)
                elif family.kind in _ENDS:
                    counts[key] = value
                    into.setdefault(key, 0.0)
                else:
                    into[key] = into.get(key, 0.0) + value
        counters.update(page.slot, page.life, counts)
    _settle(values, counters.total(), families)
    counters.save()
    return [_metric(family, values[name]) for name, family in families.items()]


def _settle(
    values: Mapping[str, dict[Key, float]], total: Mapping[Key, float], families: Mapping[str, WorkerFamily]
) -> None:
    """Store the totals in the families they belong to."""
    home = {f"{name}{end}": name for name, family in families.items() for end in _ENDS.get(family.kind, ())}
    for key, value in total.items():
        if key[0] in home:
            values[home[key[0]]][key] = value


def _metric(family: WorkerFamily, values: Mapping[Key, float]) -> Metric:
    metric = Metric(family.name, family.text, family.kind)
    metric.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
    return metric
