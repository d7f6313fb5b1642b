"""What is wrong with an engine, by the router's own view of it, and what to do: for the page and the doctor.

Works on the JSON of ``GET /kvatlas/engines``, so that a doctor of another version can read it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from router.observe.first_token import HELD_OF_MIN, HELD_SHARE_MIN

_FEED_REMEDIES = {
    "cold": "check events= of this engine, the firewall between router and engine, and that the endpoint in "
    "its --kv-events-config has a * (tcp://*:5557): without one vLLM connects to the address and listens "
    "nowhere",
    "replaying": "wait; if it lasts, look at the engine's replay socket",
    "degraded": "docs/operations.md, feed states, explains the reason",
    "stale": "check the engine and the network",
}


class EngineProblem(msgspec.Struct, frozen=True):
    """``severity`` info: it is meant to be so. ``cause`` and ``remedy`` may be empty then. ``about`` is part
    of the id of the doctor's check."""

    severity: Literal["error", "warning", "info"]
    seen: str
    cause: str = ""
    remedy: str = ""
    about: Literal["engines", "predictions"] = "engines"


def engine_problems(view: Mapping[str, Any]) -> Iterator[EngineProblem]:
    """Of one engine that ought to work."""
    if not view.get("up"):
        yield EngineProblem(
            "error",
            f"the router says it is down: {view.get('problem')}",
            "it is, or the router cannot reach it from where it runs",
            "run kvatlas doctor on the router's machine",
        )
        return
    if view.get("held"):
        yield EngineProblem("info", f"gets no new requests: {view['held']}")
    if view.get("asleep"):
        yield EngineProblem(
            "info", "sleeps: it gets no requests until it wakes (POST /wake_up at the engine)"
        )
    yield from _feed(view)
    if view.get("available") is False:
        yield EngineProblem(
            "warning",
            "the router's breaker is open for this engine",
            "its latest requests failed",
            "look at the engine's log; the breaker closes with the first success",
        )
    if view.get("drifting"):
        yield EngineProblem(
            "warning",
            "predictions drift: more than a quarter of the latest ones were wrong",
            "tokenizer or chat template differ from the engine's, or events are lost",
            "kvatlas doctor --probe compares them (cache.facts, tokens.parity)",
            "predictions",
        )
    yield from _contradictions(view)
    yield from _first_tokens(view)


def _contradictions(view: Mapping[str, Any]) -> Iterator[EngineProblem]:
    evidence = view.get("contradicting")
    if not isinstance(evidence, list) or not evidence:
        return
    shown = "; ".join(
        f"request {one['request_id']}: {one['reported_tokens']} reported of {one['prompt_tokens']}, "
        f"{one['predicted_tokens']} by its events"
        for one in evidence
        if isinstance(one, dict)
    )
    yield EngineProblem(
        "warning",
        f"the cached tokens that it reports contradict its own events ({shown})",
        "the engine, or a proxy before it, reports wrong usage, or its events are wrong; bills by "
        "cached_tokens are not safe",
        "compare with vllm:prefix_cache_hits at the engine; lines of the usage record say verified: false",
        "predictions",
    )


def _first_tokens(view: Mapping[str, Any]) -> Iterator[EngineProblem]:
    seen = view.get("first_tokens")
    if not isinstance(seen, dict):
        return
    held, compared = seen.get("held"), seen.get("compared")
    if not isinstance(held, int) or not isinstance(compared, int) or compared < HELD_OF_MIN:
        return
    if held < HELD_SHARE_MIN * compared:
        yield EngineProblem(
            "warning",
            f"{compared - held} of {compared} times to first token differ from the predicted ones",
            "others send it requests, its prompts wait for KV cache pages, or its speed changed",
            "compare the parts in /kvatlas/receipts; kv_usage near 1 means too few pages",
            "predictions",
        )


def _feed(view: Mapping[str, Any]) -> Iterator[EngineProblem]:
    feed = view.get("feed")
    state = str(view.get("feed_state"))
    reason = feed.get("reason", "") if isinstance(feed, dict) else ""
    if state in _FEED_REMEDIES:
        yield EngineProblem(
            "warning",
            f"the router's feed is {state}{f' ({reason})' if reason else ''}",
            "what the engine holds is not fully known to the router",
            _FEED_REMEDIES[state],
        )
    yield from _unusable(view, feed if isinstance(feed, dict) else {})
    alarms = feed.get("phantom_alarms", 0) if isinstance(feed, dict) else 0
    if alarms:
        yield EngineProblem(
            "warning",
            f"{alarms} phantom alarm(s): the index held more copies than the engine has blocks",
            "removals were lost, or kv_cache_report_mode=full makes the engine report blocks again",
            "let no client set kv_cache_report_mode, or set models.NAME.report_mode_full",
        )


def _unusable(view: Mapping[str, Any], feed: Mapping[str, Any]) -> Iterator[EngineProblem]:
    """An engine that publishes, but nothing that the router can use."""
    unusable = view.get("unusable_events", 0)
    if not unusable:
        return
    reasons: dict[str, int] = {**view.get("rejected_events", {}), **(feed.get("malformed_frames") or {})}
    said = [f"{reason} {count}" for reason, count in sorted(reasons.items())]
    said += [f"unknown type {name} {count}" for name, count in sorted(view.get("unknown_events", {}).items())]
    if feed.get("last_rejection"):
        said.append(str(feed["last_rejection"]))
    yield EngineProblem(
        "error",
        f"none of the latest {unusable} event(s) could be used ({', '.join(said)})",
        "the engine or its connector publishes in a form that kvatlas does not know: its cache is unknown",
        "check that events= is the address of a KV event publisher; upgrade kvatlas, or report it with what "
        "kvatlas record writes",
    )
