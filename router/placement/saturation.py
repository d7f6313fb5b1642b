"""Hold requests while every engine that could take them is saturated, and release them when there is room.

Saturation is judged by what a decision uses: the load accounts, the engines' gauges, and the latest state of
other replicas. A request's lane is the set of engines that count for it: those that serve its model, or the
one engine that it must go to. Invariants: a request that finds room, and no other waiting, costs a few
comparisons; with no engine left the waiting requests are released and fail in their decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from router.admission.admission_queue import AdmissionQueue, QueueSettings, Ticket
from router.admission.fair_queue import Lane
from router.fleet.status import Fleet
from router.openai.request import SALTED, UNCACHED, InboundRequest
from router.placement.candidate import Candidate, columns
from router.placement.engine import Engine
from router.placement.others import OthersLoad, others_at
from router.placement.placement import Decision
from router.proxy.headers import POST_PATHS

# What engines compute, render or tokenize; all else is answered at once.
_QUEUED: Final = POST_PATHS | SALTED | UNCACHED
# A prompt that shares enough with one in flight is sent at once: its prefix will be there, and most of the
# work is done once. But no engine's queue may grow beyond this multiple of ``saturation_s`` that way.
PILE = 4.0

# An engine with its maximum number of requests is checked again after this, if nothing ends before.
_FULL_S = 0.05


def gap_s(queue_s: float, requests: int, *, saturation_s: float, requests_max: int | None) -> float:
    """Seconds until an engine has room: it is saturated while more than ``saturation_s`` seconds of prompts
    are queued there, or it has its maximum number of requests. 0 or less: it has room."""
    gap = queue_s - saturation_s
    return max(gap, _FULL_S) if requests_max is not None and requests >= requests_max else gap


def any_room(candidates: Sequence[Candidate], *, saturation_s: float, requests_max: int | None) -> bool:
    """Whether at least one of them is not saturated."""
    found = columns(candidates)
    for queue_s, state in zip(found.queue_s, found.states, strict=True):
        if queue_s <= saturation_s and (requests_max is None or state.running + state.waiting < requests_max):
            return True
    return False


def joins_sibling(candidates: Sequence[Candidate], tokens: int, *, share: float, saturation_s: float) -> bool:
    """Whether this much of a prompt is in flight on an engine without too much queued."""
    found, least = columns(candidates), max(1.0, share * tokens)
    return any(
        hit.common_tokens >= least and any(found.queue_s[at] <= PILE * saturation_s for at in members)
        for hit, members in found.groups
    )


# Older state of other replicas is ignored: no request waits for it.
_OTHERS_FRESH_S = 1.0


class SaturationGate:
    """The queue of a fleet. Without ``saturation_s`` no engine is ever saturated: waiting requests go, and no
    others wait."""

    def __init__(self, settings: QueueSettings, fleet: Fleet[Engine], *, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._now = now
        self._others: Mapping[str, OthersLoad] | None = {}
        self._others_s = -math.inf
        self.room = AdmissionQueue(settings, clock=now, gap_s=self._gap_s)
        self.configure(settings)

    def configure(self, settings: QueueSettings) -> None:
        """Apply settings, for waiting requests too."""
        off = settings.saturation_s is None
        self._saturation_s = math.inf if settings.saturation_s is None else settings.saturation_s
        self._settings = msgspec.structs.replace(settings, engine_requests_max=None) if off else settings
        self.room.configure(settings)

    def others(self, load: Mapping[str, OthersLoad] | None) -> None:
        """Set the load of other replicas; None: it could not be queried."""
        self._others, self._others_s = load, self._now()

    def must_queue(self, request: InboundRequest, decision: Decision) -> bool:
        """Whether the request must wait for its turn."""
        if request.method != "POST" or request.path not in _QUEUED:
            return False
        settings, candidates = self._settings, decision.candidates
        if not len(self.room) and any_room(
            candidates, saturation_s=self._saturation_s, requests_max=settings.engine_requests_max
        ):
            return False
        together = joins_sibling(
            candidates, decision.prompt_tokens, share=settings.sibling_share, saturation_s=self._saturation_s
        )
        return not (together and self.room.alone(request.claim.tenant, pool_of(decision)))

    def queued_s(self, request: InboundRequest, decision: Decision) -> float:
        """Seconds that a request would wait here, by the work ahead of it."""
        return self.room.queued_s(request.claim.priority, pool_of(decision), len(decision.engines))

    async def wait(self, request: InboundRequest, decision: Decision) -> Ticket:
        """Wait for the request's turn. Raises ``ApiError``."""
        engines = decision.engines
        bound = request.pinned is not None or request.earlier_response is not None
        only = engines[0].engine_id if bound and len(engines) == 1 else None
        cost, work = decision.choice.cost, decision.work(request)
        return await self.room.wait(
            request.claim,
            work_s=cost.prefill_s + cost.load_s + decision.more_s(work),
            pool=pool_of(decision),
            lane=(request.model, only),
            engines=len(engines),
            tokens_per_s=self._tokens_per_s(request.model),
            session="" if request.session is None else request.session.id,
        )

    def _tokens_per_s(self, model: str | None) -> float:
        """Prompt tokens per second of all engines of a model together."""
        now = self._now()
        return sum(1 / one.rates.prefill_s_per_token(now) for one in self._fleet.ready(model))

    def _gap_s(self, lane: Lane) -> float:
        assert isinstance(lane, tuple)  # noqa: S101  # set in ``wait``
        model, only = lane
        now = self._now()
        ready = [one for one in self._fleet.ready(model) if only is None or one.engine_id == only]
        gaps = [self._gap_at(one, now) for one in ready if one.engine.answers and one.breaker.allows(now)]
        return min(gaps) if gaps else 0.0

    def _gap_at(self, engine: Engine, now: float) -> float:
        others = self._others if now - self._others_s <= _OTHERS_FRESH_S else None
        load = engine.load.current(now, others_at(engine.engine_id, others))
        return gap_s(
            load.queue_s,
            load.running + load.waiting,
            saturation_s=self._saturation_s,
            requests_max=self._settings.engine_requests_max,
        )


def pool_of(decision: Decision) -> str:
    """Engines that tenants compete for: those of one base model."""
    return decision.engine.base_model or ""
