"""The ops port: metrics and ``/kvatlas/*``, which tell what others send, on a listener of their own.

A browser may be led here by a page of another name (DNS rebinding), so that a port that wants no token
answers by names of this machine alone: its addresses, as probes and scrapes have them, ``localhost``, and
those that settings give. Always true: unless ``server.ops_port`` is "public", the port of clients answers
none of them, whatever the spelling; from another machine they are had with a token only, unless
``server.ops_open`` says otherwise.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from router.admission.gate import KeyGate
from router.api.admin_app import AdminApi
from router.api.admin_auth import Authenticator, TokenFile
from router.api.app import CONTROL_PREFIX, TENANT, error_answer, is_control
from router.http.request_cycle import TOLD
from router.http.server import SIDE_LISTEN, SideServer, listen_config
from router.http.settings import CorsSettings
from router.openai.errors import ApiError, on_ops_port, ops_name_unknown
from router.openai.request import PROMPT_APIS
from router.proxy.headers import without_trailing_slashes

_PORT = re.compile(r":[0-9]*$")
# Needs no token; the page has nothing to show without one.
_OPEN = frozenset({"/health", "/ready", "/version", "/", CONTROL_PREFIX.rstrip("/"), CONTROL_PREFIX})


class OpsPort:
    """``app`` answers everything there, to those whom ``authenticator`` lets in (None: to everybody).
    ``port`` None: there is no such port, or it is another process's, which is ``at`` that place; 0: a free
    one. ``sock`` listens already."""

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
                key="server.ops_port",
                sock=sock,
            )

    @property
    def base_url(self) -> str | None:
        """Where it is reached from its own machine; None where there is none, or it is not open yet."""
        return self.server.base_url if self.server is not None and self.server.started else None

    def refusal(self, path: str) -> ApiError:
        """Return the public port's error for a request to an ops path."""
        where = f"{self._at} (server.ops_port)" if self._at else "which is off (server.ops_port)"
        if self.server is not None and self.server.started:
            where = f"port {self.server.port} of {self.server.config.host} (server.ops_port)"
        return on_ops_port(path, where)

    def listening(self) -> AbstractAsyncContextManager[None]:
        """The port is open, if there is one. Raises ``OSError`` where it cannot be had."""
        return nullcontext() if self.server is None else self.server.listening()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI 3, of the port."""
        answer: Any = self._app
        if scope["type"] == "http":
            refused = await self._refused(Request(scope))
            answer = refused or self._app
        await answer(scope, receive, send)

    async def _refused(self, request: Request) -> Response | None:
        if self._door is None:
            host = request.headers.get("host", "")
            return None if self._is_own(host) else error_answer(ops_name_unknown(host))
        if request.url.path in _OPEN:
            return None
        try:
            await self._door.admit(request)
        except ApiError as error:
            return error_answer(error)
        return None

    def _is_own(self, host: str) -> bool:
        """Whether this is a name of this machine. None at all is no browser's."""
        name = _plain(_PORT.sub("", host))
        return not name or name in self._names or _is_address(name)


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    """Addresses need no name, so none can be made to lead here."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def ops_authenticator(
    tokens: tuple[str, str] | None, *, per_minute: float, clock: Callable[[], float]
) -> Authenticator | None:
    """For tokens of the file that a setting names (setting, path). None: everybody who reaches the port may
    come in. Raises ``AdminFileError`` for an unusable file."""
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


# Which application answers a request: own endpoints, the admin API, a sibling worker, or the proxy.
#
# What shows the whole process group (metrics, ``/kvatlas/*``, the admin API) is answered by the lead of the
# workers alone; another worker passes such a request on (``to_lead``). What browsers may ask from other
# origins is what clients ask: nothing of the fleet, nothing of other clients, nothing of the admin API.


Application = Callable[[Any, Any, Any], Awaitable[None]]
"""ASGI 3."""


class Front:
    """``control``: what ``is_control`` names, on the public port; ``insight``: the same with all that the ops
    port shows; ``ops_here``: the public port shows that too. ``to_lead`` gives None while this process is the
    lead, or alone."""

    def __init__(
        self,
        proxy: Application,
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
        self._cors = Cors(self._answer, cors) if cors.allowed_origins else None
        self._ops_here = ops_here
        self._to_lead = to_lead

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Answer one request (ASGI 3, "http" or "websocket")."""
        cors = self._cors
        if cors is not None and self._for_browsers(scope) and cors.concerns(scope):
            return cors(scope, receive, send)
        return self._answer(scope, receive, send)

    def answer_whole(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Serve a request forwarded by a sibling, in the lead worker."""
        return (self._admin_at(scope["path"]) or self._insight)(scope, receive, send)

    def _for_browsers(self, scope: Any) -> bool:
        path = scope["path"]
        if path in PROMPT_APIS:  # of what clients ask for most nothing more is asked
            return True
        return scope["type"] == "http" and not (_is_insight(path) or self._admin_at(path))

    def _admin_at(self, path: str) -> AdminApi | None:
        return self._admin if self._admin is not None and self._admin.here(path) else None

    def _answer(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Chosen without being waited for: what is awaited is the application that answers."""
        if scope["path"] not in PROMPT_APIS and scope["type"] == "http":
            if scope["path"].endswith("/") and not scope["path"].startswith(CONTROL_PREFIX):
                scope = _as_meant(scope)
            if is_control(scope["path"]):
                return self._answer_control(scope, receive, send)
            if (admin := self._admin_at(scope["path"])) is not None:
                return (self._to_lead() or admin)(scope, receive, send)
        return self._proxy(scope, receive, send)

    async def _answer_control(self, scope: Any, receive: Any, send: Any) -> None:
        """Restrict the list of models to authorised clients."""
        if self._gate is not None and scope["path"].startswith("/v1/"):
            try:
                scope = {**scope, TENANT: self._gate.tenant_of(scope["headers"])}
            except ApiError as error:
                await error_answer(error)(scope, receive, send)
                return
        passed = self._to_lead() if self._ops_here and _is_insight(scope["path"]) else None
        await (passed or self._control)(scope, receive, send)


def _as_meant(scope: Any) -> Any:
    """Own endpoints answer with and without a slash at the end; of other paths the proxy decides."""
    meant = without_trailing_slashes(scope)
    return meant if is_control(meant["path"]) else scope


def _is_insight(path: str) -> bool:
    """Whether it tells of the fleet and of other clients."""
    return path == "/metrics" or path.startswith(CONTROL_PREFIX)


# Cross-origin requests: starlette's middleware, with one policy for all answers.
#
# Engines answer with headers of their own. A client gets the router's only, else one answer would have two
# policies. Requests that no browser made from a page of another origin pass without cost.


class Cors(CORSMiddleware):
    """In front of an ASGI application."""

    def __init__(self, app: Any, settings: CorsSettings) -> None:
        super().__init__(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
        )

    def concerns(self, scope: Any) -> bool:
        """Whether this request's answer depends on where it comes from."""
        if not self.allow_all_origins:
            return True  # caches must know that the origin matters, also where there is none
        return b"origin" in (scope.get(TOLD) or dict(scope["headers"]))

    async def send(self, message: Any, send: Any, request_headers: Headers) -> None:
        """Without what the engine said on the matter."""
        if message["type"] == "http.response.start":
            message["headers"] = [field for field in message.get("headers", ()) if not _is_cors(*field)]
        await super().send(message, send, request_headers)


def _is_cors(name: bytes, value: bytes) -> bool:
    name = name.lower()
    return name.startswith(b"access-control-") or (name == b"vary" and value.strip().lower() == b"origin")
