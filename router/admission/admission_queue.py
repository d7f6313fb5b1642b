"""Where requests wait for an engine with room: the fair queue with futures, a timer and limits of time.

Waiting requests are released one at a time: the next one only after the one before has been placed, so that
each sees the load that the one before made. Room shows when something ends or begins (``changed``), or when
time has passed, for which there is one timer. Invariants: a ticket that ``wait`` gave leaves by ``leave``;
one that was refused, timed out or whose client went away has left; none waits longer than ``wait_s_max``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Annotated

import msgspec

from kvatlas.router.admission.fair_queue import GENERATED_WORTH, Charge, FairQueue, Lane, Priority, Waiting
from kvatlas.router.admission.key_file import WaitTargets
from kvatlas.router.openai.errors import queue_full, queue_timeout
from kvatlas.router.openai.request import QueueTicketRequest, Usage
from kvatlas.router.openai.work import Work

Ticket = Waiting[asyncio.Future[None]]
_LOOK_S_MIN, _LOOK_S_MAX = 0.002, 0.25


class QueueSettings(WaitTargets, frozen=True, kw_only=True):
    """Requests wait in the router while every engine that could take them is saturated, and tenants share
    what comes free ([queue.md](queue.md#the-queue)). Off by default: every request goes to an engine at
    once."""

    saturation_s: float | None = None
    """An engine is saturated with more than this many seconds of prompts queued, by the router's account.
    Switches the queue on: set 1 if tenants must share a fleet that is
    sometimes full."""
    engine_requests_max: int | None = None
    """An engine is also saturated with this many requests, running and waiting; give the engines'
    ``--max-num-seqs``. Not set: only seconds of prompts count."""
    requests_max: int = 1000
    """Most requests that wait (for each worker). Beyond it the tenant with the most waiting loses its newest,
    of the lowest class: 429 `queue_full`. Lower it if clients should get 429 sooner."""
    wait_s_max: float = 60.0
    """Longest wait; then 503 `queue_timeout`. A client's `x-request-timeout` (seconds) may shorten it. Set it
    to the time-out of your clients."""
    ageing: float = 0.0
    """Order within a tenant and class: by arrival plus this many times the request's own seconds of work.
    0: first come, first served; 10 lets short prompts overtake, for a lower mean and some longer waits."""
    # Not a key of the configuration: config/removed.py.
    credit_s: float = 2.0
    """A tenant that had less than its share may be ahead of the others by what all engines compute in this
    many seconds (times its weight), so that several of its requests at once do not wait behind a flood; 0: no
    tenant saves anything up."""


class QueueStats(msgspec.Struct):
    """Counters for metrics."""

    waiting: Annotated[int, "kvatlas_queue_waiting"] = 0
    """Requests that wait for an engine with room."""
    waited: Annotated[int, "kvatlas_queue_waited_total"] = 0
    """Requests that had to wait and were then placed."""
    waited_s: Annotated[float, "kvatlas_queue_waited_seconds_total"] = 0.0
    """Seconds that they waited, together."""
    refused: Annotated[dict[str, int], "kvatlas_queue_refused_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Requests refused: `full` on arrival, `shed` for another one while they waited, `wait_s_max`, or
    `x-request-timeout`."""
    left: Annotated[int, "kvatlas_queue_left_total"] = 0
    """Requests whose client went away while they waited."""


class AdmissionQueue:
    """``look`` looks at all engines, and returns what tells for a lane how many seconds of work are in the
    way of the next request; 0 or less: there is room."""

    def __init__(
        self,
        settings: QueueSettings,
        *,
        clock: Callable[[], float],
        look: Callable[[], Callable[[Lane], float]],
    ) -> None:
        self.settings = settings
        self.stats = QueueStats()
        self._clock = clock
        self._look = look
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(
            settings.requests_max, ageing=settings.ageing
        )
        self._released: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def configure(self, settings: QueueSettings) -> None:
        """Other bounds: for who comes from now on. There may be room now."""
        self.settings = settings
        self._queue.configure(settings.requests_max, ageing=settings.ageing)
        self.changed()

    def __len__(self) -> int:
        """Number of requests that a new one has before it."""
        return len(self._queue) + (self._released is not None)

    def alone(self, tenant: str, pool: str) -> bool:
        return self._queue.alone(tenant, pool)

    async def wait(
        self,
        claim: QueueTicketRequest,
        *,
        work_s: float,
        pool: str,
        lane: Lane,
        engines: int,
        tokens_per_s: float,
        session: str = "",
    ) -> Ticket:
        """Wait for this request's turn; ``leave`` when it has been placed, or will not be. ``engines`` share
        the work of the pool, and compute ``tokens_per_s`` prompt tokens together. ``session``: sessions of a
        tenant take turns; "": the request is alone. Raises ``ApiError`` (429,
        503)."""
        now = self._clock()
        ticket: Ticket = Waiting(
            asyncio.get_running_loop().create_future(),
            # By deadline; without one, as if due when the longest wait is over, so that nothing starves.
            arrived_s=now if claim.due_s is None else min(now, claim.due_s - self.settings.wait_s_max),
            work_s=work_s,
            tenant=claim.tenant,
            weight=claim.weight,
            priority=Priority(claim.priority),
            pool=pool,
            lane=lane,
            credit_tokens=self.settings.credit_s * tokens_per_s,
            session=session,
        )
        self._enter(ticket, engines)
        limit_s, why = self.settings.wait_s_max, "wait_s_max"
        if claim.until_s is not None and claim.until_s - now < limit_s:
            limit_s, why = claim.until_s - now, "x-request-timeout"
        self.changed()
        try:
            async with asyncio.timeout(limit_s):
                await ticket.item
        except TimeoutError:
            self.leave(ticket)
            self._count(why)
            raise queue_timeout(self._clock() - now, why, self._ahead_s(ticket, engines)) from None
        except asyncio.CancelledError:
            self.leave(ticket)
            self.stats.left += 1
            raise
        self.stats.waited += 1
        self.stats.waited_s += self._clock() - now
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """It has been placed, or will not be."""
        if self._released is ticket:
            self._released = None
        self._queue.remove(ticket)
        self.stats.waiting = len(self._queue)
        self.changed()

    def changed(self) -> None:
        """There may be room now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._released is not None or not self._queue:
            return
        gap_s = self._look()
        one = self._queue.take(lambda lane: gap_s(lane) <= 0)
        if one is not None:
            self.stats.waiting = len(self._queue)
            self._released = one
            # Else its client has just gone, and it leaves in its turn.
            if not one.item.done():
                one.item.set_result(None)
            return
        later_s = min(max(min(map(gap_s, self._queue.lanes())), _LOOK_S_MIN), _LOOK_S_MAX)
        self._timer = asyncio.get_running_loop().call_later(later_s, self.changed)

    def queued_s(self, priority: int, pool: str, engines: int) -> float:
        """Seconds of work that wait here in this class and above, for each of the engines that share it."""
        return self._queue.ahead_s(Priority(priority), pool) / max(1, engines)

    def charge(self, claim: QueueTicketRequest, pool: str, tokens: float) -> Charge | None:
        """Charge a tenant with computed tokens; None where no request waits, and it counts nowhere."""
        return self._queue.charge(claim.tenant, Priority(claim.priority), pool, tokens, claim.weight)

    def settle(
        self,
        claim: QueueTicketRequest,
        pool: str,
        charge: Charge | None,
        work: Work,
        usage: Usage | None,
        streamed: int = 0,
    ) -> None:
        """Its engine has ended a request; ``usage``: what the engine reported, else ``streamed`` tokens were
        seen."""
        # The prompt is corrected where it was charged, the generated tokens are charged now.
        generated = streamed
        if usage is not None:
            generated = usage.completion_tokens
            if charge is not None:
                charge.correct(work.computed(usage))
        if generated:
            self.charge(claim, pool, GENERATED_WORTH * generated)

    def _enter(self, ticket: Ticket, engines: int) -> None:
        gone = self._queue.add(ticket)
        self.stats.waiting = len(self._queue)
        if gone is None:
            return
        error = queue_full(self.settings.requests_max, self._ahead_s(gone, engines))
        if gone is ticket:
            self._count("full")
            raise error
        if not gone.item.done():  # else its client has just gone
            self._count("shed")
            gone.item.set_exception(error)
            # The waiter may be cancelled before it reads the result.
            gone.item.exception()

    def _ahead_s(self, ticket: Ticket, engines: int) -> float:
        """Until a request like this one could be placed."""
        waits_s = self.queued_s(ticket.priority, ticket.pool, engines)
        gap_s = self._look()(ticket.lane)
        return waits_s + (gap_s if 0 < gap_s < math.inf else 0.0)

    def _count(self, reason: str) -> None:
        self.stats.refused[reason] = self.stats.refused.get(reason, 0) + 1
