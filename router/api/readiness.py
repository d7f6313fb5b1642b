"""Readiness of this router: the answer of ``/ready``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvatlas.router.feeds.base import FeedState
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.placement.engine import Engine

_WARM_STATES = frozenset({FeedState.READY, FeedState.DEGRADED, FeedState.STALE})


class Readiness(msgspec.Struct):
    """Whether the router is ready for traffic, and if not, why."""

    ready: bool
    reason: str


class ReadinessCheck:
    """Ready: not draining, an engine answers, all sources of engines are synced, all feeds caught up."""

    # Sources and feeds delay readiness only at the start, at most ``warm_up_s_max``: an engine that joins
    # later starts with a cold feed, which must not take the other engines from clients.
    def __init__(
        self,
        fleet: Fleet[Engine],
        *,
        unsynced: Callable[[], Sequence[str]],
        index_problem: Callable[[], str],
        follows_all: bool,
        clock: Callable[[], float],
        warm_up_s_max: float,
    ) -> None:
        self._fleet = fleet
        self._unsynced = unsynced
        self._index_problem = index_problem
        self._follows_all = follows_all
        self._clock = clock
        self._warm_up_s_max = warm_up_s_max
        self._started_s = clock()
        self._warmed_up = False

    def check(self, *, draining: bool) -> Readiness:
        if draining:
            return Readiness(False, "draining")
        waited = self._clock() - self._started_s > self._warm_up_s_max
        unsynced = self._unsynced()
        up = self._fleet.ready(None)
        if not up:
            unsynced_note = f"; no answer yet from: {', '.join(unsynced)}" if unsynced else ""
            return Readiness(False, f"no engine answers yet{unsynced_note}")
        if not any(status.engine.answers for status in up):
            return Readiness(False, "only prefill engines are up; a decode engine must give the answers")
        if not any(status.up for status in up):
            return Readiness(True, "no engine answers polls in time; requests go to those that timed out")
        if unsynced and not waited and not self._warmed_up:
            return Readiness(False, f"sources of engines without an answer yet: {', '.join(unsynced)}")
        problem = self._index_problem()
        notes = [f"without the shared index: {problem}"] if problem else []
        unusable = [s.engine_id for s in up if s.unusable_events]
        notes += [f"feeds whose events cannot be used: {', '.join(unusable)}"] if unusable else []
        cold = [s.engine_id for s in up if s.publishes_events and s.feed_state not in _WARM_STATES]
        # Without leases the feeds of others' engines never run here.
        if not problem or self._follows_all:
            self._warmed_up = self._warmed_up or waited or not cold
            if not self._warmed_up:
                return Readiness(False, "; ".join((f"feeds still catching up: {', '.join(cold)}", *notes)))
            notes += [f"feeds that did not catch up: {', '.join(cold)}"] if cold else []
        return Readiness(True, "; ".join(notes))
