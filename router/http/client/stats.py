"""Counters of connections to engines; the metrics exporter reads them."""

from __future__ import annotations

import msgspec


class ClientStats(msgspec.Struct):
    """Connections to engines. Monotone."""

    stale_reconnects: int = 0
    """Kept-alive connections that died before a response byte and were replaced for free."""
    engine_connects: int = 0
    """Connections opened to engines."""
    engine_pool_overflows: int = 0
    """Requests that found ``engine_connections_max`` connections of an engine in use."""
    descriptor_shortages: int = 0
    """Connections to engines that this process had no file descriptor for."""
    read_pauses: int = 0
    """Times reading from an engine paused because the client was slower."""
