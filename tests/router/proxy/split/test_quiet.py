"""Since when an answer may have been there: never later than it may have come."""

from __future__ import annotations

import asyncio
import math

from router.proxy.disaggregated import IdleTracker
from tests.support.waiting import until


async def test_a_moment_counts_only_once_those_have_been_woken_whose_answers_were_there() -> None:
    """A loop that stood still finds an answer that has lain there for long, and the timer that was due
    meanwhile, in one turn: whose answer it is must be woken first."""

    now = 100.0
    quiet = IdleTracker(lambda: now)
    came = asyncio.get_running_loop().create_future()
    seen: list[float] = []

    async def waits() -> None:
        await came
        seen.append(quiet.at_s)

    assert quiet.begin() == 100.0
    waiting = asyncio.create_task(waits())
    await asyncio.sleep(0)
    came.set_result(None)  # the sockets are looked at: it came at 90, of which nobody knows
    quiet._looked(100.0)  # and then the timer
    await waiting
    assert seen == [-math.inf]
    await until(lambda: quiet.at_s == 100.0, "it counts for those that come later")
    quiet.end()
