"""The router's own endpoints, on the public port and on the ops port.

Health, readiness, version and models need no data of other clients, so the public port has them too
(``create_control``). Everything else, with data of all clients, is on the ops port only (``ops_app.py``,
which one process loads). Endpoints of engines go through the proxy instead. Errors are as in OpenAI's API.

Invariant: unless ``server.ops_port`` is "public", the clients' port serves none of the ops port's paths, in
any spelling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvatlas import __version__
from kvatlas.router.admission.tenants import Tenant
from kvatlas.router.api.answers import (
    READY_PROBLEMS_MAX,
    EngineBrief,
    Health,
    ModelList,
    PromptsBrief,
    Ready,
    Version,
)
from kvatlas.router.api.asgi import OwnAnswer, error_answer, json_answer
from kvatlas.router.api.findings import current_findings
from kvatlas.router.api.metrics_page import Sources
from kvatlas.router.api.readiness import Readiness
from kvatlas.router.fleet.status import ModelCard
from kvatlas.router.http.asgi import Application
from kvatlas.router.observe.findings import BAD, Severity, counts
from kvatlas.router.openai.errors import (
    ApiError,
    method_not_allowed,
    model_not_found,
)
from kvatlas.router.openai.members import run_cooperatively

# Key of the ASGI scope for the ``Tenant`` of a request's key.
TENANT = "kvatlas.tenant"
CONTROL_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/v1/models"})
CONTROL_PREFIX = "/kvatlas/"


def is_control(path: str) -> bool:
    """Whether the router answers this path itself."""
    return path in CONTROL_PATHS or path.startswith((CONTROL_PREFIX, "/v1/models/"))


def is_insight(path: str) -> bool:
    """Whether it shows the fleet or other clients."""
    return path == "/metrics" or path.startswith(CONTROL_PREFIX)


def create_control(
    sources: Sources, *, readiness: Callable[[], Readiness], refusal: Callable[[str], ApiError]
) -> Application:
    """Make the application for the public port's ``is_control`` paths; ``refusal``: for unavailable ones."""
    control = Control(sources, readiness)

    async def found(scope: Any) -> OwnAnswer:
        path, method = scope["path"], scope["method"]
        if is_insight(path):
            raise refusal(path)
        if method not in {"GET", "HEAD"}:
            raise method_not_allowed(method, path, "GET, HEAD")
        match path:
            case "/health":
                return control.health()
            case "/ready":
                return await control.ready()
            case "/version":
                return control.version()
            case "/v1/models":
                return control.models(scope)
        return control.model(scope, path.removeprefix("/v1/models/"))

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        try:
            said = await found(scope)
        except ApiError as error:
            said = error_answer(error, scope)
        await said(scope, receive, send)

    return answer


class Control:
    """Endpoints that both ports have."""

    def __init__(self, sources: Sources, readiness: Callable[[], Readiness]) -> None:
        self._sources = sources
        self._readiness = readiness

    def health(self) -> OwnAnswer:
        """The process is alive."""
        return json_answer(Health())

    async def ready(self) -> OwnAnswer:
        """200 once at least one engine answers and its feed has caught up (or had its time), else 503."""
        state = self._readiness()
        found = await run_cooperatively(current_findings(self._sources))
        engines = {
            status.engine_id: EngineBrief(status.up, status.problem, status.held, status.feed_state)
            for status in self._sources.fleet
        }
        prompts = {
            model: PromptsBrief(one.how, one.source, one.by, one.reason, one.problem, one.remedy)
            for model, one in self._sources.tokenizer_origins().items()
        }
        bad = [one for one in found if one.severity in BAD]
        bad.sort(key=lambda one: one.severity is not Severity.ERROR)
        shown = bad[:READY_PROBLEMS_MAX]
        ready = Ready(state.ready, state.reason, engines, prompts, counts(bad), shown)
        return json_answer(ready, 200 if state.ready else 503)

    def version(self) -> OwnAnswer:
        """Version of kvatlas and Python."""
        return json_answer(Version(__version__))

    def models(self, scope: Any) -> OwnAnswer:
        """Models of all engines that are up, and which the client's key may use."""
        return json_answer(ModelList(_cards(self._sources, scope)))

    def model(self, scope: Any, name: str) -> OwnAnswer:
        """One model's card."""
        card = next((card for card in _cards(self._sources, scope) if card.id == name), None)
        if card is None:
            raise model_not_found(name)
        return json_answer(card)


def _cards(sources: Sources, scope: Any) -> list[ModelCard]:
    """Return the cards of served models and their aliases that the client may use."""
    tenant: Tenant | None = scope.get(TENANT)
    cards = {card.id: card for card in sources.fleet.model_cards()}
    for name, models in () if sources.aliases is None else sources.aliases.items():
        behind = next((cards[to] for to in models if to in cards), None)
        if behind is not None:
            cards[name] = msgspec.structs.replace(behind, id=name, root=behind.id)
    return [card for card in cards.values() if tenant is None or tenant.may_use(card.id)]
