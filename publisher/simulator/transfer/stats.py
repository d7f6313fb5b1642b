"""Counters of the connector, under the names of vLLM's NixlConnector. Each appears with its first event."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = tuple(float(2**power) for power in range(11, 35, 2))
_HISTOGRAMS = (
    ("seconds", "vllm:nixl_xfer_time_seconds", "Histogram of transfer duration.", _SECONDS),
    ("num_bytes", "vllm:nixl_bytes_transferred", "Histogram of bytes per transfer.", _BYTES),
)
_COUNTERS = (
    ("failed_transfers", "Failed transfers, handshakes and notifications."),
    ("failed_notifications", "Failed notifications."),
    ("kv_expired_reqs", "Requests whose KV expired, on the prefill engine."),
    ("notifications_after_expiry", "Notifications for requests that were no longer tracked."),
)


class Observed(msgspec.Struct):
    """One histogram's counts; the last bucket has no bound."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(_SECONDS) + 1))
    total: float = 0.0

    def add(self, value: float, bounds: tuple[float, ...]) -> None:
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value


class TransferStats(msgspec.Struct):
    """What the connector counted since the engine's start."""

    failed_transfers: int = 0
    failed_notifications: int = 0
    kv_expired_reqs: int = 0
    notifications_after_expiry: int = 0
    seconds: Observed = msgspec.field(default_factory=Observed)
    num_bytes: Observed = msgspec.field(default_factory=Observed)

    def transferred(self, seconds: float, num_bytes: int) -> None:
        """A load has ended well."""
        self.seconds.add(seconds, _SECONDS)
        self.num_bytes.add(num_bytes, _BYTES)

    def families(self, names: tuple[str, ...], values: tuple[str, ...]) -> Iterator[Metric]:
        """What has been counted so far, with these labels."""
        for field, name, text, bounds in _HISTOGRAMS:
            observed: Observed = getattr(self, field)
            if any(observed.counts):
                family = HistogramMetricFamily(name, text, labels=names)
                family.add_metric(values, _cumulated(observed, bounds), sum_value=observed.total)
                yield family
        for field, text in _COUNTERS:
            if count := getattr(self, field):
                counter = CounterMetricFamily(f"vllm:nixl_num_{field}", text, labels=names)
                counter.add_metric(values, count)
                yield counter


def _cumulated(observed: Observed, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*map(str, bounds), "+Inf"), observed.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
