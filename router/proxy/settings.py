"""Limits and time-outs of the proxied path. Names carry units; all defaults live here.

``ProxySettings`` belongs to the exchange with engines, ``ListenSettings`` to the exchange with clients.
"""

from __future__ import annotations

import msgspec

from router.proxy.screen import ReportMode

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
    """Forwarding to engines: time-outs, retries, connections and refused paths."""

    body_bytes_max: int = 64 * 1024 * 1024
    """Largest request body; a larger one is answered with 413."""
    refused_paths: frozenset[str] = REFUSED_PATHS
    """Paths answered with 403 `path_not_proxied`, since they change an engine for every client."""
    passed_paths: frozenset[str] = frozenset()
    """Paths passed on although they are refused or unknown, e.g. ``/reset_prefix_cache``. The request goes
    to one engine; after a cache reset that engine is taken to hold nothing."""
    trust_client_kv_transfer_params: bool = False
    """Pass ``kv_transfer_params`` in request bodies on to engines. By default the field is taken out of every
    body: it names engines to fetch KV blocks from, and vLLM's process ends on a wrong one."""
    kv_cache_report_mode: ReportMode = "pass"
    """Requests with a ``kv_cache_report_mode`` field: ``pass`` them on, ``strip`` the field, or ``refuse``
    them with 400."""

    connect_timeout_s: float = 3.0
    """Time-out of a connection to an engine, in seconds."""
    stream_head_timeout_s: float = 30.0
    """Streams: time-out until the engine's status line, in seconds. vLLM sends it before the prefill, so
    an engine that is silent for longer hangs."""
    first_byte_timeout_s: float = 600.0
    """Time-out until the first byte of the answer's body, in seconds: queue and prefill; without
    streaming, the whole generation."""
    idle_timeout_s: float = 120.0
    """Longest pause between two pieces of an answer that has begun, in seconds."""

    attempts_max: int = 3
    """Most engines that are tried for one request."""
    retry_time_s_max: float = 60.0
    """No further engine is tried later than this many seconds after the first attempt."""
    retry_after_s_max: float = 60.0
    """Longest time for which an engine's Retry-After keeps it from being chosen, in seconds."""
    kept_answer_bytes_max: int = 256 * 1024
    """Largest error answer of an engine that is kept, to be passed on if no other engine answers."""

    engine_connections_max: int = 4096
    """Most open connections to one server; requests beyond it try another engine, or get 503."""
    idle_connections_max: int = 256
    """Most idle connections kept open to one server."""
    keepalive_s: float = 4.0
    """How long an idle connection to an engine is kept. Less than the 5 s after which vLLM closes it, so
    that reuse rarely meets a closing connection."""
    head_bytes_max: int = 64 * 1024
    """Largest answer head of an engine."""
    read_ahead_bytes_max: int = 256 * 1024
    """Bytes of an answer held for a slow client; beyond it, reading from the engine pauses."""
    usage_bytes_max: int = 4 * 1024 * 1024
    """Largest answer that is searched for its `usage`; longer ones give receipts without reported tokens."""


class ListenSettings(msgspec.Struct, frozen=True):
    """Limits and time-outs of client connections."""

    header_timeout_s: float = 10.0
    """Time-out for a complete request head, in seconds, from the connection's start or the head's first
    byte; and for a trailer."""
    body_timeout_s: float = 30.0
    """Longest pause between two pieces of a request body, in seconds."""
    body_bytes_per_s_min: int = 4096
    """Slowest request body, in bytes per second; one that falls ``body_grace_s`` behind is answered with
    408."""
    body_grace_s: float = 30.0
    """How far a request body may fall behind ``body_bytes_per_s_min``, in seconds: a small body may take so
    long as a whole."""
    keepalive_timeout_s: float = 75.0
    """How long an idle client connection is kept, in seconds; more than the 60 s that load balancers
    usually keep theirs."""
    stall_timeout_s: float = 120.0
    """A client that does not read its answer for this long is disconnected."""
    linger_s_max: float = 2.0
    """After an early answer such as 413: how long the rest of the request is read and dropped before the
    connection closes."""
    drain_delay_s: float = 0.0
    """Seconds from SIGTERM until new connections are refused: the time load balancers need to notice that
    ``/ready`` answers 503. Requests that come meanwhile are answered, and close their connection."""
    drain_s_max: float = 30.0
    """Seconds from then on that running answers may take before they are cut."""
    header_bytes_max: int = 64 * 1024
    """Largest request head, and trailer; a larger one is answered with 431."""
    body_ahead_bytes_max: int = 256 * 1024
    """Bytes of a request body received before they are asked for; beyond it, reading from the client
    pauses."""
    connections_max: int = 10_000
    """Most client connections; further ones are answered with 503 and closed."""
    client_share_max: float = 0.5
    """Share of ``connections_max`` (64 connections at least) that one client address may hold, of an IPv6
    address its /64; 1 where all clients come through one proxy."""
    bodies_bytes_max: int = 2 * 1024 * 1024 * 1024
    """Most bytes of request bodies held at one time, of all requests together; beyond it, requests are
    answered with 503."""
    pipelined_max: int = 16
    """Most requests that one connection may have waiting (HTTP pipelining); beyond it, reading pauses."""
