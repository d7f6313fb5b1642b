"""Waiting for what other tasks, threads or processes bring about: for a condition, with a generous deadline.

Nothing is measured by these waits and nothing depends on how often they look. A failure names the condition.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
WAIT_S = 60.0
"""Long enough for a crowded machine; whoever waits that long has failed."""
RUN_S = 100.0
"""Below the time-out of a test, so that what hangs is seen in its own traceback."""
_LOOK_S = 0.002
_LOOK_S_MAX = 0.05


def run(main: Coroutine[Any, Any, T], wait_s: float = RUN_S) -> T:
    """Run on uvloop, as in production, and end."""

    async def limited() -> T:
        async with asyncio.timeout(wait_s):
            return await main

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(limited())


async def until(
    condition: Callable[[], Any],
    what: str | Callable[[], str] = "condition",
    *,
    meanwhile: Callable[[], object] = lambda: None,
    ignoring: tuple[type[Exception], ...] = (),
) -> None:
    """Wait until ``condition``, which may be a coroutine function, is true.

    ``what`` is named in the failure; ``meanwhile`` is done after every look that found nothing; a
    condition that raises one of ``ignoring`` counts as false.
    """
    end, look_s = time.monotonic() + WAIT_S, _LOOK_S
    while not await _holds(condition, ignoring):
        assert time.monotonic() < end, f"never happened: {what if isinstance(what, str) else what()}"
        meanwhile()
        await asyncio.sleep(look_s)
        look_s = min(look_s * 1.2, _LOOK_S_MAX)


async def _holds(condition: Callable[[], Any], ignoring: tuple[type[Exception], ...]) -> bool:
    try:
        found = condition()
        return bool(await found if inspect.isawaitable(found) else found)
    except ignoring:
        return False


def wait_until(
    condition: Callable[[], object], what: str | Callable[[], str] = "condition", *, wait_s: float = WAIT_S
) -> None:
    """The same without an event loop; ``wait_s`` for engines that take longer to start."""
    end, look_s = time.monotonic() + wait_s, _LOOK_S
    while not condition():
        assert time.monotonic() < end, f"never happened: {what if isinstance(what, str) else what()}"
        time.sleep(look_s)
        look_s = min(look_s * 1.2, _LOOK_S_MAX)
