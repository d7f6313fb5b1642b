"""Checks of prompts: equal tokens in router and engine, usage reports, predicted against real hits.

Hits are those of a probe, and of a small generated load (``kvatlas certify``). Each request of that load has
four sources of evidence: the hit predicted from events, the hit the engine reported (``cached_tokens``), the
first token from which it stored computed blocks, and its counters on ``/metrics``. A disagreement shows which
one is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.tools.doctor.findings import (
    CheckResult,
    EngineEvidence,
    LoadEvidence,
    LoadRequest,
    ProbeRequest,
    PromptParity,
    check,
    error,
    info,
    ok,
    warning,
)
from kvatlas.router.tools.doctor.listener import ReplayState


@check("tokens.parity")
def parity(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare tokenizer and chat template with the engine's ``/tokenize``."""
    if not engine.server.models:
        return
    if not engine.tokenizer:
        yield _no_tokenizer(engine)
        return
    for result in engine.parity:
        if result.differs_at is not None:
            yield _difference(result, engine.time_zone)
    alike = [r.name for r in engine.parity if r.compared and r.differs_at is None]
    if alike:
        yield ok(f"the same tokens here ({engine.tokenizer}) and at the engine: {', '.join(alike)}")
    for result in engine.parity:
        yield from _not_compared(result)
    if engine.time_zone is not None and engine.model_config.time_zone is None:
        yield info(
            f"chats of this model contain the date, here in the router's time zone, {engine.time_zone}",
            "the engine writes its own local date: in another time zone prompts differ for hours each day",
            "set models.NAME.time_zone to the engines', or set the same TZ for router and engines",
        )


def _no_tokenizer(engine: EngineEvidence) -> CheckResult:
    """Report a missing tokenizer of the doctor, and whether the queried router has one."""
    compare = "give the doctor --tokenizer (or the router's --config): the directory the engine loaded"
    known = engine.router_tokenizers
    library = None if known is None else known.get(engine.base_model or ANY_MODEL, known.get(ANY_MODEL))
    problem = engine.tokenizer_problem
    if problem is not None and library is None:
        return warning(
            f"no tokenizer: {problem}",
            f"{problem.reason}: the tokens of each prompt are requested from an engine, one round trip each",
            problem.remedy,
        )
    if known is None:
        return info(
            "no tokenizer given: nothing compared",
            "a router without one requests the tokens of each prompt from an engine: one round trip each",
            f"{compare} its tokenizer from",
        )
    if library is not None:
        return info(
            f"nothing compared: the router tokenizes with {library}, the doctor was given no tokenizer",
            "a running router does not report which directory it reads",
            f"{compare} its tokenizer from",
        )
    return info(
        "the router has no tokenizer for this model",
        "it requests the tokens of each prompt from an engine, which costs one round trip each",
        "start the router with --tokenizer (or models.NAME.tokenizer)",
    )


