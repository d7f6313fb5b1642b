"""Lets browsers ask from other origins: starlette's middleware, with one policy for all answers.

Engines answer with headers of their own; a client gets the router's only, else one answer would have two
policies. Requests that no browser made from a page of another origin pass by, without cost.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from router.http.server.request_cycle import TOLD


class CorsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which pages may ask from a browser. The defaults are vLLM's: every page, without credentials."""

    allowed_origins: tuple[str, ...] = ("*",)
    """Origins of pages that may ask, e.g. `https://chat.example.com`; `*` for all, none (`[]`) to leave CORS
    to the engines."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that pages may use; `*` for all."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Request headers that pages may set; `*` for all."""
    allow_credentials: bool = False
    """Whether pages may send cookies and HTTP credentials."""


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
