"""Two workers of one process and the sockets between them: pages, decisions and forwarded requests."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from kvatlas.router.api.asgi import read_body
from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config
from kvatlas.router.fleet.engines import AdminDecisions, EngineAddress
from kvatlas.router.workers import sibling_calls
from kvatlas.router.workers.context import WorkerContext
from kvatlas.router.workers.control_port import ControlPort
from kvatlas.router.workers.decisions import DECISIONS_PATH, SharedDecisions
from kvatlas.router.workers.merged_view import AggregateView
from kvatlas.router.workers.sibling_calls import SiblingCalls

pytestmark = pytest.mark.real  # Unix sockets
BODY_BYTES_MAX = 1000


class Decisions:
    """Decisions of a sibling, and those that it got."""

    def __init__(self) -> None:
        self.told: list[bytes] = []

    def state(self) -> bytes:
        return msgspec.json.encode(AdminDecisions())

    def adopt(self, state: bytes) -> None:
        msgspec.json.decode(state, type=AdminDecisions)
        self.told.append(state)


class Lead:
    """An application that notes what it is asked, and answers so; with ``breaks``, half of it."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.breaks = False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.asked.append(scope)
        self.bodies.append(await read_body(receive, 1 << 20))
        await send(
            {"type": "http.response.start", "status": 418, "headers": [(b"x-own", b"1"), (b"server", b"a")]}
        )
        await send({"type": "http.response.body", "body": b"x" * 70_000, "more_body": True})
        if self.breaks:
            raise RuntimeError("it breaks")
        await send({"type": "http.response.body", "body": b"y"})


class Two:
    """The lead, which listens at first, and its sibling, which calls."""

    def __init__(self, folder: Path) -> None:
        self.lead, self.decisions = Lead(), Decisions()
        self.control = socket.socket(socket.AF_UNIX)
        self.control.bind(str(folder / "0"))
        self.control.listen()
        places = [
            WorkerContext(
                slot,
                count=2,
                life=0,
                public=[],
                ops=None,
                admin=None,
                control=self.control,
                mesh={1 - slot: self.control},
                folder=folder,
                counters_fd=-1,
                ops_at="",
                started=lambda: None,
                parent=-1,
            )
            for slot in (0, 1)
        ]
        self.router = Router(Config(engines=(EngineAddress("http://e"),)))
        view = AggregateView(places[0], self.router.sources, cast("SiblingCalls", None))
        self.calls = SiblingCalls(places[1], body_bytes_max=BODY_BYTES_MAX)
        self.port = ControlPort(places[0], view, cast("SharedDecisions", self.decisions), self.lead)

    async def forward(
        self, method: str = "POST", body: bytes = b"{}", **more: Any
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """The answer to a client of the sibling."""
        said: list[dict[str, Any]] = []
        headers = [(b"x-kvatlas-peer", b"forged"), (b"host", b"h"), (b"x-one", b"1")]
        scope = {"type": "http", "method": method, "path": "/kvatlas/ö x", "query_string": b"a=1"}
        scope |= {"client": ("192.0.2.1", 5), "headers": headers} | more

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            said.append(message)

        await self.calls.to_lead(scope, receive, send)
        return said[0]["status"], dict(said[0]["headers"]), b"".join(one["body"] for one in said[1:])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sibling_calls, "CALL_S_MAX", 60.0)


@asynccontextmanager
async def two(tmp_path: Path, *, listens: bool = True) -> AsyncIterator[Two]:
    pair = Two(tmp_path)
    with closing(pair.control), closing(pair.router.proxy), closing(pair.router.reader):
        async with pair.calls:
            if not listens:
                pair.control.close()
                yield pair
                return
            async with pair.port.listening():
                yield pair


async def test_pages_and_decisions_go_from_one_worker_to_the_other(tmp_path: Path) -> None:
    async with two(tmp_path) as pair:
        (engine,) = msgspec.json.decode(await pair.calls.call(0, "/worker/engines"))
        assert engine["engine"] == "http://e"
        assert (await pair.calls.call_all("/worker/requests?wanted=x")) == {0: b"[]"}
        assert b"kvatlas_requests" in await pair.calls.call(0, "/worker/metrics")
        state = await pair.calls.call(0, DECISIONS_PATH)
        assert await pair.calls.call(0, DECISIONS_PATH, method="PUT", body=state) == b""
        assert pair.decisions.told == [state]
        for method, path, body, status in (
            ("PUT", DECISIONS_PATH, b'"none"', 400),
            ("PUT", "/worker/engines", b"", 404),
            ("GET", "/worker/nothing", None, 404),
        ):
            with pytest.raises(OSError, match=f"worker 0: {method} {path}: status {status}"):
                await pair.calls.call(0, path, method=method, body=body)
        with pytest.raises(OSError, match="worker 7: GET /worker/engines"):
            await pair.calls.call(7, "/worker/engines")


async def test_the_lead_answers_a_request_as_its_clients(
    tmp_path: Path,
) -> None:
    async with two(tmp_path) as pair:
        status, headers, body = await pair.forward()
        assert (status, headers[b"x-own"], body) == (418, b"1", b"x" * 70_000 + b"y")
        assert not headers.keys() & {b"connection", b"content-length", b"transfer-encoding"}
        (scope,) = pair.lead.asked
        assert (scope["client"], scope["method"], scope["path"]) == (("192.0.2.1", 0), "POST", "/kvatlas/ö x")
        assert (scope["query_string"], pair.lead.bodies) == (b"a=1", [b"{}"])
        assert dict(scope["headers"])[b"x-one"] == b"1"
        await pair.forward("GET", client=None, query_string=b"", body=b"")
        assert (pair.lead.asked[1]["client"], pair.lead.asked[1]["query_string"]) == (None, b"")
        status, _, body = await pair.forward(body=b"x" * (BODY_BYTES_MAX + 1))
        assert (status, len(pair.lead.asked)) == (413, 2)


async def test_an_answer_that_breaks_breaks_for_the_client(tmp_path: Path) -> None:
    async with two(tmp_path) as pair:
        pair.lead.breaks = True
        with pytest.raises(OSError, match="the answer ended early"):
            await pair.forward()


async def test_without_the_lead_a_client_hears_that_a_worker_is_missing(tmp_path: Path) -> None:
    async with two(tmp_path, listens=False) as pair:
        status, _, body = await pair.forward()
        assert (status, msgspec.json.decode(body)["error"]["code"]) == (503, "worker_unavailable")
        assert await pair.calls.call_all("/worker/engines") == {}
