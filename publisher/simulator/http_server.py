"""uvicorn inside somebody else's event loop: told when to end, and says when it listens.

It takes no signals, and lets what is under way go on for a moment when it ends. ``listen`` opens its socket.
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
from publisher.simulator.settings import DeathPoint

_BACKLOG = 2048
_DRAIN_S = 1
"""How long ``shutdown`` waits for connections whose requests it has just ended."""
_LOOK_S = 0.005
_TICK_S = 0.1
"""How often uvicorn's own housekeeping (``on_tick``) is due."""


class LoopServer(uvicorn.Server):
    """``listening`` is set once it does; setting ``ending`` ends it."""

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
            for connection in list(connections):  # also those accepted in the turn in which listening ended
                connection.shutdown()
            await asyncio.sleep(_LOOK_S)
            if not (connections or tasks) or time.monotonic() >= end:
                break
        for task in tasks:
            task.cancel()
        for connection in list(connections):
            connection.transport.abort()


def listen(host: str, port: int) -> socket.socket:
    """Raises ``OSError`` that names the address."""
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


# A simulated engine that dies in the middle of an answer: a switch for tests and demonstrations.
#
# ``CrashSwitch`` stands between the application and the server, counts the pieces of an answer to a request
# that generates, and ends the engine at the chosen point. Dead is dead: no answer, no event, no port.


class CrashSwitch:
    """``at``: where the next answer ends the engine; None: nowhere."""

    def __init__(self, at: DeathPoint | None, die: Callable[[], None]) -> None:
        self.at = at
        self._die = die

    def watch(self, send: Send) -> Send:
        """``send`` of one answer, up to the engine's death."""

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
