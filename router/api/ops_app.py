"""The application of the ops port: metrics, explanations of routing decisions, data for the status page.

FastAPI describes these typed, rarely called endpoints in an OpenAPI document. It takes 15 MB, so only the
process that serves the ops port imports this module; ``app.py`` decides who gets access.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from kvatlas import __version__
from kvatlas.router.admission.claims import read_claim
from kvatlas.router.api.answers import (
    EndedRequest,
    EngineView,
    Health,
    LiveRequest,
    ModelList,
    PrefixView,
    Ready,
    ReceiptView,
    SessionView,
    StoreView,
    Version,
    described,
    refer,
    schemas,
)
from kvatlas.router.api.app import CONTROL_PREFIX, Control
from kvatlas.router.api.asgi import read_body
from kvatlas.router.api.explanation import explain
from kvatlas.router.api.framework import add_errors, as_json, shown
from kvatlas.router.api.metrics_page import Sources
from kvatlas.router.api.readiness import Readiness
from kvatlas.router.api.views import LocalView, OpsView, store_views
from kvatlas.router.fleet.engines import SourceStats
from kvatlas.router.fleet.status import ModelCard
from kvatlas.router.observe.findings import Finding
from kvatlas.router.observe.history import RecentHistory
from kvatlas.router.openai.apis import CHAT, COMPLETION, PROMPT_APIS, RESPONSES
from kvatlas.router.openai.body import invalid_json, peek_any_size
from kvatlas.router.openai.errors import bad_request, body_too_complex, not_json, usage_off
from kvatlas.router.openai.members import (
    STEPS_MAX,
    MalformedError,
    Scan,
    TooManyStepsError,
    run_cooperatively,
    with_value,
)
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.placement.decide import Planner


class DocumentedApi(FastAPI):
    """API whose OpenAPI document contains the schemas of the structs."""

    def openapi(self) -> dict[str, Any]:
        """Return the document, which is made once."""
        if self.openapi_schema is None:
            document = super().openapi()
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas())
        return super().openapi()


def create_ops(
    planner: Planner,
    sources: Sources,
    *,
    readiness: Callable[[], Readiness],
    body_bytes_max: int,
    view: OpsView | None = None,
) -> FastAPI:
    """Make the application with everything, for the ops port; ``view`` is what it shows, by default only this
    process."""
    app = DocumentedApi(
        title="kvatlas",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=CONTROL_PREFIX + "openapi.json",
        redirect_slashes=False,
    )
    add_errors(app, paths="GET /kvatlas/openapi.json lists the paths of this port")
    _add_control(app, Control(sources, readiness))
    view = view or LocalView(sources)
    _add_metrics(app, view)
    _add_engines(app, sources, view)
    _add_stores(app, sources)
    _add_insight(app, planner, sources, view, body_bytes_max)
    _add_requests(app, view)
    _add_page(app)
    return app


def _get(app: FastAPI, path: str, schema: dict[str, Any] | None = None) -> Callable[[Any], Any]:
    """Make a route for GET, and for HEAD, which probes use; ``schema`` is that of its JSON response."""

    def add(work: Any) -> Any:
        app.head(path, include_in_schema=False)(work)
        responses = None if schema is None else described(schema)
        return app.get(path, response_class=Response, responses=responses)(work)

    return add


def _add_control(app: FastAPI, control: Control) -> None:
    @_get(app, "/health", refer(Health))
    async def health() -> Response:
        """The process is alive."""
        return shown(control.health())

    @_get(app, "/ready", refer(Ready))
    async def ready() -> Response:
        """200 once at least one engine answers and its feed has caught up (or had its time), else 503."""
        return shown(await control.ready())

    @_get(app, "/version", refer(Version))
    async def version() -> Response:
        """Version of kvatlas and Python."""
        return shown(control.version())

    @_get(app, "/v1/models", refer(ModelList))
    async def models(request: Request) -> Response:
        """Models of all engines that are up, and which the client's key may use."""
        return shown(control.models(request.scope))

    @_get(app, "/v1/models/{model:path}", refer(ModelCard))
    async def model(model: str, request: Request) -> Response:
        """One model's card."""
        return shown(control.model(request.scope, model))


