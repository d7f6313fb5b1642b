"""Checks of an engine's HTTP side: reachability, models served, release, clock."""

from __future__ import annotations

from collections.abc import Iterator

from router.tools.doctor.evidence import EVENT_SOURCES_SINCE, NEWEST_KNOWN, EngineEvidence, missing_features
from router.tools.doctor.findings import CheckResult, engine_check, error, info, ok, warning

_SKEW_S_MAX = 2.0
_LAG_S_MAX = 1.0


@engine_check("http.health")
def health(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check ``GET /health``."""
    answer = engine.server.health
    if answer.ok:
        yield ok("GET /health: 200")
    elif answer.status == 404:
        yield info("GET /health: 404", "the server is not vLLM, or there is a proxy in front of it")
    elif answer.status:
        yield error(
            f"GET /health: {answer.description}",
            "the engine is starting, or its engine core has died",
            "look at the engine's log; restart it if the core is dead",
        )
    else:
        yield error(
            f"GET /health: {answer.problem}",
            "the engine is down, or the address, port or a firewall is wrong",
            "start the engine, or correct the URL given with --engine",
        )


@engine_check("http.models")
def models(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check ``GET /v1/models``, which the router uses as the liveness probe."""
    answer = engine.server.models_answer
    if engine.server.models:
        names = ", ".join(card.id for card in engine.server.models[:8])
        yield ok(f"serves {names}")
    elif not answer.status:
        yield error(
            f"GET /v1/models: {answer.problem}",
            "the engine does not answer",
            "no request is sent to this engine until it does; see http.health",
        )
    elif answer.status in {401, 403}:
        yield error(
            f"GET /v1/models: {answer.description}",
            "the engine requires an API key (--api-key), and the router's own requests carry none",
            "set fleet.api_key_file at the router; the doctor itself sends no key",
        )
    else:
        what = "a response without models" if answer.ok else answer.description
        yield error(
            f"GET /v1/models: {what}",
            "the server is not an OpenAI-compatible engine, or it is still loading its model",
            "correct the URL (without /v1), or wait until the model is loaded",
        )
    wanted = engine.expected_model
    if engine.server.models and wanted and wanted not in {card.id for card in engine.server.models}:
        yield error(
            f"does not serve {wanted!r}",
            "the engine was started with another model, or under another --served-model-name",
            "start it with that model, or correct --model",
        )
    if engine.server.models and engine.base_model is None:
        yield error(
            "every model listed is a LoRA adapter",
            "no card without a parent, so the base model of the cache is unknown",
            "serve the base model's name too",
        )


@engine_check("http.version")
def version(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Report features that this vLLM release missing_features."""
    server = engine.server
    if engine.kind == "sglang" or (not server.version_answer.status and not server.models):
        return
    if server.version is None:
        shown = repr(server.version_text[:80]) if server.version_text else server.version_answer.description
        yield info(
            f"GET /version: {shown}",
            "not a release number of vLLM",
            "nothing, if the other checks pass: events carry the needed facts",
        )
        return
    missing = missing_features(server.version)
    if not missing:
        newer = " (newer than any this version of kvatlas was tested with)"
        frontend = ", Rust frontend" if engine.frontend == "rust" else ""
        yield ok(f"vLLM {server.version_text}{frontend}{newer if server.version > NEWEST_KNOWN else ''}")
    for lack in missing:
        report = warning if lack.severe else info
        yield report(
            f"vLLM {server.version_text}", f"before {_name(lack.since)}: {lack.description}", lack.remedy
        )


@engine_check("http.event_sources")
def event_sources(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that the event endpoints are known, and name their source."""
    answer, sources = engine.server.sources_answer, engine.server.sources
    if engine.sources_ignored:
        yield from _compare_sources(engine)
    elif engine.engine.events is not None:
        rank = "" if engine.engine.dp_rank is None else f" (rank {engine.engine.dp_rank})"
        yield ok(f"the engine names its event endpoint {engine.engine.events}{rank}")
    elif engine.kind == "sglang" or (not engine.server.models and not answer.status):
        return  # reported by ``sglang``, or it does not answer at all
    elif answer.ok and sources is not None:
        yield warning(
            "the engine publishes no events",
            "it was started without --kv-events-config, or with events disabled",
            'start it with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
            '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\'; else its cache is estimated',
        )
    elif answer.ok:
        yield warning(
            "GET /kv_event_sources: not understood",
            "a response that is not of vLLM's shape",
            "give events= and replay= with --engine",
        )
    else:
        old = engine.server.version is not None and engine.server.version < EVENT_SOURCES_SINCE
        why = (
            f"vLLM {engine.server.version_text} has no such endpoint"
            if old
            else "the engine does not provide it"
        )
        yield warning(
            f"no event endpoint known; GET /kv_event_sources: {answer.description}",
            why,
            "give events=tcp://HOST:PORT (and replay=) with --engine",
        )


def _compare_sources(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare configured endpoints with those the engine names: only ports can be compared."""
    number = str(engine.engine.dp_rank or 0)
    source = (engine.server.sources or {}).get(number)
    if source is None or not source.endpoint:
        yield ok(f"events at {engine.engine.events}, as given")
        return
    configured = (engine.engine.events or "").rpartition(":")[2]
    named = source.endpoint.rpartition(":")[2]
    if named.isdecimal() and configured.isdecimal() and named != configured:
        yield warning(
            f"events= says port {configured}, the engine says {named}",
            "another engine's port, or a port mapping between router and engine",
            "correct events=, or leave it out: it is then read from the engine",
        )
    elif engine.engine.replay is None and source.replay_endpoint:
        yield warning(
            "the engine has a replay socket that is not used",
            "events= is given without replay=",
            f"add replay=, port {source.replay_endpoint.rpartition(':')[2]}, or leave both out",
        )
    else:
        yield ok(f"events at {engine.engine.events}, as given")


@engine_check("clock.skew")
def clock_skew(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check clocks: skew does not affect routing, but makes time figures misleading."""
    skews = [s for s in (engine.server.health.date_skew_s, engine.server.models_answer.date_skew_s) if s]
    skew = min(skews, key=abs, default=None)
    lags = sorted(engine.sockets.lags_s) if engine.sockets is not None else []
    lag = lags[len(lags) // 2] if lags else None
    parts = []
    if skew is not None:
        parts.append(f"its clock is {skew:+.1f} s from ours (Date header)")
    if lag is not None:
        parts.append(f"events are {lag * 1000:.0f} ms old when they arrive")
    seen = "; ".join(parts)
    if (skew is not None and abs(skew) > _SKEW_S_MAX) or (lag is not None and lag < -_LAG_S_MAX):
        yield warning(
            seen,
            "the machines' clocks differ",
            "run NTP on both; until then kvatlas_feed_lag_seconds and time stamps in logs mislead",
        )
    elif lag is not None and lag > _LAG_S_MAX:
        yield warning(
            seen,
            "events are delayed: an overloaded engine or network, or a clock that is behind",
            "compare the clocks; place the router near its engines",
        )
    elif seen:
        yield ok(seen)


def _name(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
