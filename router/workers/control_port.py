"""Control port of a worker: a Unix socket on which siblings request its part of a page and send the
administrator's decisions.

The lead's port also accepts forwarded client requests. Only the owner can enter the socket's folder, so no
authentication is needed.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from kvatlas.router.api.asgi import OwnAnswer, read_body
from kvatlas.router.http.server import listen_config
from kvatlas.router.http.side_ports import SIDE_LISTEN, SideServer
from kvatlas.router.workers.context import WorkerContext
from kvatlas.router.workers.decisions import DECISIONS_PATH, PREFIX, SharedDecisions
from kvatlas.router.workers.merged_view import AggregateView
from kvatlas.router.workers.sibling_calls import PEER_HEADER

# Of what an administrator decided about all engines.
_DECISIONS_BYTES_MAX = 64 << 20


class ControlPort:
    """Control port. ``whole``: ASGI application that the lead serves for all workers."""

    def __init__(
        self,
        worker: WorkerContext,
        view: AggregateView,
        decisions: SharedDecisions,
        whole: Any,
    ) -> None:
        self._view = view
        self._decisions = decisions
        self._whole = whole
        self._server = SideServer(
            listen_config(self, listen=SIDE_LISTEN, lifespan="off"),
            name="control port",
            setting="workers",
            sock=worker.control,
        )

    def listening(self) -> AbstractAsyncContextManager[None]:
        """Keep the port open for the duration of the context."""
        return self._server.listening()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["path"].startswith(PREFIX):
            await (await self._answer(scope, receive))(scope, receive, send)
            return
        peer = dict(scope["headers"]).get(PEER_HEADER.encode(), b"").decode("latin-1")
        await self._whole({**scope, "client": (peer, 0) if peer else None}, receive, send)

    async def _answer(self, scope: dict[str, Any], receive: Any) -> OwnAnswer:
        method, path = scope["method"], scope["path"]
        if method == "PUT" and path == DECISIONS_PATH:
            try:
                self._decisions.adopt(await read_body(receive, _DECISIONS_BYTES_MAX))
            except msgspec.MsgspecError:
                return OwnAnswer(status=400)
            return OwnAnswer(status=204)
        if method != "GET":
            return OwnAnswer(status=404)
        if path == "/worker/metrics":
            return OwnAnswer(await self._view.own_page())
        if path == DECISIONS_PATH:
            return OwnAnswer(self._decisions.state())
        wanted = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("wanted", "")
        part = await self._view.own_part(path.removeprefix(PREFIX), wanted)
        return OwnAnswer(status=404) if part is None else OwnAnswer(part)
