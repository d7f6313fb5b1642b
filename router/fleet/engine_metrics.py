"""Reads an engine's Prometheus page: its load, and the size of its pool.

Pure functions over the page's bytes; invalid numbers are omitted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple
from urllib.parse import urlencode

from kvatlas.router.fleet.statement import EngineStatement, metrics_statement

# Larger gauges are invalid; using them would overflow the cost of the engine.
_GAUGE_MAX = 1e9
# Patterns begin with letters, which ``re`` finds ten times as fast as ``^`` (22 instead of 275 us in vLLM
# 0.32's page of 58 KB), and stay within a line; ``_samples_of`` keeps the matches at the start of one.
_GAUGE = re.compile(
    rb"vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{([^}\n]*)\})?[ \t]+(\S+)"
)
# Gauges of SGLang 0.5.23 (srt/observability/metrics_collector.py).
_SGLANG = re.compile(
    rb"sglang:(num_running_reqs|num_queue_reqs|token_usage|num_pages|max_total_num_tokens_swa|"
    rb"mamba_(?:available|evictable|used)_tokens)(?:\{([^}\n]*)\})?[ \t]+(\S+)"
)
_OTHER_POOLS = (
    "max_total_num_tokens_swa",
    *(f"mamba_{state}_tokens" for state in ("available", "evictable", "used")),
)
# Their names at vLLM; they mean the same: pages that are only cached do not count as used.
_ALIKE = {
    "num_running_reqs": "num_requests_running",
    "num_queue_reqs": "num_requests_waiting",
    "token_usage": "kv_cache_usage_perc",
}
_TRANSFERS = re.compile(
    rb"vllm:nixl_(num_failed_transfers|num_failed_notifications|num_kv_expired_reqs|"
    rb"num_notifications_after_expiry)(?:_total)?(?:\{([^}\n]*)\})?[ \t]+(\S+)"
)
_POOL = re.compile(rb"vllm:cache_config_info\{([^}\n]*)\}")
# connectors/offload.py shows these rows with the policy ``hinted`` only.
_HINTED = re.compile(rb'kvatlas_offload_rows\{([^}\n]*state="hinted"[^}\n]*)\}')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_DRAFTS = re.compile(rb"vllm:spec_decode_num_drafts(?:_total)?(?:\{([^}\n]*)\})?[ \t]+(\S*)")
_ZEROS = frozenset({b"0", b"0.0"})
_POOL_BLOCKS = re.compile(rb'num_gpu_blocks="(\d{1,12})"')
_SLEEP = re.compile(
    rb'vllm:engine_sleep_state\{([^}\n]*sleep_state="(awake|weights_offloaded|discard_all)"[^}\n]*)\}'
    rb"[ \t]+(\S+)"
)
_STARTED = re.compile(rb"process_start_time_seconds[ \t]+(\S+)")
_SLEEP_CALLS = re.compile(
    rb"vllm:sleep_mode_operation_duration_seconds_count"
    rb'\{[^}\n]*operation="(sleep|release_kv_cache_memory)"[^}\n]*\}[ \t]+(\S+)'
)
_NEWLINE = ord("\n")
# vLLM's label of a data-parallel rank, and SGLang's.
_RANK = re.compile(rb'(?:engine|dp_rank)="(\d{1,6})"')
# Every sample of vLLM that is read here. Its page is prometheus_client's application, which takes names of
# samples (``registry.restricted_registry``): 0.6 instead of 42 KB, 0.12 instead of 3.9 ms of the engine's API
# server (vLLM 0.32). Only the path with the slash passes the query on.
_READ = (
    *(f"vllm:{gauge}" for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")),
    "vllm:cache_config_info", "vllm:spec_decode_num_drafts_total", "kvatlas_offload_rows",
    "vllm:engine_sleep_state", "vllm:sleep_mode_operation_duration_seconds_count",
    *(
        f"vllm:nixl_num_{counter}_total"
        for counter in (
            "failed_transfers", "failed_notifications", "kv_expired_reqs", "notifications_after_expiry"
        )
    ),
    "process_start_time_seconds",
)  # fmt: skip
METRICS: Final = "/metrics"
METRICS_BY_NAME: Final = f"{METRICS}/?{urlencode([('name[]', name) for name in _READ])}"
_READ_AS_BYTES = tuple(f"\n{name}".encode() for name in _READ)


def names_read(text: bytes) -> frozenset[bytes]:
    """Return which of the samples that are read here the page of a vLLM engine has."""
    return frozenset(name for name in _READ_AS_BYTES if name in text)


def _samples_of(pattern: re.Pattern[bytes], text: bytes) -> Iterator[re.Match[bytes]]:
    """Yield matches at the start of a line: elsewhere they are help texts, types or label values."""
    for match in pattern.finditer(text):
        if not match.start() or text[match.start() - 1] == _NEWLINE:
            yield match


def read_pool_blocks(text: bytes, dp_rank: int | None) -> int | None:
    """Return the number of blocks of the KV pool of one rank, or of the largest; None if the page lacks
    it."""
    sizes = []
    for match in _samples_of(_POOL, text):
        rank, blocks = _RANK.search(match[1]), _POOL_BLOCKS.search(match[1])
        if blocks is not None and (dp_rank is None or rank is None or int(rank[1]) == dp_rank):
            sizes.append(int(blocks[1]))
    sizes += [int(value) for name, value in _sglang(text, dp_rank) if name == "num_pages" and value]
    return max(sizes, default=None)


def read_statement(text: bytes, dp_rank: int | None) -> EngineStatement | None:
    """Return the set-up of this rank as stated by the page; None if it states nothing."""
    if gauges := dict(_sglang(text, dp_rank)):
        return sglang_metrics_statement(gauges)
    rows = [match for match in _samples_of(_POOL, text) if _is_of(match[1], dp_rank)]
    labels = dict(_LABEL.findall(rows[0][1].decode("utf-8", "replace"))) if rows else {}
    drafts = any(
        _is_of(match[1] or b"", dp_rank) and (labels or match[2] not in _ZEROS)
        for match in _samples_of(_DRAFTS, text)
    )
    return metrics_statement(labels, drafts=drafts)


def _is_of(labels: bytes, dp_rank: int | None) -> bool:
    rank = _RANK.search(labels)
    return dp_rank is None or rank is None or int(rank[1]) == dp_rank


class SleepState(NamedTuple):
    """Sleep mode of a vLLM engine by its metrics page. ``discarded``: level 1 or 2, which empties the caches;
    level 0 only pauses, and memory released by ``/release_kv_cache_memory`` (0.33) looks like it. ``sleeps``
    and ``releases``: calls at this server."""

    asleep: bool
    discarded: bool
    sleeps: float = 0.0
    releases: float = 0.0


def read_sleep(text: bytes, dp_rank: int | None) -> SleepState:
    """Return the state of this rank, or of any rank (``record_sleep_state``, v1/metrics/loggers.py, and
    entrypoints/serve/dev/sleep/metrics.py, vLLM 0.32)."""
    states = dict.fromkeys((b"awake", b"weights_offloaded", b"discard_all"), frozenset[float]())
    for match in _samples_of(_SLEEP, text):
        if _is_of(match[1], dp_rank):
            states[match[2]] |= {_number(match[3])}
    calls = {b"sleep": 0.0, b"release_kv_cache_memory": 0.0}
    for match in _samples_of(_SLEEP_CALLS, text):
        number = _number(match[2])
        calls[match[1]] += number if 0 <= number <= _GAUGE_MAX else 0.0
    discarded = 1.0 in states[b"weights_offloaded"] | states[b"discard_all"]
    return SleepState(0.0 in states[b"awake"], discarded, *calls.values())


def _number(value: bytes) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def read_obeys_hints(text: bytes, dp_rank: int | None) -> bool:
    """Whether this rank, or any rank, has a connector with the eviction policy ``hinted``."""
    return any(_is_of(match[1], dp_rank) for match in _samples_of(_HINTED, text))


def read_started(text: bytes) -> float | None:
    """Return the start of the process behind this page, in seconds since the epoch (prometheus_client's
    ``ProcessCollector``); None if the page lacks it."""
    match = next(_samples_of(_STARTED, text), None)
    try:
        started = math.nan if match is None else float(match[1])
    except ValueError:
        return None
    return started if 0 < started < math.inf else None


def read_transfers(text: bytes, dp_rank: int | None) -> dict[str, float]:
    """Return NIXL's counters of failed transfers, by its names without prefix; only those of one rank if
    ``dp_rank`` is given. Counters that were never incremented are absent."""
    found: dict[str, float] = {}
    for name, value in _samples(_TRANSFERS, text, dp_rank):
        if value < math.inf:
            short = name.removeprefix("num_")
            found[short] = found.get(short, 0.0) + value
    return found


def read_gauges(text: bytes, dp_rank: int | None) -> dict[str, float]:
    """Return the gauges of a metrics page by vLLM's names; only those of one rank if ``dp_rank`` is given."""
    # Requests are summed over models and ranks; of the usage (0..1) the maximum is taken. Invalid values
    # (NaN, negative, infinite) are omitted.
    gauges: dict[str, float] = {}
    alike = ((_ALIKE[name], value) for name, value in _sglang(text, dp_rank) if name in _ALIKE)
    for name, value in chain(_samples(_GAUGE, text, dp_rank), alike):
        if value <= _GAUGE_MAX:
            known = gauges.get(name, 0.0)
            gauges[name] = max(known, value) if name == "kv_cache_usage_perc" else known + value
    return gauges


