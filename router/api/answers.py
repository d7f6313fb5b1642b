"""Response structs of the router's own endpoints, and their OpenAPI document.

Invariant: responses and document are made of the same structs, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.feeds.base import FeedStats
from kvatlas.router.feeds.store_settings import StoreKind
from kvatlas.router.feeds.stores import StoreStats
from kvatlas.router.fleet.engines import EngineId, SourceStats
from kvatlas.router.fleet.status import Frontend, ModelCard
from kvatlas.router.index.learn.facts import Fact
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.observe.findings import Finding
from kvatlas.router.observe.history import HistoryInterval, RecentHistory
from kvatlas.router.observe.receipts import Contradiction, Receipt
from kvatlas.router.observe.requests import TURNS_MAX
from kvatlas.router.placement.first_token import FirstTokenSummary
from kvatlas.router.placement.load import EngineLoad

# Probes ask often, also in a fleet of a thousand engines.
READY_PROBLEMS_MAX = 32
_REF = "#/components/schemas/{name}"


class Health(msgspec.Struct, frozen=True):
    """The process is alive."""

    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    """Version of kvatlas and Python."""

    version: str


class EngineBrief(msgspec.Struct, frozen=True):
    """Short form of an engine; ``on_hold``: why it gets no new requests."""

    up: bool
    problem: str
    on_hold: str
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
    """Whether the router is ready for traffic, and if not, why; engines by id, models by name. ``problems``:
    errors and warnings, the worst first, at most ``READY_PROBLEMS_MAX`` of them; ``problem_counts`` counts
    all by severity."""

    ready: bool
    reason: str
    engines: Mapping[EngineId, EngineBrief]
    prompts: Mapping[str, PromptsBrief] = {}
    problem_counts: Mapping[str, int] = {}
    problems: Sequence[Finding] = ()


class ModelList(msgspec.Struct, frozen=True):
    """Models of all engines that are up."""

    data: list[ModelCard]
    object: str = "list"


class EngineView(msgspec.Struct, frozen=True):
    """State of one engine; docs/glossary.md explains the fields."""

    engine: str
    up: bool
    problem: str
    on_hold: str
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
    probe: dict[str, str]
    hit_share: float
    first_tokens: FirstTokenSummary
    cache_worth_s_per_minute: float


class StoreView(StoreStats, kw_only=True):
    """A store that is followed, and what its feed counts. ``loaders``: engines that load from it."""

    store: str
    kind: StoreKind
    model: str
    loaders: list[EngineId]


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
    ``broken_stream`` or ``unseen`` (a gateway forwarded the answer without showing it). ``continued_from``:
    the engine whose stream broke, or was moved, and went on from ``engine``. Token counts are the
    engine's."""

    at_s: float
    request_id: str
    path: str
    model: str
    tenant: str
    session: str = ""
    agent: str = ""
    engine: str
    continued_from: str = ""
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
    Health,
    Version,
    Ready,
    ModelList,
    ModelCard,
    EngineView,
    StoreView,
    SourceStats,
    ReceiptView,
    ErrorAnswer,
    LiveRequest,
    EndedRequest,
    SessionView,
    PrefixView,
    Finding,
    RecentHistory,
    HistoryInterval,
)


def described(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return ``responses`` of a route that answers this struct as JSON."""
    return {
        200: {"description": "Success", "content": {"application/json": {"schema": schema}}},
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
