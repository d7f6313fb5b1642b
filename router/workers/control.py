"""A worker's control port: a Unix socket where its siblings ask for its part of a page, tell what is decided,
and, at the lead, pass on what clients asked of the router as a whole.

The socket lies in a folder that only its owner may enter, so no further check is needed.
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

# An administrator's decisions at every worker: made at the lead, and told to all others.
#
# The lead tells after each change, before the change is answered, and repeats what is decided every
# ``_REPEAT_S``, so that a worker that missed it, or did not know the server yet, follows. A new lead asks
# the others what was decided, and takes it on again until its own sources have told what there is. Always
# true: only the lead changes anything, so there is one order of changes.


ROSTER_PATH = "/worker/roster"
_REPEAT_S = 1.0


class SharedRoster:
    """``applied`` makes the fleet what the roster says; ``unheard``: sources that have not told yet."""

    def __init__(
        self,
        worker: WorkerContext,
        roster: DesiredState,
        calls: SiblingCalls,
        *,
        applied: Callable[[], None],
        unheard: Callable[[], list[str]],
    ) -> None:
        self._worker = worker
        self._roster = roster
        self._calls = calls
        self._applied = applied
        self._unheard = unheard
        self._restored = AdminDecisions()
        self._told = AdminDecisions()

    def state(self) -> bytes:
        """Return the decisions, for a sibling."""
        return msgspec.json.encode(self._roster.decisions())

    def adopt(self, state: bytes) -> None:
        """The lead told what is decided. Raises ``msgspec.MsgspecError``."""
        self._adopt(msgspec.json.decode(state, type=AdminDecisions))

    async def restore(self) -> None:
        """At the start of a worker that takes another one's place: what was decided before."""
        if self._worker.life == 0:
            return
        for state in (await self._calls.ask_all(ROSTER_PATH)).values():
            self._restored = msgspec.json.decode(state, type=AdminDecisions)
            self._adopt(self._restored)
            return

    async def changed(self) -> None:
        """The lead's roster changed: returns once the others know, or have had their time."""
        self._restored = AdminDecisions()
        await self._tell()

    async def run(self) -> None:
        """Repeat what is decided, until cancelled."""
        while self._worker.slot == LEAD:
            await asyncio.sleep(_REPEAT_S)
            if self._restored.any:
                self._adopt(self._restored)
                if not self._unheard():
                    self._restored = AdminDecisions()
            if self._told.any or self._roster.decisions().any:
                await self._tell()

    async def _tell(self) -> None:
        self._told = self._roster.decisions()
        await self._calls.ask_all(ROSTER_PATH, method="PUT", body=self.state())

    def _adopt(self, decisions: AdminDecisions) -> None:
        if decisions != self._roster.decisions():
            self._roster.adopt(decisions)
            self._applied()


PREFIX = "/worker/"
_RESPONSES = "/worker/responses/"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_HELD = msgspec.msgpack.Decoder(HeldResponse)


class ControlPort:
    """``whole`` is the ASGI application that answers for the router as a whole, at the lead."""

    def __init__(
        self,
        worker: WorkerContext,
        view: AggregateView,
        roster: SharedRoster,
        responses: ResponseHolders,
        whole: Any,
    ) -> None:
        self._view = view
        self._roster = roster
        self._responses = responses
        self._whole = whole
        self._server = SideServer(
            listen_config(self, listen=SIDE_LISTEN, lifespan="off"),
            name="control port",
            key="workers",
            sock=worker.control,
        )

    def listening(self) -> AbstractAsyncContextManager[None]:
        """The port is open for as long as the context lasts."""
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
        if asked == ("GET", ROSTER_PATH):
            return Response(self._roster.state())
        if asked == ("PUT", ROSTER_PATH):
            try:
                self._roster.adopt(await request.body())
            except msgspec.MsgspecError:
                return Response(status_code=400)
            return Response(status_code=204)
        if asked[0] == "GET" and asked[1].startswith(_RESPONSES):
            held = self._responses.known(asked[1].removeprefix(_RESPONSES))
            return Response(status_code=404) if held is None else Response(msgspec.msgpack.encode(held))
        name = request.url.path.removeprefix(PREFIX)
        part = await self._view.own_part(name, request.query_params.get("request_id", ""))
        return Response(status_code=404) if part is None or request.method != "GET" else Response(part)


async def find_response(calls: SiblingCalls, response_id: str) -> HeldResponse | None:
    """Ask siblings for a response that was made before this worker began."""
    if not _PLAIN.fullmatch(response_id):
        return None
    for answer in (await calls.ask_all(_RESPONSES + response_id)).values():
        try:
            return _HELD.decode(answer)
        except msgspec.MsgspecError:
            continue
    return None
