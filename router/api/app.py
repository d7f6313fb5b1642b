"""The router's own endpoints: health, readiness, metrics, models, and explanations of routing decisions.

They are rarely called, so Starlette serves them; all endpoints of engines go through the proxy instead.
Errors have OpenAI's shape here too. There are two applications: ``create_control`` for every client,
without data of other clients, and ``create_ops`` with everything (``api/ops.py`` decides who gets access).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ExceptionHandler

from router import __version__
from router.admission.admission_queue import read_claim
from router.admission.tenants import Tenant
from router.api.answers import (
    DocumentedRoutes,
    EndedRequest,
    EngineBrief,
    EngineProblem,
    EngineView,
    Health,
    LiveRequest,
    ModelList,
    PrefixView,
    PromptsBrief,
    Ready,
    ReceiptView,
    Version,
    engine_problems,
    refer,
)
from router.api.metrics_page import Sources
from router.api.page import page
from router.api.views import LocalView, OpsView, Readiness, explain
from router.fleet.sources import SourceStats
from router.fleet.status import ModelCard
from router.observe.history import RecentHistory
from router.openai.body import invalid_json, peek_any_size
from router.openai.errors import (
    ApiError,
    bad_request,
    body_too_complex,
    body_too_large,
    internal_error,
    method_not_allowed,
    model_not_found,
    not_json,
    unknown_path,
    usage_off,
)
from router.openai.members import (
    STEPS_MAX,
    MalformedError,
    Scan,
    TooManyStepsError,
    run_cooperatively,
    with_value,
)
from router.openai.request import CHAT, COMPLETION, PROMPT_APIS, RESPONSES, InboundRequest
from router.placement.decide import Planner

# Key of the ASGI scope for the ``Tenant`` of a request's key.
TENANT = "kvatlas.tenant"
CONTROL_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/v1/models"})
CONTROL_PREFIX = "/kvatlas/"
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def is_control(path: str) -> bool:
    """Whether the router answers this path itself."""
    return path in CONTROL_PATHS or path.startswith((CONTROL_PREFIX, "/v1/models/"))


def create_control(
    planner: Planner,
    sources: Sources,
    *,
    readiness: Callable[[], Readiness],
    refusal: Callable[[str], ApiError],
) -> Starlette:
    """Make the application for ``is_control`` paths of the public port; ``refusal`` is for unavailable
    ones."""
    routes = _shared_routes(sources, readiness)

    async def elsewhere(request: Request) -> Response:
        """Return an error that names the ops port."""
        raise refusal(request.scope["path"])

    routes.add("/metrics", elsewhere, *_METHODS)
    routes.add(CONTROL_PREFIX + "{rest:path}", elsewhere, *_METHODS)
    return serving(routes)


def create_ops(
    planner: Planner,
    sources: Sources,
    *,
    readiness: Callable[[], Readiness],
    body_bytes_max: int,
    view: OpsView | None = None,
) -> Starlette:
    """Make the application with everything, for the ops port; ``view`` is what it shows, by default only this
    process."""
    routes = _shared_routes(sources, readiness)
    view = view or LocalView(sources)
    _add_metrics(routes, view)
    _add_insight(routes, planner, sources, view, body_bytes_max)
    _add_requests(routes, view)
    _add_page(routes)

    async def document(_: Request) -> Response:
        return json_answer(routes.document("kvatlas", __version__))

    routes.add(CONTROL_PREFIX + "openapi.json", document, "GET")
    return serving(routes)


def _shared_routes(sources: Sources, readiness: Callable[[], Readiness]) -> DocumentedRoutes:
    """Make the routes that both applications have."""
    routes = DocumentedRoutes()
    _add_health(routes, sources, readiness)
    _add_models(routes, sources)
    return routes


def serving(routes: DocumentedRoutes) -> Starlette:
    """Make the application of these routes; every error has OpenAI's shape."""
    app = Starlette(routes=routes.routes, exception_handlers=_ERRORS)
    app.router.redirect_slashes = False
    return app


