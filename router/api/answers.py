"""Response structs of the router's own endpoints, and their OpenAPI document.

Invariant: responses and document are made of the same structs, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from publisher.block_hash import HashScheme
from router.feeds.base import FeedStats
from router.fleet.engines import EngineId, SourceStats
from router.fleet.status import Frontend, ModelCard
from router.index.learn.facts import Fact
from router.index.learn.layout import CacheLayout
from router.observe.history import HistoryInterval, RecentHistory
from router.observe.receipts import HELD_OF_MIN, HELD_SHARE_MIN, Contradiction, FirstTokenSummary, Receipt
from router.observe.requests import TURNS_MAX
from router.placement.load import EngineLoad

# Problems of an engine as seen by the router, with remedies: for the status page and the doctor.
#
# Works on the JSON of ``GET /kvatlas/engines``, so that a doctor of another version can read it too.


_FEED_REMEDIES = {
    "cold": "check events= of this engine, the firewall between router and engine, and that the endpoint in "
    "its --kv-events-config has a * (tcp://*:5557): without one vLLM connects to the address and listens "
    "nowhere",
    "replaying": "wait; if it lasts, look at the engine's replay socket",
    "degraded": "docs/operations.md, feed states, explains the reason",
    "stale": "check the engine and the network",
}


class EngineProblem(msgspec.Struct, frozen=True):
    """``severity`` info: intended; ``cause`` and ``remedy`` may then be empty. ``about`` is part of the id of
    the doctor's check."""

    severity: Literal["error", "warning", "info"]
    seen: str
    cause: str = ""
    remedy: str = ""
    about: Literal["engines", "predictions"] = "engines"


def engine_problems(view: Mapping[str, Any]) -> Iterator[EngineProblem]:
    """Yield the problems of an engine that should work."""
    if not view.get("up"):
        yield EngineProblem(
            "error",
            f"the router reports it down: {view.get('problem')}",
            "it is down, or the router cannot reach it",
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
    """Yield a problem if the engine publishes, but the router can use nothing of it."""
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


_REF = "#/components/schemas/{name}"


class Health(msgspec.Struct, frozen=True):
    """The process is alive."""

    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    """Version of kvatlas and Python."""

    version: str


class EngineBrief(msgspec.Struct, frozen=True):
    """Short form of an engine; ``held``: why it gets no new requests."""

    up: bool
    problem: str
    held: str
    feed: str


class PromptsBrief(msgspec.Struct, frozen=True):
    """Where prompts of one model are tokenized, ``here`` or by an ``engine``, and why."""

    how: str
    source: str
    by: str
    reason: str
    problem: str
    remedy: str


class Ready(msgspec.Struct, frozen=True):
    """Whether the router is ready for traffic, and if not, why; engines by id, models by name."""

    ready: bool
    reason: str
    engines: Mapping[EngineId, EngineBrief]
    prompts: Mapping[str, PromptsBrief] = {}


class ModelList(msgspec.Struct, frozen=True):
    """Models of all engines that are up."""

    data: list[ModelCard]
    object: str = "list"


class EngineView(msgspec.Struct, frozen=True):
    """State of one engine; docs/glossary.md explains the fields."""

    engine: str
    up: bool
    problem: str
    held: str
    asleep: bool
    models: list[str]
    frontend: Frontend
    available: bool
    publishes_events: bool | None
    kv_usage: float | None
    kv_cached: float | None
    blocks_held: dict[str, int]
    feed: FeedStats | None
    feed_state: str
    followed_by: str | None
    mode: str | None
    scheme: HashScheme | None
    assumed_scheme: HashScheme | None
    layout: CacheLayout | None
    facts: list[Fact]
    shared_stores: list[str]
    rejected_events: dict[str, int]
    unknown_events: dict[str, int]
    unusable_events: int
    load: EngineLoad
    receipts: dict[str, int]
    drifting: bool
    contradicting: list[Contradiction]
    first_tokens: FirstTokenSummary
    cache_worth_s_per_minute: float


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request in progress. ``stage``: reading, placed (no answer of its engine yet), or streaming. ``why``
    has the names of trace attributes, without their prefix."""

    request_id: str
    path: str
    model: str
    tenant: str
    session: str = ""
    agent: str = ""
    engine: str
    stage: str
    age_s: float
    attempts: int
    why: dict[str, Any]


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An ended request; ``at_s``: its end in Unix time. ``status`` is HTTP's, or ``client_gone``,
    ``broken_stream`` or ``unseen`` (a gateway forwarded the answer without showing it). Token counts are the
    engine's."""

    at_s: float
    request_id: str
    path: str
    model: str
    tenant: str
    session: str = ""
    agent: str = ""
    engine: str
    status: str
    attempts: int
    waited_s: float
    first_token_s: float | None
    duration_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session: its requests that reached an engine, the latest last. Token sums are of all its requests
    whose engine reported its hit. ``held_tokens``: prompt and output tokens on the GPU of each engine, in
    blocks stored for this session, by the engine's events; None if another session, of another
    tenant for example, has the same name: events do not tell them apart."""

    tenant: str
    session: str
    turns: int
    prompt_tokens: int
    cached_tokens: int
    held_tokens: dict[str, int] | None
    latest: list[EndedRequest]

    def joined(self, other: SessionView) -> SessionView:
        """Merge with another worker's view. Workers receive the same events."""
        held: dict[str, int] | None = None
        if self.held_tokens is not None and other.held_tokens is not None:
            engines = self.held_tokens.keys() | other.held_tokens.keys()
            held = {
                engine: max(self.held_tokens.get(engine, 0), other.held_tokens.get(engine, 0))
                for engine in sorted(engines)
            }
        latest = sorted((*self.latest, *other.latest), key=lambda turn: turn.at_s)
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("turns", "prompt_tokens", "cached_tokens")
        }
        return msgspec.structs.replace(self, **sums, held_tokens=held, latest=latest[-TURNS_MAX:])


