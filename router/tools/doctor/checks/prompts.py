"""Checks of prompts: equal tokens in router and engine, usage reports, predicted against real hits."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.router.fleet.engine_probe import ProbeRequest
from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.tools.doctor.evidence import EngineEvidence, PromptParity
from kvatlas.router.tools.doctor.findings import CheckResult, check, error, info, ok, warning


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
    for path, api in {} if engine.probe is None else engine.probe.found.apis.items():
        if api.reports.verdict == "unshown":
            yield warning(
                f"POST {path}: responses do not report how many tokens were cached",
                "the engine runs without --enable-prompt-tokens-details",
                "start it with that flag: without it predictions cannot be verified",
            )
        elif api.reports.verdict == "proven":
            yield ok(f"POST {path}: responses report how many tokens were cached")


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
    for request in probe.completions:
        if request.failed is not None or request.report.prompt_tokens is None:
            why = "a response that is not a completion" if request.failed is None else request.failed.why
            yield error(
                f"POST /v1/completions: {why}",
                "the engine does not serve completions: overloaded, broken, or a model for other tasks",
                "look at the engine's log",
            )
            return
    yield from _lengths(probe.completions)
    if probe.completions:
        yield from _hit(engine, probe.completions[-1])
    for path, api in probe.found.apis.items():
        if path == COMPLETION or api.hits.verdict in {"absent", "later"}:
            continue
        report = ok if api.hits.verdict == "proven" else warning
        yield report(
            f"POST {path}: hits {api.hits.why or 'are as predicted'}",
            "see the other findings of this engine" if api.hits.why else "",
            "fix those first, then repeat" if api.hits.why else "",
        )


@check("probe.salt")
def salts(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that a ``cache_salt`` keeps prompts apart, as ``keys.isolate`` needs."""
    if engine.probe is None:
        return
    for path, (verdict, why) in engine.probe.salts.doubts.items():
        report = error if verdict == "refuted" else warning
        yield report(
            f"POST {path} {why}",
            "the engine's release, its frontend, or a proxy in front of it does not read cache_salt there",
            "with keys.isolate this API is refused at this engine; use a release that reads it",
        )
    for path in sorted(engine.probe.salts.proven):
        yield ok(f"POST {path}: a prompt with another cache_salt took nothing from the cache")


def _lengths(requests: list[ProbeRequest]) -> Iterator[CheckResult]:
    for request in requests:
        ours, theirs = request.predicted.prompt_tokens, request.report.prompt_tokens
        if request.lengths_differ:
            yield error(
                f"the probe has {ours} tokens here, {theirs} at the engine",
                "tokenizer and engine differ",
                "see tokens.parity",
            )
            return


def _hit(engine: EngineEvidence, last: ProbeRequest) -> Iterator[CheckResult]:
    predicted, cached = last.predicted, last.report.cached
    if predicted.hit is None:
        if engine.engine.events is not None:
            yield warning(
                f"no hit could be predicted: {predicted.why_unknown}",
                "see cache.scheme, cache.facts and events.flow",
                "fix those first, then repeat",
            )
        return
    if cached is None:
        return
    seen = f"predicted {predicted.hit}, engine reported {cached} of {last.report.prompt_tokens} tokens"
    stated = engine.server.server_info
    if predicted.hit != cached and stated is not None and stated.has_unseen_caches:
        yield warning(
            f"{seen} (partial)",
            "the engine has caches of which its events say nothing (cache.sglang)",
            "nothing: such predictions are not exact",
        )
    elif predicted.hit != cached:
        yield error(
            f"{seen} ({predicted.mode})",
            "a setting of the model is missing or wrong, other requests evicted the probe's blocks, or this "
            "engine behaves in a way unknown to kvatlas",
            "repeat on an idle engine; check cache.facts; report it if it persists",
        )
    elif not cached:
        yield warning(
            f"{seen}: correct, but nothing was reused",
            "prefix caching is off, or blocks are larger than the probe",
            "see cache.prefix_caching and cache.groups",
        )
    else:
        yield ok(f"{seen}: exact")
