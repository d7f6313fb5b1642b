"""What an application is offered besides ASGI: to hear that its client has gone, and to answer without
messages.

A client that goes cancels the task of its request, at every await of it. Our own listener does that itself; a
gateway's exchange tells through an ASGI extension; under any other ASGI server a task waits for
``http.disconnect``. Whoever stands between listener and application and wraps ``send`` is not passed by: it
gets messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

EXTENSION = "kvatlas.disconnect"
"""``scope["extensions"][EXTENSION](callback | None)``: call ``callback`` once the client has gone."""
TOLD = "kvatlas.told"
"""``scope[TOLD]``: ``headers`` as a dictionary, of what was said twice the last; may be missing or None."""
OWN = "kvatlas.exchange"
"""``scope["extensions"][OWN]``: the ``Exchange`` of a request that came to our own listener."""

Hook = Callable[[Callable[[], None] | None], None]


class DisconnectWatch(msgspec.Struct, eq=False):
    """Cancels the current task when the client goes: ``watch`` after the body was read; always ``unwatch``.
    Our own listener's exchange has both itself."""

    _scope: Scope
    _receive: Receive
    gone: bool = False
    _task: asyncio.Task[Any] | None = None
    _hook: Hook | None = None
    _watcher: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin. From now on nobody else may call ``receive``."""
        self._task = asyncio.current_task()
        extensions = self._scope.get("extensions")
        self._hook = extensions.get(EXTENSION) if extensions else None
        if self._hook is not None:
            self._hook(self._left)
        else:
            self._watcher = asyncio.get_running_loop().create_task(self._wait())

    def unwatch(self) -> None:
        """Watch no more."""
        if self._hook is not None:
            self._hook(None)
        if self._watcher is not None:
            self._watcher.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()


class Answering(Protocol):
    """One answer: ``begin``, and then pieces, of which the last one has ``more`` False."""

    def begin(self, status: int, fields: list[Header], length: bytes) -> None:
        """Announce the head, which goes out with the first piece. ``length``: the content-length among the
        fields; empty where there is none."""

    def piece(self, data: bytes, *, more: bool) -> Awaitable[None] | None:
        """Give a piece; to be awaited before the next one, if there is something to wait for."""


class Messages(msgspec.Struct, eq=False):
    """An answer by ASGI's ``send``."""

    _send: Send
    _start: Message | None = None

    def begin(self, status: int, fields: list[Header], length: bytes) -> None:
        """See ``Answering``."""
        self._start = {"type": "http.response.start", "status": status, "headers": fields}

    async def piece(self, data: bytes, *, more: bool) -> None:
        """See ``Answering``."""
        start, self._start = self._start, None
        if start is not None:
            await self._send(start)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
