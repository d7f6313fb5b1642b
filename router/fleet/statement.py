"""An engine's own statement of its set-up and of its event endpoints.

Set-up: from its Prometheus page, and from ``/server_info``, which SGLang always serves and vLLM only with
``VLLM_SERVER_DEV_MODE=1``. Event endpoints: from vLLM's ``/kv_event_sources`` or SGLang's ``/server_info``.

Pure functions; a value of another shape than the engine's is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal
from urllib.parse import urlsplit

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


class PartPools(msgspec.Struct, frozen=True):
    """Pools of an SGLang engine with windows or Mamba states beside full attention, and without host memory:
    tokens of full attention, of windows, and of a prompt that it computes at a time (0: all); states, and
    those that each request in flight uses. 0: it has none."""

    tokens: int
    window_tokens: int = 0
    states: int = 0
    request_states: int = 0
    prefill_tokens: int = 0


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
    blocks_per_chunk: int | None = None
    """Blocks that its own offloading keeps under one hash, if given as a number."""
    chunk_tokens: int | None = None
    """The same, if given in tokens."""
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
    part_pools: PartPools | None = None
    """Pools of these, where its rules for them can be followed; None: they cannot."""
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
    offload = _own_offload(_part(config, "kv_transfer_config"))
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
        blocks_per_chunk=_tokens(offload.get("blocks_per_chunk")),
        chunk_tokens=_tokens(offload.get("block_size")),
        bounded_replay=replay if isinstance(replay, bool) else None,
    )


def _own_offload(connector: dict[str, Any]) -> dict[str, Any]:
    """Return the options of vLLM's OffloadingConnector, alone or one of several."""
    options = _part(connector, "kv_connector_extra_config")
    if connector.get("kv_connector") == "OffloadingConnector":
        return options
    several = options.get("connectors")
    parts = [part for part in several if isinstance(part, dict)] if isinstance(several, list) else []
    own = next((part for part in parts if part.get("kv_connector") == "OffloadingConnector"), {})
    return _part(own, "kv_connector_extra_config")


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
        part_pools=_part_pools(info),
        silent_store=_silent_store(info),
        reports_cached_tokens=info.get("enable_cache_report") is not False,
        event_ports=ports,
    )


def _part_pools(info: dict[str, Any]) -> PartPools | None:
    """Read the pools of windows or states; None with host memory or storage, of whose windows and states no
    event tells either, with both parts, with a cap on the states of a path, and with drafts."""
    states = info["internal_states"]
    # A scheduler's state has its arguments as resolved (``resolved_server_args_dict``).
    resolved = {**info, **(states[0] if states and isinstance(states[0], dict) else {})}
    usage = _part(resolved, "memory_usage")
    tokens, windows = _tokens(usage.get("token_capacity")), _tokens(usage.get("token_capacity_swa"))
    slots = _tokens(resolved.get("max_mamba_cache_size")) if info.get("uses_mamba_radix_cache") else None
    if tokens is None or (windows is None) is (slots is None):
        return None
    if resolved.get("enable_hierarchical_cache") or _silent_store(info) or info.get("speculative_algorithm"):
        return None
    if resolved.get("mamba_max_states_per_path") not in {None, -1}:
        return None
    # Beside its own state those of the last steps (``get_mamba_tracking_slots``).
    strategy = resolved.get("mamba_radix_cache_strategy")
    tracking = 1 if resolved.get("disable_overlap_schedule") or strategy == "extra_buffer_lazy" else 2
    extra = tracking if isinstance(strategy, str) and strategy.startswith("extra_buffer") else 0
    prefill = _tokens(resolved.get("chunked_prefill_size")) or 0
    return PartPools(tokens, windows or 0, slots or 0, (1 + extra) if slots else 0, prefill)


def _silent_store(info: dict[str, Any]) -> str:
    backend = info.get("hicache_storage_backend")
    if info.get("enable_hierarchical_cache") and isinstance(backend, str):
        return backend if _METHOD.fullmatch(backend) else "storage"
    named = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
    return next((name.removeprefix("enable_") for name in named if info.get(name) is True), "")


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
