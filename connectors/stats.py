"""Carries the tallies of both halves to vLLM's log line and to Prometheus.

Names in a tally are ``metric`` or ``metric/label/...``; each metric below says what its labels are. Values
are sums since the last report, so reports of several ranks and of both halves add up.
"""

from __future__ import annotations

from typing import Any

from connectors.compat import KVConnectorPromMetrics, KVConnectorStats

PREFIX = "kvatlas_offload_"

COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "bytes": (("direction", "group"), "Bytes moved between GPU blocks and host rows"),
    "seconds": (("direction", "group"), "Seconds from taking a transfer job to its end"),
    "jobs": (("direction", "result"), "Transfer jobs that ended"),
    "lookups": (
        ("result",),
        "Requests admitted with a load (loaded) or without (computed); answers too late",
    ),
    "hit_tokens": ((), "Tokens that requests were admitted with, to be loaded instead of computed"),
    "blocks_stored": ((), "Blocks that became loadable"),
    "blocks_removed": ((), "Blocks that ceased to be loadable"),
    "blocks_refused": ((), "Blocks never stored, because too many sources were pinned at once"),
    "blocks_bad": (("direction",), "Blocks of transfers that failed"),
    "tier": (("what",), "Host tier: evictions, blocks dropped_for_room, failed_loads and failed_stores"),
    "store": (("reason",), "What happened at a shared store: faults, misses, time-outs, evictions"),
}
"""Metric -> its labels beside the engine's, and what it counts."""

GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "rows": (("state",), "Rows of host memory on each rank: all, and those used"),
    "jobs_waiting": (("direction",), "Transfer jobs that not every rank has answered yet"),
    "blocks_pinned": ((), "Blocks of the GPU that stores under way keep from being reused"),
    "bandwidth_bytes_per_second": (
        ("direction",),
        "Bytes per second of one rank's latest jobs, waiting included",
    ),
}
"""The same for what is so at this moment; only the scheduler's half reports it."""


class OffloadStats(KVConnectorStats):
    """``data``: name -> sum."""

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: Any) -> OffloadStats:
        """Both sums together, and the other's gauges, which are later; neither is changed."""
        data = dict(self.data)
        for name, value in other.data.items():
            data[name] = value if _is_gauge(name) else data.get(name, 0) + value
        return OffloadStats(data=data)

    def reduce(self) -> dict[str, int | float]:
        """For the log: what was counted, with the values of one metric's first label added up."""
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
        """Add one report. Names this version does not know are left out."""
        for name, value in transfer_stats_data.items():
            metric, *labels = name.split("/")
            values = [*self.per_engine_labelvalues[engine_idx], *labels]
            if metric in self._counters and len(labels) == len(COUNTERS[metric][0]):
                self._counters[metric].labels(*values).inc(value)
            elif metric in self._gauges and len(labels) == len(GAUGES[metric][0]):
                self._gauges[metric].labels(*values).set(value)


def _is_gauge(name: str) -> bool:
    return name.partition("/")[0] in GAUGES
