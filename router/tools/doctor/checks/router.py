"""Checks of a running router: its view of the fleet compared with the doctor's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.observe.findings import BAD, SOURCE_REMEDIES, Finding
from kvatlas.router.tools.doctor.engine_gauges import series
from kvatlas.router.tools.doctor.evidence import EngineEvidence, Evidence, RouterEvidence
from kvatlas.router.tools.doctor.findings import CheckResult, check, error, info, ok, warning
from kvatlas.router.tools.ops_client import OPS_PORT_HINT


@check("router.reach")
def reach(seen: Evidence) -> Iterator[CheckResult]:
    """Check that the router answers and is ready."""
    router = seen.router
    if router is None:
        return
    if router.engines is None:
        yield error(
            f"GET /kvatlas/engines: {router.engines_answer.description}",
            "the router is down, or the URL is not that of a kvatlas router's ops port",
            OPS_PORT_HINT,
            subject=router.url,
        )
        return
    ready = router.ready.json(dict[str, Any]) or {}
    if router.ready.ok:
        yield ok(f"kvatlas {router.version_text}, ready, {len(router.engines)} engine(s)", subject=router.url)
    else:
        reason = str(ready.get("reason", "")) or router.ready.description
        yield error(
            f"not ready: {reason}", "problems of the engines below", "fix those first", subject=router.url
        )


@check("router.sources")
def sources(seen: Evidence) -> Iterator[CheckResult]:
    """Report each source of engines: synced, working, number of engines."""
    router = seen.router
    if router is None or router.sources is None:
        return
    for name, source in router.sources.items():
        count, problem = source.get("engines", 0), str(source.get("last_error", ""))
        if not source.get("synced"):
            yield error(
                f"engines from {name}: not synced yet{f': {problem}' if problem else ''}",
                "the router cannot reach or read this source",
                SOURCE_REMEDIES.get(name, "see the router's log"),
                subject=router.url,
            )
        elif source.get("failing"):
            yield warning(
                f"engines from {name}: {count}, as last known; now failing: {problem}",
                "the source worked before and does not now; engines added or removed since are not known",
                SOURCE_REMEDIES.get(name, "see the router's log"),
                subject=router.url,
            )
        elif source.get("refused"):
            yield info(
                f"engines from {name}: {count}; {source['refused']} entries were invalid so far: {problem}",
                "a wrong annotation, address or object",
                "correct it where it is written",
                subject=router.url,
            )
        elif count or name != "static":
            yield ok(f"engines from {name}: {count}", subject=router.url)


@check("router.engines")
def engines(seen: Evidence) -> Iterator[CheckResult]:
    """Report each engine: known, up, feed state, mode, layout."""
    router = seen.router
    if router is None or router.engines is None:
        return
    for engine in seen.engines:
        theirs = router.engines.get(engine.engine_id)
        if theirs is None:
            yield warning(
                f"the router at {router.url} does not know this engine",
                "another URL of the same engine (host name or address), or it is not configured there",
                "give the URL exactly as the router has it, or add the engine to the router",
                subject=engine.engine_id,
            )
        else:
            yield from _one(engine, theirs, router.problems)
    for engine_id in set(router.engines) - {engine.engine_id for engine in seen.engines}:
        yield info("known to the router, not examined", remedy="add --engine for it", subject=engine_id)


def _one(engine: EngineEvidence, theirs: dict[str, Any], problems: list[Finding]) -> Iterator[CheckResult]:
    subject = engine.engine_id
    if not theirs.get("up"):
        return
    state = str(theirs.get("feed_state"))
    if state == "none" and engine.engine.events is not None:
        yield warning(
            "the router has no feed for this engine, although it publishes events",
            "the router was given no event address and could not obtain one",
            "give the router events= and replay= for this engine",
            subject=subject,
        )
    elif not any(one.subject == subject and one.severity in BAD for one in problems):
        yield ok(f"router: up, feed {state}, hashes {theirs.get('mode')}", subject=subject)
    yield from _same_view(engine, theirs)


@check("router.problems")
def problems(seen: Evidence) -> Iterator[CheckResult]:
    """Repeat the router's own list of what is wrong now, each under its own id."""
    router = seen.router
    if router is None:
        return
    for one in router.problems:
        yield CheckResult(
            one.severity,
            one.seen,
            one.cause or "the router does not say",
            one.remedy or "see the router's log",
            subject=one.subject if one.subject in (router.engines or {}) else router.url,
            check=one.check,
            since_s=one.since_s,
        )


