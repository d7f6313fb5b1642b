"""The admin API of one router: its application, and its own port if it has one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvatlas.router.api.admin_auth import PEER, AdminSettings, AdminStats, Authenticator, TokenFile
from kvatlas.router.api.asgi import add_errors, json_answer, read_body
from kvatlas.router.fleet.engines import DesiredState, EngineAddress, FleetFullError, SourceStats
from kvatlas.router.fleet.sources import check_address
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.http.downstream import DownstreamConnection
from kvatlas.router.http.listener import ListenConfig
from kvatlas.router.http.side_ports import SIDE_LISTEN, SideServer
from kvatlas.router.http.tls import Certificates, server_context
from kvatlas.router.observe.requests import LogThrottle
from kvatlas.router.openai.errors import ApiError, bad_request, engine_not_found, fleet_full
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.others import OthersLoad, others_at

# The admin API's own port, with TLS if configured; the router's own HTTP connections serve it.
#
# Invariant: with a client CA configured, no byte of a request is read from a client without a certificate
# signed by it.


_KEYS = "admin.tls_cert_file, tls_key_file or client_ca_file"


class _Connection(DownstreamConnection):
    def shared_scope(self, transport: asyncio.BaseTransport, app_state: dict[str, Any]) -> dict[str, Any]:
        scope = super().shared_scope(transport, app_state)
        certificate = transport.get_extra_info("peercert")
        if certificate:
            scope[PEER] = common_name(certificate)
        return scope


def make_admin_server(
    app: Any, settings: AdminSettings, certificates: Certificates, sock: socket.socket | None = None
) -> SideServer:
    """Make the separate port's server; ``sock`` already listens. Raises ``TlsError`` for unusable files."""
    context = None
    if settings.tls.given:
        context = certificates.add(server_context(settings.tls, _KEYS), settings.tls, _KEYS)
    config = ListenConfig(
        app,
        protocol=_Connection,
        host=settings.host,
        port=settings.port or 0,
        listen=SIDE_LISTEN,
        lifespan="off",
        tls=context,
    )
    return SideServer(config, name="admin API", setting="admin.port", sock=sock)


def common_name(certificate: dict[str, Any]) -> str:
    """Return the common name in a verified certificate, or its whole subject."""
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    names = [value for key, value in subject if key == "commonName"]
    return str(names[0] if names else subject or "certificate")[:64]


# The admin actions on the fleet, without HTTP: list, add, remove, drain, undrain.
#
# Each change takes effect at once and returns its result. Raises ``ApiError`` for invalid requests.


class FleetActions:
    """``apply`` updates the fleet to the desired state; ``others`` is what siblings and replicas
    have in flight, None where it is not known."""

    def __init__(
        self,
        desired: DesiredState,
        fleet: Fleet[Engine],
        now: Callable[[], float],
        *,
        sources: Callable[[], Mapping[str, SourceStats]],
        apply: Callable[[], None],
        others: Callable[[], Mapping[str, OthersLoad] | None] = dict,
    ) -> None:
        self._others = others
        self._desired = desired
        self._fleet = fleet
        self._now = now
        self._sources = sources
        self._apply = apply

    def listing(self) -> dict[str, Any]:
        """Return every engine, every removed server and every source."""
        return {
            "engines": [self._describe(status) for status in self._fleet],
            "removed": [{"base_url": url, "by": one.by} for url, one in self._desired.removed.items()],
            "sources": {name: msgspec.to_builtins(stats) for name, stats in self._sources().items()},
        }

    def add(self, engine: EngineAddress) -> tuple[bool, dict[str, Any]]:
        """Add an engine or change its addresses. False if nothing changed."""
        engine = msgspec.structs.replace(engine, base_url=engine.base_url.rstrip("/"))
        try:
            check_address(engine)
        except ValueError as error:
            raise bad_request("invalid_engine", str(error), param="base_url") from None
        try:
            changed = self._desired.add(engine)
        except FleetFullError:
            raise fleet_full() from None
        self._apply()
        return changed, {"engine": engine.engine_id, "sources": self._desired.sources(engine.base_url)}

    def remove(self, name: str, who: str) -> dict[str, Any]:
        """Remove a server; its streams continue. It stays removed while other sources still list it."""
        if "#" in name:
            message = (
                f"{name} is one rank of a server; drain it, or remove the server {name.partition('#')[0]}."
            )
            raise bad_request("not_a_server", message, param="engine")
        if not self._desired.remove(name, who):
            raise engine_not_found(name)
        self._apply()
        return {"engine": name, "kept_out": name in self._desired.removed}

    def drain(self, name: str, who: str) -> dict[str, Any]:
        """Stop new requests to an engine, or to all ranks of a server. Running streams continue."""
        self._affected(name)
        self._desired.drain(name, who)
        self._apply()
        requests = sum(self._in_flight(status) for status in self._affected(name))
        return {"engine": name, "requests": requests}

    def undrain(self, name: str) -> dict[str, Any]:
        """End ``drain``. New requests come again, unless the engine is held for another reason too."""
        self._affected(name)
        was = self._desired.undrain(name)
        self._apply()
        held = next((status.held for status in self._affected(name) if status.held), "")
        return {"engine": name, "was_drained": was, "on_hold": held}

    def _affected(self, name: str) -> list[Engine]:
        found = [s for s in self._fleet if name in {s.engine_id, s.engine.base_url}]
        if not found:
            raise engine_not_found(name)
        return found

    def _in_flight(self, status: Engine) -> int:
        """Return the requests in flight at the engine, of this router and of those that report theirs."""
        load, others = status.load.current(self._now()), others_at(status.engine_id, self._others())
        own = max(0, load.running + load.waiting - load.foreign)
        return own if others is None else own + others.running + others.waiting

    def _describe(self, status: Engine) -> dict[str, Any]:
        return {
            "engine": status.engine_id,
            **msgspec.to_builtins(status.engine),
            "sources": self._desired.sources(status.engine.base_url),
            "up": status.up,
            "problem": status.problem,
            "on_hold": status.held,
            "feed_state": status.feed_state,
            "models": [card.id for card in status.models],
            "requests": self._in_flight(status),
        }


