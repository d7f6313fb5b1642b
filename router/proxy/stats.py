"""Plain counters of the proxied path; the metrics exporter reads them, nothing here knows about it."""

from __future__ import annotations

import msgspec


class ProxyStats(msgspec.Struct):
    """Requests, retries and failures as the proxy saw them. Monotone, but for the gauges so named."""

    requests: int = 0
    """Requests that came to the proxied paths."""
    requests_active: int = 0
    """Gauge: requests being answered now."""
    retries: int = 0
    """Further attempts at another engine."""
    stale_reconnects: int = 0
    """Kept-alive connections that died before a response byte and were replaced for free."""
    engine_connects: int = 0
    """Connections opened to engines."""
    engine_pool_overflows: int = 0
    """Requests that found ``engine_connections_max`` connections of an engine in use."""
    descriptor_shortages: int = 0
    """Connections to engines that this process had no file descriptor for."""
    engine_failures: dict[str, int] = msgspec.field(default_factory=dict)
    """Failed attempts at engines, by reason."""
    read_pauses: int = 0
    """Times reading from an engine paused because the client was slower."""
    streams_broken: int = 0
    """Answers that broke off after their first byte had been given to the client."""
    engines_broken: int = 0
    """Requests whose engine answered 500 or ended the connection before the first byte, each time."""
    requests_quarantined: int = 0
    """Requests not tried again because they had broken two engines."""
    clients_gone: int = 0
    """Clients that left before their answer was complete."""
    clients_gave_up: int = 0
    """Clients that left without a byte although the engine had had the time, and answered nobody."""
    bodies_too_large: int = 0
    """Request bodies over `proxy.body_bytes_max`."""
    paths_refused: int = 0
    """Requests for a path that affects every client of an engine (403)."""
    kv_transfer_params_removed: int = 0
    """Requests whose body had ``kv_transfer_params``, which was taken out."""
    usage_unread: int = 0
    """Answers whose usage could not be read (too long, or not the expected shape)."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    """Answers of the router's own that say what went wrong, by error code; unknown paths and models are not
    among them."""
    not_found: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests for an unknown path or model (404 by the router), by error code."""

    def count_failure(self, reason: str) -> None:
        """One engine failure."""
        self.engine_failures[reason] = self.engine_failures.get(reason, 0) + 1

    def count_error(self, status: int, code: str) -> None:
        """One error answer of our own."""
        counts = self.not_found if status == 404 else self.errors
        counts[code] = counts.get(code, 0) + 1


class ListenStats(msgspec.Struct):
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
