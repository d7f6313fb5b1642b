"""The router's own endpoints: which application answers a request, and who may reach the ops port.

Health, readiness, version and models need no data of other clients, so the public port has them too
(``create_control``). Everything else, with data of all clients, is on the ops port only (``ops_app.py``,
which one process loads). Endpoints of engines go through the proxy instead. Errors are as in OpenAI's API.

DNS rebinding can make a browser send requests to the ops port under another host name. So without tokens it
answers only to host names of this machine: its addresses, as probes and scrapes use them, ``localhost``, and
configured names. Invariants: unless ``server.ops_port`` is "public", the clients' port serves none of these
paths, in any spelling; other machines need a token, unless ``server.ops_open`` is set.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from kvatlas import __version__
from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.tenants import Tenant
from kvatlas.router.api.admin_auth import Authenticator, header_of
from kvatlas.router.api.admin_tokens import TokenFile
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
from kvatlas.router.api.cors import Cors
from kvatlas.router.api.findings import current_findings
from kvatlas.router.api.metrics_page import Sources
from kvatlas.router.api.readiness import Readiness
from kvatlas.router.fleet.status import ModelCard
from kvatlas.router.http.asgi import Answering, Application, call_asgi
from kvatlas.router.http.request_cycle import ClientRequest
from kvatlas.router.http.server import listen_config
from kvatlas.router.http.settings import CorsSettings
from kvatlas.router.http.side_ports import SIDE_LISTEN, SideServer
from kvatlas.router.observe.findings import BAD, Severity, counts
from kvatlas.router.openai.apis import PROMPT_APIS
from kvatlas.router.openai.errors import (
    ApiError,
    method_not_allowed,
    model_not_found,
    on_ops_port,
    ops_name_unknown,
)
from kvatlas.router.openai.members import run_cooperatively
from kvatlas.router.proxy.headers import without_trailing_slashes

if TYPE_CHECKING:
    from kvatlas.router.api.admin_app import AdminApi

# Key of the ASGI scope for the ``Tenant`` of a request's key.
TENANT = "kvatlas.tenant"
CONTROL_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/v1/models"})
CONTROL_PREFIX = "/kvatlas/"


def is_control(path: str) -> bool:
    """Whether the router answers this path itself."""
    return path in CONTROL_PATHS or path.startswith((CONTROL_PREFIX, "/v1/models/"))


def create_control(
    sources: Sources, *, readiness: Callable[[], Readiness], refusal: Callable[[str], ApiError]
) -> Application:
    """Make the application for the public port's ``is_control`` paths; ``refusal``: for unavailable ones."""
    control = Control(sources, readiness)

    async def found(scope: Any) -> OwnAnswer:
        path, method = scope["path"], scope["method"]
        if _is_insight(path):
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


# The ops port.


_PORT = re.compile(r":[0-9]*$")
# Paths without a token; the page is empty without one.
_OPEN = frozenset({"/health", "/ready", "/version", "/", CONTROL_PREFIX.rstrip("/"), CONTROL_PREFIX})


class OpsPort:
    """The ops port. ``app`` answers every request that ``authenticator`` admits (None: all).

    ``port`` None: there is no such port, or another process has it, at address ``at``; 0: a free one.
    ``sock`` already listens.
    """

    def __init__(
        self,
        app: Any,
        *,
        host: str,
        port: int | None,
        authenticator: Authenticator | None,
        names: tuple[str, ...] = (),
        sock: socket.socket | None = None,
        at: str = "",
    ) -> None:
        self._app = app
        self._door = authenticator
        self._names = frozenset(map(_plain, ("localhost", socket.gethostname(), host, *names)))
        self._at = at
        self.server: SideServer | None = None
        if port is not None:
            self.server = SideServer(
                listen_config(self, host=host, port=port, listen=SIDE_LISTEN, lifespan="off"),
                name="ops port",
                setting="server.ops_port",
                sock=sock,
            )

    @property
    def base_url(self) -> str | None:
        """Its URL on this machine; None without a port, or before it is open."""
        return self.server.base_url if self.server is not None and self.server.started else None

    def refusal(self, path: str) -> ApiError:
        """Return the public port's error for a request to an ops path."""
        where = f"{self._at} (server.ops_port)" if self._at else "which is off (server.ops_port)"
        if self.server is not None and self.server.started:
            where = f"port {self.server.port} of {self.server.config.host} (server.ops_port)"
        return on_ops_port(path, where)

    def listening(self) -> AbstractAsyncContextManager[None]:
        """Keep the port open, if there is one. Raises ``OSError`` if it cannot be bound."""
        return nullcontext() if self.server is None else self.server.listening()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI 3 application of the port."""
        answer: Any = self._app
        if scope["type"] == "http":
            refused = await self._refused(scope)
            answer = refused or self._app
        await answer(scope, receive, send)

    async def _refused(self, scope: Any) -> OwnAnswer | None:
        if self._door is None:
            host = header_of(scope, b"host")
            return None if self._is_own(host) else error_answer(ops_name_unknown(host), scope)
        if scope["path"] in _OPEN:
            return None
        try:
            await self._door.admit(scope)
        except ApiError as error:
            return error_answer(error, scope)
        return None

    def _is_own(self, host: str) -> bool:
        """Whether this is a host name of this machine. Browsers always send one, so none is accepted."""
        name = _plain(_PORT.sub("", host))
        return not name or name in self._names or _is_address(name)


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    """Whether it is an IP address: those need no DNS, so rebinding does not apply."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def ops_authenticator(
    tokens: tuple[str, str] | None, *, per_minute: float, clock: Callable[[], float]
) -> Authenticator | None:
    """Authenticate by the tokens in the file of a setting (setting, path); None: admit everyone who reaches
    the port. Raises ``AdminFileError`` for an unusable file."""
    if tokens is None:
        return None
    key, path = tokens
    return Authenticator(
        TokenFile(Path(path), key),
        mutual=False,
        per_minute=per_minute,
        clock=clock,
        realm="ops",
        key=key,
        unlimited=True,
    )