def _add_metrics(app: FastAPI, view: OpsView) -> None:
    @_get(app, "/metrics")
    async def metrics() -> Response:
        """Prometheus text format. Made in the event loop's thread, since it reads live objects."""
        return Response(await view.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


# Fleets with more engines than this share answers about them between pages.
_ALONE_MAX = 64
_SHARED_S_MAX = 1.0
_SHARED_FACTOR = 20


class _SharedAnswer:
    """An answer about all engines of a large fleet, made once for all who ask at about the same time: it
    takes at most a twentieth of the time, however many pages are open. A small fleet's is always new."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], engines: Callable[[], int]) -> None:
        self._make = make
        self._engines = engines
        self._making = asyncio.Lock()
        self._until_s = -math.inf
        self._kept = b""

    async def get(self) -> bytes:
        async with self._making:
            began_s = time.monotonic()
            if began_s >= self._until_s:
                self._kept = await self._make()
                now = time.monotonic()
                shares = self._engines() > _ALONE_MAX
                self._until_s = now + min(_SHARED_S_MAX, _SHARED_FACTOR * (now - began_s)) if shares else now
            return self._kept


def _encoded(views: Sequence[EngineView]) -> Generator[None, None, bytes]:
    """Return the views as JSON, some of them in each step."""
    pieces = []
    for at in range(0, len(views), 32):
        pieces.append(msgspec.json.encode(views[at : at + 32])[1:-1])
        yield
    return b"[" + b",".join(pieces) + b"]\n"


def _add_engines(app: FastAPI, sources: Sources, view: OpsView) -> None:
    async def encoded_engines() -> bytes:
        return await run_cooperatively(_encoded(await view.engines()))

    shared_engines = _SharedAnswer(encoded_engines, lambda: len(sources.fleet))

    @_get(app, "/kvatlas/engines", {"type": "array", "items": refer(EngineView)})
    async def engines() -> Response:
        """Every engine as seen by the router. With more than 64 engines, pages that ask within a second may
        get the same answer."""
        return Response(await shared_engines.get(), media_type="application/json")


def _add_stores(app: FastAPI, sources: Sources) -> None:
    @_get(app, "/kvatlas/stores", {"type": "array", "items": refer(StoreView)})
    async def stores() -> Response:
        """Stores that the router follows, what they hold, and what of their events is not used."""
        return as_json(store_views(sources))


def _add_insight(
    app: FastAPI, planner: Planner, sources: Sources, view: OpsView, body_bytes_max: int
) -> None:
    @_get(
        app,
        "/kvatlas/problems",
        {"type": "object", "additionalProperties": {"type": "array", "items": refer(Finding)}},
    )
    async def problems() -> Response:
        """Problems that hold now, by subject: an engine (without problems: an empty list), a model, or
        ``router``; each with cause, remedy, and since when."""
        by_subject: dict[str, list[Finding]] = {engine.engine_id: [] for engine in sources.fleet}
        for finding in await view.problems():
            by_subject.setdefault(finding.subject, []).append(finding)
        return as_json(by_subject)

    @_get(app, "/kvatlas/prefixes", {"type": "array", "items": refer(PrefixView)})
    async def prefixes() -> Response:
        """Return the most common prompt prefixes, shorter ones first, and the engines that hold them."""
        return as_json(await view.prefixes())

    @_get(app, "/kvatlas/sources", {"type": "object", "additionalProperties": refer(SourceStats)})
    async def fleet_sources() -> Response:
        """State of the sources of engines."""
        known = {} if sources.origins is None else sources.origins.stats
        return as_json(dict(known))

    @_get(app, "/kvatlas/usage")
    async def usage() -> Response:
        """The usage record: a line for each request, for bills and `kvatlas advise --router`."""
        log = sources.usage
        if log is None:
            raise usage_off()
        return StreamingResponse(log.read_back(), media_type="application/x-ndjson")

    @app.post(
        "/kvatlas/explain",
        response_class=Response,
        responses=described({"type": "object"}),
        openapi_extra={"requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}}},
    )
    async def explain_request(request: Request) -> Response:
        """Explain how this request would be routed; nothing is forwarded. ``?path=`` is its path, by default
        that of a chat (messages), a completion (prompt) or a response (input); ``?tenant=`` the tenant of the
        request, if caches are isolated."""
        _check_json(request)
        body = await read_body(request.receive, body_bytes_max)
        tenant, gate = request.query_params.get("tenant"), sources.gate
        isolation = None if gate is None else gate.isolation
        isolated = tenant is not None and isolation is not None
        if tenant is not None and gate is not None and isolation is not None:
            salt = partial(isolation.salt, tenant, gate.keys.rules(tenant))
            body = await run_cooperatively(with_value(body, b"cache_salt", salt, adds=True))
        peeked = await peek_any_size(body)
        path = request.query_params.get("path") or await run_cooperatively(_likely_path(body))
        if path not in PROMPT_APIS:
            raise bad_request(
                "missing_prompt",
                "Send the body of a chat (messages), completion (prompt) or response (input), "
                f"or name its path: ?path= one of {', '.join(PROMPT_APIS)}.",
            )
        headers = list(request.scope["headers"])
        inbound = InboundRequest("POST", path, b"", headers, body, peeked.model, peeked.stream)
        inbound.isolated = isolated
        targets = planner.slo_targets
        if planner.reads_claims or targets is not None:
            now = time.monotonic()
            inbound.claim = read_claim(headers, in_body=peeked.priority, arrived_s=now, targets=targets)
        steps = explain(await planner.explain(inbound), PROMPT_APIS[path])
        return as_json(await run_cooperatively(steps))


def _check_json(request: Request) -> None:
    """Require JSON: another origin's page cannot send it without a CORS preflight. Raises ``ApiError``."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise not_json(kind)


def _add_requests(app: FastAPI, view: OpsView) -> None:
    @_get(app, "/kvatlas/requests", {"type": "array", "items": refer(LiveRequest)})
    async def requests() -> Response:
        """Requests in progress, oldest first, with their stage, engine and reasons."""
        return as_json(await view.requests())

    @_get(app, "/kvatlas/receipts", {"type": "array", "items": refer(ReceiptView)})
    async def receipts(request_id: str = "") -> Response:
        """The latest receipts, oldest first; with ``?request_id=`` all stored ones of one request."""
        return as_json(await view.receipts(request_id))

    @_get(app, "/kvatlas/answers", {"type": "array", "items": refer(EndedRequest)})
    async def answers(request_id: str = "") -> Response:
        """The latest ended requests, oldest first. With ``?request_id=`` all stored ones that match: an id,
        its beginning, or the id in an engine's answer (``chatcmpl-ID``)."""
        return as_json(await view.answers(request_id))

    @_get(app, "/kvatlas/sessions", {"type": "array", "items": refer(SessionView)})
    async def sessions(session: str = "") -> Response:
        """The latest sessions, the latest first: their latest requests, where these ran, and the tokens that
        engines hold for them. With ``?session=`` all kept sessions whose name begins so."""
        return as_json(await view.sessions(session))

    @_get(app, "/kvatlas/history", refer(RecentHistory))
    async def history() -> Response:
        """Counts of the last five minutes, in intervals of a few seconds."""
        return as_json(await view.history())


def _add_page(app: FastAPI) -> None:
    @app.api_route(CONTROL_PREFIX, methods=["GET", "HEAD"], include_in_schema=False)
    async def status_page() -> Response:
        """The status page, for browsers."""
        return page()

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route(CONTROL_PREFIX.rstrip("/"), methods=["GET", "HEAD"], include_in_schema=False)
    async def to_status_page() -> Response:
        """Redirect to the status page. The address is relative, as a proxy in front may add a path prefix."""
        return Response(status_code=307, headers={"location": CONTROL_PREFIX.removeprefix("/")})


def _likely_path(body: bytes) -> Generator[None, None, str]:
    """Guess the API of this body, in steps (``members`` paths); "": unknown."""
    by_field = {b"messages": CHAT, b"prompt": COMPLETION, b"input": RESPONSES}
    scan, found = Scan(body), set[str]()
    start = scan.start()
    try:
        for member in scan.members(start) if start is not None else ():
            if member is None:
                yield
            elif member.name in by_field:
                found.add(by_field[member.name])
    except MalformedError as error:
        raise invalid_json(error) from None
    except TooManyStepsError:
        raise body_too_complex(STEPS_MAX) from None
    return next((path for path in by_field.values() if path in found), "")


@cache
def page() -> Response:
    """Return the page and its headers, which restrict what it may do in a browser."""
    html = files("kvatlas.router.api").joinpath("status_page.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _policy(html),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(html, headers=headers, media_type="text/html")


def _policy(html: str) -> str:
    """Allow only the page's own style and script, by their hashes (CSP 3, 6.7.3.3); texts cannot become
    markup (``require-trusted-types-for``)."""
    return (
        f"default-src 'none'; style-src {_hash_of('style', html)}; script-src {_hash_of('script', html)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash_of(tag: str, html: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    if found is None:
        raise ValueError(f"status_page.html has no <{tag}>")
    digest = hashlib.sha256(found[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
