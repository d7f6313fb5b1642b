"""Both requests of a split at once: the second engine waits for what the first one is computing.

What always holds: an engine that waits for blocks which will not come has its request closed, before the
client has had a byte of it. It keeps what it had reserved all the same, and the other engine a task for it,
until their time is over: nothing but the end of the prefill wakes them. So a prefill of which an engine has
been told goes on to its end, also when nobody wants it any more (its client left, the other engine failed),
and how many may wait is bounded (``Places``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from router.http.server.seam import Send
from router.pd.course import Course
from router.pd.handoff import Handoff
from router.pd.places import Places
from router.pd.stats import PdStats
from router.proxy.attempt import Attempt
from router.proxy.carrier import Outbound
from router.proxy.split.legs import Legs, new_transfer_id

Outcome = TypeVar("Outcome")


class Together:
    """One per proxy. ``close`` it with the loop: prefills may go on that nobody waits for."""

    def __init__(self, legs: Legs, stats: PdStats, clock: Callable[[], float]) -> None:
        self._legs = legs
        self._stats = stats
        self._clock = clock
        self._places = Places()
        self._alone: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """End the prefills that nobody waits for."""
        for task in self._alone:
            task.cancel()

    def allowed(self, prefill: Attempt) -> bool:
        """Whether another engine may wait at this one."""
        most = self._legs.pd.mooncake_ahead_max
        return most > 0 and self._places.taken(prefill.engine_id, self._clock()) < most

    async def run(
        self,
        placement: Attempt,
        out: Outbound,
        course: Course,
        send: Send,
        answer: Callable[[Send], Coroutine[Any, Any, Outcome]],
    ) -> Outcome:
        """Ask the first engine and, by ``answer``, the second one; ends as ``answer`` does. Raises
        ``AgainError`` where the first one failed before the client had anything."""
        pair = _Pair(self._legs, placement, course, send)
        self._places.take(pair.prefill.engine_id)
        first = asyncio.create_task(pair.compute(out))
        first.add_done_callback(lambda task: self._over(task, pair))
        second = asyncio.create_task(pair.fetch(first, answer))
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if _failed(first) and not pair.begun:  # whatever the other one says by now
                placement.finished(None)  # it is not at fault
                await first
            outcome = await second
            if not pair.told:  # another engine may be, once the blocks are there
                await first
            return outcome
        finally:
            await self._leave(first, second, pair)

    async def _leave(self, first: asyncio.Task[None], second: asyncio.Task[Any], pair: _Pair) -> None:
        second.cancel()
        if not pair.told:
            first.cancel()
        elif not first.done():
            self._alone.add(first)
            first.add_done_callback(self._alone.discard)
        ending: set[asyncio.Task[Any]] = {second} if first in self._alone else {first, second}
        await asyncio.gather(*ending, return_exceptions=True)

    def _over(self, first: asyncio.Task[None], pair: _Pair) -> None:
        engine_id = pair.prefill.engine_id
        if pair.told and _failed(first):
            self._stats.waits_stuck += 1
            self._places.stick(engine_id, self._clock(), self._legs.pd.mooncake_abort_s)
        else:
            self._places.free(engine_id)


class _Pair:
    """One request's two halves. ``begun``: the client has had something."""

    def __init__(self, legs: Legs, placement: Attempt, course: Course, send: Send) -> None:
        if placement.prefill is None or placement.body is None:
            raise ValueError("a request for one engine")
        self.prefill = placement.prefill
        self.begun = False
        self._body = placement.body
        self._placement = placement
        self._legs = legs
        self._course = course
        self._send = send
        self._transfer_id = new_transfer_id()
        self._handoff: Handoff | None = None

    @property
    def told(self) -> bool:
        """The second engine has been told before the first one had answered."""
        return self._handoff is not None and self._handoff.sent

    async def compute(self, out: Outbound) -> None:
        """See ``Legs.prefill``."""
        await self._legs.prefill(self.prefill, self._body, out, self._course, self._transfer_id)

    async def fetch(
        self, first: asyncio.Task[None], answer: Callable[[Send], Coroutine[Any, Any, Outcome]]
    ) -> Outcome:
        """The second request, at once if it is known what to say; otherwise after the first one."""
        self._handoff = await self._legs.ahead(self.prefill, self._course, self._transfer_id)
        if self._handoff is None:
            await asyncio.shield(first)
        else:
            self._placement.expected_s += self.prefill.expected_s
        return await answer(self._passed_on)

    async def _passed_on(self, message: Any) -> None:
        self.begun = True
        await self._send(message)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
