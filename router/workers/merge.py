"""One metrics page out of those of several workers.

What each worker counts of its own requests is added up. What all of them see alike (engines, feeds, the
index, sources) is not: of that the largest value counts. Always true: a sum never falls, neither when a
worker dies (what was last heard of its counts stays in) nor when one does not answer in time (its last answer
counts), and what was last heard outlives the worker that merges (``CountLedger``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

_ALIKE = (
    *("kvatlas_build_info", "kvatlas_tokenizer_info"),
    *("kvatlas_engine_", "kvatlas_feed_", "kvatlas_index_", "kvatlas_source_"),
    *(
        "kvatlas_queue_ahead_seconds",
        "kvatlas_prefill_seconds_per_token",
        "kvatlas_prediction_drifting",
        "kvatlas_cache_reports_doubtful",
    ),
    "kvatlas_time_to_first_token_margin_seconds",
    *("kvatlas_inflight_prompts", "kvatlas_inflight_blocks", "kvatlas_lease_replicas"),
    *("kvatlas_lease_wanted", "process_max_fds", "process_start_time_seconds"),
)
"""Beginnings of the names of families of which every worker shows the same things."""
_DIVIDED = ("kvatlas_index_blocks", "kvatlas_index_residencies", "kvatlas_index_extra_copies")
"""Of these each worker has a part where they share an index."""
_ENDS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
"""Kinds of families whose counts outlive the worker, and the ends of their samples' names."""

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]
"""A sample's name and labels."""


class WorkerFamily(msgspec.Struct, array_like=True):
    """A metric family on its way to another worker."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, Labels, float]]


class WorkerPage(msgspec.Struct, array_like=True):
    """All families of one life of a worker."""

    slot: int
    life: int
    families: list[WorkerFamily]


def family_of(family: Metric) -> WorkerFamily:
    """A worker's own family, ready to be sent."""
    samples = [(s.name, tuple(s.labels.items()), float(s.value)) for s in family.samples]
    return WorkerFamily(family.name, family.documentation, family.type, samples)


def is_alike(name: str, *, shared_index: bool) -> bool:
    """Whether every worker shows the same of this family, so that it is not added up."""
    if shared_index and name in _DIVIDED:
        return False
    return name.startswith(_ALIKE)


class CountLedger:
    """What was last heard of every worker's counts. ``file``: a descriptor that outlives this process."""

    def __init__(self, file: int | None = None) -> None:
        self._file = file
        self._ended: dict[Key, float] = {}
        """Counts of lives that are over, together."""
        self._last: dict[int, tuple[int, dict[Key, float]]] = {}
        """Slot -> (life, counts)."""
        if file is not None:
            self._load(file)

    def heard(self, slot: int, life: int, counts: dict[Key, float]) -> None:
        """A worker told its counts."""
        known = self._last.get(slot)
        if known is not None and known[0] != life:
            for key, value in known[1].items():
                self._ended[key] = self._ended.get(key, 0.0) + value
        self._last[slot] = life, counts

    def total(self) -> dict[Key, float]:
        """All counts of all lives."""
        total = dict(self._ended)
        for _, counts in self._last.values():
            for key, value in counts.items():
                total[key] = total.get(key, 0.0) + value
        return total

    def save(self) -> None:
        """Write it where a successor finds it."""
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
        except msgspec.MsgspecError:  # its writer died in the middle: what it had told before is lost
            return
        self._ended = dict(ended)
        self._last = {slot: (life, dict(counts)) for slot, life, counts in last}


def merged(pages: Iterable[WorkerPage], ledger: CountLedger, *, shared_index: bool) -> list[Metric]:
    """One set of families; the first page's order comes first."""
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
        ledger.heard(page.slot, page.life, counts)
    _settle(values, ledger.total(), families)
    ledger.save()
    return [_metric(family, values[name]) for name, family in families.items()]


def _settle(
    values: Mapping[str, dict[Key, float]],
    total: Mapping[Key, float],
    families: Mapping[str, WorkerFamily],
) -> None:
    """Put the counts of all lives where they belong."""
    home = {f"{name}{end}": name for name, family in families.items() for end in _ENDS.get(family.kind, ())}
    for key, value in total.items():
        if key[0] in home:
            values[home[key[0]]][key] = value


def _metric(family: WorkerFamily, values: Mapping[Key, float]) -> Metric:
    metric = Metric(family.name, family.text, family.kind)
    metric.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
    return metric
