"""Hold requests while every engine that could take them is saturated, and release them when there is room.

Saturation is judged by what a decision uses: the load accounts, the engines' gauges, and the latest state of
other replicas. A request's lane is the set of engines that count for it: those that serve its model, or the
one engine that it must go to. Invariants: a request that finds room, and no other waiting, costs a few
comparisons; with no engine left the waiting requests are released and fail in their decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kvatlas.router.admission.admission_queue import AdmissionQueue, QueueSettings, Ticket
from kvatlas.router.admission.fair_queue import Lane
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.openai.apis import SALTED, UNCACHED
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.placement.candidate import Candidate
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.placement.fleet_values import columns
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.placement.placement import Decision
from kvatlas.router.placement.snapshot import FleetSnapshot
from kvatlas.router.proxy.paths import POST_PATHS

# What engines compute, render or tokenize; all else is answered at once.
_QUEUED: Final = POST_PATHS | SALTED | UNCACHED
# A prompt that shares enough with one in flight is sent at once: its prefix will be there, and most of the
# work is done once. But no engine's queue may grow beyond this multiple of ``saturation_s`` that way.
PILE = 4.0
SIBLING_SHARE = 0.5

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
    free = found.queue_s <= saturation_s
    if requests_max is not None:
        free &= found.values.requests < requests_max
    return bool(free.any())


def joins_sibling(candidates: Sequence[Candidate], tokens: int, *, share: float, saturation_s: float) -> bool:
    """Whether this much of a prompt is in flight on an engine without too much queued."""
    found, least, most_s = columns(candidates), max(1.0, share * tokens), PILE * saturation_s
    return any(
        hit.common_tokens >= least and bool((found.queue_s[found.which == number] <= most_s).any())
        for number, hit in enumerate(found.hits, 1)
    )


# Older state of other replicas is ignored: no request waits for it.
_OTHERS_FRESH_S = 1.0


class _Look:
    """Room of every engine at one moment, for all lanes: each engine is looked at once, and each list of
    engines once, however many lanes have it."""

    def __init__(self, fleet: Fleet[Engine], gaps: Mapping[Engine, float]) -> None:
        self._fleet = fleet
        self._gaps = gaps
        self._of_lists: dict[tuple[int, float], float] = {}
        self._members: dict[int, set[Engine]] = {}

    def gap_s(self, lane: Lane) -> float:
        """Seconds until an engine of the lane has room; 0 without engines."""
        assert isinstance(lane, tuple)  # noqa: S101  # set in ``wait``
        model, only, context_tokens = lane
        ready = self._fleet.ready(model)
        if only is not None:
            engine = self._fleet.get(only)
            found = math.inf if engine is None else self._gaps.get(engine, math.inf)
            if id(ready) not in self._members:
                self._members[id(ready)] = set(ready)
            return found if found < math.inf and engine in self._members[id(ready)] else 0.0
        known = self._of_lists.get((id(ready), context_tokens))
        if known is None:
            fit: Sequence[Engine] = ready
            if context_tokens:
                lengths = self._fleet.lengths(model).of
                fit = [engine for engine in ready if lengths[engine.engine_id] >= context_tokens]
            least = min(map(self._gaps.__getitem__, fit), default=math.inf)
            known = self._of_lists[id(ready), context_tokens] = least if least < math.inf else 0.0
        return known


class SaturationGate:
    """The queue of a fleet. Without ``saturation_s`` no engine is ever saturated: waiting requests go, and no
    others wait."""

    def __init__(self, settings: QueueSettings, fleet: Fleet[Engine], accounts: Accounts) -> None:
        self._fleet = fleet
        self._accounts = accounts
        now = accounts.now
        self._now = now
        self._others: Mapping[str, OthersLoad] | None = {}
        self._others_s = -math.inf
        self._rows = FleetSnapshot(())
        self._setups = -1
        self._silent: Sequence[Engine] = ()
        self.room = AdmissionQueue(settings, clock=now, look=lambda: self._look().gap_s)
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
            candidates, decision.prompt_tokens, share=SIBLING_SHARE, saturation_s=self._saturation_s
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
            lane=(request.model, only, self._context_tokens(request.model, engines)),
            engines=len(engines),
            tokens_per_s=self._tokens_per_s(request.model),
            session="" if request.session is None else request.session.id,
        )

    def _context_tokens(self, model: str | None, engines: Sequence[Engine]) -> float:
        """Return the shortest context of a request's engines if some cannot take it; 0: all can."""
        lengths = self._fleet.lengths(model)
        if lengths.shortest == lengths.longest:
            return 0.0
        least = min([lengths.of.get(engine.engine_id, math.inf) for engine in engines])
        return least if least > lengths.shortest else 0.0

    def _tokens_per_s(self, model: str | None) -> float:
        """Prompt tokens per second of all engines of a model together."""
        rows = self._snapshot()
        rows.queue_s(self._fresh_others(), self._now())
        s_per_token = dict(zip(rows.engines, rows.values.rates.tolist(), strict=True))
        return sum(map((1.0).__truediv__, map(s_per_token.__getitem__, self._fleet.ready(model))))

    def _look(self) -> _Look:
        now, most = self._now(), self._settings.engine_requests_max
        snapshot = self._snapshot()
        queue_s: list[float] = snapshot.queue_s(self._fresh_others(), now).tolist()
        gaps: Iterable[float] = map((-self._saturation_s).__add__, queue_s)
        if most is not None:
            gaps = (
                gap_s(seconds, requests, saturation_s=self._saturation_s, requests_max=most)
                for seconds, requests in zip(queue_s, snapshot.values.requests.tolist(), strict=True)
            )
        by_engine = dict(zip(snapshot.engines, gaps, strict=True))
        # Engines that answer no clients, or whose breaker is open, have no room at any time.
        by_engine.update(dict.fromkeys(self._silent, math.inf))
        if now >= self._accounts.free_until:
            for engine in snapshot.engines:
                if now >= engine.breaker.free_until and not engine.breaker.allows(now):
                    by_engine[engine] = math.inf
        return _Look(self._fleet, by_engine)

    def _snapshot(self) -> FleetSnapshot:
        """Rows of all engines."""
        fleet = self._fleet
        if fleet.setups != self._setups:
            setups, before, engines = fleet.setups, self._rows, list(fleet)
            self._silent = [engine for engine in engines if not engine.engine.answers]
            if engines != before.engines:
                self._rows = FleetSnapshot(engines, self._accounts.changes, before)
                self._accounts.changes.leave(before.changed)
            self._setups = setups
        return self._rows

    def _fresh_others(self) -> Mapping[str, OthersLoad] | None:
        return self._others if self._now() - self._others_s <= _OTHERS_FRESH_S else None


def pool_of(decision: Decision) -> str:
    """Engines that tenants compete for: those of one base model."""
    return decision.engine.base_model or ""
