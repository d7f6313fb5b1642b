"""Reports to vLLM: KV events of blocks outside the GPU, and counters for its log line and Prometheus.

Counter names are ``metric`` or ``metric/label/...``; the tables below list each metric's labels. Values are
sums since the last report, so reports of several ranks and of both halves add up.

Events use vLLM's structs and are published together with the engine's own. An event is made when a block
becomes loadable or is removed; the block's tokens were kept when its store began. Neighbouring blocks of a
group that are stored consecutively share one event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvatlas.connectors.compat import (
    BlockRemoved,
    BlockStored,
    KVConnectorPromMetrics,
    KVConnectorStats,
    generate_block_hash_extra_keys,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from kvatlas.connectors.scheduler.plans import PlannedBlock
from kvatlas.connectors.tier.base import TierChanges, split_key

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
            data[name] = value if name.partition("/")[0] in GAUGES else data.get(name, 0) + value
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


@dataclass(frozen=True, slots=True)
class EventPlace:
    """Location fields common to all events of one tier."""

    medium: str
    """``CPU`` or ``STORAGE``."""
    locality: str
    """``LOCAL``, or ``REMOTE`` if other engines can load the blocks too."""
    ownership: str
    """The store's name, which distinguishes connectors that hold the same block in one medium."""


@dataclass(frozen=True, slots=True)
class _Group:
    kind: str
    sliding_window: int | None


@dataclass(slots=True)
class _Block:
    """Event fields of a block whose store is running."""

    parent: bytes | None
    tokens: list[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


class KvEventLog:
    """Event fields of blocks whose stores are running; bounded by their number."""

    def __init__(self, kv_cache_config: Any, hash_block_tokens: int, place: EventPlace) -> None:
        self._place = place
        self._hash_block_tokens = hash_block_tokens
        self._groups: Mapping[int, _Group] = {
            index: _Group(
                kind=get_kv_cache_spec_kind(group.kv_cache_spec).value,
                sliding_window=get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
        }
        self._blocks: dict[bytes, _Block] = {}

    def submitted(self, request: Any, block: PlannedBlock) -> None:
        """Copy the fields of the event: the request may have ended when the store does."""
        lora = request.lora_request
        extra, _ = generate_block_hash_extra_keys(request, block.start_token, block.end_token, 0)
        before = block.start_token // self._hash_block_tokens
        self._blocks[block.key] = _Block(
            parent=request.block_hashes[before - 1] if before else None,
            tokens=list(request.all_token_ids[block.start_token : block.end_token]),
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=extra,
        )

    def dropped(self, key: bytes) -> None:
        self._blocks.pop(key, None)

    def events(self, changes: TierChanges) -> list[Any]:
        """Events in the order of the changes, without blocks that another engine stored and announces."""
        events: list[Any] = []
        # Group and last hash of the last event, if a stored block may be added to it.
        tail: tuple[int, bytes] | None = None
        for stored, key in changes.changes:
            block_hash, group_idx = split_key(key)
            if not stored:
                self._removed(events, block_hash, group_idx)
                tail = None
                continue
            block = self._blocks.pop(key, None)
            if block is None:
                continue
            if tail == (group_idx, block.parent) and _alike(events[-1], block):
                self._extend(events[-1], block_hash, block)
            else:
                events.append(self._stored(block_hash, group_idx, block))
            tail = (group_idx, block_hash)
        return events

    def _stored(self, block_hash: bytes, group_idx: int, block: _Block) -> Any:
        group = self._groups[group_idx]
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block_hash)],
            parent_block_hash=None if block.parent is None else maybe_convert_block_hash(block.parent),
            token_ids=block.tokens,
            block_size=len(block.tokens),
            lora_id=block.lora_id,
            medium=self._place.medium,
            lora_name=block.lora_name,
            extra_keys=to_event_extra_keys([block.extra_keys]),
            group_idx=group_idx,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.sliding_window,
            locality=self._place.locality,
            ownership=self._place.ownership,
        )

    def _extend(self, event: Any, block_hash: bytes, block: _Block) -> None:
        event.block_hashes.append(maybe_convert_block_hash(block_hash))
        event.token_ids.extend(block.tokens)
        event.extra_keys.extend(to_event_extra_keys([block.extra_keys]))

    def _removed(self, events: list[Any], block_hash: bytes, group_idx: int) -> None:
        if events and isinstance(events[-1], BlockRemoved) and events[-1].group_idx == group_idx:
            events[-1].block_hashes.append(maybe_convert_block_hash(block_hash))
            return
        events.append(
            BlockRemoved(
                block_hashes=[maybe_convert_block_hash(block_hash)],
                medium=self._place.medium,
                group_idx=group_idx,
                locality=self._place.locality,
                ownership=self._place.ownership,
            )
        )


def _alike(event: Any, block: _Block) -> bool:
    return bool(event.block_size == len(block.tokens) and event.lora_name == block.lora_name)
