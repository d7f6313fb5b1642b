"""Waiting for what other tasks, threads or processes bring about: for a condition, with a generous deadline.

Nothing is measured by these waits and nothing depends on how often they look. A failure names the condition.
On real sockets deadlines grow with the load of the machine (``patience``).
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from tests.world import seams

T = TypeVar("T")
WAIT_S = 60.0
"""Long enough on a machine that has a processor for each process that wants one."""
RUN_S = 100.0
"""Below the time-out of a test, so that what hangs is seen in its own traceback."""
PATIENCE_MAX = 4.0
HANG_S = WAIT_S * PATIENCE_MAX
"""For a wait in a thread or in compiled code, which cannot grow meanwhile and which nothing interrupts: it is
given so much from its begin. All other waits have no limit of their own: the test's ends them, and grows."""
_LOOK_S = 0.002
_LOOK_S_MAX = 0.05


def patience() -> float:
    """Factor by which deadlines grow: runnable processes per processor in the last minute, at least 1."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), PATIENCE_MAX)


class Chosen:
    """Of the test that runs: ``real`` as it is marked, and the seed of its delays."""

    real = False
    seed = 1


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end: on virtual time, or where the test is marked ``real``, on uvloop as in production."""
    return run_real(main) if Chosen.real else seams.run(main, Chosen.seed)


def run_real(main: Coroutine[Any, Any, T], wait_s: float = RUN_S) -> T:
    """Run on uvloop, and end."""

    async def limited() -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout_at(began + wait_s) as limit:
            # The load is read late: that of the minute before the test began says little of the test.
            extend = loop.call_later(0.9 * wait_s, lambda: limit.reschedule(began + wait_s * patience()))
            try:
                return await main
            finally:
                extend.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # Not Runner.run: setting a signal handler formats the task, which takes longer than many a test.
        loop = runner.get_loop()
        try:
            return loop.run_until_complete(limited())
        finally:
            seams.cancel_all(loop, lambda: list(asyncio.all_tasks(loop)))


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
    began, look_s = time.monotonic(), _LOOK_S
    while not await _holds(condition, ignoring):
        assert _may_wait(began, WAIT_S), f"never happened: {what if isinstance(what, str) else what()}"
        meanwhile()
        await asyncio.sleep(look_s)
        look_s = min(look_s * 1.2, _LOOK_S_MAX)


async def until_thread(condition: Callable[[], object], what: str) -> None:
    """Wait until a thread of the code's own has done something. Real time passes, as the thread runs in it:
    virtual time would be over before the thread has had its turn."""
    pause = threading.Event()
    for _ in range(round(WAIT_S / _LOOK_S)):
        if condition():
            return
        await asyncio.sleep(0)
        pause.wait(_LOOK_S)
    raise AssertionError(f"never happened: {what}")


def _may_wait(began: float, wait_s: float) -> bool:
    waited_s = time.monotonic() - began
    return waited_s < wait_s or (seams.virtual_loop() is None and waited_s < wait_s * patience())


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
    began, look_s = time.monotonic(), _LOOK_S
    while not condition():
        assert _may_wait(began, wait_s), f"never happened: {what if isinstance(what, str) else what()}"
        time.sleep(look_s)
        look_s = min(look_s * 1.2, _LOOK_S_MAX)
