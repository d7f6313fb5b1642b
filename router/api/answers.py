"""What the router's own endpoints answer, as structs, and their OpenAPI document.

Always true: an answer is made of the struct that the document describes, so the two cannot part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI

from publisher.block_hash import HashScheme
from router.api.problems import EngineProblem
from router.feeds.base import FeedStats
from router.fleet.identity import EngineId
from router.fleet.sources.base import SourceStats
from router.fleet.status import ModelCard
from router.index.learn.facts import Fact
from router.index.learn.layout import CacheLayout
from router.observe.first_token import FirstTokenSummary
from router.observe.history import HistoryInterval, RecentHistory
from router.observe.receipts import Contradiction, Receipt
from router.placement.load.account import EngineLoad

_REF = "#/components/schemas/{name}"


class Health(msgspec.Struct, frozen=True):
    """The process lives."""

    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    """Which kvatlas this is."""

    version: str


class EngineBrief(msgspec.Struct, frozen=True):
    """One engine, in short; ``held`` says why it gets no new requests."""

    up: bool
    problem: str
    held: str
    feed: str


class PromptsBrief(msgspec.Struct, frozen=True):
    """How the prompts of one model become tokens: ``here``, or by asking an ``engine``, and why."""

    how: str
    source: str
    by: str
    reason: str
    problem: str
    remedy: str


class Ready(msgspec.Struct, frozen=True):
    """Whether traffic should come here, and if not, why; engines by their ids, models by their names."""

    ready: bool
    reason: str
    engines: Mapping[EngineId, EngineBrief]
    prompts: Mapping[str, PromptsBrief] = {}


class ModelList(msgspec.Struct, frozen=True):
    """Models of all engines that are up."""

    data: list[ModelCard]
    object: str = "list"


class EngineView(msgspec.Struct, frozen=True):
    """One engine as the router sees it; docs/glossary.md explains the fields."""

    engine: str
    up: bool
    problem: str
    held: str
    asleep: bool
    models: list[str]
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


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has not ended. ``stage``: reading, placed (its engine has said nothing yet), or
    streaming. ``why`` has the names of trace attributes, without their prefix."""

    request_id: str
    path: str
    model: str
    tenant: str
    engine: str
    stage: str
    age_s: float
    attempts: int
    why: dict[str, Any]


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended, at ``at_s`` in Unix time. ``status`` is HTTP's, or ``client_gone``,
    ``broken_stream`` or ``unseen`` (a gateway passed the answer on without showing it). Token counts are the
    engine's."""

    at_s: float
    request_id: str
    path: str
    model: str
    tenant: str
    engine: str
    status: str
    attempts: int
    waited_s: float
    first_token_s: float | None
    duration_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None


class PrefixView(msgspec.Struct, frozen=True):
    """A prefix that prompts begin with: ``rate`` prompts of the last ten minutes; ``holders``: engine ->
    groups of layers that hold its last block on the GPU. ``parent`` is a shorter prefix's id."""

    id: str
    parent: str
    model: str
    tokens: int
    rate: float
    holders: dict[str, list[int]]


class ReceiptView(Receipt, frozen=True, kw_only=True):
    """A receipt with what follows from it."""

    hit_by_medium: dict[str, int]
    outcome_: str = msgspec.field(name="outcome")


def view_receipt(receipt: Receipt) -> ReceiptView:
    """The receipt and what follows from it."""
    return ReceiptView(
        **msgspec.structs.asdict(receipt), hit_by_medium=receipt.by_medium, outcome_=receipt.outcome
    )


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; ``code`` is stable."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Every answer that is not a success, in OpenAI's shape."""

    error: ErrorDetail


_KINDS = (
    *(Health, Version, Ready, ModelList, ModelCard, EngineView, SourceStats, ReceiptView, ErrorAnswer),
    *(LiveRequest, EndedRequest, PrefixView, EngineProblem, RecentHistory, HistoryInterval),
)


def described(schema: dict[str, Any], text: str = "Success") -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route that answers this as JSON."""
    return {
        200: {"description": text, "content": {"application/json": {"schema": schema}}},
        "default": {
            "description": "An error",
            "content": {"application/json": {"schema": refer(ErrorAnswer)}},
        },
    }


def refer(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of a struct of this module."""
    return {"$ref": _REF.format(name=kind.__name__)}


class DocumentedApi(FastAPI):
    """Its OpenAPI document has the schemas of the structs."""

    def openapi(self) -> dict[str, Any]:
        """The document; made once."""
        if self.openapi_schema is None:
            _, schemas = msgspec.json.schema_components(_KINDS, ref_template=_REF)
            document = super().openapi()
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return super().openapi()
