"""Plain counters of the proxied path; the metrics exporter reads them, nothing here knows about it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from router.http.settings import ClientStats


class ProxyStats(ClientStats):
    """Requests, retries and failures as the proxy saw them. Monotone, but for the gauges so named."""

    requests: Annotated[int, "kvatlas_proxy_requests_total"] = 0
    """Requests that came to the proxied paths."""
    requests_active: Annotated[int, "kvatlas_proxy_requests_active"] = 0
    """Requests being answered now."""
    retries: Annotated[int, "kvatlas_proxy_retries_total"] = 0
    """Further attempts at another engine."""
    requests_moved: Annotated[int, "kvatlas_proxy_requests_moved_total"] = 0
    """Requests that waited for a first byte when their engine went down, and were given to another one."""
    engine_failures: Annotated[dict[str, int], "kvatlas_proxy_engine_failures_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Failed attempts at engines, by reason."""
    streams_broken: Annotated[int, "kvatlas_proxy_streams_broken_total"] = 0
    """Answers that broke off after their first byte had been given to the client."""
    engines_broken: Annotated[int, "kvatlas_proxy_engines_broken_total"] = 0
    """Requests whose engine answered 500 or ended the connection before the first byte, each time."""
    requests_quarantined: Annotated[int, "kvatlas_proxy_requests_quarantined_total"] = 0
    """Requests not tried again because they had broken two engines."""
    clients_gone: Annotated[int, "kvatlas_proxy_clients_gone_total"] = 0
    """Clients that left before their answer was complete."""
    clients_left_unanswered: Annotated[int, "kvatlas_proxy_clients_left_unanswered_total"] = 0
    """Clients that left without a byte although the engine had had the time, and gave no answers."""
    bodies_too_large: Annotated[int, "kvatlas_proxy_bodies_too_large_total"] = 0
    """Request bodies over `proxy.body_bytes_max`."""
    paths_refused: Annotated[int, "kvatlas_proxy_paths_refused_total"] = 0
    """Requests for a path that affects every client of an engine (403)."""
    kv_transfer_params_removed: Annotated[int, "kvatlas_proxy_kv_transfer_params_removed_total"] = 0
    """Requests whose body had ``kv_transfer_params``, which was taken out."""
    forms_refused: Annotated[int, "kvatlas_proxy_forms_refused_total"] = 0
    """Forms (audio uploads) refused: not to be read with certainty, or with fields that must not reach
    engines."""
    priorities_refused: Annotated[int, "kvatlas_proxy_priorities_refused_total"] = 0
    """Requests that an engine refused with the priority of `policy.engine_priority` and took without; it is
    given none until it has been down."""
    usage_unreadable: Annotated[int, "kvatlas_proxy_usage_unreadable_total"] = 0
    """Answers whose usage could not be read (too long, or not the expected shape)."""
    errors: Annotated[dict[str, int], "kvatlas_proxy_errors_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Answers of the router's own that say what went wrong, by error code; unknown paths and models are not
    among them."""
    not_found: Annotated[dict[str, int], "kvatlas_proxy_not_found_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Requests for an unknown path or model (404 by the router), by error code."""

    def count_failure(self, reason: str) -> None:
        """One engine failure."""
        self.engine_failures[reason] = self.engine_failures.get(reason, 0) + 1

    def count_error(self, status: int, code: str) -> None:
        """One error answer of our own."""
        counts = self.not_found if status == 404 else self.errors
        counts[code] = counts.get(code, 0) + 1
