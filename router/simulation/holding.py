"""Requests held by a simulated router while every engine is saturated, in the router's own queue.

An engine is saturated with more than ``hold_s`` seconds of prompts queued by the router's account, or with
the maximum number of running requests; the rule of ``placement/saturation.py`` exempts siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvatlas.router.admission.fair_queue import FairQueue, Priority, Waiting
from kvatlas.router.placement.candidate import Candidate
from kvatlas.router.placement.load import LoadAccount
from kvatlas.router.placement.saturation import gap_s, joins_sibling
from kvatlas.router.simulation.requests import Request
from kvatlas.router.simulation.variants import HoldSetup

_SOONEST_S = 0.001
_POOL = "fleet"
# Unlimited in a simulation: no request is rejected, so that all variants serve the same requests.
_REQUESTS_MAX = 10_000_000
Held = tuple[int, Request]


class Holding:
    """Held requests and their order. ``loads`` are the router's accounts of the engines."""

    def __init__(self, hold: HoldSetup, loads: Sequence[LoadAccount], seqs_max: int) -> None:
        self._hold = hold
        self._loads = loads
        self._seqs_max = seqs_max
        self._queue: FairQueue[Held] = FairQueue(_REQUESTS_MAX, ageing=hold.ageing)

    def __len__(self) -> int:
        return len(self._queue)

    def room(self, now: float) -> bool:
        """Whether an engine is not saturated."""
        return self._gap_s(now) <= 0

    def holds(self, request: Request, candidates: Sequence[Candidate], now: float) -> bool:
        """Whether a request that arrives now has to wait."""
        if not self._queue and self.room(now):
            return False
        share, hold_s = self._hold.siblings, self._hold.hold_s
        if share is None or not self._queue.alone(request.tenant, _POOL):
            return True
        return not joins_sibling(candidates, request.input_tokens, share=share, saturation_s=hold_s)

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
        while self._queue and self.room(now):
            held = self._queue.take(lambda _: True)
            if held is not None:
                place(*held.item)

    def charge(self, tenant: str, tokens: int) -> None:
        self._queue.charge(tenant, Priority.NORMAL, _POOL, tokens)

    def wake_s(self, now: float) -> float:
        """Time at which there may be room without another event before; infinity: no request waits."""
        return now + max(_SOONEST_S, self._gap_s(now)) if self._queue else float("inf")

    def _gap_s(self, now: float) -> float:
        """Return the seconds of work until an engine is no longer saturated; 0 or less if one is not."""
        gaps = []
        for account in self._loads:
            load = account.current(now)
            requests, hold_s = load.running + load.waiting, self._hold.hold_s
            gaps.append(gap_s(load.queue_s, requests, saturation_s=hold_s, requests_max=self._seqs_max))
        return min(gaps)
