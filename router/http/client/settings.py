"""Limits and time-outs of connections to engines. Names carry units; all defaults live here."""

from __future__ import annotations

import msgspec


class ClientSettings(msgspec.Struct, frozen=True):
    """Connections to engines: time-outs and bounds."""

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
