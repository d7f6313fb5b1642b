"""FastAPI applications of the router, with its errors: the ops port and the admin API.

FastAPI takes 15 MB and 0.4 s of CPU, so only the process that serves one of these imports this module.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from kvatlas.router.api.asgi import ClientLeftError, OwnAnswer, error_answer, json_answer
from kvatlas.router.openai.errors import ApiError, internal_error, method_not_allowed, unknown_path


def add_errors(app: FastAPI, *, paths: str) -> None:
    """Convert every error to OpenAI's shape; ``paths``: how to list those of this application."""

    async def api_error(request: Request, error: Any) -> OwnAnswer:
        return error_answer(error, request.scope)

    async def unknown(request: Request, error: Any) -> OwnAnswer:
        return error_answer(unknown_path(request.scope["path"], error.status_code, paths), request.scope)

    async def not_allowed(request: Request, error: Any) -> OwnAnswer:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "GET").split(", ")))
        refused = method_not_allowed(request.method, request.scope["path"], allow)
        return error_answer(refused, request.scope)

    async def fault(request: Request, error: Exception) -> OwnAnswer:
        """Handle a bug of the router; the server logs it."""
        return error_answer(internal_error(), request.scope)

    async def gone(_: Request, error: Exception) -> OwnAnswer:
        """Handle a client that disconnected: no response is sent."""
        return OwnAnswer(status=400)

    # Any ASGI application may be returned.
    handlers: dict[Any, Any] = {
        ApiError: api_error,
        404: unknown,
        405: not_allowed,
        Exception: fault,
        ClientLeftError: gone,
    }
    for of, handler in handlers.items():
        app.add_exception_handler(of, handler)


def shown(answer: OwnAnswer) -> Response:
    """Return the same as FastAPI's."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers}
    return Response(answer.body, answer.status, headers, answer.kind.decode() or None)


def as_json(content: Any, status: int = 200) -> Response:
    """Return ``content`` as JSON with a newline at its end."""
    return shown(json_answer(content, status))
