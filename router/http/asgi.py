"""A client's request for an ASGI application, which the ports and endpoints of the router itself are.

What engines answer has none of this: it takes the ``ClientRequest``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from kvatlas.router.http.request_cycle import ClientRequest, request_id_of

Message = dict[str, Any]
Application = Callable[[Any, Any, Any], Awaitable[None]]
"""ASGI 3."""
Answering = Callable[[ClientRequest], Awaitable[None]]


def answering(app: Any) -> Answering:
    """How this application takes a request: by its own ``answer``, or as ASGI."""
    own: Answering | None = getattr(app, "answer", None)
    return partial(call_asgi, app) if own is None else own


def connection_scope(
    transport: asyncio.BaseTransport | None = None, state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the part that all requests of a connection share; without ``transport``: of one that is
    another's. ``state`` is the lifespan's."""
    told = (lambda name: None) if transport is None else transport.get_extra_info
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "scheme": "https" if told("sslcontext") else "http",
        "root_path": "",
        "server": _address(told("sockname")),
        "client": _address(told("peername")),
        "state": state or {},
    }


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


async def call_asgi(app: Application, request: ClientRequest) -> None:
    """Have an application answer."""
    head, shared = request.head, request.connection_scope
    scope = {
        **shared,
        "http_version": head.version,
        "method": head.method,
        "path": head.path,
        "raw_path": head.raw_path,
        "query_string": head.query,
        "headers": head.fields,
        "state": {**shared["state"]},
    }
    call = _Call(request)
    await app(scope, call.receive, call.send)


class _Call(msgspec.Struct, eq=False):
    _request: ClientRequest
    _next: str = "http.response.start"
    """Type of the message that may be sent."""

    async def receive(self) -> Message:
        piece = await self._request.read()
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece[0], "more_body": piece[1]}

    async def send(self, message: Message) -> None:
        if message["type"] != self._next:
            raise RuntimeError(f"expected {self._next or 'nothing more'}, got {message['type']}")
        if self._next == "http.response.start":
            self._next = "http.response.body"
            fields = list(message.get("headers", ()))
            if all(name != b"x-request-id" for name, _ in fields):
                fields.append((b"x-request-id", request_id_of(self._request.head.fields)))
            self._request.start(message["status"], fields, None)
            return
        more = message.get("more_body", False)
        self._next = "http.response.body" if more else ""
        if (waits := self._request.write(message.get("body", b""), more=more)) is not None:
            await waits
