"""A decision in words and numbers: what each engine holds of a prompt, what it would cost, who was chosen."""

from __future__ import annotations

from typing import Any

import msgspec

from router.index.seats import EngineHit
from router.placement.candidate import Candidate, Hit
from router.placement.engine import Engine
from router.placement.placement import Decision, Split
from router.prompts.affinity import TextAffinity
from router.prompts.prompt import Prompt


def explain(decision: Decision, api: str) -> dict[str, Any]:
    """The decision on a request of this API as JSON-ready values; token counts, seconds."""
    taken = decision.candidate.hit
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
        **({} if decision.split is None else {"split": _split(decision.split)}),
        "engines": _engines(decision),
    }


def _split(split: Split) -> dict[str, Any]:
    """Whether the prompt is computed elsewhere; ``why`` not, and what both would cost."""
    told = {
        "why": split.why,
        "local_s": split.local_s,
        "remote_s": split.remote_s,
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
        "engines": _engines(prefill),
    }
    return {**told, "prefill": chosen}


def _engines(decision: Decision) -> list[dict[str, Any]]:
    return [
        _engine(engine, candidate, msgspec.to_builtins(cost), decision.prompt_tokens)
        for engine, candidate, cost in zip(
            decision.engines, decision.candidates, decision.choice.costs, strict=True
        )
    ]


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
        "mode": "none" if held is None else held.mode,
        "why_unknown": "" if held is None else held.why_unknown,
        "stale": held is not None and held.stale,
        "hit_tokens": _hit_tokens(hit),
        "trunk_tokens": hit.trunk_tokens,
        "inflight_tokens": hit.common_tokens,
        "coming_tokens": hit.coming_tokens,
        "facts": [] if engine.residency is None else msgspec.to_builtins(engine.residency.writer.found_facts),
        "evicted_tokens": hit.evicted_tokens,
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
    """What the engine holds, by medium; also where that is too old for the choice to count on it.

    ``offloaded`` is CPU and STORAGE together.
    """
    gpu, cpu, storage = hit.gpu_tokens, hit.cpu_tokens, hit.storage_tokens
    if hit.held is not None and hit.held.stale:
        gpu, cpu, storage = hit.held.hit_tokens, hit.held.cpu_tokens, hit.held.storage_tokens
    return {"GPU": gpu, "CPU": cpu, "STORAGE": storage, "offloaded": cpu + storage}


def ended_by(hit: EngineHit, prompt_tokens: int) -> dict[str, Any] | None:
    """Which spec class ended the match, and at which token; None where nothing could be looked up.

    A class alone reaches ``hit_tokens`` of its own; the one that reaches least ended the match. Where every
    class alone reaches further than the joint hit, no boundary suits all of them: ``no common boundary``; or
    all it reaches would be computed again: ``bounded replay``.
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
