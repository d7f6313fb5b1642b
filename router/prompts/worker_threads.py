"""Worker threads for jobs that would block the event loop too long, with a bounded queue.

Invariant: at most ``queue_len_max`` jobs are queued or running; one more raises ``NotLocalError("busy")``
at once, so that a burst of long prompts costs exactness, not latency.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvatlas.router.prompts.request import (
    NotLocalError,
)
from kvatlas.router.prompts.settings import PromptStats

_Result = TypeVar("_Result")


class Workers:
    """A small thread pool; ``close`` does not wait and lets running jobs finish."""

    def __init__(self, stats: PromptStats, *, threads: int, queue_len_max: int) -> None:
        self._stats = stats
        self._queue_len_max = queue_len_max
        self._jobs = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prompts")

    async def run(self, job: Callable[[], _Result]) -> _Result:
        """Return the job's result, computed in a thread; its exceptions pass through."""
        if self._jobs >= self._queue_len_max:
            self._stats.worker_full += 1
            raise NotLocalError("busy")
        self._jobs += 1
        self._stats.worker_jobs += 1
        # Counted until the thread is done, even if the waiting task is cancelled.
        future = self._pool.submit(job)
        waiting = asyncio.wrap_future(future)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _done: _call_soon(loop, self._job_ended))
        return await waiting

    def _job_ended(self) -> None:
        self._jobs -= 1

    def close(self) -> None:
        """Accept no further jobs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
