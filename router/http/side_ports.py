"""Side ports of the same process and loop, such as the admin API's and the ops port.

The main server handles signals, and ends them with its own drain.
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

from kvatlas.router.http.listen_config import ListenConfig
from kvatlas.router.http.server import ListenError, ProxyServer
from kvatlas.router.http.settings import ListenSettings

_log = structlog.get_logger()


# Limits of a side port: few clients, and a short drain after the main server's.
SIDE_LISTEN = ListenSettings(connections_max=64, drain_s_max=2.0, keepalive_timeout_s=10.0)


class SideServer(ProxyServer):
    """``name`` is for the log; ``setting`` is the setting that an error names; ``sock`` listens already."""

    silent = True

    def __init__(
        self, config: ListenConfig, *, name: str, setting: str, sock: socket.socket | None = None
    ) -> None:
        super().__init__(config)
        self._sock = sock
        self._name = name
        self._setting = setting

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen. Raises ``OSError``."""
        try:
            await super().startup(sockets)
        except ListenError as error:
            raise ListenError(f"{self._setting}: {error}") from None
        if self.started:
            log = _log.debug if self.base_url.startswith("unix:") else _log.info
            log(f"{self._name} open", url=self.base_url)

    @property
    def base_url(self) -> str:
        """URL of this port from the same machine; only once ``started``."""
        return server_url(self)

    @property
    def port(self) -> int:
        """Port number; only once ``started``."""
        number: int = self.servers[0].sockets[0].getsockname()[1]
        return number

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Serve as long as the context is open. Raises ``OSError`` if the port is not available."""
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


def server_url(server: uvicorn.Server) -> str:
    """Return the URL of a started server from the same machine."""
    return address_url(server.servers[0].sockets[0].getsockname(), is_ssl=server.config.is_ssl)


def address_url(address: Any, *, is_ssl: bool = False) -> str:
    """Return the URL of a bound socket from the same machine."""
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # recognised, not bound
    scheme = "https" if is_ssl else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"
