"""``/admin/engines`` over HTTP: who asks, how often, what was done, and a line in the log for each change.

Always true: nothing is read of a request, and nothing done, before its sender is known and within their
rate; every attempt of a known sender to change something is in the log, also a refused one. Of attempts by
nobody known there is one line a second at most, with the number of those it stands for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import structlog
from fastapi import FastAPI, Request, Response

from router import __version__
from router.api.admin.actions import FleetActions
from router.api.admin.authenticator import Authenticator
from router.api.admin.stats import AdminStats
from router.api.app import add_errors, json_answer, read_body
from router.fleet.identity import EngineAddress
from router.observe.log_throttle import LogThrottle
from router.openai.errors import ApiError, bad_request

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
) -> FastAPI:
    """The application for paths under ``PREFIX``; ``settled`` is awaited before a change is answered."""
    app = FastAPI(
        title="kvatlas admin",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    add_errors(app)
    _add_routes(app, actions, _Audit(authenticator, stats), settled)
    return app


class _Audit:
    """Lets a request in and writes down what became of it."""

    def __init__(self, authenticator: Authenticator, stats: AdminStats) -> None:
        self._door = authenticator
        self._stats = stats
        self._seldom = LogThrottle(_REFUSED_EVERY_S)

    async def enter(self, request: Request, action: str) -> str:
        """Who asks. Raises ``ApiError``; a refused change is in the log."""
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
        """Carry a change out, and write down its outcome. Raises what ``work`` raises."""
        try:
            outcome = work()
        except ApiError as error:
            self._refused(request, action, who, engine, error)
            raise
        self._stats.changes[action] = self._stats.changes.get(action, 0) + 1
        self._write(request, action, who, engine, outcome={k: v for k, v in outcome.items() if k != "engine"})
        return outcome

    def malformed(self, request: Request, action: str, who: str, error: ApiError) -> None:
        """A change that could not even be understood."""
        self._refused(request, action, who, "", error)

    def _refused(self, request: Request, action: str, who: str, engine: str, error: ApiError) -> None:
        self._stats.refused[error.code] = self._stats.refused.get(error.code, 0) + 1
        if action == "list":
            return
        more: dict[str, Any] = {}
        if who == _UNKNOWN:  # anybody can cause these
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

    async def body(request: Request, action: str, who: str, kind: type[_T]) -> _T:
        try:
            return _decode(await read_body(request, _BODY_BYTES_MAX), kind)
        except ApiError as error:
            audit.malformed(request, action, who, error)
            raise

    @app.get("/admin/engines")
    async def listing(request: Request) -> Response:
        """Every engine with its sources, every server kept out, every source."""
        await audit.enter(request, "list")
        return json_answer(actions.listing())

    @app.post("/admin/engines")
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

    @app.delete("/admin/engines")
    async def remove(request: Request) -> Response:
        """Remove a server: ``?engine=http://host:port``."""
        who = await audit.enter(request, "remove")
        name = request.query_params.get("engine", "").rstrip("/")
        return json_answer(await changed(request, "remove", who, name, lambda: actions.remove(name, who)))

    @app.post("/admin/engines/drain")
    async def drain(request: Request) -> Response:
        """No new requests there: ``{"engine": ...}``."""
        who = await audit.enter(request, "drain")
        name = (await body(request, "drain", who, _Name)).engine.rstrip("/")
        return json_answer(await changed(request, "drain", who, name, lambda: actions.drain(name, who)))

    @app.post("/admin/engines/undrain")
    async def undrain(request: Request) -> Response:
        """New requests again: ``{"engine": ...}``."""
        who = await audit.enter(request, "undrain")
        name = (await body(request, "undrain", who, _Name)).engine.rstrip("/")
        return json_answer(await changed(request, "undrain", who, name, lambda: actions.undrain(name)))


def _decode(raw: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request("invalid_json", f"The request body cannot be used: {error}") from None
