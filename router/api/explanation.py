"""Explanation of a decision: what each engine holds of a prompt, its cost there, and the choice."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec

from kvatlas.router.api.views import ENGINES_PER_STEP
from kvatlas.router.index.query_plan import EngineHit
from kvatlas.router.placement.candidate import Candidate, Hit
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.placement import Decision, Split
from kvatlas.router.placement.service_level import SloForecast
from kvatlas.router.prompts.prompt import Prompt, TextAffinity


def explain(decision: Decision, api: str) -> Generator[None, None, dict[str, Any]]:
    """Return the decision on a request of this API as JSON-ready values; token counts, seconds. In steps of a
    few engines."""
    taken, pull = decision.hit, decision.choice.pull
    return {
        "prompt": {"api": api, **_prompt(decision)},
        "choice": {
            "engine": decision.choice.engine_id,
            "reason": decision.choice.reason,
            "hit_tokens": taken.whole_tokens,
            "hit_by_medium": taken.by_medium,
            "uncached_tokens": decision.choice.uncached_tokens,
        },
        "index_problem": decision.index_problem,
        "waits": decision.waits,
        "refused": None if decision.long_wait is None else msgspec.to_builtins(decision.long_wait),
        **({} if decision.slo_forecast is None else {"slo": _slo(decision, decision.slo_forecast)}),
        **(
            {}
            if pull is None
            else {"pull": {"source": pull.source_id, "tokens": pull.tokens, "link_s": pull.link_s}}
        ),
        **({} if decision.split is None else {"split": (yield from _split(decision.split))}),
        "engines": (yield from _engines(decision)),
    }


def _slo(decision: Decision, forecast: SloForecast) -> dict[str, Any]:
    """Predicted first token of each engine alone, and of the chosen two of a split request, against the time
    left until the request's target."""
    left_s, split = forecast.left_s, decision.split
    engines = [
        {"engine": name, "first_token_s": predicted_s, "late_s": max(0.0, predicted_s - left_s)}
        for name, predicted_s in forecast.predicted_s.items()
    ]
    if split is not None and split.prefill is not None and split.first_token_s is not None:
        pair = f"{split.prefill.choice.engine_id} -> {decision.choice.engine_id}"
        first_s = split.first_token_s + split.margin_s
        engines.append({"engine": pair, "first_token_s": first_s, "late_s": max(0.0, first_s - left_s)})
    return {"left_s": left_s, "engines": engines}


def _split(split: Split) -> Generator[None, None, dict[str, Any]]:
    """Return whether the prompt is computed elsewhere; if not, ``why``; and the costs of both."""
    first_s = split.first_token_s
    told = {
        "why": split.why,
        "local_s": split.local_s,
        "remote_s": split.remote_s,
        "first_token_s": None if first_s is None else first_s + split.margin_s,
        "transfer_tokens": split.lacks_tokens,
        "transfer_s": split.transfer_s,
    }
    prefill = split.prefill
    if prefill is None:
        return {**told, "prefill": None}
    hit, choice = prefill.candidate.hit, prefill.choice
    chosen = {
        "engine": choice.engine_id,
        "reason": choice.reason,
        "hit_tokens": hit.whole_tokens,
        "hit_by_medium": hit.by_medium,
        "uncached_tokens": choice.uncached_tokens,
        "engines": (yield from _engines(prefill)),
    }
    return {**told, "prefill": chosen}


def _engines(decision: Decision) -> Generator[None, None, list[dict[str, Any]]]:
    found, candidates, scored = [], decision.candidates, decision.choice.scored
    for at, engine in enumerate(decision.engines):
        if at % ENGINES_PER_STEP == ENGINES_PER_STEP - 1:
            yield
        cost = msgspec.to_builtins(scored.cost(at))
        found.append(_engine(engine, candidates[at], cost, decision.prompt_tokens))
    return found


def _prompt(decision: Decision) -> dict[str, Any]:
    read = decision.read
    if isinstance(read, Prompt):
        return {
            "tokens": decision.prompt_tokens,
            "read": read.source,
            "by": read.by,
            "skips_cache": read.skips_cache,
        }
    reason = read.reason if isinstance(read, TextAffinity) else "not a prompt"
    return {"tokens_estimated": decision.prompt_tokens, "read": "affinity", "why": reason}


def _engine(engine: Engine, candidate: Candidate, cost: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    hit, held = candidate.hit, candidate.hit.held
    return {
        "engine": candidate.engine_id,
        "feed": engine.feed_state,
        "mode": "none" if held is None else hit.mode if hit.confidence == "partial" else held.mode,
        "why_unknown": "" if held is None else held.why_unknown,
        "stale": held is not None and held.stale,
        "hit_tokens": _hit_tokens(hit),
        "shared_prefix_tokens": hit.shared_prefix_tokens,
        "inflight_tokens": hit.common_tokens,
        "coming_tokens": hit.coming_tokens,
        "facts": [] if engine.residency is None else msgspec.to_builtins(engine.residency.writer.found_facts),
        "evicted_tokens": hit.evicted_tokens,
        "hit_share": hit.share,
        "by_class": [] if held is None else msgspec.to_builtins(held.by_class),
        "ended_by": None if held is None else ended_by(held, prompt_tokens),
        "load": {
            "queue_s": candidate.queue_s,
            "running": candidate.running,
            "waiting": candidate.waiting,
            "kv_usage": engine.kv_usage,
        },
        "cost": cost,
    }


def _hit_tokens(hit: Hit) -> dict[str, int]:
    """Return the engine's hit by medium, even if it is too old for the selection to rely on.

    ``offloaded`` is CPU and STORAGE together.
    """
    gpu, cpu, storage = hit.gpu_tokens, hit.cpu_tokens, hit.storage_tokens
    if hit.held is not None and hit.held.stale:
        gpu, cpu, storage = hit.held.hit_tokens, hit.held.cpu_tokens, hit.held.storage_tokens
    return {"GPU": gpu, "CPU": cpu, "STORAGE": storage, "offloaded": cpu + storage}


def ended_by(hit: EngineHit, prompt_tokens: int) -> dict[str, Any] | None:
    """Return the spec class that ended the match, and at which token; None without a lookup.

    A class alone reaches its own ``hit_tokens``; the one with the fewest ended the match. If every class
    alone reaches further than the joint hit, no boundary suits all of them: ``no common boundary``; or
    everything reached would be recomputed: ``bounded replay``.
    """
    if not hit.by_class:
        return None
    least = min(hit.by_class, key=lambda c: c.hit_tokens)
    if not hit.hit_tokens and 0 < least.hit_tokens <= hit.replay_tokens:
        return {"spec_class": "bounded replay", "at_token": least.hit_tokens}
    if least.hit_tokens > hit.hit_tokens:
        return {"spec_class": "no common boundary", "at_token": hit.hit_tokens}
    if prompt_tokens - 1 - hit.hit_tokens < hit.alignment:
        return {"spec_class": "none: the whole prompt but its last tokens", "at_token": hit.hit_tokens}
    return {"spec_class": least.spec_class, "at_token": least.hit_tokens}
