"""Report the counters of both halves to vLLM's log line and to Prometheus.

Counter names are ``metric`` or ``metric/label/...``; the tables below list each metric's labels. Values are
sums since the last report, so reports of several ranks and of both halves add up.
"""

from __future__ import annotations

from typing import Any

from connectors.compat import KVConnectorPromMetrics, KVConnectorStats

PREFIX = "kvatlas_offload_"

COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "bytes": (("direction", "group"), "Bytes moved between GPU blocks and host rows"),
    "seconds": (("direction", "group"), "Seconds from the submission of a transfer job to its end"),
    "jobs": (("direction", "result"), "Transfer jobs that ended"),
    "lookups": (
        ("result",),
        "Requests admitted with a load (loaded) or without (computed); lookups answered too late (late)",
    ),
    "hit_tokens": ((), "Tokens of admitted requests that are loaded instead of computed"),
    "blocks_stored": ((), "Blocks that became loadable"),
    "blocks_removed": ((), "Blocks that are no longer loadable"),
    "blocks_refused": ((), "Blocks never stored, because too many sources were pinned at once"),
    "blocks_bad": (("direction",), "Blocks of transfers that failed"),
    "tier": (("what",), "Host tier: evictions, blocks dropped_for_room, failed_loads and failed_stores"),
    "hinted_blocks": (
        ("what",),
        "Blocks under retention hints: retained, saved (lru had evicted them), expired, over_share",
    ),
    "hints_invalid": ((), "Requests whose retention hint is invalid and ignored"),
    "store": (("reason",), "Events of a shared store: faults, misses, timeouts, evictions"),
}
"""Metric -> its labels after the engine's, and its help text."""

GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "rows": (
        ("state",),
        "Rows of host memory on each rank: all rows, used rows, and rows under a retention hint (hinted)",
    ),
    "jobs_waiting": (("direction",), "Transfer jobs that not every rank has answered yet"),
    "blocks_pinned": ((), "GPU blocks protected from reuse by running stores"),
    "bandwidth_bytes_per_second": (
        ("direction",),
        "Bytes per second of one rank's latest jobs, queueing included",
    ),
}
"""Gauges in the same form; only the scheduler half reports them."""


class OffloadStats(KVConnectorStats):
    """``data``: name -> sum."""

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: Any) -> OffloadStats:
        """Add counters and take the other's gauges, which are later; returns a new object."""
        data = dict(self.data)
        for name, value in other.data.items():
            data[name] = value if _is_gauge(name) else data.get(name, 0) + value
        return OffloadStats(data=data)

    def reduce(self) -> dict[str, int | float]:
        """For the log: sums by metric and first label."""
        totals: dict[str, float] = {}
        for name, value in self.data.items():
            metric, _, labels = name.partition("/")
            short = f"{metric} {labels.partition('/')[0]}".strip()
            totals[short] = totals.get(short, 0) + value
        return {name: round(value, 6) for name, value in sorted(totals.items())}


class OffloadPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter or gauge per metric, made when vLLM sets up its metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            metric: self._counter_cls(
                name=f"{PREFIX}{metric}", documentation=text, labelnames=[*labelnames, *labels]
            )
            for metric, (labels, text) in COUNTERS.items()
        }
        self._gauges = {
            metric: self._gauge_cls(
                name=f"{PREFIX}{metric}",
                documentation=text,
                multiprocess_mode="mostrecent",
                labelnames=[*labelnames, *labels],
            )
            for metric, (labels, text) in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report; unknown names are ignored."""
        for name, value in transfer_stats_data.items():
            metric, *labels = name.split("/")
            values = [*self.per_engine_labelvalues[engine_idx], *labels]
            if metric in self._counters and len(labels) == len(COUNTERS[metric][0]):
                self._counters[metric].labels(*values).inc(value)
            elif metric in self._gauges and len(labels) == len(GAUGES[metric][0]):
                self._gauges[metric].labels(*values).set(value)


def _is_gauge(name: str) -> bool:
    return name.partition("/")[0] in GAUGES