async def _api_error(_: Request, error: Exception) -> Response:
    return error_answer(cast("ApiError", error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Convert the framework's own errors: an unknown path, or an unsupported method."""
    found = cast("HTTPException", error)
    path = request.url.path
    if found.status_code == 405:
        return error_answer(
            method_not_allowed(request.method, path, (found.headers or {}).get("Allow", "GET"))
        )
    return error_answer(unknown_path(path, found.status_code))


async def _fault(_: Request, error: Exception) -> Response:
    """Handle a bug of the router; the server logs it."""
    return error_answer(internal_error())


async def _gone(_: Request, error: Exception) -> Response:
    """Handle a client that disconnected: no response is sent."""
    return Response(status_code=400)


_ERRORS: dict[Any, ExceptionHandler] = {
    ApiError: _api_error,
    HTTPException: _http_error,
    Exception: _fault,
    ClientDisconnect: _gone,
}


def error_answer(error: ApiError) -> Response:
    """Return the response for an error, in OpenAI's shape."""
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.body(), error.status, headers, media_type="application/json")


def _add_health(routes: DocumentedRoutes, sources: Sources, readiness: Callable[[], Readiness]) -> None:
    @routes.get("/health", refer(Health))
    async def health(_: Request) -> Response:
        """The process is alive."""
        return json_answer(Health())

    @routes.get("/ready", refer(Ready))
    async def ready(_: Request) -> Response:
        """200 once at least one engine answers and its feed has caught up (or had its time), else 503."""
        state = readiness()
        engines = {
            status.engine_id: EngineBrief(status.up, status.problem, status.held, status.feed_state)
            for status in sources.fleet
        }
        prompts = {
            model: PromptsBrief(one.how, one.source, one.by, one.reason, one.problem, one.remedy)
            for model, one in sources.tokenizer_origins().items()
        }
        ready = Ready(state.ready, state.reason, engines, prompts)
        return json_answer(ready, 200 if state.ready else 503)

    @routes.get("/version", refer(Version))
    async def version(_: Request) -> Response:
        """Version of kvatlas and Python."""
        return json_answer(Version(__version__))


def _add_metrics(routes: DocumentedRoutes, view: OpsView) -> None:
    @routes.get("/metrics")
    async def metrics(_: Request) -> Response:
        """Prometheus text format. Made in the event loop's thread, since it reads live objects."""
        return Response(await view.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_models(routes: DocumentedRoutes, sources: Sources) -> None:
    @routes.get("/v1/models", refer(ModelList))
    async def models(request: Request) -> Response:
        """Models of all engines that are up, and which the client's key may use."""
        return json_answer(ModelList(_cards(sources, request)))

    @routes.get("/v1/models/{model:path}", refer(ModelCard))
    async def model(request: Request) -> Response:
        """One model's card."""
        model = request.path_params["model"]
        card = next((card for card in _cards(sources, request) if card.id == model), None)
        if card is None:
            raise model_not_found(model)
        return json_answer(card)


def _cards(sources: Sources, request: Request) -> list[ModelCard]:
    """Return the cards of served models and their aliases that the client may use."""
    tenant: Tenant | None = request.scope.get(TENANT)
    cards = {card.id: card for card in sources.fleet.model_cards()}
    for name, models in () if sources.aliases is None else sources.aliases.items():
        behind = next((cards[to] for to in models if to in cards), None)
        if behind is not None:
            cards[name] = msgspec.structs.replace(behind, id=name, root=behind.id)
    return [card for card in cards.values() if tenant is None or tenant.may_use(card.id)]


def _add_insight(
    routes: DocumentedRoutes, planner: Planner, sources: Sources, view: OpsView, body_bytes_max: int
) -> None:
    @routes.get("/kvatlas/engines", {"type": "array", "items": refer(EngineView)})
    async def engines(_: Request) -> Response:
        """Every engine as seen by the router."""
        return json_answer(await view.engines())

    @routes.get(
        "/kvatlas/problems",
        {"type": "object", "additionalProperties": {"type": "array", "items": refer(EngineProblem)}},
    )
    async def problems(_: Request) -> Response:
        """Problems and remedies by engine; an engine without problems has an empty list."""
        views: list[dict[str, Any]] = msgspec.to_builtins(await view.engines())
        return json_answer({seen["engine"]: list(engine_problems(seen)) for seen in views})

    @routes.get("/kvatlas/prefixes", {"type": "array", "items": refer(PrefixView)})
    async def prefixes(_: Request) -> Response:
        """Return the most common prompt prefixes, shorter ones first, and the engines that hold them."""
        return json_answer(await view.prefixes())

    @routes.get("/kvatlas/sources", {"type": "object", "additionalProperties": refer(SourceStats)})
    async def fleet_sources(_: Request) -> Response:
        """State of the sources of engines."""
        known = {} if sources.origins is None else sources.origins.stats
        return json_answer(dict(known))

    @routes.get("/kvatlas/usage")
    async def usage(_: Request) -> Response:
        """The usage record: a line for each request, for bills and `kvatlas advise --router`."""
        log = sources.usage
        if log is None:
            raise usage_off()
        return StreamingResponse(log.read_back(), media_type="application/x-ndjson")

    @routes.post("/kvatlas/explain", {"type": "object"}, query=("path", "tenant"))
    async def explain_request(request: Request) -> Response:
        """Explain how this request would be routed; nothing is forwarded. ``?path=`` is its path, by default
        that of a chat (messages), a completion (prompt) or a response (input); ``?tenant=`` the tenant of the
        request, if caches are isolated."""
        _check_json(request)
        body = await read_body(request, body_bytes_max)
        tenant, gate = request.query_params.get("tenant"), sources.gate
        if tenant is not None and gate is not None and gate.isolation is not None:
            salt = partial(gate.isolation.salt, tenant, gate.keys.rules(tenant))
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
        targets = planner.slo_targets
        if planner.reads_claims or targets is not None:
            now = time.monotonic()
            inbound.claim = read_claim(headers, in_body=peeked.priority, arrived_s=now, targets=targets)
        return json_answer(explain(await planner.explain(inbound), PROMPT_APIS[path]))


def _check_json(request: Request) -> None:
    """Require JSON: a page of another origin cannot send it without a CORS preflight. Raises
    ``ApiError``."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise not_json(kind)


def _add_requests(routes: DocumentedRoutes, view: OpsView) -> None:
    @routes.get("/kvatlas/requests", {"type": "array", "items": refer(LiveRequest)})
    async def requests(_: Request) -> Response:
        """Requests in progress, oldest first, with their stage, engine and reasons."""
        return json_answer(await view.requests())

    @routes.get("/kvatlas/receipts", {"type": "array", "items": refer(ReceiptView)}, query=("request_id",))
    async def receipts(request: Request) -> Response:
        """The latest receipts, oldest first; with ``?request_id=`` all stored ones of one request."""
        return json_answer(await view.receipts(request.query_params.get("request_id", "")))

    @routes.get("/kvatlas/answers", {"type": "array", "items": refer(EndedRequest)}, query=("request_id",))
    async def answers(request: Request) -> Response:
        """The latest ended requests, oldest first. With ``?request_id=`` all stored ones that match: an id,
        its beginning, or the id in an engine's answer (``chatcmpl-ID``)."""
        return json_answer(await view.answers(request.query_params.get("request_id", "")))

    @routes.get("/kvatlas/history", refer(RecentHistory))
    async def history(_: Request) -> Response:
        """Counts of the last five minutes, in intervals of a few seconds."""
        return json_answer(await view.history())


def _add_page(routes: DocumentedRoutes) -> None:
    async def status_page(_: Request) -> Response:
        """The status page, for browsers."""
        return page()

    async def to_status_page(_: Request) -> Response:
        """Redirect to the status page. The address is relative, as a proxy in front may add a path prefix."""
        return Response(status_code=307, headers={"location": CONTROL_PREFIX.removeprefix("/")})

    routes.add(CONTROL_PREFIX, status_page, "GET")
    routes.add("/", to_status_page, "GET")
    routes.add(CONTROL_PREFIX.rstrip("/"), to_status_page, "GET")


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


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Read a request's body. Raises ``ApiError`` if it is over the limit."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit_bytes:
            error = body_too_large(limit_bytes)
            error.headers = (*error.headers, (b"connection", b"close"))  # the rest is not read
            raise error
    return cast(bytes, body)


def json_answer(content: Any, status: int = 200) -> Response:
    """Return ``content`` as JSON with a newline at its end."""
    return Response(msgspec.json.encode(content) + b"\n", status, media_type="application/json")
