"""Calls from one worker to another, over HTTP on the sibling's control port (``control_port.py``).

Invariant: every call ends within its timeout, also if the sibling is dead, stuck or being replaced.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self
from urllib.parse import quote

from kvatlas.router.api.asgi import ClientLeftError, error_answer, read_body
from kvatlas.router.http.client import HttpClient
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.openai.errors import ApiError, worker_unavailable
from kvatlas.router.workers.context import LEAD, WorkerContext

CALL_S_MAX = 1.0
_FORWARD_S_MAX = 30.0
_NOT_FORWARDED = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_BASE = "http://worker"
# Of a sibling's part of a page: of a thousand engines it has some 3 MB.
_ANSWER_BYTES_MAX = 64 << 20
# Address of the client whose request another worker forwards.
PEER_HEADER = "x-kvatlas-peer"


class SiblingCalls:
    """HTTP connections to the siblings of one worker; an async context manager. ``body_bytes_max``: largest
    request that is forwarded."""

    def __init__(self, worker: WorkerContext, *, body_bytes_max: int) -> None:
        self.siblings = sorted(worker.mesh)
        self._worker = worker
        self._body_bytes_max = body_bytes_max
        self._clients: dict[int, HttpClient] = {}

    async def __aenter__(self) -> Self:
        for slot in self.siblings:
            self._clients[slot] = HttpClient(socket_path=self._worker.control_path(slot), requests_max=64)
        return self

    async def __aexit__(self, *ended: object) -> None:
        for client in self._clients.values():
            await client.__aexit__(*ended)
        self._clients.clear()

    async def call(self, slot: int, path: str, *, method: str = "GET", body: bytes | None = None) -> bytes:
        """Call one sibling. Raises ``OSError`` if it does not answer in time."""
        try:
            async with self._clients[slot].exchange(method, _BASE + path, CALL_S_MAX, body) as answer:
                content = await answer.body(_ANSWER_BYTES_MAX)
                if answer.status >= 300:
                    raise OSError(f"status {answer.status}")
                return content
        except (KeyError, OSError) as error:
            raise OSError(f"worker {slot}: {method} {path}: {describe_error(error)}") from error

    async def call_all(
        self, path: str, *, method: str = "GET", body: bytes | None = None
    ) -> dict[int, bytes]:
        """Call all siblings; returns the answers that came in time, by worker."""
        calls = [self.call(slot, path, method=method, body=body) for slot in self.siblings]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return {slot: one for slot, one in zip(self.siblings, found, strict=True) if isinstance(one, bytes)}

    async def to_lead(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI application that forwards a request to the lead."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name.decode("latin-1") not in {*_NOT_FORWARDED, PEER_HEADER}
        }
        headers[PEER_HEADER] = scope["client"][0] if scope.get("client") else ""
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        url, begun = _BASE + quote(scope["path"]) + query, False
        # An administrator's decision that the lead may have made must not reach it again.
        method, once = scope["method"], scope["method"] not in _SAFE
        try:
            async with asyncio.timeout(_FORWARD_S_MAX):
                body = await read_body(receive, self._body_bytes_max)
                async with self._clients[LEAD].exchange(
                    method, url, None, body, headers, once=once
                ) as answer:
                    fields = [field for field in answer.headers if field[0].decode() not in _NOT_FORWARDED]
                    await send({"type": "http.response.start", "status": answer.status, "headers": fields})
                    begun = True
                    async for piece in answer.pieces():
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
        except ClientLeftError:
            return
        except ApiError as error:
            await error_answer(error, scope)(scope, receive, send)
        except (KeyError, OSError, ValueError):
            if begun:
                raise
            await error_answer(worker_unavailable(), scope)(scope, receive, send)
