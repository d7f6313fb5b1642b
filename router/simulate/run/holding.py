"""Requests that a simulated router holds while every engine is saturated, in the router's own queue.

An engine is saturated with more than ``hold_s`` seconds of prompts queued by the router's account, or as many
requests as it runs at once; which siblings are not held is the router's own rule
(``router.placement.holding.saturation``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.admission.queue.fair import FairQueue, Priority, Waiting
from router.placement.candidate import Candidate
from router.placement.holding.saturation import gap_s, joins_sibling
from router.placement.load.account import LoadAccount
from router.simulate.run.arms import HoldSetup
from router.simulate.workload.requests import Request

_SOONEST_S = 0.001
_POOL = "fleet"
_REQUESTS_MAX = 10_000_000
"""Of a simulation: nobody is turned away, so that arms answer the same requests."""

Held = tuple[int, Request]


class Holding:
    """Who waits, and who is next. ``loads`` are the router's accounts of the engines."""

    def __init__(self, hold: HoldSetup, loads: Sequence[LoadAccount], seqs_max: int) -> None:
        self._hold = hold
        self._loads = loads
        self._seqs_max = seqs_max
        self._queue: FairQueue[Held] = FairQueue(_REQUESTS_MAX, ageing=hold.ageing)

    def __len__(self) -> int:
        return len(self._queue)

    def room(self, now: float) -> bool:
        """Whether some engine is not saturated."""
        return self._gap_s(now) <= 0

    def holds(self, request: Request, candidates: Sequence[Candidate], now: float) -> bool:
        """Whether a request that comes now has to wait."""
        if not self._queue and self.room(now):
            return False
        share, hold_s = self._hold.siblings, self._hold.hold_s
        if share is None or not self._queue.alone(request.tenant, _POOL):
            return True
        return not joins_sibling(candidates, request.input_tokens, share=share, hold_s=hold_s)

    def add(self, index: int, request: Request, candidates: Sequence[Candidate], now: float) -> None:
        work_s = min(
            (request.input_tokens - one.hit.whole_tokens) * one.prefill_s_per_token for one in candidates
        )
        tokens_per_s = sum(1 / one.prefill_s_per_token for one in candidates)
        self._queue.add(
            Waiting(
                (index, request),
                arrived_s=now,
                work_s=work_s,
                tenant=request.tenant,
                pool=_POOL,
                credit_tokens=self._hold.credit * tokens_per_s,
            )
        )

    def release(self, now: float, place: Callable[[int, Request], None]) -> None:
        """Place those that wait for as long as there is room."""
        while self._queue and self.room(now):
            held = self._queue.take(lambda _: True)
            if held is not None:
                place(*held.item)

    def charge(self, tenant: str, tokens: int) -> None:
        """So much is computed for the tenant."""
        self._queue.charge(tenant, Priority.NORMAL, _POOL, tokens)

    def wake_s(self, now: float) -> float:
        """When there may be room without anything happening before; infinity: nobody waits."""
        return now + max(_SOONEST_S, self._gap_s(now)) if self._queue else float("inf")

    def _gap_s(self, now: float) -> float:
        """Seconds of work until an engine is no longer saturated; 0 or less: one is not."""
        gaps = []
        for account in self._loads:
            load = account.at(now)
            requests, hold_s = load.running + load.waiting, self._hold.hold_s
            gaps.append(gap_s(load.queue_s, requests, hold_s=hold_s, requests_max=self._seqs_max))
        return min(gaps)
