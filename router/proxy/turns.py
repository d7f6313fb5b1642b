"""Turns of streams that go on from another engine: those of one dead engine come together.

The smallest goes first, and an engine has a bounded number of them before their first token, so that they
bury no others. Invariants: a turn that was given ends once; one that waits is given up with its request.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable

from kvatlas.router.openai.errors import ApiError, no_ready_engine
from kvatlas.router.proxy.attempt import Attempt

ON_ENGINE_MAX = 8
"""Streams that one engine is to go on with, before their first token."""
_PLACING_MAX = 8
WAIT_S_MAX = 30.0
"""Longest wait for a turn, and longest predicted wait for the first token."""

Place = Callable[[frozenset[str]], Awaitable[Attempt]]


class ContinuationTurns:
    """Of one router. ``place`` chooses an engine, none of those that it is given."""

    def __init__(self) -> None:
        self._on: dict[str, int] = {}
        """Engine -> streams without a first token."""
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """Tokens to compute at most, number, and what ends the wait."""
        self._numbers = itertools.count()
        self._placing = 0
        self._full = False
        """No engine has room."""

    async def place(self, tokens: int, place: Place) -> tuple[Attempt, Callable[[], None]]:
        """Place a stream with this number of tokens on an engine with room. Returns what to call at its
        first token, or where there is none. Raises ``ApiError``."""
        until_s = asyncio.get_running_loop().time() + WAIT_S_MAX
        while True:
            await self._turn(tokens, until_s)
            try:
                full = frozenset(engine for engine, count in self._on.items() if count >= ON_ENGINE_MAX)
                try:
                    attempt = await place(full)
                except ApiError:
                    if not full:
                        raise
                    self._full = True
                    continue
                engine_id = attempt.engine_id
                if self._on.get(engine_id, 0) >= ON_ENGINE_MAX:
                    # Others were placed meanwhile.
                    attempt.finished(None)
                    continue
                if attempt.expected_s > WAIT_S_MAX:
                    attempt.finished(None)
                    raise _too_long()
                self._on[engine_id] = self._on.get(engine_id, 0) + 1
                return attempt, self._ending(engine_id)
            finally:
                self._placing -= 1
                self._next()

    async def _turn(self, tokens: int, until_s: float) -> None:
        """Wait for a turn, until this time of the loop. Raises ``ApiError``."""
        if not self._waiting and self._has_room:
            self._placing += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = tokens, next(self._numbers), waiter
        heapq.heappush(self._waiting, entry)
        self._next()
        try:
            async with asyncio.timeout_at(until_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                # It came too late.
                self._placing -= 1
                self._next()
            else:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            if isinstance(error, TimeoutError):
                raise _too_long() from None
            raise

    @property
    def _has_room(self) -> bool:
        # Where an engine is full, the next one may find none, and goes back to the others.
        several = not self._on or max(self._on.values()) < ON_ENGINE_MAX
        return not self._full and self._placing < (_PLACING_MAX if several else 1)

    def _next(self) -> None:
        """Give the next turns."""
        while self._waiting and self._has_room:
            _, _, waiter = heapq.heappop(self._waiting)
            if not waiter.done():
                self._placing += 1
                waiter.set_result(None)

    def _ending(self, engine_id: str) -> Callable[[], None]:
        """A function that ends the turn, once."""
        left = [engine_id]

        def end() -> None:
            if left:
                count = self._on.pop(left.pop()) - 1
                if count:
                    self._on[engine_id] = count
                self._full = False
                self._next()

        return end


def _too_long() -> ApiError:
    return no_ready_engine("The stream broke, and no engine can go on with it soon enough.")