class PrefixView(msgspec.Struct, frozen=True):
    """A common prompt prefix. ``rate``: number of prompts in the last ten minutes; ``holders``: engine ->
    groups of layers that hold its last block on the GPU; ``parent``: id of a shorter prefix."""

    id: str
    parent: str
    model: str
    tokens: int
    rate: float
    holders: dict[str, list[int]]


class ReceiptView(Receipt, frozen=True, kw_only=True):
    """A receipt and the values derived from it."""

    hit_by_medium: dict[str, int]
    outcome_: str = msgspec.field(name="outcome")


def view_receipt(receipt: Receipt) -> ReceiptView:
    return ReceiptView(
        **msgspec.structs.asdict(receipt), hit_by_medium=receipt.by_medium, outcome_=receipt.outcome
    )


class ErrorDetail(msgspec.Struct, frozen=True):
    """An error response; ``code`` is stable."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Any error response, in OpenAI's shape."""

    error: ErrorDetail


_KINDS = (
    *(Health, Version, Ready, ModelList, ModelCard, EngineView, SourceStats, ReceiptView, ErrorAnswer),
    *(LiveRequest, EndedRequest, SessionView, PrefixView, EngineProblem, RecentHistory, HistoryInterval),
)


def described(schema: dict[str, Any], text: str = "Success") -> dict[int | str, dict[str, Any]]:
    """Return ``responses`` of a route that answers this struct as JSON."""
    return {
        200: {"description": text, "content": {"application/json": {"schema": schema}}},
        "default": {
            "description": "An error",
            "content": {"application/json": {"schema": refer(ErrorAnswer)}},
        },
    }


def refer(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the reference to the schema of a struct of this module."""
    return {"$ref": _REF.format(name=kind.__name__)}


def schemas() -> dict[str, Any]:
    """Return the schemas of the structs for an OpenAPI document, by name."""
    return msgspec.json.schema_components(_KINDS, ref_template=_REF)[1]