def _sglang(text: bytes, dp_rank: int | None) -> Iterator[tuple[str, float]]:
    """Yield SGLang's gauges; the page of another engine is only searched for its prefix."""
    if b"sglang:num_running_reqs" in text:
        yield from ((n, v) for n, v in _samples(_SGLANG, text, dp_rank) if v <= _GAUGE_MAX)


def _samples(pattern: re.Pattern[bytes], text: bytes, dp_rank: int | None) -> Iterator[tuple[str, float]]:
    """Yield name and value of each sample of this rank, or of all: numbers that are not negative."""
    for match in _samples_of(pattern, text):
        rank = _RANK.search(match[2] or b"")
        if dp_rank is not None and rank is not None and int(rank[1]) != dp_rank:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if value >= 0:  # NaN is not
            yield match[1].decode(), value


def sglang_metrics_statement(gauges: Mapping[str, float]) -> EngineStatement | None:
    """Read SGLang's gauges (srt/observability/metrics_collector.py, 0.5.23): a pool for windows has a size of
    its own, and so has one for Mamba states: what is free, kept and used in it. None: nothing of the kind."""
    if not any(gauges.get(name) for name in _OTHER_POOLS):
        return None
    return EngineStatement(source="metrics", kind="sglang", keeps_last_block=True, other_attention=True)
