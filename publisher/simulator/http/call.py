"""One HTTP exchange of the simulated engine, over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from publisher.simulator.api.protocol import EngineError, malformed

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_BYTES_MAX = 64 << 20

_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")


class Call:
    """One HTTP exchange."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])

    @property
    def query(self) -> dict[str, str]:
        """What the URL asks, by name."""
        return dict(parse_qsl(self._scope["query_string"].decode("latin-1")))

    def priority(self, in_body: int) -> int:
        """The request's priority: the header goes before the body where it is a number
        (vllm/entrypoints/generate/base/serving.py ``_get_priority``, 0.32)."""
        try:
            return int(self.headers[b"x-vllm-priority"])
        except (KeyError, ValueError):
            return in_body

    async def body(self) -> bytes:
        """The request body. Raises ``EngineError`` where it is not JSON by its type, or too large."""
        content_type = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise malformed("Unsupported Media Type: Only 'application/json' is allowed")
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > BODY_BYTES_MAX:
                text = f"the body is larger than {BODY_BYTES_MAX} bytes"
                raise EngineError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
            more = message.get("more_body", False)
        return b"".join(parts)

    async def start(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        """Send the status line and headers."""
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def start_stream(self) -> None:
        """Begin an answer of server-sent events."""
        await self.start(200, _SSE, (b"cache-control", b"no-cache"))

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def reply(
        self, body: bytes, *, status: int = 200, content_type: tuple[bytes, bytes] = _JSON
    ) -> None:
        """Send a whole answer."""
        await self.start(status, content_type, (b"content-length", str(len(body)).encode()))
        await self.write(body, more=False)

    async def reply_json(self, value: Any) -> None:
        """Send ``value`` as JSON with status 200."""
        await self.reply(msgspec.json.encode(value))

    @asynccontextmanager
    async def on_disconnect(self, action: Callable[[], None]) -> AsyncIterator[None]:
        """Call ``action`` if the client goes away within the block; the body must have been read."""
        watcher = asyncio.create_task(self._watch(action))
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self, action: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        action()


class ClientGoneError(Exception):
    """The client closed the connection before its request was read."""
