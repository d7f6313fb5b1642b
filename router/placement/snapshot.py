"""Values of the engines of a list, kept between decisions.

A decision asks every engine for the same values: its queue, its rate, what it holds of the prompt. Most of
them are as they were at the decision before, so a snapshot keeps those of each engine, and reads them again
only when something happened to the engine (``EngineChanges``), or when time alone changes them: for each it
is known until when they are good. Engines with an equal hit share it, and many hold nothing. So a decision
takes a Python step for every engine that changed, and otherwise computes with arrays; a ``Candidate`` is made
of an engine only where one is looked at.

Invariant: a snapshot's values are those of reading every engine again
(tests/router/placement/test_snapshot.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np

from kvatlas.router.feeds.base import FeedState
from kvatlas.router.fleet.engines import EngineId
from kvatlas.router.index.query_plan import EngineHit
from kvatlas.router.placement.candidate import EngineState, Hit
from kvatlas.router.placement.engine import Engine, EngineChanges, PromptView
from kvatlas.router.placement.fleet_values import Candidates, FleetValues, Floats, Places
from kvatlas.router.placement.others import NO_OTHERS, OthersLoad

_READY = FeedState.READY
_NO_ROOMS: dict[int, float] = {}
_NONE_S: Final[Floats] = np.array(0.0)
# Sets of engines with equal hits whose positions are kept.
_SETS_MAX = 1024
# Lists of engines whose snapshots are kept: those of a model, and those without one that failed.
_SNAPSHOTS_MAX = 8


class FleetSnapshot:
    """Values of some engines, in their order. ``changes``: of all engines; None: the engines are read once.
    ``like``: a snapshot of many of these engines, whose values are taken over."""

    __slots__ = (
        "_at",
        "_beyond_s",
        "_borrowed",
        "_borrowing",
        "_due",
        "_engine_ids",
        "_fits_tokens",
        "_fleet_rates",
        "_head_at_s",
        "_head_s",
        "_known",
        "_late_sum",
        "_lates",
        "_medians",
        "_moving",
        "_others",
        "_position",
        "_positions",
        "_recent_sum",
        "_recents",
        "_requests_sum",
        "_scheduled_s",
        "_states",
        "_surely_fits",
        "_unclear",
        "_until_s",
        "_whole_s",
        "changed",
        "engines",
        "values",
    )

    def __init__(
        self,
        engines: Sequence[Engine],
        changes: EngineChanges | None = None,
        like: FleetSnapshot | None = None,
    ) -> None:
        count = len(engines)
        self.engines = engines
        self._at: dict[Engine, int] = dict(zip(engines, range(count), strict=True))
        self.changed: set[EngineId] = set() if changes is None else changes.follow()
        """Engines that are to be read again."""
        # Whether the engines have been read.
        self._known = False
        self._engine_ids = [engine.engine_id for engine in engines]
        self._position: dict[str, int] = dict(zip(self._engine_ids, range(count), strict=True))
        # By the identity of the names, which the plans of the index keep: a hash walks over all names.
        self._positions: dict[int, _Positions] = {}
        self.values = FleetValues(*np.zeros((6, count)))
        # A decision keeps the list: another one follows a change.
        self._states: list[EngineState] = [EngineState()] * count
        # As whole multiples of a small part of a second: a sum that is kept is what adding up again would be.
        self._recents, self._recent_sum = [0] * count, 0
        self._lates, self._late_sum = [0] * count, 0
        self._requests_sum = 0
        self._fits_tokens = np.full(count, math.inf)
        self._surely_fits = math.inf
        # ``HeadProgress`` of each: queues that do not fall with time have a head of 0 s.
        self._whole_s, self._beyond_s, self._head_at_s, self._head_s = np.zeros((4, count))
        self._moving: set[int] = set()
        # Engines whose own hit is not that of others with equal blocks.
        self._unclear: set[int] = set()
        # Until when each engine's values are good, and the earliest of these times first; a time may be
        # listed too early.
        self._until_s, self._scheduled_s = [math.inf] * count, [math.inf] * count
        self._due: list[tuple[float, int]] = []
        # Engines with estimates of the fleet, and these, by the medians that they were taken from.
        self._borrowing: set[int] = set()
        self._borrowed = 0.0, 0.0
        self._fleet_rates = engines[0].rates.fleet if engines else None
        self._medians: tuple[float, float, float] | None = None
        self._others: Mapping[str, OthersLoad] | None = {}
        if like is not None:
            self._take_over(like)

    def holds_any(self, engines: Sequence[Engine]) -> bool:
        """Whether it has the first or the last of these engines: then it has most of them, usually."""
        return bool(engines) and (engines[0] in self._at or engines[-1] in self._at)

    def _take_over(self, like: FleetSnapshot) -> None:
        """Copy the values of engines that both have; the others are to be read."""
        if not like._known or not self.engines:  # of the same class
            return
        at, count = self._at, len(self.engines)
        places = list(map(like._at.get, self.engines, repeat(-1)))
        known = [place for place, old in enumerate(places) if old >= 0]
        old = [place for place in places if place >= 0]

        def taken(values: Floats) -> Floats:
            found = np.zeros(count)
            found[known] = values[old]
            return found

        values = like.values
        self.values = FleetValues(
            taken(values.rates),
            taken(values.decode_s),
            taken(values.requests),
            taken(values.waiting),
            taken(values.recent_s),
            taken(values.admitted_s),
        )
        self._states = [EngineState() if place < 0 else like._states[place] for place in places]
        self._recents = [0 if place < 0 else like._recents[place] for place in places]
        self._lates = [0 if place < 0 else like._lates[place] for place in places]
        self._recent_sum, self._late_sum = sum(self._recents), sum(self._lates)
        self._requests_sum = sum([state.running + state.waiting for state in self._states])
        self._fits_tokens = taken(like._fits_tokens)
        self._whole_s, self._beyond_s = taken(like._whole_s), taken(like._beyond_s)
        self._head_at_s, self._head_s = taken(like._head_at_s), taken(like._head_s)
        self._until_s = [math.inf if place < 0 else like._until_s[place] for place in places]
        self.changed.update(like.changed)
        if len(known) < count:
            self.changed.update([self._engine_ids[place] for place, old in enumerate(places) if old < 0])
        for name in ("_moving", "_borrowing", "_unclear"):
            engines = [like.engines[place] for place in getattr(like, name)]
            setattr(self, name, {at[engine] for engine in engines if engine in at})
        self._scheduled_s = self._until_s[:]
        self._due = list(zip(self._until_s, range(count), strict=True))
        heapify(self._due)
        self._borrowed, self._medians, self._others = like._borrowed, like._medians, like._others
        self._summed()
        self._known = True

    def candidates(self, asked: PromptView, now: float) -> Candidates:
        """Return the engines as candidates for one prompt, in order."""
        queue_s = self.queue_s(asked.others, now)
        engines = self.engines
        hits, which = self._hits(asked)
        rooms = _NO_ROOMS
        behind_pages = {} if asked.order is None else self._pass(asked, hits, which, queue_s)
        if asked.tokens > self._surely_fits:
            rooms = {}
            for at in (self._fits_tokens < asked.tokens).nonzero()[0].tolist():
                pages = engines[at].load.pages
                rooms[at] = pages.wait_s(asked.tokens, behind_pages.get(at, 0))
        return Candidates(
            self._engine_ids,
            self._states,
            self.values,
            queue_s,
            hits=hits,
            which=which,
            rooms=rooms,
            nothing=lambda at: engines[at].hit(asked),
            now=now,
        )

    def queue_s(self, others: Mapping[str, OthersLoad] | None, now: float) -> Floats:
        """Return the seconds of prompts queued at each engine; ``values`` are of now as well."""
        self._refresh(others, now)
        if not self._moving:
            return self._whole_s.copy()
        left_s: Floats = self._whole_s - np.minimum(np.array(now) - self._head_at_s, self._head_s)
        return np.maximum(left_s, _NONE_S) + self._beyond_s

    def _pass(self, asked: PromptView, hits: Sequence[Hit], which: Places, queue_s: Floats) -> dict[int, int]:
        """Take off the prompts that this one would pass in the engines' own order. Returns their pages."""
        pages: dict[int, int] = {}
        order, states = asked.order, self._states
        for at in self.values.waiting.nonzero()[0].tolist():
            engine = self.engines[at]
            if order is None or not engine.takes_order:
                continue
            rate, number = states[at].prefill_s_per_token, which.item(at)
            work_s = rate * (asked.tokens - (hits[number - 1].whole_tokens if number else 0))
            behind_s, pages[at] = engine.load.behind(order.rank_s(work_s), rate)
            queue_s[at] = max(0.0, queue_s.item(at) - behind_s)
        return pages

    def _hits(self, asked: PromptView) -> tuple[list[Hit], Places]:
        """Return the hits of engines that hold a part of the prompt, or will; and of each engine the number
        of its hit, from 1, or 0."""
        engines, position = self.engines, self._position
        single: dict[int, EngineHit | None] = {}
        for found in (asked.held, asked.common, asked.coming):
            for name in found:
                if (at := position.get(name)) is not None:
                    single[at] = None
        if asked.shadows is not None:
            single.update({at: None for at, one in enumerate(engines) if one.shadow is not None})
        hits: list[Hit] = []
        which = np.zeros(len(engines), np.intp)
        special = {*single, *self._unclear} if single or self._unclear else ()
        for held, names in asked.alike:
            known = self._positions.get(id(names))
            if known is None or known.names is not names:
                known = self._positions_of(names)
            _, those, first, places = known
            if special and not those.isdisjoint(special):
                apart = those.intersection(special)
                single.update(dict.fromkeys(apart, held))
                first = min(those - apart, default=-1)
            if first >= 0:
                hits.append(engines[first].discounted(held))
                if places is not None:
                    which[places] = len(hits)
                else:
                    for at in those:
                        which[at] = len(hits)
        if single:
            self._by_hit(asked, single, hits, which)
        return hits, which

    def _by_hit(
        self, asked: PromptView, single: Mapping[int, EngineHit | None], hits: list[Hit], which: Places
    ) -> None:
        """Add the hits of engines that are asked one by one."""
        common, coming, held_by, nothing = asked.common, asked.coming, asked.held.get, asked.nothing.get
        # Engines with equal state that missed nothing have equal hits: its number, by what it follows from.
        numbers: dict[tuple[int, int, int], int] = {}
        engines, names, unclear = self.engines, self._engine_ids, self._unclear
        for at, alike in single.items():
            name = names[at]
            held = alike or held_by(name) or nothing(name)
            clear = at not in unclear
            key = id(held), common.get(name, 0), coming.get(name, 0)
            if clear and (number := numbers.get(key)) is not None:
                which[at] = number
                continue
            hit = engines[at].hit(asked, held)
            if not clear and held is not None and hit.soon_tokens and held.mode not in {"unknown", "shadow"}:
                hit = self._after_evictions(engines[at], hit, asked)
            hits.append(hit)
            which[at] = len(hits)
            if clear and held is not None and held.mode not in {"unknown", "shadow"}:
                numbers[key] = len(hits)

    @staticmethod
    def _after_evictions(engine: Engine, hit: Hit, asked: PromptView) -> Hit:
        """Lower the hit of an engine of which all is known by what it will have evicted."""
        feed = engine.feed
        unseen = feed is None or feed.state is not _READY or feed.unconfirmed or engine.has_unseen_caches
        return hit if unseen or not engine.evictions.crowded else engine.after_evictions(hit, asked)

    def _positions_of(self, names: tuple[str, ...]) -> _Positions:
        if len(self._positions) >= _SETS_MAX:
            self._positions.clear()
        position = self._position
        those = frozenset([position[name] for name in names if name in position])
        places = np.array(sorted(those)) if len(those) > _FEW else None
        known = self._positions[id(names)] = _Positions(names, those, min(those, default=-1), places)
        return known

    def _refresh(self, others: Mapping[str, OthersLoad] | None, now: float) -> None:
        """Read the engines that may have changed."""
        rates, due = self._fleet_rates, self._due
        if not self._known:
            stale: Collection[int] = range(len(self.engines))
            self._borrowed = (0.0, 0.0) if rates is None else rates.borrowed
        elif (
            not self.changed
            and others is self._others
            and rates is not None
            and rates.medians.kept is self._medians
            and not (due and due[0][0] <= now)
        ):
            return
        else:
            stale = self._stale(others, now)
        self._others = others
        if stale:
            self._states = self._states[:]
            for at in stale:
                self._read(at, now)
            self._summed()
        # After the reading, which may itself note changes: heads that are done by now.
        self.changed.clear()
        self._known = True
        self._medians = None if rates is None else rates.medians.kept

    def _summed(self) -> None:
        """Set what follows from all engines."""
        self.values.summed(self._recent_sum / _ONE, self._late_sum / _ONE, self._requests_sum)
        self._surely_fits = self._fits_tokens.item(self._fits_tokens.argmin())

    def _stale(self, others: Mapping[str, OthersLoad] | None, now: float) -> Collection[int]:
        before, position, names = self._others, self._position, self.changed
        if others is not before and others != before:
            if others is None or before is None:
                return range(len(self.engines))
            told = {**before, **others}
            names.update([EngineId(name) for name in told if before.get(name) != others.get(name)])
        stale: set[int] = set()
        for name in names:
            if (known := position.get(name)) is not None:
                stale.add(known)
        due, scheduled_s, until_s = self._due, self._scheduled_s, self._until_s
        while due and due[0][0] <= now:
            _, at = heappop(due)
            scheduled_s[at] = math.inf
            if until_s[at] <= now:
                stale.add(at)
            else:
                self._schedule(at)
        rates = self._fleet_rates
        if rates is not None and (rates.medians.kept is None or rates.medians.kept is not self._medians):
            borrowed = rates.borrowed
            if borrowed != self._borrowed:
                self._borrowed = borrowed
                stale |= self._borrowing
        return stale

    def _read(self, at: int, now: float) -> None:
        """Read one engine."""
        engine = self.engines[at]
        rates, load, feed = engine.rates, engine.load, engine.feed
        rate, interference_s = rates.current(now)
        known = self._others
        others = known.get(engine.engine_id, NO_OTHERS) if known else None if known is None else NO_OTHERS
        queue_s, running, waiting, _, late_s, recent_s, head, until_s = load.ahead(now, others, rate)
        values, state, last_s = self.values, self._states[at], load.last_admit_s
        if recent_s != state.recent_s:
            before, self._recents[at] = self._recents[at], int(recent_s * _ONE_F)
            self._recent_sum += self._recents[at] - before
            values.recent_s[at] = recent_s
        if late_s != state.late_s:
            before, self._lates[at] = self._lates[at], int(late_s * _ONE_F)
            self._late_sum += self._lates[at] - before
        self._requests_sum += running + waiting - state.running - state.waiting
        self._states[at] = EngineState(running, waiting, last_s, rate, interference_s, late_s, recent_s)
        values.rates[at], values.decode_s[at] = rate, interference_s * running
        values.requests[at], values.waiting[at] = running + waiting, waiting
        values.admitted_s[at] = last_s
        self._fits_tokens[at] = load.pages.surely_fits_tokens
        if head is not None:
            self._moving.add(at)
            self._whole_s[at], self._beyond_s[at] = head.whole_s, head.beyond_s
            self._head_at_s[at], self._head_s[at] = head.head_at_s, head.head_s
        else:
            self._moving.discard(at)
            self._whole_s[at], self._beyond_s[at], self._head_s[at] = queue_s, 0.0, 0.0
        ready = feed is not None and feed.state is _READY and not feed.unconfirmed
        doubted = engine.evictions.crowded or engine.has_unseen_caches or engine.hit_share < 1.0
        if doubted or not ready:
            self._unclear.add(at)
        else:
            self._unclear.discard(at)
        if now > rates.fresh_until_s:
            self._borrowing.add(at)
        else:
            self._borrowing.discard(at)
        rates_until_s = rates.constant_until(now)
        self._until_s[at] = until_s if until_s < rates_until_s else rates_until_s  # noqa: FURB136
        self._schedule(at)

    def _schedule(self, at: int) -> None:
        until_s = self._until_s[at]
        if until_s < self._scheduled_s[at]:
            self._scheduled_s[at] = until_s
            heappush(self._due, (until_s, at))


