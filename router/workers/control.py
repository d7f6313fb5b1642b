"""Control port of a worker: a Unix socket on which siblings request its part of a page and send the
administrator's decisions. The lead's port also accepts forwarded client requests.

Only the owner can enter the socket's folder, so no authentication is needed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.fleet.desired import AdminDecisions, DesiredState
from router.fleet.status import HeldResponse, ResponseHolders
from router.http.server import SIDE_LISTEN, SideServer, listen_config
from router.workers.context import LEAD, WorkerContext
from router.workers.view import PEER_HEADER, AggregateView, SiblingCalls

# The administrator's decisions, replicated to every worker.
#
# Only the lead makes decisions, so all workers see one order of changes. It sends them to its siblings before
# it answers the change, and again every ``_REPEAT_S``, for workers that missed them or did not know the
# server yet. A new lead restores them from a sibling, and applies them until its own sources have reported.


DECISIONS_PATH = "/worker/decisions"
_REPEAT_S = 1.0


class SharedDecisions:
    """Replicated decisions. ``applied`` updates the fleet; ``unsynced``: sources that have not reported
    yet."""

    def __init__(
        self,
        worker: WorkerContext,
        desired: DesiredState,
        calls: SiblingCalls,
        *,
        applied: Callable[[], None],
        unsynced: Callable[[], list[str]],
    ) -> None:
        self._worker = worker
        self._desired = desired
        self._calls = calls
        self._applied = applied
        self._unsynced = unsynced
        self._restored = AdminDecisions()
        self._last_sent = AdminDecisions()

    def state(self) -> bytes:
        """Return the encoded decisions."""
        return msgspec.json.encode(self._desired.decisions())

    def adopt(self, state: bytes) -> None:
        """Adopt the lead's decisions. Raises ``msgspec.MsgspecError``."""
        self._adopt(msgspec.json.decode(state, type=AdminDecisions))

    async def restore(self) -> None:
        """Restore the decisions from a sibling if this worker replaces a dead one."""
        if self._worker.life == 0:
            return
        for state in (await self._calls.call_all(DECISIONS_PATH)).values():
            self._restored = msgspec.json.decode(state, type=AdminDecisions)
            self._adopt(self._restored)
            return

    async def changed(self) -> None:
        """Send the lead's changed decisions; returns when the siblings have answered or their time is
        over."""
        self._restored = AdminDecisions()
        await self._send()

    async def run(self) -> None:
        """Send the decisions periodically, until cancelled."""
        while self._worker.slot == LEAD:
            await asyncio.sleep(_REPEAT_S)
            if self._restored.any:
                self._adopt(self._restored)
                if not self._unsynced():
                    self._restored = AdminDecisions()
            if self._last_sent.any or self._desired.decisions().any:
                await self._send()

    async def _send(self) -> None:
        self._last_sent = self._desired.decisions()
        await self._calls.call_all(DECISIONS_PATH, method="PUT", body=self.state())

    def _adopt(self, decisions: AdminDecisions) -> None:
        if decisions != self._desired.decisions():
            self._desired.adopt(decisions)
            self._applied()


PREFIX = "/worker/"
_RESPONSES = "/worker/responses/"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_HELD = msgspec.msgpack.Decoder(HeldResponse)


class ControlPort:
    """Control port. ``whole``: ASGI application that the lead serves for all workers."""

    def __init__(
        self,
        worker: WorkerContext,
        view: AggregateView,
        decisions: SharedDecisions,
        responses: ResponseHolders,
        whole: Any,
    ) -> None:
        self._view = view
        self._decisions = decisions
        self._responses = responses
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
        """ASGI 3."""
        if scope["path"].startswith(PREFIX):
            request = Request(scope, receive)
            await (await self._answer(request))(scope, receive, send)
            return
        peer = dict(scope["headers"]).get(PEER_HEADER.encode(), b"").decode("latin-1")
        await self._whole({**scope, "client": (peer, 0) if peer else None}, receive, send)

    async def _answer(self, request: Request) -> Response:
        asked = request.method, request.url.path
        if asked == ("GET", "/worker/metrics"):
            return Response(msgspec.msgpack.encode(await self._view.own_page()))
        if asked == ("GET", DECISIONS_PATH):
            return Response(self._decisions.state())
        if asked == ("PUT", DECISIONS_PATH):
            try:
                self._decisions.adopt(await request.body())
            except msgspec.MsgspecError:
                return Response(status_code=400)
            return Response(status_code=204)
        if asked[0] == "GET" and asked[1].startswith(_RESPONSES):
            held = self._responses.known(asked[1].removeprefix(_RESPONSES))
            return Response(status_code=404) if held is None else Response(msgspec.msgpack.encode(held))
        name = request.url.path.removeprefix(PREFIX)
        part = await self._view.own_part(name, request.query_params.get("wanted", ""))
        return Response(status_code=404) if part is None or request.method != "GET" else Response(part)


async def find_response(calls: SiblingCalls, response_id: str) -> HeldResponse | None:
    """Find a response that another worker made before this one started."""
    if not _PLAIN.fullmatch(response_id):
        return None
    for answer in (await calls.call_all(_RESPONSES + response_id)).values():
        try:
            return _HELD.decode(answer)
        except msgspec.MsgspecError:
            continue
    return None
