"""Checks of an engine's HTTP side (reachability, models, release, clock) and of its event stream."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.router.fleet.statement import EVENTS_OPTION
from kvatlas.router.index.places import ON_GPU, medium_named
from kvatlas.router.tools.doctor.evidence import EngineEvidence
from kvatlas.router.tools.doctor.findings import CheckResult, check, error, info, ok, warning
from kvatlas.router.tools.doctor.listener import Connectivity, ReplayState
from kvatlas.router.tools.doctor.missing_features import EVENT_SOURCES_SINCE, NEWEST_KNOWN, missing_features

_CHECK_ADDRESS = "correct events= (or what the engine was started with), and open the port in the firewall"


@check("events.reach")
def reach(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that the live socket accepts a subscription."""
    sockets, address = engine.sockets, engine.engine.events
    if sockets is None:
        return
    match sockets.events_link:
        case Connectivity.UP:
            note = f"; {sockets.disconnects} disconnect(s) during the check" if sockets.disconnects else ""
            yield ok(f"subscribed to {address}{note}")
        case Connectivity.REFUSED:
            yield _refused(engine)
        case Connectivity.NO_HANDSHAKE:
            yield error(
                f"{address}: the listener there is not a ZMQ publisher",
                "the port is that of the HTTP server or of the replay socket",
                "swap events= and replay= if they are exchanged; otherwise correct events=",
            )
        case _:
            problem = sockets.events_problem or "no connection within the time allowed"
            yield error(f"{address}: {problem}", "not an address that can be connected to", _CHECK_ADDRESS)


def _refused(engine: EngineEvidence) -> CheckResult:
    """Report a refused connection.

    vLLM's publisher binds an endpoint that contains ``*`` or ``::``, and connects to any other, 0.0.0.0
    included (``_is_bind_endpoint`` of vllm/distributed/kv_events.py, 0.32 and 0.33).
    """
    seen = f"{engine.engine.events}: nothing accepts connections"
    endpoint = engine.event_endpoint or ""
    port = endpoint.rpartition(":")[2]
    asked = (engine.engine.events or "").rpartition(":")[2]
    if not endpoint.startswith("tcp://") or "*" in endpoint or "::" in endpoint or port != asked:
        cause = "wrong address or port, a firewall, or an engine that has not bound it"
        return error(seen, cause, _CHECK_ADDRESS)
    return error(
        seen,
        f"the engine was started with the endpoint {endpoint}: without * vLLM connects to it and does "
        "not listen there",
        f'start it with "endpoint":"tcp://*:{port}" in --kv-events-config',
    )


