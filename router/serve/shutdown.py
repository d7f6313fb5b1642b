"""The last bound of a process that is to end: after it the process ends, and says what did not.

Every step of a shutdown has a bound of its own; this one is for what nobody thought of: a task that swallows
its cancellation, a thread that hangs, a loop that does not come round. So it runs in a thread of its own.
Always true: nothing happens before ``begin``, and a process that ends by itself does not wait for this.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import CoroutineType
from typing import Any

import structlog

_log = structlog.get_logger()
_NAMED_MAX = 20


class ShutdownGuard:
    """``limit_s`` is asked once, when the shutdown begins; ``end`` ends the process with a status."""

    def __init__(self, limit_s: Callable[[], float], *, end: Callable[[int], object] = os._exit) -> None:
        self._limit_s = limit_s
        self._end = end
        self._begun = False

    def begin(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """The process is to end; idempotent. Tasks of ``loop`` are named if they do not."""
        if not self._begun:
            self._begun = True
            limit_s = self._limit_s()
            timer = threading.Timer(limit_s, self._ended_not, (limit_s, loop))
            timer.daemon = True
            timer.start()

    def _ended_not(self, limit_s: float, loop: asyncio.AbstractEventLoop | None) -> None:
        tasks = [] if loop is None else sorted(map(_named, asyncio.all_tasks(loop)))
        _log.error(
            "shutdown does not end, ending the process",
            after_s=limit_s,
            tasks=tasks[:_NAMED_MAX],
            threads=list(_threads())[:_NAMED_MAX],
        )
        self._end(1)


def _named(task: asyncio.Task[Any]) -> str:
    """Its name, what it runs, and the line that it waits at."""
    outer = inner = task.get_coro()
    while isinstance(inner, CoroutineType) and isinstance(inner.cr_await, CoroutineType):
        inner = inner.cr_await
    frame = inner.cr_frame if isinstance(inner, CoroutineType) else None
    at = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    return f"{task.get_name()} ({getattr(outer, '__qualname__', outer)}){at}"


def _threads() -> Iterator[str]:
    """Threads that a process waits for, with the line that each is at."""
    frames = sys._current_frames()  # noqa: SLF001  # the only way to see another thread
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if not thread.daemon and frame is not None:
            yield f"{thread.name} at {frame.f_code.co_filename}:{frame.f_lineno}"
