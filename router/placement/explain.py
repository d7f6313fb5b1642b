"""A decision in words and numbers: what each engine holds of a prompt, what it would cost, who was chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from router.index.model import EngineHit
from router.placement.decision import Decision, View
from router.prompts.affinity import TextAffinity
from router.prompts.prompt import Prompt


def explain(decision: Decision, feed_state: Callable[[str], str]) -> dict[str, Any]:
    """The decision as JSON-ready values; token counts, seconds."""
    return {
        "prompt": _prompt(decision),
        "choice": {
            "engine": decision.choice.engine_id,
            "reason": decision.choice.reason,
            "hit_tokens": decision.view.expected_tokens,
            "hit_by_medium": decision.view.expected_by_medium,
            "uncached_tokens": decision.choice.uncached_tokens,
        },
        "index_problem": decision.index_problem,
        "engines": [
            _engine(
                view, msgspec.to_builtins(cost), feed_state(view.status.engine_id), decision.prompt_tokens
            )
            for view, cost in zip(decision.views, decision.choice.costs, strict=True)
        ],
    }


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


def _engine(view: View, cost: dict[str, Any], feed: str, prompt_tokens: int) -> dict[str, Any]:
    candidate = view.candidate
    return {
        "engine": candidate.engine_id,
        "feed": feed,
        "mode": "shadow" if view.shadow is not None else view.hit.mode if view.hit is not None else "none",
        "why_unknown": view.hit.why_unknown if view.hit is not None else "",
        "stale": view.hit is not None and view.hit.stale,
        "hit_tokens": _hit_tokens(view),
        "trunk_tokens": candidate.trunk_tokens,
        "inflight_tokens": view.shared.common_tokens,
        "coming_tokens": view.shared.coming_tokens,
        "by_class": [] if view.hit is None else msgspec.to_builtins(view.hit.by_class),
        "ended_by": None if view.hit is None else ended_by(view.hit, prompt_tokens),
        "load": {
            "queue_s": candidate.queue_s,
            "running": candidate.running,
            "waiting": candidate.waiting,
            "kv_usage": view.status.kv_usage,
        },
        "cost": cost,
    }


def _hit_tokens(view: View) -> dict[str, int]:
    """What the engine holds, by medium; also where that is too old for the choice to count on it.

    ``offloaded`` is CPU and STORAGE together.
    """
    hit, candidate = view.hit, view.candidate
    if hit is not None and hit.stale:
        gpu, cpu, storage = hit.hit_tokens, hit.cpu_tokens, hit.storage_tokens
    else:
        gpu, cpu, storage = candidate.hit_tokens, candidate.cpu_tokens, candidate.storage_tokens
    return {"GPU": gpu, "CPU": cpu, "STORAGE": storage, "offloaded": cpu + storage}


def ended_by(hit: EngineHit, prompt_tokens: int) -> dict[str, Any] | None:
    """Which spec class ended the match, and at which token; None where nothing could be looked up.

    A class alone reaches ``hit_tokens`` of its own; the one that reaches least ended the match. Where every
    class alone reaches further than the joint hit, no boundary suits all of them: ``no common boundary``.
    """
    if not hit.by_class:
        return None
    least = min(hit.by_class, key=lambda c: c.hit_tokens)
    if least.hit_tokens > hit.hit_tokens:
        return {"spec_class": "no common boundary", "at_token": hit.hit_tokens}
    if prompt_tokens - 1 - hit.hit_tokens < hit.alignment:
        return {"spec_class": "none: the whole prompt but its last tokens", "at_token": hit.hit_tokens}
    return {"spec_class": least.spec_class, "at_token": least.hit_tokens}