@check("events.replay")
def replay(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that missed batches can be replayed."""
    sockets, address = engine.sockets, engine.engine.replay
    if sockets is None:
        return
    if address is None:
        yield warning(
            "no replay socket",
            "the engine was started without replay_endpoint, or replay= is not given",
            "set replay_endpoint in --kv-events-config: without it a router that restarts knows nothing of "
            "what the engine holds, and a gap is never repaired",
        )
    elif sockets.replay_state is ReplayState.COMPLETE:
        yield from _replay_complete(engine)
    elif sockets.replay_state is ReplayState.CUT_SHORT and sockets.replayed_batches:
        yield warning(
            f"{address}: {sockets.replayed_batches} batches, then silence",
            "the engine stopped in the middle of its response, or its send queue overflowed",
            "look at the engine's log; a large buffer_steps needs a large hwm",
        )
    elif sockets.replay_link is Connectivity.NO_HANDSHAKE:
        yield error(
            f"{address}: the listener there is not a replay socket",
            "the port is that of the HTTP server or of the event socket",
            "swap events= and replay= if they are exchanged; otherwise correct replay=",
        )
    elif sockets.replay_link is Connectivity.UP:
        yield error(
            f"{address}: connected, but no response",
            "the engine is stuck or very busy, or the socket is not vLLM's replay socket",
            "look at the engine's log; correct replay=",
        )
    else:
        problem = sockets.replay_problem or "nothing accepts connections"
        yield error(f"{address}: {problem}", "wrong address or port, or a firewall", "correct replay=")


def _replay_complete(engine: EngineEvidence) -> Iterator[CheckResult]:
    sockets = engine.sockets
    if sockets is None:
        return
    if not sockets.replayed_batches:
        yield ok("replay works; it has no batches yet")
    elif sockets.first_seq:
        yield info(
            f"replay returned {sockets.replayed_batches} batches, the oldest is number {sockets.first_seq}",
            "older ones have been dropped from the engine's buffer (buffer_steps)",
            "what was stored before is unknown to a router that starts now (feed state degraded) until the "
            "engine's cache is cleared or it restarts; a larger buffer_steps reaches further back",
        )
    else:
        yield ok(f"replay returned all {sockets.replayed_batches} batches since the engine's start")


@check("events.flow")
def flow(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that events arrive."""
    sockets = engine.sockets
    if sockets is None or sockets.events_link is not Connectivity.UP:
        return
    probed = engine.probe is not None and any(one.failed is None for one in engine.probe.completions)
    received = f"{sockets.live_batches} live and {sockets.replayed_batches} replayed batches"
    event_counts = engine.event_counts
    came = event_counts.events or event_counts.rejected or event_counts.unknown_types
    if sockets.live_batches and (came or not probed):
        yield ok(received)
    elif probed:
        yield error(
            f"{received} without an event, although the engine answered the probe",
            "prefix caching or events are off, the endpoint belongs to another engine, or its blocks are "
            "larger than the probe",
            "start the engine with prefix caching on and enable_kv_cache_events; check events=",
        )
    elif sockets.replayed_batches:
        yield ok(f"{received}: the engine is idle now")
    else:
        yield info(
            "no event yet",
            "the engine has had no request long enough to fill a block, or its events are off",
            "try --probe, which sends a few small requests",
        )
    if sockets.missing or sockets.restarts:
        # Without a probe a busy engine may have overrun this connection.
        report = info if engine.probe is None else warning
        yield report(
            f"{sockets.missing} batch number(s) missing, {sockets.restarts} restart(s) of the numbering",
            "the connection lost messages, or the engine restarted while the doctor listened",
            "repeat; if it persists, several publishers may share the address",
        )


@check("events.removals")
def removals(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that every removed block was stored before."""
    stored, removed, unknown = (engine.removals.get(name, 0) for name in ("stored", "removed", "unknown"))
    if engine.sockets is None or not stored + removed + unknown:
        return
    seen = f"{stored} block(s) stored, {removed} of them removed"
    if unknown and engine.history_complete:
        yield error(
            f"{seen}; {unknown} removal(s) of blocks that are not stored",
            "stores were not published, removals were published twice, or hashes of removals differ",
            "report it to the maintainers of the engine: its events cannot be counted",
        )
    elif unknown:
        yield info(
            f"{seen}; {unknown} removal(s) of blocks stored before the history begins",
            "older batches have been dropped from the engine's buffer, or some were missed",
            "check a freshly started engine",
        )
    elif removed:
        yield ok(f"{seen}, none that was not stored")


@check("events.topic")
def topic(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that the topic matches: with a wrong topic the router receives nothing."""
    sockets, wanted = engine.sockets, engine.engine.topic
    if sockets is None or not sockets.topics:
        return
    shown = ", ".join(repr(name) for name in sorted(sockets.topics))
    if all(name.startswith(wanted) for name in sockets.topics):
        yield ok(f"topic {shown}")
    else:
        yield error(
            f"the engine publishes under {shown}, the router subscribes to {wanted!r}",
            "topic= is not what --kv-events-config says",
            "correct topic=, or leave it out to take every topic",
        )


@check("events.encoding")
def encoding(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that every event could be decoded."""
    sockets, event_counts = engine.sockets, engine.event_counts
    if sockets is None:
        return
    if event_counts.events:
        forms = "/".join(sorted(event_counts.encodings)) or "no"
        hashes = "/".join(sorted(event_counts.hash_forms)) or "no"
        yield ok(f"{forms} encoding, {hashes} hashes, {event_counts.events} events")
    if event_counts.rejected:
        yield warning(
            f"{event_counts.rejected} event(s) could not be read: {'; '.join(event_counts.rejections)}"[:400],
            "a newer or foreign publisher",
            "upgrade kvatlas; the content of these events is missing from the index",
        )
    unknown_media = {
        name: count
        for name, count in event_counts.media.items()
        if name not in ON_GPU and medium_named(name) is None
    }
    if unknown_media:
        shown = ", ".join(f"{name} {count}" for name, count in sorted(unknown_media.items()))
        yield warning(
            f"events in media that were seen and not used: {shown}",
            "kvatlas does not know these media: hits there are never predicted",
            "nothing, if hits there need no prediction; otherwise upgrade kvatlas, or report it",
        )
    if event_counts.unknown_types:
        types = ", ".join(f"{name} {count}" for name, count in sorted(event_counts.unknown_types.items()))
        seen = f"events of unknown types that could not be read: {types}"
        if event_counts.events:
            yield info(
                seen, "a newer publisher", "nothing, unless a newer kvatlas knows them: they are skipped"
            )
        else:
            yield warning(
                f"{seen}; nothing else arrived",
                "a newer or foreign publisher",
                "upgrade kvatlas; nothing is known of what this engine holds",
            )
    if sockets.malformed:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(sockets.malformed.items()))
        yield error(
            f"malformed messages: {reasons}",
            "the publisher is not vLLM's, or the address belongs to another service",
            "correct events= and replay=",
        )
    rejected = dict(engine.residency.rejected) if engine.residency is not None else {}
    rejected.pop("undecodable", None)
    if rejected:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
        yield warning(
            f"invalid events: {reasons}",
            "a medium or a kind of KV cache group that kvatlas does not know",
            "upgrade kvatlas; predictions for this engine are unreliable",
        )
    if sockets.sink_problem:
        yield error(
            f"a batch could not be applied: {sockets.sink_problem}",
            "a fault in kvatlas, or events of an unknown form",
            "please report it with a recording of the events",
        )


@check("events.ranks")
def ranks(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that each data-parallel rank has an event socket of its own."""
    received = engine.event_counts.ranks
    expected = engine.engine.dp_rank
    if len(received) > 1:
        yield error(
            f"events of ranks {sorted(received)} at one address",
            "several ranks publish to one socket: their caches cannot be told apart",
            "give each rank its own endpoint (vLLM adds the rank to the port)",
        )
    elif expected is not None and received and expected not in received:
        yield error(
            f"events of rank {min(received)} where rank {expected} was expected",
            "dp-rank= and events= do not belong together",
            "the port of rank N is that of rank 0 plus N",
        )


_SKEW_S_MAX = 2.0
_LAG_S_MAX = 1.0


@check("http.health")
def health(engine: EngineEvidence) -> Iterator[CheckResult]:
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


@check("http.models")
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
    if engine.server.models and engine.base_model is None:
        yield error(
            "every model listed is a LoRA adapter",
            "no card without a parent, so the base model of the cache is unknown",
            "serve the base model's name too",
        )


@check("http.version")
def version(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Report features that this vLLM release lacks."""
    server = engine.server
    if server.is_router:
        yield error(
            f"this is a kvatlas router (version {server.version_text}), not an engine",
            "--engine names a router",
            "give --router with the URL of its ops port, and --engine with those of its engines",
        )
        return
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
        unknown = server.version[:2] > NEWEST_KNOWN
        newer = " (newer than any this version of kvatlas was tested with)" if unknown else ""
        frontend = ", Rust frontend" if engine.frontend == "rust" else ""
        yield ok(f"vLLM {server.version_text}{frontend}{newer}")
    for lack in missing:
        report = warning if lack.severe else info
        major, minor, _ = lack.since
        yield report(
            f"vLLM {server.version_text}", f"before {major}.{minor}: {lack.description}", lack.remedy
        )


@check("http.event_sources")
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
            f"start it with {EVENTS_OPTION['vllm']}; else its cache is estimated",
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


@check("clock.skew")
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
