"""The HTTP server: uvicorn's start-up and lifespan, our connections, and a drain on SIGTERM.

SIGTERM (or SIGINT): go on for ``drain_delay_s``, but say in each answer that its connection closes behind
it; then stop accepting, close idle connections, let running answers finish for up to ``drain_s_max``, and
cut what is left. Repeating the signal changes nothing, a second SIGINT cuts at once. The process ends with
status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import FrameType
from typing import Any

import structlog
import uvicorn

from router.http.downstream import ClientConnection
from router.http.listener import ListenConfig
from router.http.settings import ListenSettings, ListenStats
from router.http.sockets import reason_of

_log = structlog.get_logger()
_LOOK_S = 0.02
_TICK_S = 0.1
"""How often uvicorn's own housekeeping (``on_tick``) is due."""


def listen_config(
    app: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    listen: ListenSettings | None = None,
    stats: ListenStats | None = None,
    **options: Any,
) -> ListenConfig:
    """The configuration of ``ProxyServer``; ``options`` are ``uvicorn.Config``'s."""
    return ListenConfig(
        app, protocol=ClientConnection, host=host, port=port, listen=listen, stats=stats, **options
    )


class ListenError(OSError):
    """The server cannot be started: its address cannot be had, or its application has said why in the
    log."""


class _NoErrors(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Drop what the caller is about to say itself."""
        return record.levelno < logging.ERROR


@contextlib.contextmanager
def _uvicorn_silent() -> Iterator[None]:
    """Keep uvicorn from writing errors of the start past the log and its format."""
    logger, silence = logging.getLogger("uvicorn.error"), _NoErrors()
    logger.addFilter(silence)
    try:
        yield
    finally:
        logger.removeFilter(silence)


class ProxyServer(uvicorn.Server):
    """Serve with ``run()`` or ``await serve()``; ``drain()`` or a signal ends it."""

    quiet = False
    """Whether its drain is logged by another one, which it belongs to."""

    def __init__(self, config: ListenConfig) -> None:
        super().__init__(config)
        self._clock = config.clock
        self._config = config
        self._listen = config.listen
        self._stats = config.listen_stats
        self._draining = False
        self.on_drain: Callable[[], None] = lambda: None
        """Called once, when the drain begins."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()

    @property
    def draining(self) -> bool:
        """No new work is wanted: ``/ready`` should say 503."""
        return self._draining

    def configure(self, listen: ListenSettings) -> None:
        """Limits of connections from now on, and of a drain that has not begun."""
        self._listen = listen
        self._config.configure(listen)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen. Raises ``ListenError``."""
        self._loop = asyncio.get_running_loop()
        try:
            with _uvicorn_silent():
                await super().startup(sockets)
        except SystemExit as end:  # uvicorn's way of saying that the address cannot be had
            if self.lifespan.should_exit:
                raise ListenError("the application could not be started") from None
            why = end.__context__ or OSError("no address")
            where = f"{self.config.host}:{self.config.port}"
            raise ListenError(f"cannot listen on {where}: {reason_of(why)}") from None
        if self.should_exit:
            self._stop_listening()

    async def main_loop(self) -> None:
        """Until it is to end: at once then, where uvicorn's own loop would sleep out its tick."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._ending.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came. Not remembered for raising again: a drained server has ended well."""
        if self._draining and sig == signal.SIGINT:
            self.force_exit = self.should_exit = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.drain)
        else:
            self.should_exit = True

    def drain(self) -> None:
        """Begin to end; idempotent. Call in the server's loop."""
        if self._draining:
            return
        self._draining = True
        connections = list(self.server_state.connections)
        if not self.quiet:
            _log.info("draining", connections=len(connections), delay_s=self._listen.drain_delay_s)
        self.on_drain()
        if self._loop is None or not self._listen.drain_delay_s:
            self._close()
            return
        self._config.lame = True
        for connection in connections:
            setattr(connection, "closing_soon", True)  # noqa: B010  # uvicorn's types know its own protocols only
        self._loop.call_later(self._listen.drain_delay_s, self._close)

    def _close(self) -> None:
        """No new connection, and none that is idle; idempotent."""
        self.should_exit = True
        self._config.lame = True  # connections accepted in this turn of the loop do not exist yet
        self._ending.set()
        self._stop_listening()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self._config.handshakes is not None:
            self._config.handshakes.close()

    def _stop_listening(self) -> None:
        for server in getattr(self, "servers", ()):
            server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running answers, cut what remains, end the application's lifespan."""
        self.drain()
        self._close()
        for sock in sockets or []:
            sock.close()
        connections = self.server_state.connections
        end = self._clock() + self._listen.drain_s_max
        running = len(self.server_state.tasks)
        while True:
            await asyncio.sleep(_LOOK_S)
            self._close()  # again: what was accepted as listening ended becomes known a turn later
            if not connections or self.force_exit or self._clock() >= end:
                break
        left = len(connections)
        self._stats.drain_closed += left
        self._stats.drained += max(0, running - left)
        for connection in list(connections):
            connection.transport.abort()
        tasks = [task for task in self.server_state.tasks if not task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        for task in list(self.server_state.tasks):
            task.cancel()
        if not self.force_exit:
            await self.lifespan.shutdown()


# ASGI's lifespan of an application that works in the background while it is served.


async def lifespan(running: AbstractAsyncContextManager[None], receive: Any, send: Any) -> None:
    """``running`` lasts as long as the server does. An ``OSError`` on entering it (a port beside the main one
    cannot be had) is logged, and the server does not start."""
    await receive()
    started = False
    try:
        async with running:
            started = True
            await send({"type": "lifespan.startup.complete"})
            await receive()
    except OSError as error:
        if started:
            raise
        _log.error("not started", problem=str(error))
        await send({"type": "lifespan.startup.failed", "message": ""})
        return
    await send({"type": "lifespan.shutdown.complete"})


# A second port of the same process: served in the router's loop beside the main listener, ends with it.
#
# The admin API's port and the ops port are such. Signals and the drain are the main server's business.


SIDE_LISTEN = ListenSettings(connections_max=64, drain_s_max=2.0, keepalive_timeout_s=10.0)
"""Limits of a side port: few clients, who may be cut soon after the main server has ended."""


class SideServer(ProxyServer):
    """``name`` is for the log; ``key`` is the setting that an error names; ``sock`` listens already."""

    quiet = True

    def __init__(
        self, config: ListenConfig, *, name: str, key: str, sock: socket.socket | None = None
    ) -> None:
        super().__init__(config)
        self._sock = sock
        self._name = name
        self._key = key

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen. Raises ``OSError``."""
        try:
            await super().startup(sockets)
        except ListenError as error:
            raise ListenError(f"{self._key}: {error}") from None
        if self.started:
            say = _log.debug if self.base_url.startswith("unix:") else _log.info
            say(f"{self._name} open", url=self.base_url)

    @property
    def base_url(self) -> str:
        """Where this port is reached from its own machine. Only once it is ``started``."""
        return url_of(self)

    @property
    def port(self) -> int:
        """The port it listens on. Only once it is ``started``."""
        number: int = self.servers[0].sockets[0].getsockname()[1]
        return number

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """The port is open for as long as the context lasts. Raises ``OSError`` where it cannot be had."""
        serving = asyncio.create_task(
            self.serve(None if self._sock is None else [self._sock]), name=self._name
        )
        try:
            while not self.started and not serving.done():  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(0.005)
            if serving.done():
                serving.result()
            yield
        finally:
            self.drain()
            await serving


def url_of(server: uvicorn.Server) -> str:
    """Where clients reach a started server from its own machine."""
    return address_url(server.servers[0].sockets[0].getsockname(), is_ssl=server.config.is_ssl)


def address_url(address: Any, *, is_ssl: bool = False) -> str:
    """Where a socket bound to this address is reached from its own machine."""
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # recognised, not bound
    scheme = "https" if is_ssl else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"
