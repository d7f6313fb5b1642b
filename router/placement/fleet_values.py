"""Values of all engines that a decision reads: arrays in the engines' order.

``FleetValues`` is the same for every prompt, and kept between decisions; ``Candidates`` adds what one prompt
finds: its hits, and its wait. A ``Candidate`` is made of an engine only where one is looked at, mostly for
explanations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt

from kvatlas.router.placement.candidate import Candidate, EngineState, Hit

Floats = npt.NDArray[np.float64]
"""A single number is an array without dimensions, which numpy takes in half the time of a float."""
Places = npt.NDArray[np.intp]


class FleetValues(msgspec.Struct, gc=False):
    """Values of some engines that are the same for any prompt: arrays, and what follows from all of them.

    ``rates``: ``prefill_s_per_token``; ``decode_s``: ``interference_s``; ``requests``: running and waiting,
    with their mean, and of these ``waiting``; ``recent_s``: recent work, with its mean; ``admitted_s``: when
    the router last sent a request; ``late_s``: the mean. They are of the latest look: a decision takes what
    it needs at once.
    """

    rates: Floats
    decode_s: Floats
    requests: Floats
    waiting: Floats
    recent_s: Floats
    admitted_s: Floats
    recent_mean_s: float = 0.0
    late_s: float = 0.0
    requests_mean: float = 0.0
    spread: float = -1.0
    spread_s: Floats | None = None
    priced_by: tuple[float, float] = (-1.0, -1.0)
    prices: Floats | None = None

    def summed(self, recent_sum_s: float, late_sum_s: float, requests_sum: float) -> None:
        """Set what follows from the arrays; the sums are given, since one that is kept costs less than adding
        up."""
        if count := len(self.rates):
            self.recent_mean_s, self.late_s = recent_sum_s / count, late_sum_s / count
            self.requests_mean = requests_sum / count
        self.spread, self.prices = -1.0, None

    def spread_of(self, spread: float) -> Floats:
        """Price of recent work beyond the mean."""
        found = self.spread_s
        if found is None or self.spread != spread:
            mean_s, self.spread = np.array(self.recent_mean_s), spread
            found = self.spread_s = np.array(spread) * (np.maximum(self.recent_s, mean_s) - mean_s)
        return found

    def only(self, picked: list[int]) -> FleetValues:
        """Copy those at these positions, without what follows from all."""
        return FleetValues(
            self.rates[picked],
            self.decode_s[picked],
            self.requests[picked],
            self.waiting[picked],
            self.recent_s[picked],
            self.admitted_s[picked],
        )


class Candidates(Sequence[Candidate]):
    """Candidates for one prompt, by arrays in their order; a ``Candidate`` is made on demand.

    ``which``: for each the number of its hit among ``hits``, from 1; 0: it holds nothing of the prompt, and
    ``nothing`` gives its hit. Each of ``hits`` is at least one's. ``rooms``: ``room_s`` where it is not
    0.
    """

    __slots__ = (
        "_made",
        "_nothing",
        "_now",
        "engine_ids",
        "hits",
        "queue_s",
        "rooms",
        "states",
        "values",
        "which",
    )

    def __init__(
        self,
        engine_ids: Sequence[str],
        states: Sequence[EngineState | Candidate],
        values: FleetValues,
        queue_s: Floats,
        *,
        hits: Sequence[Hit],
        which: Places,
        rooms: Mapping[int, float],
        nothing: Callable[[int], Hit] = lambda at: Hit(),
        now: float = 0.0,
    ) -> None:
        self.engine_ids = engine_ids
        self.states = states
        self.values = values
        self.queue_s = queue_s
        self.hits = hits
        self.which = which
        self.rooms = rooms
        self._nothing = nothing
        self._made: dict[int, Candidate] | None = None
        self._now = now

    def __len__(self) -> int:
        return len(self.queue_s)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...

    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...

    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        made = self._made
        if made is None:
            made = self._made = {}
        found = made.get(at)
        if found is None:
            count = len(self.queue_s)
            at = at + count if at < 0 else at
            if not 0 <= at < count:
                raise IndexError(at)
            found = made[at] = self._make(at)
        return found

    def _make(self, at: int) -> Candidate:
        state = self.states[at]
        if isinstance(state, Candidate):
            return state
        number = self.which.item(at)
        return Candidate(
            self.engine_ids[at],
            self.hits[number - 1] if number else self._nothing(at),
            self.queue_s.item(at),
            state.running,
            state.waiting,
            self._now - state.last_admit_s,
            state.prefill_s_per_token,
            state.decode_interference_s,
            state.late_s,
            state.recent_s,
            self.rooms.get(at, 0.0),
        )

    def prices(self, delay: float, premium: float, *, answers: bool = True) -> Floats:
        """Price of a second of prefill at each: ``delay`` for each request that it delays, but at least
        ``premium``. Without ``answers`` only prompts that wait are delayed."""
        values = self.values
        if not answers:
            waiting: Floats = np.maximum(delay * (values.waiting.mean() + values.waiting), premium)
            return waiting
        prices = values.prices
        if prices is None or values.priced_by != (delay, premium):
            values.priced_by = delay, premium
            delayed = np.array(values.requests_mean) + values.waiting
            prices = values.prices = np.maximum(np.array(delay) * delayed, np.array(premium))
        if not self.rooms:
            return prices
        # Answers hold the pages that prompts wait for.
        full = [at for at, room_s in self.rooms.items() if room_s > self.queue_s[at]]
        if full:
            prices = prices.copy()
            prices[full] = np.maximum(delay * (values.requests_mean + values.requests[full]), premium)
        return prices

    @property
    def waits_s(self) -> Floats:
        """Seconds until each begins with the prompt: for the prompts ahead there, or for pages."""
        return self.queues_s(1.0)

    def queues_s(self, room_share: float) -> Floats:
        """Seconds queued at each, or this share of the wait for pages, if that is more."""
        queue_s = self.queue_s
        if self.rooms:
            queue_s = queue_s.copy()
            for at, room_s in self.rooms.items():
                queue_s[at] = max(queue_s.item(at), room_share * room_s)
        return queue_s

    def only(self, places: Sequence[int]) -> Candidates:
        """Return those at these positions."""
        picked = list(places)
        number = {at: place for place, at in enumerate(places)}
        found, which = np.unique(np.append(self.which[picked], 0), return_inverse=True)
        states = [self.states[at] for at in places]
        return Candidates(
            [self.engine_ids[at] for at in places],
            states,
            _summed(self.values.only(picked), states),
            self.queue_s[picked],
            hits=[self.hits[number - 1] for number in found[1:].tolist()],
            which=which[:-1],
            rooms={number[at]: room for at, room in self.rooms.items() if at in number},
            nothing=lambda place: self._nothing(places[place]),
            now=self._now,
        )

    def idle(self, least_s: float) -> Places:
        """Return the positions of those with at least this ``idle_s``."""
        return (self._now - self.values.admitted_s >= least_s).nonzero()[0]


def _summed(values: FleetValues, states: Sequence[EngineState | Candidate]) -> FleetValues:
    recent_s, late_s = [state.recent_s for state in states], [state.late_s for state in states]
    values.summed(math.fsum(recent_s), math.fsum(late_s), values.requests.sum().item())
    return values


def columns(candidates: Sequence[Candidate]) -> Candidates:
    """Return the candidates as arrays."""
    if isinstance(candidates, Candidates):
        return candidates
    hits = {id(one.hit): one.hit for one in candidates}
    values = FleetValues(
        np.array([one.prefill_s_per_token for one in candidates]),
        np.array([one.interference_s for one in candidates]),
        np.array([float(one.running + one.waiting) for one in candidates]),
        np.array([float(one.waiting) for one in candidates]),
        np.array([one.recent_s for one in candidates]),
        np.array([-one.idle_s for one in candidates]),
    )
    numbers = dict(zip(hits, range(1, len(hits) + 1), strict=True))
    return Candidates(
        [one.engine_id for one in candidates],
        candidates,
        _summed(values, candidates),
        np.array([one.queue_s for one in candidates]),
        hits=list(hits.values()),
        which=np.array([numbers[id(one.hit)] for one in candidates], np.intp),
        rooms={at: one.room_s for at, one in enumerate(candidates) if one.room_s},
    )
