"""The HTTP server: uvicorn's start-up and lifespan, our connections, and a drain on SIGTERM.

SIGTERM (or SIGINT): serve for ``drain_delay_s`` more, with ``connection: close`` in each response; then stop
accepting, close idle connections, let running responses finish for up to ``drain_s_max``, and close the rest.
A repeated signal has no effect; a second SIGINT closes at once. The exit status is 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import Any

import structlog
import uvicorn

from kvatlas.router.http.downstream import DownstreamConnection
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.listen_config import ListenConfig
from kvatlas.router.http.settings import ListenSettings, ListenStats

_log = structlog.get_logger()
_POLL_S = 0.02
# How often uvicorn's own housekeeping (``on_tick``) is due.
_TICK_S = 0.1


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
        app, protocol=DownstreamConnection, host=host, port=port, listen=listen, stats=stats, **options
    )


class ListenError(OSError):
    """The server cannot start: its address is not available, or its application has failed, as logged."""


class _DropErrors(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Drop errors, which the caller reports itself."""
        return record.levelno < logging.ERROR


@contextlib.contextmanager
def _suppress_uvicorn_errors() -> Iterator[None]:
    """Suppress uvicorn's own messages about errors of the start, which have another format."""
    logger, silence = logging.getLogger("uvicorn.error"), _DropErrors()
    logger.addFilter(silence)
    try:
        yield
    finally:
        logger.removeFilter(silence)


class ProxyServer(uvicorn.Server):
    """Serve with ``run()`` or ``await serve()``; ``drain()`` or a signal ends it."""

    silent = False
    """Whether its drain is not logged."""

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
        self._exit_event = asyncio.Event()

    @property
    def draining(self) -> bool:
        """Whether the drain has begun: ``/ready`` answers 503."""
        return self._draining

    def configure(self, listen: ListenSettings) -> None:
        """Set limits of new connections, and of a drain that has not begun."""
        self._listen = listen
        self._config.configure(listen)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen. Raises ``ListenError``."""
        self._loop = asyncio.get_running_loop()
        try:
            with _suppress_uvicorn_errors():
                await super().startup(sockets)
        except SystemExit as end:
            # Uvicorn exits if the address is not available.
            if self.lifespan.should_exit:
                raise ListenError("the application could not be started") from None
            why = end.__context__ or OSError("no address")
            where = f"{self.config.host}:{self.config.port}"
            raise ListenError(f"cannot listen on {where}: {describe_error(why)}") from None
        if self.should_exit:
            self._stop_listening()

    async def main_loop(self) -> None:
        """Run until the exit event, without uvicorn's wait for the end of its tick."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._exit_event.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on a signal."""
        # It is not raised again at the end as by uvicorn: the exit status is 0.
        if self._draining and sig == signal.SIGINT:
            self.force_exit = self.should_exit = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.drain)
        else:
            self.should_exit = True

    def drain(self) -> None:
        """Start the drain; idempotent. Call in the server's loop."""
        if self._draining:
            return
        self._draining = True
        # Uvicorn's types know its own protocols only.
        connections: list[Any] = list(self.server_state.connections)
        if not self.silent:
            _log.info("draining", connections=len(connections), delay_s=self._listen.drain_delay_s)
        self.on_drain()
        if self._loop is None or not self._listen.drain_delay_s:
            self._close()
            return
        self._config.draining = True
        for connection in connections:
            connection.draining = True
        self._loop.call_later(self._listen.drain_delay_s, self._close)

    def _close(self) -> None:
        """Stop accepting, and close idle connections; idempotent."""
        self.should_exit = True
        # For connections accepted in this turn of the loop.
        self._config.draining = True
        self._exit_event.set()
        self._stop_listening()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self._config.handshakes is not None:
            self._config.handshakes.close()

    def _stop_listening(self) -> None:
        for server in getattr(self, "servers", ()):
            server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running responses, close the other connections, end the application's lifespan."""
        self.drain()
        self._close()
        for sock in sockets or []:
            sock.close()
        connections = self.server_state.connections
        end = self._clock() + self._listen.drain_s_max
        running = len(self.server_state.tasks)
        while True:
            await asyncio.sleep(_POLL_S)
            # again, for connections that were accepted last.
            self._close()
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


async def lifespan(running: AbstractAsyncContextManager[None], receive: Any, send: Any) -> None:
    """The ASGI lifespan of an application with background work: keep ``running`` open as long as the server
    runs.

    An ``OSError`` on entering it, such as a port in use, is logged, and the server does not start.
    """
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