# Selects the application for a request: own endpoints, the admin API, a sibling worker, or the proxy.
#
# Data of the whole process group (metrics, ``/kvatlas/*``, the admin API) is served by the lead worker only;
# other workers forward such requests (``to_lead``). CORS is allowed for the endpoints of clients: not for
# data of the fleet or of other clients, and not for the admin API.


class Front:
    """``control``: ``is_control`` paths of the public port; ``insight``: the same with everything of the ops
    port; ``ops_here``: the public port serves that too. ``to_lead`` returns None if this process is the lead,
    or the only one."""

    def __init__(
        self,
        proxy: Answering,
        control: Application,
        insight: Application,
        *,
        admin: AdminApi | None,
        gate: KeyGate | None,
        cors: CorsSettings,
        ops_here: bool,
        to_lead: Callable[[], Application | None],
    ) -> None:
        self._proxy = proxy
        self._control = control
        self._insight = insight
        self._admin = admin
        self._gate = gate
        self._cors = Cors(self._answered, cors) if cors.allowed_origins else None
        self._ops_here = ops_here
        self._to_lead = to_lead

    def answer(self, request: ClientRequest) -> Awaitable[None]:
        """Answer one request."""
        cors, path = self._cors, request.head.path
        # The most common paths need no further checks.
        for_clients = path in PROMPT_APIS
        if (
            cors is not None
            and (for_clients or not (_is_insight(path) or self._admin_at(path)))
            # Caches must know that the origin matters, also without one.
            and (not cors.allow_all_origins or b"origin" in request.head.by_name)
        ):
            return cors.answer(request)
        return self._proxy(request) if for_clients else self._answered(request)

    def answer_whole(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Serve a request forwarded by a sibling, in the lead worker."""
        return (self._admin_at(scope["path"]) or self._insight)(scope, receive, send)

    def _admin_at(self, path: str) -> AdminApi | None:
        return self._admin if self._admin is not None and self._admin.here(path) else None

    def _answered(self, request: ClientRequest) -> Awaitable[None]:
        path = request.head.path
        if path not in PROMPT_APIS:
            if path.endswith("/") and not path.startswith(CONTROL_PREFIX):
                # Without a trailing slash for own endpoints; the proxy decides about other paths.
                meant = without_trailing_slashes(request.head)
                if is_control(meant.path):
                    request.head, path = meant, meant.path
            if is_control(path):
                return call_asgi(self._control_at(path), request)
            if (admin := self._admin_at(path)) is not None:
                return call_asgi(self._to_lead() or admin, request)
        return self._proxy(request)

    def _control_at(self, path: str) -> Application:
        if self._ops_here and _is_insight(path):
            return self._to_lead() or self._insight
        return self._control if self._gate is None or not path.startswith("/v1/") else self._control_of_tenant

    async def _control_of_tenant(self, scope: Any, receive: Any, send: Any) -> None:
        """Restrict the list of models to authorised clients."""
        answer: Application = self._control
        try:
            scope = {**scope, TENANT: cast(KeyGate, self._gate).tenant_of(scope["headers"])}
        except ApiError as error:
            answer = error_answer(error, scope)
        await answer(scope, receive, send)


def _is_insight(path: str) -> bool:
    """Whether it shows the fleet or other clients."""
    return path == "/metrics" or path.startswith(CONTROL_PREFIX)
