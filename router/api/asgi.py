"""Bodies, answers and errors of the router's own applications, in OpenAI's shape."""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvatlas.router.http.request_cycle import request_id_of
from kvatlas.router.observe.requests import LogThrottle
from kvatlas.router.openai.errors import (
    ApiError,
    body_too_large,
    internal_error,
    method_not_allowed,
    unknown_path,
)

_log = structlog.get_logger()
# Anyone can be refused: one line a second for each code.
_refusals = LogThrottle(1.0)
_PATH_CHARS_MAX = 200


def add_errors(app: Starlette) -> None:
    """Convert every error to OpenAI's shape."""

    async def api_error(request: Request, error: Any) -> Response:
        return error_answer(error, request.scope)

    async def http_error(request: Request, error: Any) -> Response:
        """Convert the framework's own errors: an unknown path, or an unsupported method."""
        path = request.url.path
        if error.status_code == 405:
            allow = ", ".join(sorted((error.headers or {}).get("Allow", "GET").split(", ")))
            return error_answer(method_not_allowed(request.method, path, allow), request.scope)
        return error_answer(unknown_path(path, error.status_code), request.scope)

    async def fault(request: Request, error: Exception) -> Response:
        """Handle a bug of the router; the server logs it."""
        return error_answer(internal_error(), request.scope)

    async def gone(_: Request, error: Exception) -> Response:
        """Handle a client that disconnected: no response is sent."""
        return Response(status_code=400)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, fault)
    app.add_exception_handler(ClientDisconnect, gone)


def error_answer(error: ApiError, scope: Any) -> Response:
    """Return the response for an error of this request, in OpenAI's shape, and log a refusal."""
    headers = {name.decode(): value.decode() for name, value in error.headers}
    request_id = headers["x-request-id"] = request_id_of(scope["headers"]).decode("latin-1")
    if error.status in {401, 403, 429}:
        unsaid = _refusals.due(error.code, time.monotonic())
        if unsaid is not None:
            _log.warning(
                "request refused",
                status=error.status,
                code=error.code,
                path=scope["path"][:_PATH_CHARS_MAX],
                request_id=request_id,
                **({"unsaid": unsaid} if unsaid else {}),
            )
    return Response(error.body(), error.status, headers, media_type="application/json")


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