# ``/admin/engines`` over HTTP: authentication, rate limits, and a log line for each change.
#
# Invariants: nothing of a request is read or done before its sender is authenticated and within their rate;
# every attempt of an authenticated sender to change something is logged, also a refused one. Attempts by
# unknown senders are logged at most once a second, with their number.


PREFIX = "/admin/"
_log = structlog.get_logger()
_BODY_BYTES_MAX = 64 * 1024
_TEXT_MAX = 200
_UNKNOWN = "unknown"
_REFUSED_EVERY_S = 1.0
_T = TypeVar("_T")


class _Engine(EngineAddress, frozen=True, forbid_unknown_fields=True):
    pass


class _Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine: str


def create_admin(
    actions: FleetActions,
    authenticator: Authenticator,
    stats: AdminStats,
    settled: Callable[[], Awaitable[None]] | None = None,
) -> Starlette:
    """Make the application for paths under ``PREFIX``; ``settled`` is awaited before a change is answered."""
    app = Starlette(routes=_routes(actions, _Audit(authenticator, stats), settled))
    app.router.redirect_slashes = False
    add_errors(app)
    return app


class _Audit:
    """Authorizes requests and logs their outcome."""

    def __init__(self, authenticator: Authenticator, stats: AdminStats) -> None:
        self._door = authenticator
        self._stats = stats
        self._seldom = LogThrottle(_REFUSED_EVERY_S)

    async def enter(self, request: Request, action: str) -> str:
        """Return the authenticated sender. Raises ``ApiError``; a refused change is logged."""
        try:
            who = await self._door.admit(request)
        except ApiError as error:
            self._refused(request, action, _UNKNOWN, "", error)
            raise
        self._stats.requests += 1
        return who

    def change(
        self, request: Request, action: str, who: str, engine: str, work: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Make a change and log its outcome. Raises what ``work`` raises."""
        try:
            outcome = work()
        except ApiError as error:
            self._refused(request, action, who, engine, error)
            raise
        self._stats.changes[action] = self._stats.changes.get(action, 0) + 1
        self._write(request, action, who, engine, outcome={k: v for k, v in outcome.items() if k != "engine"})
        return outcome

    def malformed(self, request: Request, action: str, who: str, error: ApiError) -> None:
        """Log a change whose request could not be parsed."""
        self._refused(request, action, who, "", error)

    def _refused(self, request: Request, action: str, who: str, engine: str, error: ApiError) -> None:
        self._stats.refused[error.code] = self._stats.refused.get(error.code, 0) + 1
        if action == "list":
            return
        more: dict[str, Any] = {}
        if who == _UNKNOWN:  # anyone can cause these
            unsaid = self._seldom.due("", self._door.now())
            if unsaid is None:
                return
            more = {"unsaid": unsaid} if unsaid else {}
        self._write(request, action, who, engine, refused=error.code, status=error.status, **more)

    def _write(self, request: Request, action: str, who: str, engine: str, **more: Any) -> None:
        client = request.client.host if request.client is not None else ""
        _log.info("admin", action=action, who=who, engine=engine[:_TEXT_MAX], client=client, **more)


def _routes(
    actions: FleetActions, audit: _Audit, settled: Callable[[], Awaitable[None]] | None
) -> list[Route]:
    async def changed(
        request: Request, action: str, who: str, engine: str, work: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        outcome = audit.change(request, action, who, engine, work)
        if settled is not None:
            await settled()
        return outcome

    async def body(request: Request, action: str, who: str, kind: type[_T]) -> _T:
        try:
            return _decode(await read_body(request, _BODY_BYTES_MAX), kind)
        except ApiError as error:
            audit.malformed(request, action, who, error)
            raise

    async def listing(request: Request) -> Response:
        """Every engine with its sources, every removed server, every source."""
        await audit.enter(request, "list")
        return json_answer(actions.listing())

    async def add(request: Request) -> Response:
        """Add an engine: the keys of ``[[engines]]``."""
        who = await audit.enter(request, "add")
        given = await body(request, "add", who, _Engine)
        engine = EngineAddress(*(getattr(given, name) for name in EngineAddress.__struct_fields__))
        status = 200

        def work() -> dict[str, Any]:
            nonlocal status
            changed, outcome = actions.add(engine)
            status = 201 if changed else 200
            return outcome

        outcome = await changed(request, "add", who, engine.engine_id, work)
        return json_answer(outcome, status)

    async def remove(request: Request) -> Response:
        """Remove a server: ``?engine=http://host:port``."""
        who = await audit.enter(request, "remove")
        name = request.query_params.get("engine", "").rstrip("/")
        return json_answer(await changed(request, "remove", who, name, lambda: actions.remove(name, who)))

    async def drain(request: Request) -> Response:
        """Stop new requests: ``{"engine": ...}``."""
        who = await audit.enter(request, "drain")
        name = (await body(request, "drain", who, _Name)).engine.rstrip("/")
        return json_answer(await changed(request, "drain", who, name, lambda: actions.drain(name, who)))

    async def undrain(request: Request) -> Response:
        """Allow new requests again: ``{"engine": ...}``."""
        who = await audit.enter(request, "undrain")
        name = (await body(request, "undrain", who, _Name)).engine.rstrip("/")
        return json_answer(await changed(request, "undrain", who, name, lambda: actions.undrain(name)))

    return [
        Route("/admin/engines", listing, methods=["GET"]),
        Route("/admin/engines", add, methods=["POST"]),
        Route("/admin/engines", remove, methods=["DELETE"]),
        Route("/admin/engines/drain", drain, methods=["POST"]),
        Route("/admin/engines/undrain", undrain, methods=["POST"]),
    ]


def _decode(raw: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request("invalid_json", f"The request body cannot be used: {error}") from None


class AdminApi:
    """The admin API. ``settings.enabled`` must be on.

    ``port`` False: another process has the API's own port; ``sock`` already listens there. ``settled`` is
    awaited before a change is answered. Raises ``AdminFileError`` or ``TlsError`` for unusable files.
    """

    def __init__(
        self,
        settings: AdminSettings,
        actions: FleetActions,
        *,
        clock: Callable[[], float],
        certificates: Certificates,
        port: bool = True,
        sock: socket.socket | None = None,
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._public = settings.port is None
        self.stats = AdminStats()
        self.server: SideServer | None = None
        tokens = TokenFile(Path(settings.token_file)) if settings.token_file is not None else None
        authenticator = Authenticator(
            tokens,
            mutual=settings.client_ca_file is not None,
            per_minute=settings.requests_per_minute,
            clock=clock,
        )
        self._app: Any = create_admin(actions, authenticator, self.stats, settled)
        if port and settings.port is not None:
            self.server = make_admin_server(self._app, settings, certificates, sock)

    def here(self, path: str) -> bool:
        """Whether the router's own port serves this path through ``__call__``."""
        return self._public and path.startswith(PREFIX)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI 3."""
        await self._app(scope, receive, send)

    def listening(self) -> AbstractAsyncContextManager[None]:
        """Keep its own port open, if it has one. Raises ``OSError`` if it cannot be bound."""
        return nullcontext() if self.server is None else self.server.listening()
