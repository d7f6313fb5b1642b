"""The proxied path as a raw ASGI application: reads the request whole, has it forwarded, answers errors.

No framework in between: bytes in, bytes out. The request body is forwarded byte-identical; of the two
completion endpoints it is peeked at (model, stream), of other JSON bodies leniently. Everything a client sees
that is not an engine's own answer is an ``ApiError`` in OpenAI's shape and carries the request id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from router.http.client import UpstreamClient
from router.http.disconnect import DisconnectWatch, Receive, Scope, Send
from router.openai.body import Peek, peek_any_size
from router.openai.errors import ApiError, bad_request, body_too_large
from router.openai.request import InboundRequest
from router.proxy.forward import Forwarder, Outbound, Planner
from router.proxy.headers import RequestHead, read_request_headers
from router.proxy.paths import COMPLETION_PATHS, Verdict, judge
from router.proxy.report_mode import screen
from router.proxy.settings import ProxySettings
from router.proxy.stats import ProxyStats

_NO_PEEK = Peek()
_NO_RETRY = ((b"x-should-retry", b"false"),)


class _ClientGoneError(Exception):
    """The client left while its request was still being read."""


class ProxyApp:
    """ASGI 3 application for everything that engines answer. ``close`` it in the loop it ran in."""

    def __init__(
        self,
        planner: Planner,
        settings: ProxySettings | None = None,
        stats: ProxyStats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or ProxySettings()
        self.stats = stats or ProxyStats()
        self.client = UpstreamClient(self.settings, self.stats, clock)
        self._forwarder = Forwarder(
            planner, self.client, settings=self.settings, stats=self.stats, clock=clock
        )

    def close(self) -> None:
        """Close all connections to engines."""
        self.client.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; a websocket is refused."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        self.stats.requests += 1
        self.stats.requests_active += 1
        watch = DisconnectWatch()
        request_id: bytes | None = None
        try:
            client = scope.get("client")
            head = read_request_headers(scope["headers"], client[0] if client else None)
            request_id = head.request_id
            self._check_path(scope["path"])
            out = await self._outbound(scope, head, await self._read_body(head, receive))
            watch.start(scope, receive)
            await self._forwarder.forward(out, send)
        except ApiError as error:
            await self._answer_error(error, request_id, send)
        except _ClientGoneError:
            self.stats.clients_gone += 1
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not watch.gone or task is None:
                raise
            task.uncancel()
            self.stats.clients_gone += 1
        finally:
            watch.stop()
            self.stats.requests_active -= 1

    def _check_path(self, path: str) -> None:
        verdict = judge(path, self.settings.refused_paths, self.settings.passed_paths)
        if verdict is Verdict.FORWARD:
            return
        if verdict is Verdict.UNKNOWN:
            raise ApiError(404, "path_not_found", "Unknown path.", kind="not_found_error")
        self.stats.paths_refused += 1
        message = "This path affects every client of an engine and is not forwarded."
        raise ApiError(403, "path_not_proxied", message, kind="permission_error", headers=_NO_RETRY)

    async def _outbound(self, scope: Scope, head: RequestHead, body: bytes) -> Outbound:
        path, method, query = scope["path"], scope["method"], scope["query_string"]
        if self.settings.kv_cache_report_mode != "pass" and (head.json or path in COMPLETION_PATHS):
            body = screen(body, self.settings.kv_cache_report_mode)
        look = await self._peek(path, method, head, body)
        raw_path = scope.get("raw_path") or path.encode()
        target = b"%b?%b" % (raw_path, query) if query else raw_path
        request = InboundRequest(
            method, path, query, scope["headers"], body, look.model, look.stream, head.request_id
        )
        return Outbound(request, head, target)

    async def _read_body(self, head: RequestHead, receive: Receive) -> bytes:
        limit = self.settings.body_bytes_max
        if head.content_length is not None and head.content_length > limit:
            raise self._too_large()
        message = await receive()
        pieces: list[bytes] = []
        size = 0
        while message["type"] == "http.request":
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join((*pieces, piece)) if pieces else piece
            pieces.append(piece)
            message = await receive()
        raise _ClientGoneError

    def _too_large(self) -> ApiError:
        self.stats.bodies_too_large += 1
        error = body_too_large(self.settings.body_bytes_max)
        error.headers = (*error.headers, (b"connection", b"close"))  # the rest of the body is not read
        return error

    @staticmethod
    async def _peek(path: str, method: str, head: RequestHead, body: bytes) -> Peek:
        if method == "POST" and path in COMPLETION_PATHS:
            if not body:
                raise bad_request("invalid_json", "The request body is empty; a JSON object is expected.")
            return await peek_any_size(body)
        if not head.json or not body:
            return _NO_PEEK
        try:
            return await peek_any_size(body)
        except ApiError:
            return _NO_PEEK  # the engine knows what its other endpoints take

    async def _answer_error(self, error: ApiError, request_id: bytes | None, send: Send) -> None:
        self.stats.count_error(error.code)
        body = error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *error.headers,
        ]
        if request_id is not None:
            headers.append((b"x-request-id", request_id))
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
