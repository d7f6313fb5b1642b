"""Rules: what is wrong with the engines of a running router, and with the router itself.

Each rule reads live state, asks nothing of the network, and yields findings
(``router/observe/findings.py``). The ids are those of docs/troubleshooting.md, "The list of problems".
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial

from kvatlas.router.api.metrics_page import Sources
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.stores import StoreFeed
from kvatlas.router.fleet.engines import EngineKind
from kvatlas.router.fleet.statement import EVENTS_OPTION, REPORT_OPTION
from kvatlas.router.observe.findings import ROUTER, SOURCE_REMEDIES, Finding, Severity
from kvatlas.router.observe.usage import UsageLog
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.first_token import ACCURATE_OF_MIN, ACCURATE_SHARE_MIN
from kvatlas.router.placement.own_pulls import Pulls
from kvatlas.router.placement.seconds import CHANGE_SHOWN_S
from kvatlas.router.placement.shadow import Shadow

_info = partial(Finding, severity=Severity.INFO)
_warning = partial(Finding, severity=Severity.WARNING)
_error = partial(Finding, severity=Severity.ERROR)

_FEED_SEEN = {
    FeedState.COLD: "the router is not connected to its events",
    FeedState.REPLAYING: "its earlier events are being fetched",
    FeedState.DEGRADED: "some of its events are missing",
    FeedState.STALE: "its events have stopped",
}
_FEED_REMEDIES = {
    FeedState.COLD: "check events= of this engine, the firewall between router and engine, and that the "
    "endpoint in its --kv-events-config has a * (tcp://*:5557): without one vLLM connects to the address and "
    "listens nowhere",
    FeedState.REPLAYING: "wait; if it lasts, look at the engine's replay socket",
    FeedState.DEGRADED: "docs/glossary.md, feed states, has the remedy of each reason",
    FeedState.STALE: "check the engine and the network",
}
# Engines between two pauses.
_STEP = 16


def current_findings(s: Sources) -> Generator[None, None, Sequence[Finding]]:
    """Return all findings that hold now, with since when; pauses
    (``kvatlas.router.openai.members.run_cooperatively``)."""
    now = s.accounts.now()
    found = list(of_router(s))
    for number, engine in enumerate(list(s.fleet)):
        if number % _STEP == _STEP - 1:
            yield
        if not engine.closed:
            found += of_engine(engine, now)
            if s.pulls is not None and engine.up:
                found += of_source(engine, s.pulls)
    return s.findings.update(found, time.time())


def of_router(s: Sources) -> Iterator[Finding]:
    """Yield problems that belong to no single engine."""
    problem = "" if s.shared is None else s.shared.problem
    if problem:
        yield _warning(
            "replicas.index",
            subject=ROUTER,
            seen=f"the shared index does not answer: {problem}",
            cause="Redis is down, slow, or out of reach",
            remedy="check Redis and the network; until then it predicts for the engines that it follows: "
            "none, if it started without",
        )
    sources = {} if s.origins is None else s.origins.stats
    for name, source in sources.items():
        if source.failing:
            yield _warning(
                f"source.{name}",
                subject=ROUTER,
                seen=f"engines from {name}: {source.engines}, as last known; failing: {source.last_error}",
                cause="the source does not answer, or is not understood",
                remedy=SOURCE_REMEDIES.get(name, "see the router's log"),
            )
    finding = [name for name in sources if name != "static"]
    if finding and all(one.synced and not one.failing and not one.engines for one in sources.values()):
        yield _warning(
            "engine.none",
            subject=ROUTER,
            seen=f"no engine is known: {', '.join(f'0 from {name}' for name in finding)}",
            cause="nothing matches what is configured, or no engine runs",
            remedy="; ".join(SOURCE_REMEDIES.get(name, name) for name in finding),
        )
    if s.usage is not None:
        yield from _usage_record(s.usage)
    if unused := s.unused():
        yield _warning(
            "config.unused",
            subject=ROUTER,
            seen="; ".join(unused),
            cause="what switches them on is not set",
            remedy="set it, or leave these settings out",
        )
    for feed in s.stores or ():
        yield from of_store(feed)
    for model, origin in s.tokenizer_origins().items():
        if origin.problem:
            how = "its prompts are tokenized by engines"
            if origin.how == "here":
                how = "the configured tokenizer is used although an engine's tokens differ"
            yield _warning(
                "tokens.tokenizer",
                subject=model,
                seen=f"{model}: {how} ({origin.reason})",
                cause=origin.problem,
                remedy=origin.remedy,
            )


def of_store(feed: StoreFeed) -> Iterator[Finding]:
    """Yield what is wrong with a store, and what it publishes that is not used."""
    stats, settings = feed.stats, feed.settings
    if not stats.connected:
        yield _warning(
            "store.disconnected",
            subject=ROUTER,
            seen=f"store {settings.name}: not connected to {', '.join(settings.events)}",
            cause="nothing publishes there, or the router cannot reach it",
            remedy="check stores.events and the firewall; Mooncake's master publishes only if it was built "
            "with MOONCAKE_ENABLE_KV_EVENTS and started with kv_events; until then loads from this store are "
            "not predicted",
        )
    if stats.unused:
        said = ", ".join(f"{name} {count}" for name, count in sorted(stats.unused.items()))
        yield _warning(
            "store.unused",
            subject=ROUTER,
            seen=f"store {settings.name}: events that were seen and not used: {said}",
            cause="they are of other models, layouts or tenants, or in a form that kvatlas does not know: "
            "what they tell of is never predicted",
            remedy="nothing, if no engine here loads them; otherwise set key_model and the parallel sizes of "
            "this store as its engines have them",
        )


def _usage_record(log: UsageLog) -> Iterator[Finding]:
    """Lines that are not written, or do not agree with the index."""
    if log.failing:
        yield _error(
            "record.unwritten",
            subject=ROUTER,
            seen=f"the usage record cannot be written: {log.stats.queued} line(s) wait, "
            f"{sum(log.stats.dropped.values())} are lost",
            cause="the disk is full, or usage.path may not be written",
            remedy="make room, or correct its permissions: waiting lines are written then",
        )
    if share := log.unverified_share:
        yield _warning(
            "record.unverified",
            subject=ROUTER,
            seen=f"{share:.0%} of the latest lines of the usage record have verified: false",
            cause="engines report other cached tokens than their events say",
            remedy="see predictions of the engines here; bills by cached_tokens are not safe until then",
        )


def of_engine(engine: Engine, now: float) -> Iterator[Finding]:
    """Yield what is wrong with an engine that should work; ``now`` in monotonic seconds."""
    name = engine.engine_id
    if not engine.up:
        yield _error(
            "engine.down",
            subject=name,
            seen=f"the router reports it down: {engine.problem}",
            cause="it answers with an error, or something else listens there"
            if " from /v1/models" in engine.problem
            else "it is down, or the router cannot reach it",
            remedy="check its address and port; kvatlas doctor on the router's machine says more",
        )
        return
    if engine.held:
        yield _info(
            "engine.on_hold",
            subject=name,
            seen=f"gets no new requests: {engine.held}",
            cause="an administrator, its file or its pod says so",
            remedy="nothing, if that is meant; otherwise undo it there (docs/discovery.md)",
        )
    if engine.asleep:
        yield _info(
            "engine.asleep",
            subject=name,
            seen="sleeps: it gets no requests until it wakes",
            cause="the engine was sent to sleep (vLLM's sleep mode)",
            remedy="POST /wake_up at the engine",
        )
    yield from _feed(engine)
    if not engine.breaker.allows(now):
        yield _warning(
            "engine.breaker",
            subject=name,
            seen="the router's breaker is open for this engine",
            cause="its latest requests failed",
            remedy="look at the engine's log; the breaker closes with the first success",
        )
    yield from _predictions(engine, now)
    yield from _salts(engine)
    yield from _probe(engine)
    if engine.ignores_ids:
        yield _warning(
            "responses.ids",
            subject=name,
            seen="its latest answer of /v1/responses has an id of its own, which proves no tenant: it cannot "
            "be read, continued or cancelled by id",
            cause="the engine, or a proxy before it, ignores request_id of the body",
            remedy="use a release of the engine that takes it, or set store to false in requests",
        )


def _salts(engine: Engine) -> Iterator[Finding]:
    """APIs that are refused for tenants whose caches are isolated, although the engine serves them."""
    proof = engine.salt_proof
    if proof is None:
        return
    if doubts := proof.doubts:
        yield _warning(
            "isolation.unproven",
            subject=engine.engine_id,
            seen="prompts cannot be isolated: "
            + "; ".join(f"{path} {told}" for path, (_, told) in doubts.items()),
            cause="its release, its frontend, or a proxy in front of it does not keep prompts with different "
            "salts apart, or does not show it",
            remedy="while keys.isolate is on, these APIs are refused at this engine; use a release that "
            "reads cache_salt there (docs/tenants.md, cache isolation)",
        )


def _probe(engine: Engine) -> Iterator[Finding]:
    """Everything that the probe of an engine has not proven; a try without an answer is no finding."""
    doubts = {} if engine.probe is None else engine.probe.doubts()
    shown = {what: one for what, one in doubts.items() if one.verdict != "later"}
    if shown:
        counts = f" Its predicted hits count {engine.hit_share:.0%}." if engine.hit_share < 1.0 else ""
        yield _warning(
            "engine.unproven",
            subject=engine.engine_id,
            seen="not proven by the probe: " + "; ".join(f"{what} {one.why}" for what, one in shown.items()),
            cause="its release, its options, or a proxy in front of it differ from what predictions rest on."
            + counts,
            remedy="kvatlas doctor --probe --engine URL says more; what is mended is seen at a later probe",
        )


def of_source(engine: Engine, pulls: Pulls) -> Iterator[Finding]:
    """Yield that engines pull nothing from this one, although it should work."""
    found = pulls.resting_source(engine.engine)
    if found is not None:
        guess = "" if found.given else ", a guess"
        yield _warning(
            "engine.pull_source",
            subject=engine.engine_id,
            seen=f"the latest {found.bad_pulls} pulls from it at {found.address}{guess} brought nothing",
            cause="no p2p tier listens at this address, or it drops blocks before they are read",
            remedy="give kv_source of this engine (kvatlas.io/kv-source-port of its pod), the host and port "
            "of its p2p tier, and check both engines' logs",
        )


def _feed(engine: Engine) -> Iterator[Finding]:
    state, feed = engine.feed_state, engine.feed
    if state in _FEED_REMEDIES:
        reason = "" if feed is None or not feed.reason else f" ({feed.reason})"
        yield _warning(
            "feed.state",
            subject=engine.engine_id,
            seen=f"{_FEED_SEEN[FeedState(state)]}: the feed is {state}{reason}",
            cause="what the engine holds is not fully known to the router",
            remedy=_FEED_REMEDIES[FeedState(state)],
        )
    if engine.unusable_events:
        yield _unusable(engine)
    unused = {} if engine.residency is None else engine.residency.writer.unused
    if unused and not engine.unusable_events:
        said = ", ".join(f"{name} {count}" for name, count in sorted(unused.items()))
        yield _warning(
            "feed.unused",
            subject=engine.engine_id,
            seen=f"events that were seen and not used: {said}",
            cause="kvatlas does not know these media or types: what they tell of is never predicted",
            remedy="nothing, if hits there need no prediction; otherwise upgrade kvatlas, or report it with "
            "what kvatlas record writes",
        )
    if feed is not None and feed.phantom_alarms:
        yield _warning(
            "feed.phantoms",
            subject=engine.engine_id,
            seen=f"{feed.phantom_alarms} phantom alarm(s): the index held more copies than the engine has "
            "blocks",
            cause="removals were lost, or kv_cache_report_mode=full makes the engine report blocks again",
            remedy="let no client set kv_cache_report_mode, or set models.NAME.report_mode_full",
        )


def _unusable(engine: Engine) -> Finding:
    """The engine publishes, but the router can use nothing of it."""
    feed, writer = engine.feed, None if engine.residency is None else engine.residency.writer
    reasons: dict[str, int] = {} if writer is None else dict(writer.rejected)
    reasons |= {} if feed is None else feed.malformed_frames
    said = [f"{reason} {count}" for reason, count in sorted(reasons.items())]
    unknown = {} if writer is None else writer.unknown_types
    said += [f"unknown type {name} {count}" for name, count in sorted(unknown.items())]
    if feed is not None and feed.last_rejection:
        said.append(str(feed.last_rejection))
    return _error(
        "feed.unusable",
        subject=engine.engine_id,
        seen=f"none of the latest {engine.unusable_events} event(s) could be used ({', '.join(said)})",
        cause="the engine or its connector publishes in a form that kvatlas does not know: its cache is "
        "unknown",
        remedy="check that events= is the address of a KV event publisher; upgrade kvatlas, or report it "
        "with what kvatlas record writes",
    )


def _estimate(engine_id: str, kind: EngineKind, shadow: Shadow) -> Finding:
    spec, sizes = shadow.spec, []
    for name, value in (("num_blocks", shadow.num_blocks), ("block_size", spec.block_size)):
        sizes.append(f"{name} {value}{' (assumed)' if name in shadow.assumed else ''}")
    windows = sorted({group.sliding_window for group in spec.groups if group.sliding_window is not None})
    sizes += [f"windows {', '.join(map(str, windows))}"] if windows else []
    return _warning(
        "predictions.estimate",
        subject=engine_id,
        seen=f"estimate: hits are predicted from this router's own requests to it, with {', '.join(sizes)}",
        cause="it publishes no KV events: it was started without --kv-events-config, or the router was given "
        "no address",
        remedy=f"start the engine with {EVENTS_OPTION[kind]}",
    )


def _layout(engine: Engine) -> str:
    """Its groups in words."""
    groups = () if engine.layout is None else engine.layout.groups
    return ", ".join(f"{one.kind} of {one.block_size}" for one in groups) or "unknown"


def _predictions(engine: Engine, now: float) -> Iterator[Finding]:
    receipts = engine.receipts
    if engine.shadow is not None:
        yield _estimate(engine.engine_id, engine.kind, engine.shadow)
    if receipts.tells_no_hits:
        yield _warning(
            "predictions.unreported",
            subject=engine.engine_id,
            seen=f"estimate: the latest {receipts.undetailed} response(s) did not report cached tokens, so "
            "that predictions are neither checked nor corrected",
            cause=f"the engine runs without {REPORT_OPTION[engine.kind]}",
            remedy=f"start the engine with {REPORT_OPTION[engine.kind]}",
        )
    if receipts.drifting:
        cause = "tokenizer or chat template differ from the engine's, or events are lost"
        remedy = "kvatlas doctor --probe compares them (cache.facts, tokens.parity)"
        if engine.shadow is not None:
            cause = "its cache is an estimate: other clients' prompts and generated tokens take a part of it"
            remedy = f"start the engine with {EVENTS_OPTION[engine.kind]}"
        yield _warning(
            "predictions.drift",
            subject=engine.engine_id,
            seen="predictions drift: more than a quarter of the latest ones were wrong",
            cause=cause,
            remedy=remedy,
        )
    if missed := receipts.store_misses:
        yield _warning(
            "predictions.store",
            subject=engine.engine_id,
            seen=f"{missed} of the latest {len(receipts.store_window)} hits from a store were not delivered",
            cause="the store lost blocks that it reported: damaged or removed files, a server that came back "
            "empty, or evictions that are not published",
            remedy="check the store and the connector's log; with a shorter models.NAME.shared_store_ttl_s, "
            "what is not published again is forgotten sooner",
        )
    if evidence := receipts.contradicting:
        shown = "; ".join(
            f"request {one.request_id}: {one.reported_tokens} reported of {one.prompt_tokens}, "
            f"{one.predicted_tokens} by its events"
            for one in evidence
        )
        yield _warning(
            "predictions.contradicted",
            subject=engine.engine_id,
            seen=f"the cached tokens that it reports contradict its own events ({shown})",
            cause="the engine, or a proxy before it, reports wrong usage, its events are wrong, or hits of "
            f"its cache layout ({_layout(engine)}) follow rules that the router does not have; bills by "
            "cached_tokens are not safe",
            remedy="compare with vllm:prefix_cache_hits at the engine; lines of the usage record say "
            "verified: false",
        )
    if receipts.prompt_mismatches:
        yield _error(
            "tokens.length",
            subject=engine.engine_id,
            seen=f"{receipts.prompt_mismatches} prompt(s) had different lengths at the engine and in the "
            "router",
            cause="tokenizer or chat template differ from the engine's",
            remedy="see tokens.parity of kvatlas doctor; give the router the engine's tokenizer and template",
        )
    change = engine.rates.model.change
    if change is not None and now - change.at_s < CHANGE_SHOWN_S:
        late = change.factor > 1
        times = change.factor if late else 1 / change.factor
        yield _info(
            "engine.speed",
            subject=engine.engine_id,
            seen=f"its first tokens come about {times:.1f} times as {'late' if late else 'soon'} as before",
            cause="its speed changed, or something else runs on its machine",
            remedy="nothing: predictions follow it; if it is slower, see what else runs there",
        )
    first = engine.first_tokens
    if first.compared >= ACCURATE_OF_MIN and first.accurate < ACCURATE_SHARE_MIN * first.compared:
        yield _warning(
            "predictions.first_token",
            subject=engine.engine_id,
            seen=f"{first.compared - first.accurate} of {first.compared} times to first token differ from "
            "the predicted ones",
            cause="others send it requests, its prompts wait for KV cache pages, or its speed changed",
            remedy="compare the parts in /kvatlas/receipts; kv_usage near 1 means too few pages",
        )
