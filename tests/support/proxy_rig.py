"""Engines that misbehave, a planner that remembers, and a client that sees bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from kvatlas.router.http.asgi import Application, call_asgi
from kvatlas.router.http.request_cycle import ClientRequest
from kvatlas.router.http.server import ProxyServer, listen_config
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.openai.errors import no_ready_engine
from kvatlas.router.openai.request import InboundRequest, Usage
from kvatlas.router.pd.handoff import DisaggState
from kvatlas.router.proxy.app import ProxyApp
from kvatlas.router.proxy.attempt import Attempt
from kvatlas.router.proxy.breaker import Breaker
from kvatlas.router.proxy.deaths import WatchedFleet
from kvatlas.router.proxy.settings import ProxySettings

NO_REQUEST = InboundRequest("POST", "/v1/chat/completions", b"", [], b"")


class Head(msgspec.Struct):
    """A request or answer head as it was on the wire."""

    first: list[str]
    fields: list[tuple[str, str]]

    def __getitem__(self, name: str) -> str:
        return ", ".join(value for key, value in self.fields if key == name)

    def __contains__(self, name: str) -> bool:
        return any(key == name for key, _ in self.fields)


async def read_head(reader: asyncio.StreamReader) -> Head:
    raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = raw[:-4].split("\r\n")
    fields = [line.partition(":") for line in lines]
    return Head(first.split(" ", 2), [(name.lower(), value.strip()) for name, _, value in fields])


class Call(msgspec.Struct):
    """One request that an engine received."""

    head: Head
    body: bytes
    closed: asyncio.Event


Script = Callable[["Engine", Call, asyncio.StreamWriter], Awaitable[None]]


async def _closed(reader: asyncio.StreamReader) -> None:
    """Done when the other end has closed or reset; reads nothing, so pipelined requests stay."""
    while not reader._eof and reader.exception() is None:  # type: ignore[attr-defined]
        await asyncio.sleep(0.002)


class Engine:
    """A small HTTP server that answers by script; the script may close, reset or hang."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.connections = 0
        self.port = 0
        self.go = asyncio.Event()  # scripts may wait for the test
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                head = await read_head(reader)
                body = await reader.readexactly(int(head["content-length"] or 0))
                call = Call(head, body, asyncio.Event())
                self.calls.append(call)
                script = asyncio.ensure_future(self.script(self, call, writer))
                watch = asyncio.ensure_future(_closed(reader))
                done, _ = await asyncio.wait({script, watch}, return_when=asyncio.FIRST_COMPLETED)
                if watch in done or isinstance(script.exception(), ConnectionError):
                    call.closed.set()
                    script.cancel()
                    watch.cancel()
                    await asyncio.gather(script, watch, return_exceptions=True)
                    break
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                script.result()
        self._writers.discard(writer)
        self._tasks.discard(task)
        writer.transport.abort()

    async def __aenter__(self) -> Engine:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**24)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Refuse connections from now on, and reset those that are open."""
        self.server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def answer(status: int, body: bytes, *fields: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"


def says(status: int, body: bytes, *fields: str) -> Script:
    """Always the same whole answer."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(status, body, *fields))

    return script


def writes(*pieces: bytes, then: str = "keep") -> Script:
    """Each piece as a packet of its own; then ``keep``, ``close``, ``reset``, or ``hang`` the connection."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)  # only to keep packets apart; nothing depends on it
        if then == "close":
            writer.close()
        elif then == "reset":
            reset(writer)
        elif then == "hang":
            await asyncio.Event().wait()

    return script


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()


class FakePlacement(Attempt):
    """Records its calls, in order."""

    def __init__(
        self,
        url: str,
        engine_headers: Any = (),
        client_headers: Any = (),
        *,
        request: InboundRequest = NO_REQUEST,
        breaker: Breaker | None = None,
        now: Callable[[], float] = time.monotonic,
        later: bool = False,
    ) -> None:
        super().__init__(
            url,
            url,
            breaker or Breaker(),
            request,
            now=now,
            engine_headers=engine_headers,
            client_headers=client_headers,
            later=later,
        )
        self.told: list[str] = []
        self.usage: Usage | None = None

    @property
    def says_ids(self) -> bool:
        return True

    def _begun(self, now: float) -> None:
        self.told.append("first_byte")

    def _ended(self, usage: Usage | None, failed: str) -> None:
        self.told.append(failed or "finished")
        self.usage = usage

    @property
    def over(self) -> bool:
        return any(word != "first_byte" for word in self.told)


class FakePlanner:
    """Gives the engines in order, skipping the excluded and the unavailable ones."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.placements: list[FakePlacement] = []
        self.requests: list[InboundRequest] = []
        self.engine_headers: Any = ()
        self.client_headers: Any = ()
        self.breakers: defaultdict[str, Breaker] = defaultdict(Breaker)
        self.now: Callable[[], float] = time.monotonic

    def available(self, url: str) -> bool:
        client = self.requests[-1].client if self.requests else 0
        return self.breakers[url].allows(self.now(), client)

    def decode(self, model: str, ids: Sequence[int], *, skips_special: bool) -> str | None:
        return None

    async def place(
        self, request: InboundRequest, *, exclude: frozenset[str], disagg: DisaggState | None = None
    ) -> FakePlacement:
        self.requests.append(request)
        for url in self.urls:
            if url not in exclude and self.available(url):
                placement = FakePlacement(
                    url,
                    self.engine_headers,
                    self.client_headers,
                    request=request,
                    breaker=self.breakers[url],
                    now=self.now,
                )
                self.placements.append(placement)
                return placement
        raise no_ready_engine("no engine")


