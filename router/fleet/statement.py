"""An engine's own statement of its set-up and of its event endpoints.

Set-up: from its Prometheus page, and from ``/server_info``, which SGLang always serves and vLLM only with
``VLLM_SERVER_DEV_MODE=1``. Event endpoints: from vLLM's ``/kv_event_sources`` or SGLang's ``/server_info``.

Pure functions; a value of another shape than the engine's is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec

from kvatlas.router.fleet.engines import EngineAddress, EngineKind

SERVER_INFO: Final = "/server_info?config_format=json"
_ENDPOINT: Final = re.compile(r"(tcp|ipc|inproc)://\S+")
_PORT_MAX: Final = (1 << 16) - 1
_RANKS_MAX: Final = 1024
_TOKENS_MAX: Final = 1 << 24
_METHOD: Final = re.compile(r"[\w-]{1,40}", re.ASCII)
_BOOLS: Final = {"True": True, "False": False}
# Options without which hits are estimated, or predictions cannot be checked, by software.
EVENTS_OPTION: Final[dict[EngineKind, str]] = {
    "vllm": '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": '
    '"tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\'',
    "sglang": '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": '
    '"tcp://*:5558"}\'',
}
REPORT_OPTION: Final[dict[EngineKind, str]] = {
    "vllm": "--enable-prompt-tokens-details",
    "sglang": "--enable-cache-report",
}


class EventPorts(msgspec.Struct, frozen=True, rename={"host": "endpoint_host", "ranks": "dp_size"}):
    """``kv_events`` of SGLang's ``/server_info``: rank ``r`` publishes at port base + r."""

    endpoint_port_base: int
    replay_endpoint_port_base: int | None = None
    host: str = "*"
    topic: str = ""
    ranks: int = 1
    block_size: int = 0
    """Tokens per page, over all ranks of decode context parallelism."""
    load_endpoint_port_base: int | None = None
    """Only with ``--load-publish-endpoint``: rank ``r`` publishes its load at this port + r."""
    load_topic: str = "load"

    def __post_init__(self) -> None:
        last = _PORT_MAX - self.ranks + 1
        bases = (self.endpoint_port_base, self.replay_endpoint_port_base, self.load_endpoint_port_base)
        if not 0 < self.ranks <= _RANKS_MAX or not all(base is None or 0 < base <= last for base in bases):
            raise ValueError("ports out of range")


Retention = int | Literal["dense"] | None
"""``--prefix-cache-retention-interval`` in tokens; ``dense``: every block is kept; None: not stated."""


