"""Counters of client connections; the metrics exporter reads them."""

from __future__ import annotations

import msgspec


class HandshakeStats(msgspec.Struct):
    """Of connections that are not there yet."""

    handshakes_failed: int = 0
    """TLS handshakes that came to nothing, or did not end in time."""
    descriptor_shortages: int = 0
    """Connections that were accepted with the last file descriptors that the process may have."""


class ListenStats(HandshakeStats):
    """What clients did to the listener."""

    connections: int = 0
    """Connections accepted."""
    connections_refused: int = 0
    """Connections refused because there were too many."""
    bodies_refused: int = 0
    """Requests refused because all bodies together would have been over ``bodies_bytes_max``."""
    requests: int = 0
    """Requests read, of all paths of the public port."""
    header_timeouts: int = 0
    """Connections closed because a request head did not come in time."""
    body_timeouts: int = 0
    """Requests ended because their body did not come in time."""
    stalled_clients: int = 0
    """Connections cut because the client did not read its answer."""
    bad_requests: int = 0
    """Requests that are not valid HTTP."""
    header_overflows: int = 0
    """Request heads that were too large."""
    pipeline_pauses: int = 0
    """Times reading paused because too many requests waited on one connection."""
    drained: int = 0
    """Requests that were still being answered when the drain began and finished in time."""
    drain_cuts: int = 0
    """Connections cut because ``drain_s_max`` was over."""
