"""Limits of HTTP/2 connections, and what happened at them. Names carry units; all defaults live here."""

from __future__ import annotations

import msgspec

from router.http.server.stats import HandshakeStats


class H2Settings(msgspec.Struct, frozen=True):
    """Limits of the connections of a gateway."""

    handshake_timeout_s: float = 10.0
    """Time-out of a connection's TLS handshake, and from then on until its HTTP/2 preface and settings are
    there, in seconds."""
    stall_timeout_s: float = 60.0
    """A connection that takes nothing of what waits to be sent to it for this long is cut, in seconds."""
    connections_max: int = 256
    """Most connections; further ones are closed at once. A gateway holds one for each of its threads."""
    streams_max: int = 4096
    """Most requests at one time on one connection; further ones are refused."""
    stream_window_bytes: int = 1024 * 1024
    """Bytes of one stream that may be under way to here and not taken yet."""
    header_bytes_max: int = 32 * 1024
    """Largest head of a stream; a larger one ends its connection."""
    control_frames_per_s_max: int = 20_000
    """Most frames without content (pings, settings, window updates) that a connection may send per second; a
    reset of a running stream counts as ten. One that sends more is ended."""


class H2Stats(HandshakeStats):
    """What peers did."""

    connections: int = 0
    """Connections accepted from gateways."""
    connections_open: int = 0
    """Gauge: connections of gateways now."""
    connections_refused: int = 0
    """Connections refused because there were too many."""
    connections_broken: int = 0
    """Connections ended because the peer broke the protocol or a limit of it."""
    handshake_timeouts: int = 0
    """Connections closed because they did not begin to speak HTTP/2 in time."""
    stalled_connections: int = 0
    """Connections cut because they took nothing of what was to be sent."""
    streams: int = 0
    """Streams opened by gateways, health checks included."""
    streams_open: int = 0
    """Gauge: streams now."""
    streams_refused: int = 0
    """Streams refused because their connection had too many, or was ending."""
    streams_reset: int = 0
    """Streams that a gateway reset."""
    streams_broken: int = 0
    """Streams ended because the gateway broke a limit of theirs."""