class EngineStatement(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in tokens; None: not stated."""

    source: Literal["server_info", "metrics"]
    kind: EngineKind = "vllm"
    drafts: bool | None = None
    """Whether it decodes speculatively."""
    method: str = ""
    """Method of speculative decoding; "": not stated."""
    keeps_last_block: bool = False
    """Lookups drop no block, by option or by the method of its release."""
    attention_block_size: int | None = None
    """Block size of its full-attention layers, over all ranks of decode context parallelism."""
    block_size: int | None = None
    """The option of this name. Models with Mamba states have other blocks of full attention."""
    mamba_cache_mode: str | None = None
    mamba_block_size: int | None = None
    decode_ranks: int | None = None
    """Ranks of decode context parallelism."""
    retention_interval: Retention = None
    caches_prefixes: bool | None = None
    """False: prefix caching is off, as always for encoder-decoder models."""
    bounded_replay: bool | None = None
    """Whether windows may be rebuilt by replay, for models that support it."""
    version: str = ""
    """SGLang's release; vLLM states its own elsewhere."""
    namespaced: bool = False
    """SGLang's hashes cover more than its events tell: adapters' ids, or salts in Dynamo's format."""
    other_attention: bool = False
    """SGLang has pools for sliding windows or Mamba states, of which its events say nothing."""
    silent_store: str = ""
    """SGLang's storage, or store of another software, of which its events say nothing; "": none."""
    reports_cached_tokens: bool = True
    """False: SGLang without ``--enable-cache-report``, whose answers do not tell its hits."""
    event_ports: EventPorts | None = None
    """Event sockets of an SGLang server; None: it publishes nothing."""

    @property
    def has_unseen_caches(self) -> bool:
        """Whether it has caches of which no event tells: a prediction is not exact."""
        return self.other_attention or bool(self.silent_store)


def metrics_statement(cache_config: Mapping[str, str], *, drafts: bool) -> EngineStatement | None:
    """Read the labels of ``vllm:cache_config_info``, and whether the page has counters of drafts.

    vLLM registers the counters when an engine with speculative decoding starts, and on no other engine
    (``SpecDecodingProm``, vLLM 0.32).
    """
    # Its Rust frontend, whose page lacks ``cache_config_info``, always has them (0.33): there ``drafts``
    # requires one above zero. Returns None for a page with neither.
    if not cache_config and not drafts:
        return None
    mode = cache_config.get("mamba_cache_mode")
    return EngineStatement(
        source="metrics",
        drafts=drafts,
        attention_block_size=_label_tokens(cache_config.get("effective_attention_block_size")),
        block_size=_label_tokens(cache_config.get("block_size")),
        mamba_cache_mode=mode if mode in {"align", "all"} else None,
        mamba_block_size=_label_tokens(cache_config.get("mamba_block_size")),
        retention_interval=_label_retention(cache_config.get("prefix_cache_retention_interval")),
        caches_prefixes=_BOOLS.get(cache_config.get("enable_prefix_caching", "")),
        bounded_replay=_BOOLS.get(cache_config.get("swa_bounded_replay", "")),
    )


def server_info_statement(body: bytes) -> EngineStatement | None:
    """Read ``GET /server_info?config_format=json``; None for a body of another kind."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(answer, dict) and isinstance(answer.get("internal_states"), list):
        return _sglang_statement(answer)
    config = _part(answer, "vllm_config")
    cache = _part(config, "cache_config")
    if not cache:
        return None
    drafter = _part(config, "speculative_config")
    method, mode = drafter.get("method"), cache.get("mamba_cache_mode")
    method = method if isinstance(method, str) and _METHOD.fullmatch(method) else ""
    replay = cache.get("swa_bounded_replay")
    return EngineStatement(
        source="server_info",
        drafts=bool(drafter),
        method=method,
        # vLLM 0.33, which has the second option, drops no block for drafters that do not need the next token
        # (``SpeculativeConfig.needs_eagle_block_drop``).
        keeps_last_block=drafter.get("disable_eagle_block_drop") is True
        or (method in {"dflash", "dspark"} and "disable_lookahead_block_hashes" in drafter),
        attention_block_size=_tokens(cache.get("effective_attention_block_size")),
        block_size=_tokens(cache.get("block_size")),
        mamba_cache_mode=mode if mode in {"align", "all"} else None,
        mamba_block_size=_tokens(cache.get("mamba_block_size")),
        decode_ranks=_tokens(_part(config, "parallel_config").get("decode_context_parallel_size")),
        retention_interval=_retention(cache),
        bounded_replay=replay if isinstance(replay, bool) else None,
    )


def _sglang_statement(info: dict[str, Any]) -> EngineStatement:
    """Read the ``/server_info`` of SGLang 0.5.23 (``build_server_info``, srt/utils/common.py): its resolved
    arguments, ``kv_events``, and the state of its schedulers."""
    try:
        ports = msgspec.convert(info.get("kv_events"), EventPorts | None)
    except msgspec.ValidationError:
        ports = None
    states = [_part(state, "memory_usage") for state in info["internal_states"] if isinstance(state, dict)]
    method, version = info.get("speculative_algorithm"), info.get("version")
    return EngineStatement(
        source="server_info",
        kind="sglang",
        drafts=bool(method),
        method=method.lower() if isinstance(method, str) and _METHOD.fullmatch(method) else "",
        # Its lookup knows no drop (srt/mem_cache/radix_cache.py).
        keeps_last_block=True,
        attention_block_size=_tokens(ports.block_size if ports else info.get("page_size")),
        version=version if isinstance(version, str) else "",
        namespaced=bool(info.get("enable_lora")) or '"dynamo"' in str(info.get("kv_events_config")),
        # The second one is declared for models with a Mamba cache only (srt/arg_groups/overrides.py).
        other_attention=any(_tokens(state.get("token_capacity_swa")) for state in states)
        or info.get("uses_mamba_radix_cache") is True,
        silent_store=_silent_store(info),
        reports_cached_tokens=info.get("enable_cache_report") is not False,
        event_ports=ports,
    )


def _silent_store(info: dict[str, Any]) -> str:
    backend = info.get("hicache_storage_backend")
    if info.get("enable_hierarchical_cache") and isinstance(backend, str):
        return backend if _METHOD.fullmatch(backend) else "storage"
    named = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
    return next((name.removeprefix("enable_") for name in named if info.get(name) is True), "")


def sglang_metrics_statement(gauges: Mapping[str, float]) -> EngineStatement | None:
    """Read SGLang's gauges (srt/observability/metrics_collector.py, 0.5.23): a pool for windows has a size of
    its own, and so has one for Mamba states: what is free, kept and used in it. None: nothing of the kind."""
    if not any(gauges.get(name) for name in _OTHER_POOLS):
        return None
    return EngineStatement(source="metrics", kind="sglang", keeps_last_block=True, other_attention=True)


class _Source(msgspec.Struct):
    enable_kv_cache_events: bool = True
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""


def event_sources(base_url: str, body: bytes, like: EngineAddress | None = None) -> list[EngineAddress]:
    """Return the engines in an answer of vLLM's ``/kv_event_sources``, one per rank, with role, kind and
    source of ``like``. Raises ``ValueError`` for another kind of body.

    The rank is set only if there are several. Sources that publish nothing, or have an invalid endpoint or
    rank, are omitted.
    """
    try:
        sources = msgspec.json.decode(body, type=dict[str, _Source | None])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error) or "nested too deeply") from None
    host = urlsplit(base_url).hostname or "127.0.0.1"
    live: dict[int, EngineAddress] = {}
    for rank, source in sources.items():
        number = int(rank) if re.fullmatch(r"\d{1,6}", rank, re.ASCII) else None
        if number is None or source is None or not source.enable_kv_cache_events:
            continue
        events, replay = (
            reachable(e, host) if e else None for e in (source.endpoint, source.replay_endpoint)
        )
        if events is None or not _ENDPOINT.fullmatch(events):
            continue
        if replay is not None and not _ENDPOINT.fullmatch(replay):
            replay = None
        named = number if len(sources) > 1 else None
        live[number] = _published(base_url, named, events, replay, source.topic, like)
    return [live[number] for number in sorted(live)]


def sglang_engines(
    base_url: str, ports: EventPorts | None, like: EngineAddress | None = None
) -> list[EngineAddress]:
    """Return the engines of an SGLang server that publishes at these ports, one per data-parallel rank."""
    if ports is None:
        return []
    host = urlsplit(base_url).hostname or "127.0.0.1"

    def address(base: int | None, rank: int) -> str | None:
        return None if base is None else reachable(f"tcp://{ports.host}:{base + rank}", host)

    return [
        _published(
            base_url,
            rank if ports.ranks > 1 else None,
            address(ports.endpoint_port_base, rank),
            address(ports.replay_endpoint_port_base, rank),
            ports.topic,
            like,
        )
        for rank in range(ports.ranks)
    ]


def load_source(engine: EngineAddress, stated: EngineStatement | None) -> tuple[str, str] | None:
    """Return address and topic of the socket at which an SGLang engine publishes its load; None without
    one."""
    ports = None if stated is None else stated.event_ports
    if ports is None or ports.load_endpoint_port_base is None:
        return None
    # SGLang tells no host for it, but to take that of the server (``describe_kv_events_publisher``).
    host = urlsplit(engine.base_url).hostname or "127.0.0.1"
    port = ports.load_endpoint_port_base + (engine.dp_rank or 0)
    return reachable(f"tcp://*:{port}", host), ports.load_topic


def _published(
    base_url: str,
    rank: int | None,
    events: str | None,
    replay: str | None,
    topic: str,
    like: EngineAddress | None,
) -> EngineAddress:
    role, kind, source = (None, None, None) if like is None else (like.role, like.kind, like.kv_source)
    return EngineAddress(base_url, rank, events, replay, topic, role=role, kind=kind, kv_source=source)


def reachable(endpoint: str, host: str) -> str:
    """Convert an endpoint as bound (``tcp://*:5557``) to one that others can connect to."""
    address = f"[{host}]" if ":" in host else host
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\]|::)(?=:\d+$)", f"tcp://{address}", endpoint)


def _part(whole: Any, name: str) -> dict[str, Any]:
    part = whole.get(name) if isinstance(whole, dict) else None
    return part if isinstance(part, dict) else {}


def _tokens(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= _TOKENS_MAX else None


def _label_tokens(label: str | None) -> int | None:
    return _tokens(int(label)) if label and label.isdecimal() and len(label) < 10 else None


def _label_retention(label: str | None) -> Retention:
    return "dense" if label == "None" else 0 if label == "0" else _label_tokens(label)


def _retention(cache: dict[str, Any]) -> Retention:
    value = cache.get("prefix_cache_retention_interval", 0.5)
    return "dense" if value is None else 0 if value == 0 and type(value) is int else _tokens(value)


# Reads an engine's Prometheus page: its load, and the size of its pool.
#
# Pure functions over the page's bytes; invalid numbers are omitted.


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
