"""Notices that the client has gone, at every await of an exchange, and cancels the exchange's task.

Our own listener tells through an ASGI extension, which costs a function call; under any other ASGI server a
task waits for ``http.disconnect``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

EXTENSION = "kvatlas.disconnect"
"""``scope["extensions"][EXTENSION](callback | None)``: call ``callback`` once the client has gone."""

Hook = Callable[[Callable[[], None] | None], None]


class DisconnectWatch(msgspec.Struct, eq=False):
    """Cancels the current task when the client goes. ``start`` after the body was read; always ``stop``."""

    gone: bool = False
    _task: asyncio.Task[Any] | None = None
    _hook: Hook | None = None
    _watcher: asyncio.Task[None] | None = None

    def start(self, scope: Scope, receive: Receive) -> None:
        """Begin to watch. From now on nobody else may call ``receive``."""
        self._task = asyncio.current_task()
        extensions = scope.get("extensions")
        self._hook = extensions.get(EXTENSION) if extensions else None
        if self._hook is not None:
            self._hook(self._left)
        else:
            self._watcher = asyncio.get_running_loop().create_task(self._wait(receive))

    def stop(self) -> None:
        """Watch no more."""
        if self._hook is not None:
            self._hook(None)
        if self._watcher is not None:
            self._watcher.cancel()

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()
