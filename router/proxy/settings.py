"""Limits, rules, counters of forwarding, and aliases of models. Names carry units; all defaults live here."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvatlas.router.http.settings import ClientSettings, ClientStats

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
    """Largest request body; a larger one is answered with 413. Raise it for images or audio sent inline."""
    refused_paths: frozenset[str] = REFUSED_PATHS
    """Paths answered with 403 `path_not_proxied`, since they change an engine for every client. Extend it if
    your engines have further endpoints that clients must not reach."""
    passed_paths: frozenset[str] = frozenset()
    """Paths passed on although they are refused or unknown, e.g. ``/reset_prefix_cache``. The request goes to
    one engine; after a cache reset that engine is taken to hold nothing. Set it for tools that reset caches
    through the router."""
    trust_client_kv_transfer_params: bool = False
    """Pass ``kv_transfer_params`` in request bodies on to engines, and the other fields that choose a peer, a
    rank or a hint. By default they are taken out of every body: they name engines to fetch KV blocks from,
    and vLLM's process ends on a wrong one. Switch it on only if every client is a trusted orchestrator."""
    kv_cache_report_mode: ReportMode = "pass"
    """Requests with a ``kv_cache_report_mode`` field: ``pass`` them on, ``strip`` the field, or ``refuse``
    them with 400. `strip` it if clients use it: reports make predictions less exact."""

    pin_header: bool = False
    """Let clients choose the engine by an `x-kvatlas-engine` header with its id, for debugging; 503 where it
    cannot take the request. Switch it on while searching a fault of one engine."""

    attempts_max: int = 3
    """Most engines that are tried for one request. Set 1 if another router or gateway in front retries."""
    # Not a key of the configuration: config/removed.py.
    retry_time_s_max: float = 60.0
    """No further engine is tried later than this many seconds after the first attempt."""
    suspect_s: float = 300.0
    """Seconds for which a request is remembered that was on an engine when it died: no engine gets it before
    that one is known to be back or has left the fleet, and after two deaths none at all. 0: any engine gets
    it at once. Raise it to the time in which an engine restarts."""
    continue_streams: bool = True
    """Let chat and completion streams that break go on from another engine, unseen by the client. Engines are
    asked for token ids, which are taken out of the answers again. A client opts out by
    `x-kvatlas-continue: off`. Switch it off where the ids of a prompt, 3 to 7 bytes per token, are too much
    for the network between engine and router."""
    continue_tools: bool = False
    """Let also chats with tools go on (`continue_streams`), and those whose reasoning is not over.
    Experimental. Switch it on where engines are started with `--enable-scale-out`, and have time to read each
    answer that goes on many times again."""
    move_drained_s: float = 0.0
    """Seconds after an engine is drained or held, by which its streams have gone on from other engines
    (`continue_streams`), those first that are not predicted to end by then. 0: only a drain's own deadline
    and the end of a pod's grace period count. Set it where engines end sooner than these say."""
    stall_s: float = 30.0
    """Seconds without a token in any stream of an engine, after which its streams go on elsewhere
    (`continue_streams`), whatever its health check says; 0: `idle_timeout_s` alone ends them. Raise it where
    one step of an engine may take longer."""
    # Not a key of the configuration: config/removed.py.
    retry_after_s_max: float = 60.0
    """Longest time for which an engine's Retry-After keeps it from being chosen, in seconds."""


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
    """Answers that broke off, or ended with an error, after a part had been given to the client."""
    continuations: Annotated[dict[str, int], "kvatlas_stream_continuations_total{outcome}"] = msgspec.field(
        default_factory=dict
    )
    """Streams that broke, or left a drained engine, and went on from another one: `completed`, `failed`,
    `client_gone`, or `broke` there too and went on again; or `closed`, as nothing but their end mark was
    missing."""
    continuations_refused: Annotated[dict[str, int], "kvatlas_stream_continuations_refused_total{reason}"] = (
        msgspec.field(default_factory=dict)
    )
    """Streams that broke and could not go on, by reason."""
    recomputed_tokens: Annotated[int, "kvatlas_stream_recomputed_tokens_total"] = 0
    """Tokens of prompts and answers that other engines computed for streams that broke; they are not
    billed."""
    moves: Annotated[dict[str, int], "kvatlas_stream_moves_total{outcome}"] = msgspec.field(
        default_factory=dict
    )
    """Streams that were to leave a drained engine and were taken over, `warmed` or `cold`, by whether the new
    engine had computed their tokens before; or `stayed`, since no engine took them."""
    warmings: Annotated[dict[str, int], "kvatlas_stream_warmings_total{outcome}"] = msgspec.field(
        default_factory=dict
    )
    """Requests that had an engine compute the tokens of a stream before it took that over: `completed` or
    `failed`."""
    warmed_tokens: Annotated[int, "kvatlas_stream_warmed_tokens_total"] = 0
    """Tokens that engines computed for these; they are not billed."""
    engines_broken: Annotated[int, "kvatlas_proxy_engines_broken_total"] = 0
    """Requests whose engine answered 500, 502 or 504, or ended the connection before the first byte, each
    time."""
    requests_quarantined: Annotated[int, "kvatlas_proxy_requests_quarantined_total"] = 0
    """Requests not tried again because they had broken two engines."""
    suspects_noted: Annotated[int, "kvatlas_proxy_suspects_noted_total"] = 0
    """Requests that were on an engine when it died, here or at another router."""
    suspects_learned: Annotated[int, "kvatlas_proxy_suspects_learned_total"] = 0
    """Deaths of engines with a request that other routers reported."""
    suspects_forgotten: Annotated[int, "kvatlas_proxy_suspects_forgotten_total"] = 0
    """Such requests that were forgotten early, as there were too many."""
    suspects_current: Annotated[int, "kvatlas_proxy_suspects"] = 0
    """Such requests that are remembered now (`proxy.suspect_s`), and those whose engine is looked at."""
    suspects_refused: Annotated[dict[str, int], "kvatlas_proxy_suspects_refused_total{reason}"] = (
        msgspec.field(default_factory=dict)
    )
    """Requests refused since an engine died with them: `waits` for it to come back, or `twice`."""
    clients_gone: Annotated[int, "kvatlas_proxy_clients_gone_total"] = 0
    """Clients that left before their answer was complete."""
    clients_left_unanswered: Annotated[int, "kvatlas_proxy_clients_left_unanswered_total"] = 0
    """Clients that left without a byte although the engine had had the time, and gave no answers."""
    bodies_too_large: Annotated[int, "kvatlas_proxy_bodies_too_large_total"] = 0
    """Request bodies over `proxy.body_bytes_max`."""
    paths_refused: Annotated[int, "kvatlas_proxy_paths_refused_total"] = 0
    """Requests for a path that affects every client of an engine (403)."""
    kv_transfer_params_removed: Annotated[int, "kvatlas_proxy_kv_transfer_params_removed_total"] = 0
    """Requests whose body had ``kv_transfer_params``, or another field that chooses a peer, a rank or a hint,
    which was taken out."""
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
        count(self.engine_failures, reason)

    def count_continuation(self, outcome: str, *, refused: str = "") -> None:
        """One stream that broke; ``refused``: why it did not go on."""
        counts, label = (self.continuations_refused, refused) if refused else (self.continuations, outcome)
        count(counts, label)

    def count_move(self, outcome: str) -> None:
        """One stream that was to leave its engine."""
        count(self.moves, outcome)

    def count_warming(self, tokens: int | None) -> None:
        """One request that had an engine compute a stream's tokens; None: it failed."""
        count(self.warmings, "failed" if tokens is None else "completed")
        self.warmed_tokens += tokens or 0

    def count_error(self, status: int, code: str) -> None:
        """One error answer of our own."""
        count(self.not_found if status == 404 else self.errors, code)


def count(counts: dict[str, int], label: str) -> None:
    """One more of a label."""
    counts[label] = counts.get(label, 0) + 1
