"""Limits and time-outs of the proxied path. Names carry units; all defaults live here.

``ProxySettings`` belongs to the exchange with engines, ``ListenSettings`` to the exchange with clients.
"""

from __future__ import annotations

import msgspec

from router.proxy.report_mode import ReportMode

REFUSED_PATHS = frozenset(
    {
        # vLLM's operator and development endpoints: each changes or stops the engine for everyone.
        "/abort_requests",
        "/collective_rpc",
        "/flush_cache",
        "/init_weight_transfer_engine",
        "/is_paused",
        "/is_scaling_elastic_ep",
        "/is_sleeping",
        "/pause",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/scale_elastic_ep",
        "/server_info",
        "/shutdown",
        "/sleep",
        "/start_profile",
        "/stop_profile",
        "/update_weights",
        "/wake_up",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)


class ProxySettings(msgspec.Struct, frozen=True):
    """How engines are asked, how long they are waited for, and when another one is tried."""

    body_bytes_max: int = 8 * 1024 * 1024
    refused_paths: frozenset[str] = REFUSED_PATHS
    passed_paths: frozenset[str] = frozenset()
    """Passed on although refused or unknown, e.g. ``/reset_prefix_cache``: to one engine, which is then taken
    to hold nothing."""
    kv_cache_report_mode: ReportMode = "pass"
    """What to do with requests that ask for it: ``pass``, ``strip`` (that field only) or ``refuse`` (400)."""

    connect_timeout_s: float = 3.0
    stream_head_timeout_s: float = 30.0
    """For streams: until the status line. vLLM sends it before the prefill, so a silent engine hangs."""
    first_byte_timeout_s: float = 600.0
    """Until the first body byte: queueing and prefill; without streaming, the whole generation."""
    idle_timeout_s: float = 120.0
    """Between two pieces of a body that has begun."""

    attempts_max: int = 3
    retry_time_s_max: float = 60.0
    """No further attempt is begun later than this after the first one."""
    retry_after_s_max: float = 60.0
    """An engine's own Retry-After keeps it out for at most this long."""
    kept_answer_bytes_max: int = 256 * 1024
    """Of a refusal that may have to be passed on when no other engine answers."""

    engine_connections_max: int = 4096
    idle_connections_max: int = 256
    keepalive_s: float = 4.0
    """Below the 5 s after which vLLM's server closes an idle connection, so that reuse rarely races it."""
    head_bytes_max: int = 64 * 1024
    read_ahead_bytes_max: int = 256 * 1024
    """Held for a slow client before reading from the engine pauses."""
    usage_bytes_max: int = 4 * 1024 * 1024
    """A longer answer is not searched for its usage."""


class ListenSettings(msgspec.Struct, frozen=True):
    """What a client may hold, and for how long."""

    header_timeout_s: float = 10.0
    """For a request head, from the connection's start or the head's first byte; and for trailers."""
    body_timeout_s: float = 30.0
    """Between two pieces of a request body."""
    body_bytes_per_s_min: int = 4096
    """A body that comes slower than this is given up once it has fallen ``body_grace_s`` behind."""
    body_grace_s: float = 30.0
    """How far a body may fall behind ``body_bytes_per_s_min``: a small one may take so long as a whole."""
    keepalive_timeout_s: float = 75.0
    """Above the 60 s that load balancers in front usually keep idle connections."""
    stall_timeout_s: float = 120.0
    """A client that does not read its answer is cut off after this."""
    linger_s_max: float = 2.0
    """After an early answer (413): how long the rest of the request is thrown away before closing."""
    drain_delay_s: float = 0.0
    """From SIGTERM until no new connection is taken: how long load balancers may need to see that ``/ready``
    says no. Meanwhile requests are still answered, each closing its connection."""
    drain_s_max: float = 30.0
    """From then on: how long running answers may take before they are cut."""
    header_bytes_max: int = 64 * 1024
    """Of a request's head, and of its trailer."""
    body_ahead_bytes_max: int = 256 * 1024
    """Received before the application asked for it; then reading pauses."""
    connections_max: int = 10_000
    pipelined_max: int = 16
