"""Plain counters of the proxied path; the metrics exporter reads them, nothing here knows about it."""

from __future__ import annotations

import msgspec


class ProxyStats(msgspec.Struct):
    """Requests, retries and failures as the proxy saw them. Monotone, but for the gauges so named."""

    requests: int = 0
    requests_active: int = 0
    """Gauge."""
    retries: int = 0
    stale_reconnects: int = 0
    """Kept-alive connections that died before a response byte and were replaced for free."""
    engine_connects: int = 0
    engine_pool_overflows: int = 0
    """Requests that found ``engine_connections_max`` connections of an engine in use."""
    descriptor_shortages: int = 0
    """Connections to engines that this process had no file descriptor for."""
    engine_failures: dict[str, int] = msgspec.field(default_factory=dict)
    """By reason (``router.openai.request.FAILURES``)."""
    read_pauses: int = 0
    """Times reading from an engine paused because the client was slower."""
    streams_broken: int = 0
    """Answers that broke off after their first byte had been given to the client."""
    engines_broken: int = 0
    """Requests whose engine answered 500 or ended the connection before the first byte, each time."""
    requests_quarantined: int = 0
    """Requests not tried again because they had broken two engines."""
    clients_gone: int = 0
    clients_gave_up: int = 0
    """Clients that left without a byte although the engine had had the time, and answered nobody."""
    bodies_too_large: int = 0
    paths_refused: int = 0
    kv_transfer_params_removed: int = 0
    """Requests whose body had ``kv_transfer_params``, which was taken out."""
    usage_unread: int = 0
    """Answers whose usage could not be read (too long, or not the expected shape)."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    """Answers of our own, by error code."""

    def count_failure(self, reason: str) -> None:
        """One engine failure."""
        self.engine_failures[reason] = self.engine_failures.get(reason, 0) + 1

    def count_error(self, code: str) -> None:
        """One error answer of our own."""
        self.errors[code] = self.errors.get(code, 0) + 1


class ListenStats(msgspec.Struct):
    """What clients did to the listener."""

    connections: int = 0
    connections_refused: int = 0
    bodies_refused: int = 0
    """Requests refused because all bodies together would have been over ``bodies_bytes_max``."""
    requests: int = 0
    header_timeouts: int = 0
    body_timeouts: int = 0
    stalled_clients: int = 0
    bad_requests: int = 0
    header_overflows: int = 0
    pipeline_pauses: int = 0
    drained: int = 0
    """Requests that were still being answered when the drain began and finished in time."""
    drain_cuts: int = 0
    """Connections cut because ``drain_s_max`` was over."""
