"""ASGI's lifespan of an application that works in the background while it is served."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import structlog

_log = structlog.get_logger()


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
