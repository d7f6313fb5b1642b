"""Limits and rules of forwarding. Names carry units; all defaults live here."""

from __future__ import annotations

from typing import Literal

from router.http.settings import ClientSettings

ReportMode = Literal["pass", "strip", "refuse"]

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
        "/release_kv_cache_memory",
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


class ProxySettings(ClientSettings, frozen=True):
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

    pin_header: bool = False
    """Let clients choose the engine by an `x-kvatlas-engine` header with its id, for debugging; 503 where it
    cannot take the request."""

    attempts_max: int = 3
    """Most engines that are tried for one request."""
    retry_time_s_max: float = 60.0
    """No further engine is tried later than this many seconds after the first attempt."""
    retry_after_s_max: float = 60.0
    """Longest time for which an engine's Retry-After keeps it from being chosen, in seconds."""
