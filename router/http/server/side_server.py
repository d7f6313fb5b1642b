"""A second port of the same process: served in the router's loop beside the main listener, ends with it.

The admin API's port and the ops port are such. Signals and the drain are the main server's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
import uvicorn

from router.http.server.config import ListenConfig
from router.http.server.server import ListenError, ProxyServer
from router.http.server.settings import ListenSettings

_log = structlog.get_logger()
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
