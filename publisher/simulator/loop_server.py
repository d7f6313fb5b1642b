"""A uvicorn server inside the caller's event loop.

It installs no signal handlers; at its end it waits a moment for open requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from typing import Any

import uvicorn

_BACKLOG = 2048
# Time that ``shutdown`` waits for connections whose requests it has ended.
_DRAIN_S = 1
_POLL_S = 0.005
# Interval of uvicorn's housekeeping (``on_tick``).
_TICK_S = 0.1


class LoopServer(uvicorn.Server):
    """A uvicorn server controlled by events: ``listen``, then ``serve`` until ``ending`` is set."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    async def listen(self, host: str, port: int) -> int:
        """Open the port; returns its number. Raises ``OSError`` naming the address."""
        self.config.load()
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            server = await loop.create_server(self._protocol, host, port, family=family, backlog=_BACKLOG)
        except OSError as error:
            # Loops word it differently; numbers below 0 are the resolver's, with its own text.
            number = error.errno or 0
            problem = os.strerror(number) if number > 0 else error.strerror
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {problem}") from None
        self.servers, self.started = [server], True
        return int(server.sockets[0].getsockname()[1])

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state={})  # type: ignore[no-any-return]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self.main_loop()
        await self.shutdown()

    async def main_loop(self) -> None:
        for ticks in itertools.count():
            if self.ending.is_set() or await self.on_tick(ticks):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        connections, tasks = self.server_state.connections, self.server_state.tasks
        end = time.monotonic() + _DRAIN_S
        while True:
            # Repeat for connections accepted in the loop iteration in which the listeners were closed.
            for connection in list(connections):
                connection.shutdown()
            await asyncio.sleep(_POLL_S)
            if not (connections or tasks) or time.monotonic() >= end:
                break
        for task in tasks:
            task.cancel()
        for connection in list(connections):
            connection.transport.abort()