@check("tokens.family")
def family(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that chats of this model can be rendered locally."""
    if engine.unreadable is not None:
        yield warning(
            "this model's chats cannot be rendered here: an engine or a render server has to render each one",
            "vLLM renders them with code, not with a template, and the required package is not installed "
            "here",
            engine.unreadable,
        )


@check("tokens.speed")
def speed(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Report the library that tokenizes."""
    name = engine.tokenized_by
    if name is None:
        return
    if name.startswith(("fastokens", "mistral-common")):
        yield ok(f"tokenized by {name}")
    else:
        yield info(
            f"tokenized by {name}",
            "new text takes ten to twenty times the CPU time of fastokens",
            "install fastokens where it is missing; tokenizers that it does not support stay as they are",
        )


def _difference(result: PromptParity, time_zone: str | None) -> CheckResult:
    seen = (
        f"{result.name}: {result.local_tokens} tokens here, {result.engine_tokens} at the engine, "
        f"the first difference at token {result.differs_at}"
    )
    if "chat" in result.name:
        cause = (
            "a different chat template (--chat-template, --tokenizer-mode, a newer model revision), a "
            "different "
            "version of the package that renders, or a different tokenizer"
        )
        if time_zone is not None:
            cause += f"; or a different date: this model's chats contain it, here in time zone {time_zone}"
        remedy = (
            "give the engine's tokenizer directory and models.NAME.chat_template as it was started, and "
            "install its version of the package"
        )
        if time_zone is not None:
            remedy += "; set models.NAME.time_zone to the engine's"
    else:
        cause = "a different tokenizer from the engine's"
        remedy = "give the directory from which the engine loaded its tokenizer, in the same revision"
    return error(seen, cause, remedy)


def _not_compared(result: PromptParity) -> Iterator[CheckResult]:
    if result.local_problem and result.engine_problem:
        yield info(f"{result.name}: not compared", f"neither here ({result.local_problem}) nor at the engine")
    elif result.engine_problem:
        yield info(
            f"{result.name}: not compared; /tokenize: {result.engine_problem}",
            "the engine's endpoint is off, or it refuses this prompt",
            "--probe compares token counts instead",
        )
    elif result.local_problem:
        yield warning(
            f"{result.name}: cannot be tokenized here ({result.local_problem})",
            "this tokenizer or chat template is not of a kind that can be reproduced exactly",
            "nothing: such prompts are tokenized by an engine, which costs one round trip each",
        )


@check("tokens.usage")
def cached_report(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that the engine runs with ``--enable-prompt-tokens-details``."""
    if engine.probe is None:
        return
    answered = [request for request in engine.probe.requests if not request.status]
    if answered and all(request.cached is None for request in answered):
        yield warning(
            "responses do not report how many tokens were cached",
            "the engine runs without --enable-prompt-tokens-details",
            "start it with that flag: without it predictions cannot be verified",
        )
    elif answered:
        yield ok("responses report how many tokens were cached")


@check("probe.exact")
def exact(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare predicted with reported hits."""
    probe = engine.probe
    if probe is None:
        return
    if probe.problem:
        yield error(
            f"the probe failed: {probe.problem}", "see the other findings", "fix those first, then repeat"
        )
        return
    for request in probe.requests:
        if request.status:
            yield error(
                f"POST /v1/completions: {request.status}",
                "the engine does not serve completions: overloaded, broken, or a model for other tasks",
                "look at the engine's log",
            )
            return
    # A load shows the same with more evidence.
    if not probe.requests or engine.load is not None:
        return
    yield from _lengths(probe.requests)
    yield from _hit(engine, probe.requests[-1])


@check("probe.salt")
def salts(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that a ``cache_salt`` keeps prompts apart, as ``keys.isolate`` needs."""
    for path, why in {} if engine.probe is None else engine.probe.unsalted.items():
        yield warning(
            f"POST {path} {why}",
            "the engine's release, its frontend, or a proxy in front of it does not read cache_salt there",
            "with keys.isolate this API is refused at this engine; use a release that reads it",
        )
    salted = None if engine.probe is None else engine.probe.salted
    if salted is None or (not salted.status and salted.cached is None):
        return
    if salted.status:
        yield warning(
            f"POST /v1/completions with cache_salt: {salted.status}",
            "the engine refuses it",
            "do not set keys.isolate in front of this engine",
        )
    elif salted.cached:
        yield error(
            f"a prompt with a cache_salt of its own took {salted.cached} tokens from the cache of another",
            "the engine, or a proxy in front of it, ignores cache_salt",
            "do not set keys.isolate in front of this engine: tenants would share its cache",
        )
    else:
        yield ok("a prompt with another cache_salt took nothing from the cache")


def _lengths(requests: list[ProbeRequest]) -> Iterator[CheckResult]:
    for request in requests:
        ours, theirs = request.prompt_tokens, request.reported_prompt_tokens
        if request.lengths_differ:
            yield error(
                f"the probe has {ours} tokens here, {theirs} at the engine",
                "tokenizer and engine differ",
                "see tokens.parity",
            )
            return


def _hit(engine: EngineEvidence, last: ProbeRequest) -> Iterator[CheckResult]:
    if last.predicted is None:
        if engine.engine.events is not None:
            yield warning(
                f"no hit could be predicted: {last.why_unknown}",
                "see cache.scheme, cache.facts and events.flow",
                "fix those first, then repeat",
            )
        return
    if last.cached is None:
        return
    seen = (
        f"predicted {last.predicted}, engine reported {last.cached} of {last.reported_prompt_tokens} tokens"
    )
    stated = engine.server.server_info
    if last.predicted != last.cached and stated is not None and stated.has_unseen_caches:
        yield warning(
            f"{seen} (partial)",
            "the engine has caches of which its events say nothing (cache.sglang)",
            "nothing: such predictions are not exact",
        )
    elif last.predicted != last.cached:
        yield error(
            f"{seen} ({last.mode})",
            "a setting of the model is missing or wrong, other requests evicted the probe's blocks, or this "
            "engine behaves in a way unknown to kvatlas",
            "repeat on an idle engine; check cache.facts; report it if it persists",
        )
    elif not last.cached:
        yield warning(
            f"{seen}: correct, but nothing was reused",
            "prefix caching is off, or blocks are larger than the probe",
            "see cache.prefix_caching and cache.groups",
        )
    else:
        yield ok(f"{seen}: exact")


Outcome = Literal["exact", "phantom", "over", "under", "unpredicted", "unknown"]
_REPORT = "report it to the maintainers of the engine, with the output of --json"


def actual(one: LoadRequest) -> int | None:
    """Return the real hit: from the stored blocks if they show it, otherwise as reported."""
    cached, stored = one.request.cached, one.stored
    if stored is not None and stored.computed_from is not None:
        return cached if cached is not None and stored.begins(cached) else stored.computed_from
    return cached


def outcome(one: LoadRequest, alignment: int) -> Outcome:
    """Compare the prediction with the real hit.

    ``phantom``: blocks held according to events were computed again, and more of them than the last unit,
    which a drafter's lookup drops.
    """
    predicted, real = one.request.predicted, actual(one)
    if predicted is None:
        return "unpredicted"
    if real is None:
        return "unknown"
    if predicted == real:
        return "exact"
    if predicted < real:
        return "under"
    return "phantom" if _witnessed(one) and predicted - real > alignment else "over"


def _compared(engine: EngineEvidence) -> list[tuple[LoadRequest, Outcome]]:
    load, residency = engine.load, engine.residency
    if load is None:
        return []
    layout = None if residency is None else residency.layout
    alignment = 1 if layout is None else layout.alignment
    answered = [one for one in load.requests if not one.request.status]
    compared = [(one, outcome(one, alignment)) for one in answered]
    if any(_untrue(one) for one in answered):  # without stored blocks an untrue report proves nothing
        compared = [(one, how if _witnessed(one) else "unknown") for one, how in compared]
    if any(
        how == "phantom" for _, how in compared
    ):  # a single unit is then a phantom too, not a drafter's dropped block
        compared = [(one, "phantom" if how == "over" and _witnessed(one) else how) for one, how in compared]
    return compared


def _witnessed(one: LoadRequest) -> bool:
    return one.stored is not None and one.stored.computed_from is not None


def _untrue(one: LoadRequest) -> bool:
    cached = one.request.cached
    return cached is not None and one.stored is not None and not one.stored.begins(cached)


def _shown(one: LoadRequest) -> str:
    request, stored = one.request, one.stored
    text = f"{one.kind}: predicted {request.predicted}, reported {request.cached}"
    if stored is not None and stored.computed_from is not None:
        text += f", stored from token {stored.computed_from} on"
    return f"{text}, of {request.reported_prompt_tokens or request.prompt_tokens} tokens"


@check("load.answers")
def answers(engine: EngineEvidence) -> Iterator[CheckResult]:
    load = engine.load
    if load is None:
        return
    failed = [one for one in load.requests if one.request.status]
    if load.problem:
        yield error(f"the load was aborted: {load.problem}", "a response of an unexpected shape", _REPORT)
    for one in failed[:1]:
        yield error(
            f"{one.kind}: {one.request.status}",
            "the engine does not serve this kind of request, or it terminated",
            "look at the engine's log",
        )
    if load.requests and not failed and not load.problem:
        late = "; the time limit ended the load early" if load.out_of_time else ""
        yield ok(f"{load.sent} requests answered{late}")


@check("load.idle")
def idle(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that the engine was idle: other requests evict blocks and are counted too."""
    load = engine.load
    if load is None or not load.after.requests:
        return
    if foreign := _foreign(load):
        yield warning(
            f"{foreign} requests of other clients finished at the engine during the load",
            "another client uses the engine",
            "take it out of service while it is certified",
        )


@check("load.replay")
def replay(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that the replay socket returns what was published."""
    again = None if engine.load is None else engine.load.replay
    if again is None:
        return
    if again.state is not ReplayState.COMPLETE:
        yield error(
            f"the replay socket did not return everything ({again.state})",
            "the engine answers the first request for history only, or its send queue overflowed",
            "look at the engine's log; a large buffer_steps needs a large hwm",
        )
    elif again.missing or again.different:
        yield error(
            f"of {again.received} batches received live {again.missing} are missing in replay, "
            f"{again.different} differ",
            "the buffer drops or rewrites batches",
            _REPORT,
        )
    elif again.received:
        yield ok(f"replay gives all {again.received} batches that were received live")


@check("load.tokens")
def tokens(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare the tokens of prompts with those of the events and with the reported lengths."""
    compared = _compared(engine)
    for one, _ in compared:
        ours, theirs = one.request.prompt_tokens, one.request.reported_prompt_tokens
        differs = None if one.stored is None else one.stored.token_differs_at
        if differs is not None or one.request.lengths_differ:
            where = f"its events differ from token {differs} on" if differs is not None else "in length"
            yield error(
                f"{one.kind}: {ours} tokens here, {theirs} at the engine; {where}",
                "a different tokenizer or chat template, or events with other tokens than were computed",
                "see tokens.parity; give the tokenizer directory that the engine loaded",
            )
            return
    matched = sum(_witnessed(one) for one, _ in compared)
    if matched:
        yield ok(f"tokens in the events of {matched} prompts equal those computed here")


@check("load.hashes")
def hashes(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare published hashes with hashes recomputed from the prompts."""
    compared = _compared(engine)
    if not compared or not engine.event_counts.stored:
        return
    residency = engine.residency
    if residency is None or residency.scheme is None:
        yield error(
            "no hash of a block could be recomputed from its tokens",
            "the hash function is not vLLM's, its seed is random, or the hashes are wrong",
            "set PYTHONHASHSEED for the engine (and models.NAME.hash_seeds); see cache.scheme",
        )
        return
    count = 0
    for one, _ in compared:
        if one.stored is None:
            continue
        count += one.stored.hashes
        if one.stored.hash_differs_at is not None:
            yield error(
                f"{one.kind}: the hash of the block that ends at token {one.stored.hash_differs_at} does not "
                "match its tokens",
                "the engine hashes something that its events do not carry, or publishes wrong hashes",
                _REPORT,
            )
            return
    if count:
        yield ok(f"{count} published hashes equal those of the prompts' blocks")


@check("load.phantoms")
def phantoms(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that every block held according to events is held by the engine."""
    compared = _compared(engine)
    found = [one for one, how in compared if how == "phantom"]
    if found:
        yield error(
            f"{len(found)} of {len(compared)} prompts: blocks held according to events were computed again; "
            f"{_shown(found[0])}",
            "a removal was not published, or a store of a block that the engine does not keep",
            _REPORT,
        )
        return
    held = [one for one, how in compared if how == "exact" and one.request.predicted]
    if held:
        yield ok(f"all {len(held)} prompts with blocks held according to events were hits")


@check("load.hits")
def hits(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare predicted with real hits; phantoms have a separate check."""
    compared = _compared(engine)
    if not compared:
        return
    wrong = [(one, how) for one, how in compared if how in {"over", "under"}]
    unpredicted = [one for one, how in compared if how == "unpredicted"]
    exact = [one for one, how in compared if how == "exact"]
    if wrong:
        one, how = wrong[0]
        yield error(
            f"{len(wrong)} of {len(compared)} predictions wrong; {how}, {_shown(one)}",
            "the engine holds blocks that were not published"
            if how == "under"
            else "a fact that no event carries is missing: the drafter's dropped block or the Mamba mode",
            _REPORT if how == "under" else "see cache.facts; set models.NAME.eagle_groups",
        )
    if unpredicted:
        yield error(
            f"no hit could be predicted of {len(unpredicted)} of {len(compared)} requests: "
            f"{unpredicted[0].request.why_unknown}",
            "no events, or a fact that no event carries is missing",
            "see http.event_sources, events.flow and cache.facts",
        )
    reused = sum(bool(actual(one)) for one in exact)
    if exact and not reused:
        yield error(
            f"{len(exact)} predictions exact, but nothing was reused",
            "prefix caching is off, or blocks are larger than the prompts",
            "see cache.prefix_caching and cache.groups",
        )
    elif exact and not wrong and not unpredicted:
        yield ok(f"all {len(exact)} predictions exact, {reused} of them hits")


@check("load.usage")
def usage(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare ``cached_tokens`` with the stored blocks and the engine's own counters."""
    load = engine.load
    answered = [one for one, _ in _compared(engine)]
    reporting = [one for one in answered if one.request.cached is not None]
    if load is None or not reporting:
        return
    false = [one for one in reporting if _untrue(one)]
    if false:
        yield error(
            f"{len(false)} of {len(reporting)} responses with wrong cached_tokens; {_shown(false[0])}",
            "the report does not belong to this request's lookup",
            _REPORT,
        )
        return
    witnessed = sum(_witnessed(one) for one in reporting)
    counted = _counted(load)
    total = load.uncompared_cached_tokens + sum(one.request.cached or 0 for one in reporting)
    if counted is not None and len(reporting) == len(answered) and not _foreign(load) and counted != total:
        yield error(
            f"responses reported {total} cached tokens, the engine's counters {counted}",
            "the report does not belong to this request's lookup, or there were other requests",
            _REPORT,
        )
    elif witnessed:
        yield ok(
            f"{witnessed} reports of cached tokens agree with the blocks stored, {total} tokens in total"
        )
    else:
        yield info(
            f"{len(reporting)} reports of cached tokens, none of them compared with stored blocks",
            "no full-attention group, or no events",
        )


def _foreign(load: LoadEvidence) -> int:
    """Return the number of requests of other clients, by the engine's counter."""
    return max(0, load.after.requests - load.before.requests - load.sent)


def _counted(load: LoadEvidence) -> int | None:
    before, after = load.before.hit_tokens, load.after.hit_tokens
    return None if before is None or after is None else after - before
