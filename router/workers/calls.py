"""One worker asks another, over HTTP on the Unix socket where that one answers (``control.py``).

Always true: every call ends within its time; a worker that is dead, stuck or just being replaced costs no
more than that.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import aiohttp

from router.http.reasons import reason_of
from router.openai.errors import ApiError, worker_unavailable
from router.workers.seat import LEAD, WorkerSeat

ASK_S_MAX = 1.0
_FORWARD_S_MAX = 30.0
_NOT_FORWARDED = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
PEER_HEADER = "x-kvatlas-peer"
"""The address of a client whose request another worker passes on."""


class SiblingCalls:
    """Connections to the siblings of one worker; an async context."""

    def __init__(self, seat: WorkerSeat) -> None:
        self.siblings = sorted(seat.mesh)
        self._seat = seat
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Self:
        for slot in self.siblings:
            connector = aiohttp.UnixConnector(self._seat.control_path(slot), limit=64)
            self._sessions[slot] = aiohttp.ClientSession(
                "http://worker", connector=connector, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    async def ask(self, slot: int, path: str, *, method: str = "GET", body: bytes | None = None) -> bytes:
        """One answer. Raises ``OSError`` where there is none in time."""
        try:
            async with (
                asyncio.timeout(ASK_S_MAX),
                self._sessions[slot].request(method, path, data=body) as answer,
            ):
                content = await answer.read()
                if answer.status >= 300:
                    raise OSError(f"worker {slot}: {method} {path}: status {answer.status}")
                return content
        except (aiohttp.ClientError, KeyError, TimeoutError) as error:
            raise OSError(f"worker {slot}: {method} {path}: {reason_of(error)}") from error

    async def ask_all(self, path: str, *, method: str = "GET", body: bytes | None = None) -> dict[int, bytes]:
        """Answers by worker, of those that answered in time."""
        asked = [self.ask(slot, path, method=method, body=body) for slot in self.siblings]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return {slot: one for slot, one in zip(self.siblings, found, strict=True) if isinstance(one, bytes)}

    async def to_lead(self, scope: Any, receive: Any, send: Any) -> None:
        """An ASGI application: the lead's answer to a request that came here."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name.decode("latin-1") not in {*_NOT_FORWARDED, PEER_HEADER}
        }
        headers[PEER_HEADER] = scope["client"][0] if scope.get("client") else ""
        target = scope["path"] + (
            f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        )
        begun = False
        try:
            async with (
                asyncio.timeout(_FORWARD_S_MAX),
                self._sessions[LEAD].request(
                    scope["method"],
                    target,
                    data=_body(receive),
                    headers=headers,
                    allow_redirects=False,
                    auto_decompress=False,
                ) as answer,
            ):
                await send(
                    {
                        "type": "http.response.start",
                        "status": answer.status,
                        "headers": [
                            (name.lower(), value)
                            for name, value in answer.raw_headers
                            if name.lower().decode() not in _NOT_FORWARDED
                        ],
                    }
                )
                begun = True
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, KeyError, OSError, TimeoutError):
            if begun:
                raise
            await send_error(send, worker_unavailable())


async def _body(receive: Any) -> Any:
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def send_error(send: Any, error: ApiError) -> None:
    """An error as a whole ASGI answer."""
    headers = [(b"content-type", b"application/json"), *error.headers]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body()})
