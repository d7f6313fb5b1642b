"""Endpoints of the router itself on both ports: health, readiness, version, models. Errors are OpenAI's.

They need no client data of others, so the public port has them too (``create_control``). Everything else of
the router's own is on the ops port only: ``ops_app.py``, which one process loads. Endpoints of engines go
through the proxy instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from router import __version__
from router.admission.tenants import Tenant
from router.api.answers import EngineBrief, Health, ModelList, PromptsBrief, Ready, Version
from router.api.metrics_page import Sources
from router.api.views import Readiness
from router.fleet.status import ModelCard
from router.openai.errors import (
    ApiError,
    body_too_large,
    internal_error,
    method_not_allowed,
    model_not_found,
    unknown_path,
)

# Key of the ASGI scope for the ``Tenant`` of a request's key.
TENANT = "kvatlas.tenant"
CONTROL_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/v1/models"})
CONTROL_PREFIX = "/kvatlas/"
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def is_control(path: str) -> bool:
    """Whether the router answers this path itself."""
    return path in CONTROL_PATHS or path.startswith((CONTROL_PREFIX, "/v1/models/"))


def create_control(
    sources: Sources, *, readiness: Callable[[], Readiness], refusal: Callable[[str], ApiError]
) -> Starlette:
    """Make the application for ``is_control`` paths of the public port; ``refusal`` is for unavailable
    ones."""

    async def elsewhere(request: Request) -> Response:
        """Return an error that names the ops port."""
        raise refusal(request.scope["path"])

    control = Control(sources, readiness)
    routes = [
        Route("/health", control.health),
        Route("/ready", control.ready),
        Route("/version", control.version),
        Route("/v1/models", control.models),
        Route("/v1/models/{model:path}", control.model),
        Route("/metrics", elsewhere, methods=_METHODS),
        Route(CONTROL_PREFIX + "{rest:path}", elsewhere, methods=_METHODS),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    add_errors(app)
    return app


class Control:
    """Endpoints that both ports have."""

    def __init__(self, sources: Sources, readiness: Callable[[], Readiness]) -> None:
        self._sources = sources
        self._readiness = readiness

    async def health(self, request: Request) -> Response:
        """The process is alive."""
        return json_answer(Health())

    async def ready(self, request: Request) -> Response:
        """200 once at least one engine answers and its feed has caught up (or had its time), else 503."""
        state = self._readiness()
        engines = {
            status.engine_id: EngineBrief(status.up, status.problem, status.held, status.feed_state)
            for status in self._sources.fleet
        }
        prompts = {
            model: PromptsBrief(one.how, one.source, one.by, one.reason, one.problem, one.remedy)
            for model, one in self._sources.tokenizer_origins().items()
        }
        ready = Ready(state.ready, state.reason, engines, prompts)
        return json_answer(ready, 200 if state.ready else 503)

    async def version(self, request: Request) -> Response:
        """Version of kvatlas and Python."""
        return json_answer(Version(__version__))

    async def models(self, request: Request) -> Response:
        """Models of all engines that are up, and which the client's key may use."""
        return json_answer(ModelList(_cards(self._sources, request)))

    async def model(self, request: Request) -> Response:
        """One model's card."""
        model = request.path_params["model"]
        card = next((card for card in _cards(self._sources, request) if card.id == model), None)
        if card is None:
            raise model_not_found(model)
        return json_answer(card)


def add_errors(app: Starlette) -> None:
    """Convert every error to OpenAI's shape."""

    async def api_error(_: Request, error: Any) -> Response:
        return error_answer(error)

    async def http_error(request: Request, error: Any) -> Response:
        """Convert the framework's own errors: an unknown path, or an unsupported method."""
        path = request.url.path
        if error.status_code == 405:
            allow = ", ".join(sorted((error.headers or {}).get("Allow", "GET").split(", ")))
            return error_answer(method_not_allowed(request.method, path, allow))
        return error_answer(unknown_path(path, error.status_code))

    async def fault(_: Request, error: Exception) -> Response:
        """Handle a bug of the router; the server logs it."""
        return error_answer(internal_error())

    async def gone(_: Request, error: Exception) -> Response:
        """Handle a client that disconnected: no response is sent."""
        return Response(status_code=400)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, fault)
    app.add_exception_handler(ClientDisconnect, gone)


def error_answer(error: ApiError) -> Response:
    """Return the response for an error, in OpenAI's shape."""
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.body(), error.status, headers, media_type="application/json")


def _cards(sources: Sources, request: Request) -> list[ModelCard]:
    """Return the cards of served models and their aliases that the client may use."""
    tenant: Tenant | None = request.scope.get(TENANT)
    cards = {card.id: card for card in sources.fleet.model_cards()}
    for name, models in () if sources.aliases is None else sources.aliases.items():
        behind = next((cards[to] for to in models if to in cards), None)
        if behind is not None:
            cards[name] = msgspec.structs.replace(behind, id=name, root=behind.id)
    return [card for card in cards.values() if tenant is None or tenant.may_use(card.id)]


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
