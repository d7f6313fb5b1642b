"""``/admin/engines`` over HTTP: authentication, rate limits, and a log line for each change.

Invariants: nothing of a request is read or done before its sender is authenticated and within their rate;
every attempt of an authenticated sender to change something is logged, also a refused one. Attempts by
unknown senders are logged at most once a second, with their number.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import structlog
from fastapi import FastAPI, Request, Response

from kvatlas.router.api.admin_actions import FleetActions
from kvatlas.router.api.admin_auth import AdminStats, Authenticator
from kvatlas.router.api.asgi import read_body
from kvatlas.router.api.framework import add_errors, as_json
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.error_texts import fields_of
from kvatlas.router.observe.log_throttle import LogThrottle
from kvatlas.router.openai.errors import ApiError, bad_request

_log = structlog.get_logger()
_BODY_BYTES_MAX = 64 * 1024
_TEXT_MAX = 200
_UNKNOWN = "unknown"
_REFUSED_EVERY_S = 1.0
# In what msgspec says of a body.
_FIELD = re.compile(r"field `(\w+)`|`\$\.(\w+)")
_S = TypeVar("_S", bound=msgspec.Struct)


class _Engine(EngineAddress, frozen=True, forbid_unknown_fields=True):
    pass


class _Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine: str


class _Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine: str
    deadline_s: float | None = None


def create_admin(
    actions: FleetActions,
    authenticator: Authenticator,
    stats: AdminStats,
    settled: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """Make the application for ``/admin/``; ``settled`` is awaited before a change is answered."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_routes(app, actions, _Audit(authenticator, stats), settled)
    add_errors(app, paths="docs/discovery.md lists the paths of the admin API")
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
            who = await self._door.admit(request.scope)
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


def _add_routes(
    app: FastAPI, actions: FleetActions, audit: _Audit, settled: Callable[[], Awaitable[None]] | None
) -> None:
    async def changed(
        request: Request, action: str, who: str, engine: str, work: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        outcome = audit.change(request, action, who, engine, work)
        if settled is not None:
            await settled()
        return outcome

    async def body(request: Request, action: str, who: str, kind: type[_S]) -> _S:
        try:
            return _decode(await read_body(request.receive, _BODY_BYTES_MAX), kind)
        except ApiError as error:
            audit.malformed(request, action, who, error)
            raise

    async def listing(request: Request) -> Response:
        """Every engine with its sources, every removed server, every source."""
        await audit.enter(request, "list")
        return as_json(actions.listing())

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
        return as_json(outcome, status)

    async def remove(request: Request) -> Response:
        """Remove a server: ``?engine=http://host:port``."""
        who = await audit.enter(request, "remove")
        name = request.query_params.get("engine", "").rstrip("/")
        return as_json(await changed(request, "remove", who, name, lambda: actions.remove(name, who)))

    async def drain(request: Request) -> Response:
        """Stop new requests: ``{"engine": ..., "deadline_s": ...}``."""
        who = await audit.enter(request, "drain")
        given = await body(request, "drain", who, _Drain)
        name = given.engine.rstrip("/")

        def work() -> dict[str, Any]:
            return actions.drain(name, who, given.deadline_s)

        return as_json(await changed(request, "drain", who, name, work))

    async def undrain(request: Request) -> Response:
        """Allow new requests again: ``{"engine": ...}``."""
        who = await audit.enter(request, "undrain")
        name = (await body(request, "undrain", who, _Name)).engine.rstrip("/")
        return as_json(await changed(request, "undrain", who, name, lambda: actions.undrain(name)))

    app.api_route("/admin/engines", methods=["GET", "HEAD"])(listing)
    app.post("/admin/engines")(add)
    app.delete("/admin/engines")(remove)
    app.post("/admin/engines/drain")(drain)
    app.post("/admin/engines/undrain")(undrain)


def _decode(raw: bytes, kind: type[_S]) -> _S:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = (
            f"The request body cannot be used: {error}. Send one JSON object; its fields: {fields_of(kind)}."
        )
        if not isinstance(error, msgspec.ValidationError):
            raise bad_request("invalid_json", message) from None
        named = _FIELD.search(str(error))
        raise bad_request("invalid_type", message, param=named and (named[1] or named[2])) from None
