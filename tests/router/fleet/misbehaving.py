"""A server that answers with bytes of the test's choosing, and a listener that records its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.poller import FleetPoller
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.fleet.status import EngineStatus, Fleet
from kvatlas.router.http.client import HttpClient
from tests.support.waiting import until

MODELS = {"object": "list", "data": [{"id": "m", "root": "m", "max_model_len": 100}]}
QUICK = FleetSettings(
    poll_interval_s=0.02,
    poll_down_interval_s=0.01,
    gauge_interval_s=0.02,
    poll_timeout_s=0.3,
    polls_missed_max=2,
)
HANG = b"hang"


class Server:
    """Answers every path from ``answers``: JSON, raw bytes of a whole answer, or ``HANG``; else 404."""

    def __init__(self) -> None:
        self.answers: dict[str, object] = {"/v1/models": MODELS}
        self.asked: list[str] = []
        self.base_url = ""

    def count(self, path: str) -> int:
        return self.asked.count(path)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            self.asked.append(path)
            answer = self.answers.get(path)
            if answer is HANG:
                await reader.read()
            elif isinstance(answer, bytes):
                writer.write(answer)
            else:
                writer.write(page(msgspec.json.encode(answer), 404 if answer is None else 200))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def page(body: bytes, status: int = 200) -> bytes:
    """A whole answer; the connection ends with it."""
    return b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Listener:
    """Calls of the poller."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.loads: dict[str, tuple[int, int]] = {}
        self.asleep: list[tuple[str, bool]] = []
        self.fault: Exception | None = None

    def engine_up(self, status: EngineStatus) -> None:
        if self.fault is not None:
            raise self.fault
        self.told.append(("up", status.engine_id))

    def engine_down(self, status: EngineStatus) -> None:
        self.told.append(("down", status.engine_id))

    def engine_asleep(self, status: EngineStatus, *, woke: bool) -> None:
        self.asleep.append((status.engine_id, woke))

    def engine_restarted(self, status: EngineStatus) -> None:
        self.told.append(("restarted", status.engine_id))

    def engine_load(self, status: EngineStatus, *, running: int, waiting: int) -> None:
        self.loads[status.engine_id] = running, waiting


class Watch:
    """A poller at work on one server."""

    def __init__(
        self,
        server: Server,
        fleet: Fleet,
        listener: Listener,
        polling: asyncio.Task[None],
        listening: asyncio.Server,
        poller: FleetPoller,
    ) -> None:
        self.poller = poller
        self.server = server
        self.listening = listening
        self.fleet = fleet
        self.listener = listener
        self.polling = polling

    @property
    def told(self) -> list[tuple[str, str]]:
        return self.listener.told

    @property
    def ids(self) -> list[str]:
        return [status.engine_id.removeprefix(self.server.base_url) for status in self.fleet]

    async def until(self, condition: Callable[[], bool], what: str = "condition") -> None:
        def lives() -> None:
            assert not self.polling.done(), "the poller has ended"

        await until(condition, what, meanwhile=lives)

    async def polls(self, path: str = "/v1/models", count: int = 3) -> None:
        """This many further polls."""
        wanted = self.server.count(path) + count
        await self.until(lambda: self.server.count(path) >= wanted, f"{path} polled")


@asynccontextmanager
async def watching(
    *engines: Callable[[str], EngineAddress],
    settings: FleetSettings = QUICK,
    answers: dict[str, object] | None = None,
) -> AsyncIterator[Watch]:
    """A server, and a poller on it; ``engines`` make the configured ones from the server's URL."""
    server = Server()
    server.answers |= answers or {}
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.base_url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    listener = Listener()

    class Watched(EngineStatus):
        """Says when it leaves."""

        def close(self) -> None:
            listener.told.append(("gone", self.engine_id))

    fleet = Fleet([make(server.base_url) for make in engines or (EngineAddress,)], Watched)
    async with listening, HttpClient() as client:
        patched = pytest.MonkeyPatch()
        patched.setattr("kvatlas.router.fleet.poller.ANSWER_BYTES_MAX", 100_000)
        poller = FleetPoller(fleet, listener, settings, client)
        polling = asyncio.create_task(poller.run())
        try:
            yield Watch(server, fleet, listener, polling, listening, poller)
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            patched.undo()
            listening.close()
