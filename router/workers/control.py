"""A worker's control port: a Unix socket where its siblings ask for its part of a page, tell what is decided,
and, at the lead, pass on what clients asked of the router as a whole.

The socket lies in a folder that only its owner may enter, so nobody else is let in and nothing is checked.
"""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.fleet.response_holders import HeldResponse, ResponseHolders
from router.http.server.server import listen_config
from router.http.server.side_server import SIDE_LISTEN, SideServer
from router.workers.calls import PEER_HEADER, SiblingCalls
from router.workers.roster import ROSTER_PATH, SharedRoster
from router.workers.seat import WorkerSeat
from router.workers.view import WholeView

PREFIX = "/worker/"
_RESPONSES = "/worker/responses/"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_HELD = msgspec.msgpack.Decoder(HeldResponse)


class ControlPort:
    """``whole`` is the ASGI application that answers for the router as a whole, at the lead."""

    def __init__(
        self,
        seat: WorkerSeat,
        view: WholeView,
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
            sock=seat.control,
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