class Paths:
    """A proxy beside ASGI applications, which have these paths."""

    def __init__(self, proxy: ProxyApp, apps: dict[str, Application]) -> None:
        self._proxy = proxy
        self._apps = apps

    def answer(self, request: ClientRequest) -> Awaitable[None]:
        app = self._apps.get(request.head.path)
        return self._proxy.answer(request) if app is None else call_asgi(app, request)


class Rig:
    """A running router: proxy, planner and server."""

    def __init__(self, app: ProxyApp, planner: FakePlanner, server: ProxyServer, port: int) -> None:
        self.app = app
        self.planner = planner
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.stats = app.stats
        self.listen_stats = server.config.listen_stats  # type: ignore[attr-defined]
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that ends with the rig at the latest."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**26)
        self.writers.append(writer)
        return reader, writer


@contextlib.asynccontextmanager
async def routing(
    *urls: str,
    settings: ProxySettings | None = None,
    listen: ListenSettings | None = None,
    wrap: Callable[[ProxyApp], Any] = lambda app: app,
    planner: FakePlanner | None = None,
    clock: Callable[[], float] = time.monotonic,
    watched: WatchedFleet | None = None,
    silence_s: float = 0.0,
) -> AsyncIterator[Rig]:
    """The proxy in front of ``urls``, on a free port of this loop; ``planner``: instead of one for
    ``urls``."""
    planner = planner or FakePlanner(*urls)
    app = ProxyApp(planner, settings, clock=clock, watched=watched, silence_s=silence_s)
    config = listen_config(
        wrap(app), port=0, listen=listen or ListenSettings(drain_s_max=0.5), lifespan="off"
    )
    config.load()
    server = ProxyServer(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    rig = Rig(app, planner, server, port)
    try:
        yield rig
    finally:
        for writer in rig.writers:
            writer.close()
        server.force_exit = True
        await server.shutdown()
        app.close()
        await asyncio.sleep(0)  # transports tell their loss in the next turn
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def served(*scripts: Script, **options: Any) -> AsyncIterator[Any]:
    """Engines with these scripts, and the proxy in front of them: ``(engine, ..., rig)``."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(script)) for script in scripts]
        yield *engines, await stack.enter_async_context(routing(*[one.url for one in engines], **options))


class Answer(msgspec.Struct):
    head: Head
    body: bytes
    whole: bool
    """The body ended as its framing says it should."""

    @property
    def status(self) -> int:
        return int(self.head.first[1])

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


async def read_answer(reader: asyncio.StreamReader, method: str = "POST") -> Answer:
    head = await read_head(reader)
    body = b""
    whole = True
    try:
        if method == "HEAD" or head.first[1] in ("204", "304"):
            pass
        elif head["transfer-encoding"] == "chunked":
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        elif "content-length" in head:
            body = await reader.readexactly(int(head["content-length"]))
        else:
            body = await reader.read()
    except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
        body += getattr(error, "partial", b"")
        whole = False
    return Answer(head, body, whole)


CHAT = b'{"model": "m",  "messages": [{"role": "user", "content": "hi"}]}'
STREAM = b'{"model": "m",  "stream": true, "messages": [{"role": "user", "content": "hi"}]}'


def request(
    body: bytes = CHAT, *fields: str, method: str = "POST", target: str = "/v1/chat/completions"
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: router", *fields]
    if body or method == "POST":
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def ask(rig: Rig, data: bytes | None = None, method: str = "POST") -> Answer:
    """One request on a connection of its own."""
    reader, writer = await rig.connect()
    try:
        writer.write(request() if data is None else data)
        return await read_answer(reader, method)
    finally:
        writer.close()


def event(text: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text.encode()


DONE = b"data: [DONE]\n\n"
