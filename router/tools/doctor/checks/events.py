"""Checks of an engine's event stream: sockets, flow, encoding."""

from __future__ import annotations

from collections.abc import Iterator

from router.tools.doctor.evidence import EngineEvidence
from router.tools.doctor.findings import CheckResult, engine_check, error, info, ok, warning
from router.tools.doctor.gather.listener import Connectivity, ReplayState

_CHECK_ADDRESS = "correct events= (or what the engine was started with), and open the port in the firewall"


@engine_check("events.reach")
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
    endpoint = engine.event_endpoint
    if endpoint is None or not endpoint.startswith("tcp://") or "*" in endpoint or "::" in endpoint:
        cause = "wrong address or port, a firewall, or an engine that has not bound it"
        return error(seen, cause, _CHECK_ADDRESS)
    port = endpoint.rpartition(":")[2]
    return error(
        seen,
        f"the engine was started with the endpoint {endpoint}: without * vLLM connects to it and does "
        "not listen there",
        f'start it with "endpoint":"tcp://*:{port}" in --kv-events-config',
    )


@engine_check("events.replay")
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


@engine_check("events.flow")
def flow(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that events arrive."""
    sockets = engine.sockets
    if sockets is None or sockets.events_link is not Connectivity.UP:
        return
    probed = engine.probe is not None and any(not r.status for r in engine.probe.requests)
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
            "try --probe, which sends two small requests",
        )
    if sockets.missing or sockets.restarts:
        report = info if engine.load is None else error
        yield report(
            f"{sockets.missing} batch number(s) missing, {sockets.restarts} restart(s) of the numbering",
            "the connection lost messages, or the engine restarted while the doctor listened",
            "repeat; if it persists, several publishers may share the address",
        )


@engine_check("events.removals")
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
    elif engine.load is not None:
        yield info(
            f"{seen}: nothing was evicted",
            "the pool is too large to be filled by a small load"
            if not engine.load.filled_tokens
            else "the load did not fill the pool",
            "start the engine with a small pool (vLLM: --num-gpu-blocks-override) to run this check",
        )


@engine_check("events.topic")
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


@engine_check("events.encoding")
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


@engine_check("events.ranks")
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