_ONE: Final = 1 << 140
_ONE_F: Final = float(_ONE)
# Fewer positions are assigned faster one by one.
_FEW: Final = 16


class _Positions(NamedTuple):
    """Positions of the engines of these names, the first one (-1: there is none), and all as an array if they
    are many."""

    names: tuple[str, ...]
    those: frozenset[int]
    first: int
    places: Places | None


class FleetSnapshots:
    """Snapshots of the latest lists of engines."""

    def __init__(self, changes: EngineChanges) -> None:
        self._changes = changes
        self._kept: list[FleetSnapshot] = []

    def of(self, engines: Sequence[Engine]) -> FleetSnapshot:
        """Return the snapshot of these engines."""
        kept = self._kept
        for snapshot in kept:
            if snapshot.engines is engines:
                return snapshot
        for snapshot in kept:
            # Adapters of one model have the same engines in lists of their own.
            if snapshot.engines == engines:
                return snapshot
        for left in kept[_SNAPSHOTS_MAX - 1 :]:
            self._changes.leave(left.changed)
        like = next((one for one in kept if one.holds_any(engines)), None)
        made = FleetSnapshot(engines, self._changes, like)
        self._kept = [made, *kept[: _SNAPSHOTS_MAX - 1]]
        return made


def candidates(engines: Sequence[Engine], asked: PromptView, now: float) -> Candidates:
    """Return these engines as candidates for one prompt, without a snapshot to come back to."""
    return FleetSnapshot(engines).candidates(asked, now)
