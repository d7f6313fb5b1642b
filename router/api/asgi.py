"""Bodies and answers of the router's own endpoints, errors in OpenAI's shape.

Every process serves some of these endpoints and must stay small, so nothing here needs a framework. What only
some processes serve (ops port, admin API) is built with FastAPI (``framework.py``).
"""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec

from kvatlas.router.http.refusal_log import RefusalLog
from kvatlas.router.http.request_cycle import ClientRequest, answer_whole, request_id_of
from kvatlas.router.openai.errors import ApiError, body_too_large

_refusals = RefusalLog(time.monotonic)
JSON = b"application/json"


class ClientLeftError(Exception):
    """The client disconnected before its request was complete: no response is sent."""


class OwnAnswer(msgspec.Struct, frozen=True):
    """A whole response, and an ASGI application that sends it. ``kind``: its content type, "" for none."""

    body: bytes = b""
    status: int = 200
    kind: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def answer(self, request: ClientRequest) -> None:
        fields = [*self._fields(), (b"x-request-id", request_id_of(request.head.fields))]
        await answer_whole(request, self.status, fields, self.body)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self._fields()})
        await send({"type": "http.response.body", "body": self.body})

    def _fields(self) -> list[tuple[bytes, bytes]]:
        headers = [*self.headers]
        if self.status != 204:
            headers.append((b"content-length", b"%d" % len(self.body)))
        if self.kind:
            headers.append((b"content-type", self.kind))
        return headers


def error_answer(error: ApiError, scope: Any) -> OwnAnswer:
    """Return the response for an error of this request, in OpenAI's shape, and log a refusal."""
    request_id = request_id_of(scope["headers"])
    _refusals.note(error, request_id, path=scope["path"])
    return OwnAnswer(error.body(), error.status, JSON, (*error.headers, (b"x-request-id", request_id)))


async def read_body(receive: Any, limit_bytes: int) -> bytes:
    """Read a request's body. Raises ``ApiError`` if it is over the limit, and ``ClientLeftError``."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientLeftError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit_bytes:
            error = body_too_large(limit_bytes)
            error.headers = (*error.headers, (b"connection", b"close"))  # the rest is not read
            raise error
    return cast(bytes, body)


def json_answer(content: Any, status: int = 200) -> OwnAnswer:
    """Return ``content`` as JSON with a newline at its end."""
    return OwnAnswer(msgspec.json.encode(content) + b"\n", status, JSON)