def _same_view(engine: EngineEvidence, theirs: dict[str, Any]) -> Iterator[CheckResult]:
    """Compare hash scheme and groups found by the router with the doctor's."""
    residency = engine.residency
    if residency is None or residency.layout is None:
        return
    scheme = None if residency.scheme is None else msgspec.to_builtins(residency.scheme)
    if residency.detection is Detection.NATIVE and theirs.get("mode") == "learned":
        yield warning(
            "the router learns hashes; the doctor found the scheme",
            "the router has other hash_seeds, or received other events",
            "give the router the same configuration; restart it if the engine's seed changed",
            subject=engine.engine_id,
        )
    elif (
        residency.detection is Detection.NATIVE
        and theirs.get("mode") in {"native", "partial"}
        and theirs["scheme"] != scheme
    ):
        yield error(
            f"the router uses another hash scheme: {theirs['scheme']}",
            "the engine restarted with another seed and the router has not detected it",
            "restart the router, and report it",
            subject=engine.engine_id,
        )
    layout = theirs.get("layout")
    groups = layout.get("groups") if isinstance(layout, dict) else None
    ours = msgspec.to_builtins(residency.layout.groups)
    if groups is not None and groups != list(ours):
        yield warning(
            f"the router sees {len(groups)} group(s) in a layout different from the doctor's {len(ours)}",
            "one of them has not seen all groups yet, or they have different configurations",
            "repeat with --probe; give both the same --config",
            subject=engine.engine_id,
        )


@check("router.predictions")
def predictions(seen: Evidence) -> Iterator[CheckResult]:
    """Check drift, receipts, and prompts whose length differs at the engine."""
    router = seen.router
    if router is None or router.engines is None:
        return
    for engine_id, theirs in router.engines.items():
        outcomes = {k: v for k, v in _outcomes(theirs).items() if v}
        compared = sum(outcomes.get(name, 0) for name in ("exact", "over", "under"))
        if compared and not theirs.get("drifting"):
            share = outcomes.get("exact", 0) / compared
            partial = " (mode partial)" if theirs.get("mode") == "partial" else ""
            yield ok(f"{share:.0%} of {compared} predictions were exact{partial}", subject=engine_id)
    yield from _metrics(router)


def _outcomes(theirs: dict[str, Any]) -> dict[str, int]:
    receipts = theirs.get("receipts")
    return {k: v for k, v in receipts.items() if isinstance(v, int)} if isinstance(receipts, dict) else {}


def _metrics(router: RouterEvidence) -> Iterator[CheckResult]:
    """Report problems that only the router's metrics page shows."""
    page = router.metrics_answer.body.decode("utf-8", "replace") if router.metrics_answer.ok else ""
    for name, _, value in series(page):
        if not value:
            continue
        if name == "kvatlas_prompts_template_mismatches_total":
            yield info(
                "a precompiled chat template differed from jinja2 and is not used for such chats",
                "the template uses a construct that the precompiled form renders differently",
                "nothing: jinja2 renders these chats, which is slower",
                subject=router.url,
            )
        elif name == "kvatlas_index_unknown_removals_total":
            yield info(
                f"{value:.0f} removals of blocks unknown to the router",
                "history from before the router's start, or copies counted differently",
                "if it rises while feeds are ready, counts differ: report it",
                subject=router.url,
            )


# Smaller shares of all prompt tokens need no action.
_ELSEWHERE_SHARE, _EVICTED_SHARE = 0.05, 0.1
_ELSEWHERE = {
    "load": "the queue of that engine was longer",
    "pages": "prompts wait for KV cache pages there",
    "choice": "other costs were higher",
    "slo": "it was predicted to miss the request's service level",
}


@check("router.cache")
def cache_funnel(seen: Evidence) -> Iterator[CheckResult]:
    """Report how much of the prompts was held, where, and why the rest was not reused."""
    router = seen.router
    if router is None or not router.metrics_answer.ok:
        return
    stages: dict[str, float] = {}
    missed: dict[str, float] = {}
    seconds = 0.0
    for name, labels, value in series(router.metrics_answer.body.decode("utf-8", "replace")):
        if name == "kvatlas_cache_tokens_total":
            stage = labels.get("stage", "")
            stages[stage] = stages.get(stage, 0.0) + value
        elif name == "kvatlas_cache_missed_tokens_total":
            reason = labels.get("reason", "")
            missed[reason] = missed.get(reason, 0.0) + value
        elif name == "kvatlas_cache_elsewhere_seconds_total":
            seconds += value
    prompt = stages.get("prompt", 0.0)
    if not prompt:
        return
    delivered, elsewhere = stages.get("delivered", 0.0), sum(missed.get(reason, 0.0) for reason in _ELSEWHERE)
    yield ok(
        f"{delivered / prompt:.0%} of {prompt:,.0f} prompt tokens came from caches, "
        f"{stages.get('held', 0.0) / prompt:.0%} were held by an engine",
        subject=router.url,
    )
    if elsewhere >= _ELSEWHERE_SHARE * prompt:
        shares = {text: missed.get(reason, 0.0) / elsewhere for reason, text in _ELSEWHERE.items()}
        yield info(
            f"{elsewhere / prompt:.0%} of prompt tokens were held by another engine than the selected one",
            ", ".join(f"{text} ({share:.0%})" for text, share in shares.items() if share),
            f"a store that engines share, or a pull from that engine, would save {seconds:,.0f} s of prefill",
            subject=router.url,
        )
    for reason, seen_text, cause, remedy in _MISSED:
        tokens = missed.get(reason, 0.0)
        if tokens >= _EVICTED_SHARE * prompt:
            yield info(
                f"{tokens / prompt:.0%} of prompt tokens {seen_text}", cause, remedy, subject=router.url
            )


