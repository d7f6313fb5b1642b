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
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import structlog
import uvicorn

from router.http.reasons import reason_of
from router.http.server.config import ListenConfig
from router.http.server.connection.client_connection import ClientConnection
from router.http.server.settings import ListenSettings
from router.http.server.stats import ListenStats

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
        while connections and not self.force_exit and self._clock() < end:  # noqa: ASYNC110  # one is a signal
            await asyncio.sleep(_LOOK_S)
        left = len(connections)
        self._stats.drain_cuts += left
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
