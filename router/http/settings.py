"""Settings and counters of listeners and of connections to engines.

Names carry units; all defaults live here.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class ListenSettings(msgspec.Struct, frozen=True):
    """Limits and time-outs of client connections."""

    # Not a key of the configuration: config/removed.py.
    header_timeout_s: float = 10.0
    """Time-out for a complete request head, in seconds, from the connection's start or the head's first
    byte; for a trailer; and for a TLS handshake."""
    # Not a key of the configuration: config/removed.py.
    body_timeout_s: float = 30.0
    """Longest pause between two pieces of a request body, in seconds."""
    # Not a key of the configuration: config/removed.py.
    body_bytes_per_s_min: int = 4096
    """Slowest request body, in bytes per second; one that falls 30 s behind is answered with
    408."""
    # Not a key of the configuration: config/removed.py.
    keepalive_timeout_s: float = 75.0
    """How long an idle client connection is kept, in seconds; more than the 60 s that load balancers
    usually keep theirs."""
    # Not a key of the configuration: config/removed.py.
    stall_timeout_s: float = 120.0
    """A client that does not read its answer for this long is disconnected."""
    keepalive_comment_s: float = 0.0
    """A client of a stream gets a comment (`: keep-alive`) before it has had nothing for this many seconds,
    from the engine's first byte on; 0: none. Set it below the idle time-out of proxies between client and
    router, if prompts compute longer than that."""
    drain_delay_s: float = 0.0
    """Seconds from SIGTERM until new connections are refused: the time load balancers need to notice that
    ``/ready`` answers 503. Requests that come meanwhile are answered, and close their connection. Set it to
    the interval of your load balancer's health checks times its failures."""
    drain_s_max: float = 30.0
    """Seconds from then on that running answers may take before they are cut. Raise it to the longest answer
    that must not be cut, and the grace period of the pod with it."""
    # Not a key of the configuration: config/removed.py.
    header_bytes_max: int = 64 * 1024
    """Largest request head, and trailer; a larger one is answered with 431."""
    connections_max: int = 10_000
    """Most client connections, TLS handshakes included; further ones are answered with 503 and closed. Raise
    it for more open streams; the limit of open files must allow twice as many."""
    client_share_max: float = 0.5
    """Share of ``connections_max`` (64 connections at least) that one client address may hold, of an IPv6
    address its /64; set 1 where all clients come through one proxy."""
    bodies_bytes_max: int = 2 * 1024 * 1024 * 1024
    """Most bytes of request bodies held at one time, of all requests together; beyond it, requests are
    answered with 503. Lower it on a machine with less memory; raise it for many long prompts together."""


class CorsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which pages may ask from a browser. The defaults are vLLM's: every page, without credentials."""

    allowed_origins: tuple[str, ...] = ("*",)
    """Origins of pages that may ask, e.g. `https://chat.example.com`; `*` for all, none (`[]`) to leave CORS
    to the engines. Restrict it if browsers reach the router."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that pages may use; `*` for all. Restrict it with the origins."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Request headers that pages may set; `*` for all. Restrict it with the origins."""
    allow_credentials: bool = False
    """Whether pages may send cookies and HTTP credentials. Switch it on with a list of origins, for pages
    that log in by cookie."""


class HandshakeStats(msgspec.Struct):
    """Counters of client connections that are not there yet."""

    handshakes_failed: Annotated[int, "kvatlas_*_handshakes_failed_total"] = 0
    """TLS handshakes that came to nothing, or did not end in time."""
    descriptor_shortages: Annotated[int, "kvatlas_*_descriptor_shortages_total"] = 0
    """Connections that were accepted with the last file descriptors that the process may have."""


class ListenStats(HandshakeStats):
    """Counters of the listener."""

    connections: Annotated[int, "kvatlas_listen_connections_total"] = 0
    """Connections accepted."""
    connections_refused: Annotated[int, "kvatlas_listen_connections_refused_total"] = 0
    """Connections refused because there were too many."""
    bodies_refused: Annotated[int, "kvatlas_listen_bodies_refused_total"] = 0
    """Requests refused because all bodies together would have been over ``bodies_bytes_max``."""
    requests: Annotated[int, "kvatlas_listen_requests_total"] = 0
    """Requests read, of all paths of the public port."""
    header_timeouts: Annotated[int, "kvatlas_listen_header_timeouts_total"] = 0
    """Connections closed because a request head did not come in time."""
    body_timeouts: Annotated[int, "kvatlas_listen_body_timeouts_total"] = 0
    """Requests ended because their body did not come in time."""
    stalled_clients: Annotated[int, "kvatlas_listen_stalled_clients_total"] = 0
    """Connections cut because the client did not read its answer."""
    bad_requests: Annotated[int, "kvatlas_listen_bad_requests_total"] = 0
    """Requests that are not valid HTTP."""
    header_overflows: Annotated[int, "kvatlas_listen_header_overflows_total"] = 0
    """Request heads that were too large."""
    pipeline_pauses: Annotated[int, "kvatlas_listen_pipeline_pauses_total"] = 0
    """Times reading paused because too many requests waited on one connection."""
    drained: Annotated[int, "kvatlas_listen_drained_total"] = 0
    """Requests that were still being answered when the drain began and finished in time."""
    drain_closed: Annotated[int, "kvatlas_listen_drain_closed_total"] = 0
    """Connections cut because ``drain_s_max`` was over."""


class ClientSettings(msgspec.Struct, frozen=True):
    """Connections to engines: time-outs and bounds."""

    connect_timeout_s: float = 3.0
    """Time-out of a connection to an engine, in seconds. Raise it if engines are in another data centre, or
    accept slowly under load."""
    stream_head_timeout_s: float = 30.0
    """Streams: time-out until the engine's status line, in seconds. vLLM sends it before the prefill, so an
    engine that is silent for longer hangs. Raise it if a proxy before the engines holds heads back."""
    first_byte_timeout_s: float = 600.0
    """Time-out until the answer begins, in seconds: of a stream the first token (queue and prefill; comments
    and openings do not count), without streaming the whole generation. Set it to the longest wait that your
    clients accept."""
    idle_timeout_s: float = 120.0
    """Longest pause between two pieces of an answer that has begun, in seconds; comments do not count. Raise
    it for engines that pause for long between tokens (swapping, very slow models)."""
    # Not a key of the configuration: config/removed.py.
    engine_connections_max: int = 4096
    """Most open connections to one server; requests beyond it try another engine, or get 503."""
    # Not a key of the configuration: config/removed.py.
    keepalive_s: float = 4.0
    """How long an idle connection to an engine is kept. Less than the 5 s after which vLLM closes it, so
    that reuse rarely meets a closing connection."""


class ClientStats(msgspec.Struct):
    """Counters of connections to engines. Monotone."""

    stale_reconnects: Annotated[int, "kvatlas_proxy_stale_reconnects_total"] = 0
    """Kept-alive connections that died before a response byte and were replaced for free."""
    engine_connects: Annotated[int, "kvatlas_proxy_engine_connects_total"] = 0
    """Connections opened to engines."""
    engine_pool_overflows: Annotated[int, "kvatlas_proxy_engine_pool_overflows_total"] = 0
    """Requests that found all 4,096 connections of an engine in use."""
    descriptor_shortages: Annotated[int, "kvatlas_proxy_descriptor_shortages_total"] = 0
    """Connections to engines that this process had no file descriptor for."""
    read_pauses: Annotated[int, "kvatlas_proxy_read_pauses_total"] = 0
    """Times reading from an engine paused because the client was slower."""
