"""A uvicorn server inside the caller's event loop, and a switch that crashes the engine.

The server installs no signal handlers; at its end it waits a moment for open requests. ``listen`` opens its
socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import uvicorn

from publisher.simulator.http_agents import ClientGoneError, Send
from publisher.simulator.settings import CrashPoint

_BACKLOG = 2048
# Time that ``shutdown`` waits for connections whose requests it has ended.
_DRAIN_S = 1
_POLL_S = 0.005
# Interval of uvicorn's housekeeping (``on_tick``).
_TICK_S = 0.1


class LoopServer(uvicorn.Server):
    """A uvicorn server controlled by events: it sets ``listening``; set ``ending`` to stop it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        ticks = 0
        while not (self.ending.is_set() or await self.on_tick(ticks)):
            ticks += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
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


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ``OSError`` naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


class CrashSwitch:
    """Crash a simulated engine during an answer, for tests and demonstrations.

    It wraps ``send`` between application and server. ``at`` is the point of the next generated answer at
    which the engine ends, without any further answer or event and with all ports closed; None to keep it
    running.
    """

    def __init__(self, at: CrashPoint | None, die: Callable[[], None]) -> None:
        self.at = at
        self._die = die

    def watch(self, send: Send) -> Send:
        """Wrap ``send`` of one answer; the wrapper raises ``ClientGoneError`` after the crash."""

        async def watched(message: MutableMapping[str, Any]) -> None:
            begins = message["type"] == "http.response.start"
            if begins and self.at == "before_answer":
                self._end()
            ends = not begins and not message.get("more_body", False)
            if not begins and self.at == "after_first_byte":
                body = message["body"]
                await send({**message, "body": body[: max(1, len(body) // 2)], "more_body": True})
                self._end()
            await send(message)
            if ends and self.at == "after_answer":
                self._end()

        return watched

    def _end(self) -> None:
        self._die()
        raise ClientGoneError
