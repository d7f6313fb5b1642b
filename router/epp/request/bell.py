"""One task waits for the next thing that happens; whoever makes it happen rings."""

from __future__ import annotations

import asyncio


class Bell:
    """For one waiting task at a time; used from the event loop only."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def rung(self) -> None:
        """Waits for the next ring."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        await waiter

    def ring(self) -> None:
        """Something happened."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