# Reason, and the observation, cause and remedy reported for it.
_MISSED = (
    (
        "evicted",
        "had been seen before, but no engine holds them any more",
        "engines evicted them, or keep no boundary of them (sliding windows, Mamba states)",
        "offload to host memory or a store (docs/connectors.md), or add KV cache",
    ),
    (
        "lost",
        "were predicted on the selected engine but not reused",
        "the engine evicted them before it started the prompt",
        "kv_usage near 1 means too few pages; otherwise docs/troubleshooting.md, wrong predictions",
    ),
    (
        "template",
        "were not reused by engines that count the prompt's tokens differently",
        "tokenizer or chat template differ from the engine's",
        "see tokens.parity; give the router the engine's tokenizer and template",
    ),
    (
        "salted",
        "are new under their cache salt",
        "prompts with another salt share nothing, whatever their text",
        "give clients that may share prefixes the same cache_salt",
    ),
    (
        "isolated",
        "had been sent by another isolation group only",
        "keys.isolate keeps the caches of tenants or groups apart",
        "give tenants that trust each other one cache_group (keys.isolate = group)",
    ),
)

# Smaller shares of an API's requests that the router cannot tokenize need no action.
_SELDOM_SHARE = 0.05
_RENDER = "give a render server (--renderer: vllm launch render) beside the router"
_READING_REMEDIES = {
    "no_tokenizer": "tokens.parity and the router's /ready give the reason why its tokenizer is not used",
    "no_template": "give the model's chat template (models.NAME.chat_template)",
    "model_unknown": "name the model in [models], or give a tokenizer for all",
    "lora_path_unknown": "name the adapter's path (models.NAME.lora_paths)",
    "renderer": f"tokens.family names what the model's family needs here; otherwise {_RENDER}",
    "template_rejected": "tokens.parity shows whether the chat template is the engine's",
    "tokenizer_class": f"give the model tokenizer_class PreTrainedTokenizerFast, or {_RENDER}",
    "request_template": f"let clients send no template of their own, or {_RENDER}",
    "multimodal": f"{_RENDER}: one request for each set of images",
    "too_large": "none is needed: prompts over 8 MiB are placed by their text",
    "busy": "raise prompts.worker_threads",
}
_RENDERERS = "kvatlas_prompts_renderer_"
_RENDERERS_REMEDY = (
    "start them, or correct prompts.renderers: each must answer GET /health and serve the model"
)
_OTHERWISE = f"{_RENDER}; docs/tokenizers.md lists what the router can tokenize"


@check("router.prompts")
def prompts(seen: Evidence) -> Iterator[CheckResult]:
    """Report the share of each API's requests placed by exact tokens, and how to raise it."""
    router = seen.router
    if router is None or not router.metrics_answer.ok:
        return
    reads: dict[str, dict[str, float]] = {}
    reasons: dict[str, float] = {}
    asked: dict[str, float] = {}
    for name, labels, value in series(router.metrics_answer.body.decode("utf-8", "replace")):
        if name == "kvatlas_prompts_reads_total" and value:
            reads.setdefault(labels["api"], {})[labels["how"]] = value
        elif name == "kvatlas_prompts_not_local_total" and value:
            reasons[labels["reason"]] = value
        elif name.startswith(_RENDERERS):
            asked[name.removeprefix(_RENDERERS)] = value
    in_vain = asked.get("failures_total", 0) + asked.get("skipped_total", 0)
    failing = in_vain > asked.get("calls_total", 0) / 2
    if failing:
        yield warning(
            f"render servers returned no usable result for {in_vain:.0f} prompt(s)",
            "a server of --renderer is down, too slow, or serves other models",
            _RENDERERS_REMEDY,
            subject=router.url,
        )
    often = max(reasons, key=lambda reason: reasons[reason], default="")
    for api, ways in reads.items():
        total = sum(ways.values())
        shares = ", ".join(f"{ways.get(way, 0) / total:.0%} {text}" for way, text in _WAYS.items())
        summary = f"{api}: {total:.0f} prompt(s), {shares}"
        if ways.get("local", 0) >= (1 - _SELDOM_SHARE) * total:
            yield ok(summary, subject=router.url)
        else:
            yield info(
                summary,
                f"most often, over all APIs: {often or 'unknown'} (docs/glossary.md explains it)",
                _RENDERERS_REMEDY if failing else _READING_REMEDIES.get(often, _OTHERWISE),
                subject=router.url,
            )


_WAYS = {
    "local": "tokenized here",
    "renderer": "by render servers",
    "engine": "by engines",
    "affinity": "placed by text",
}
