"""``/admin/engines`` over HTTP: who asks, how often, what was done, and a line in the log for each change.

Always true: nothing is read of a request, and nothing done, before its sender is known and within their
rate; every attempt to change something is in the log, also a refused one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import structlog
from fastapi import FastAPI, Request, Response

from router import __version__
from router.api.admin.actions import FleetDesk
from router.api.admin.rate_limit import RateLimit
from router.api.admin.stats import AdminStats
from router.api.admin.tokens import TokenFile
from router.api.app import add_errors, json_answer, read_body
from router.fleet.identity import Engine
from router.openai.errors import ApiError, bad_request

PREFIX = "/admin/"
PEER = "kvatlas.peer"
"""Where the listener puts the common name of a client certificate into the ASGI scope."""
_log = structlog.get_logger()
_BODY_BYTES_MAX = 64 * 1024
_NO_RETRY = (b"x-should-retry", b"false")
_TEXT_MAX = 200
_T = TypeVar("_T")


class _Engine(Engine, frozen=True, forbid_unknown_fields=True):
    pass


class _Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine: str


class Doorkeeper:
    """Knows who may come in, and how often. ``mutual``: connections come with a checked certificate."""

    def __init__(
        self, tokens: TokenFile | None, *, mutual: bool, per_minute: float, clock: Callable[[], float]
    ) -> None:
        self._tokens = tokens
        self._mutual = mutual
        self._limit = RateLimit(per_minute)
        self._clock = clock

    def admit(self, request: Request) -> str:
        """Who asks. Raises ``ApiError``."""
        who = self._who(request)
        wait_s = self._limit.take("" if who is None else f"={who}", self._clock())
        if wait_s:
            raise ApiError(
                429,
                "admin_rate_limited",
                "Rate limit exceeded (admin.requests_per_minute); retry later.",
                kind="rate_limit_error",
                headers=((b"retry-after", b"%d" % wait_s),),
            )
        if who is None:
            raise ApiError(
                401,
                "admin_unauthorized",
                "Not authorized: send Authorization: Bearer with a token from admin.token_file.",
                kind="authentication_error",
                headers=((b"www-authenticate", b'Bearer realm="kvatlas admin"'), _NO_RETRY),
            )
        return who

    def _who(self, request: Request) -> str | None:
        peer: str | None = request.scope.get(PEER) if self._mutual else None
        if self._tokens is None:
            return peer
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        who = self._tokens.who(token.strip().encode("utf-8", "replace"))
        if scheme.lower() != "bearer" or (self._mutual and peer is None):
            return None
        return who


def create_admin(desk: FleetDesk, door: Doorkeeper, stats: AdminStats) -> FastAPI:
    """The application for paths under ``PREFIX``."""
    app = FastAPI(
        title="kvatlas admin",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    add_errors(app)
    _add_routes(app, desk, _Audit(door, stats))
    return app


class _Audit:
    """Lets a request in and writes down what became of it."""

    def __init__(self, door: Doorkeeper, stats: AdminStats) -> None:
        self._door = door
        self._stats = stats

    def enter(self, request: Request, action: str) -> str:
        """Who asks. Raises ``ApiError``; a refused change is in the log."""
        try:
            who = self._door.admit(request)
        except ApiError as error:
            self._refused(request, action, "unknown", "", error)
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
        if action != "list":
            self._write(request, action, who, engine, refused=error.code, status=error.status)

    def _write(self, request: Request, action: str, who: str, engine: str, **more: Any) -> None:
        client = request.client.host if request.client is not None else ""
        _log.info("admin", action=action, who=who, engine=engine[:_TEXT_MAX], client=client, **more)


def _add_routes(app: FastAPI, desk: FleetDesk, audit: _Audit) -> None:
    async def body(request: Request, action: str, who: str, kind: type[_T]) -> _T:
        try:
            return _decode(await read_body(request, _BODY_BYTES_MAX), kind)
        except ApiError as error:
            audit.malformed(request, action, who, error)
            raise

    @app.get("/admin/engines")
    async def listing(request: Request) -> Response:
        """Every engine with its sources, every server kept out, every source."""
        audit.enter(request, "list")
        return json_answer(desk.listing())

    @app.post("/admin/engines")
    async def add(request: Request) -> Response:
        """Add an engine: the keys of ``[[engines]]``."""
        who = audit.enter(request, "add")
        given = await body(request, "add", who, _Engine)
        engine = Engine(*(getattr(given, name) for name in Engine.__struct_fields__))
        status = 200

        def work() -> dict[str, Any]:
            nonlocal status
            changed, outcome = desk.add(engine)
            status = 201 if changed else 200
            return outcome

        return json_answer(audit.change(request, "add", who, engine.engine_id, work), status)

    @app.delete("/admin/engines")
    async def remove(request: Request) -> Response:
        """Remove a server: ``?engine=http://host:port``."""
        who = audit.enter(request, "remove")
        name = request.query_params.get("engine", "").rstrip("/")
        return json_answer(audit.change(request, "remove", who, name, lambda: desk.remove(name, who)))

    @app.post("/admin/engines/drain")
    async def drain(request: Request) -> Response:
        """No new requests there: ``{"engine": ...}``."""
        who = audit.enter(request, "drain")
        name = (await body(request, "drain", who, _Name)).engine.rstrip("/")
        return json_answer(audit.change(request, "drain", who, name, lambda: desk.drain(name, who)))

    @app.post("/admin/engines/undrain")
    async def undrain(request: Request) -> Response:
        """New requests again: ``{"engine": ...}``."""
        who = audit.enter(request, "undrain")
        name = (await body(request, "undrain", who, _Name)).engine.rstrip("/")
        return json_answer(audit.change(request, "undrain", who, name, lambda: desk.undrain(name)))


def _decode(raw: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request("invalid_json", f"The request body cannot be used: {error}") from None
