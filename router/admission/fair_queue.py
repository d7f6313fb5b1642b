"""A bounded queue that shares what comes free: by class, then by what each tenant has had, then by arrival.

Classes are strict: a lower one is served while no higher one waits that could be. Within a class tenants
have virtual token counters (Sheng et al., Fairness in Serving Large Language Models, 2024, with the virtual
time of start-time fair queueing): what was computed for a tenant, by its weight. The tenant with the lowest
counter is next. One that begins to wait starts no further behind the counter of the tenant served last than
its ``credit_tokens``: a tenant that asks for less than its share is thus ahead of a flood all the time, and
not only with the first of several requests that come together, but none saves up more. Tenants compete for
the engines of one ``pool`` only; a ``lane`` is a set of engines within a pool that a request fits.

Within a tenant sessions take turns: a request's round is one after that of its session's latest request, at
least the round that is served now (start-time fair queueing with equal costs), so a session with many waiting
requests delays another by one of them. A request without a session is a session of its own. Within a round
the order is that of arrival, or with ``ageing`` of arrival plus ``ageing`` times the request's own work, so
that short work overtakes and nothing waits for ever.

Full, the queue lets go of the newest request of the tenant with the most requests waiting, by weight, in the
lowest class that is not above the newcomer's: that may be the newcomer. Invariants: at most ``requests_max``
wait; an added request is taken, released or removed, once; counters are kept only while a request waits for
their pool in their class; no more is given back to a tenant than it was charged, and giving back takes it no
further ahead than its credit. Pure: the caller has the clock."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from enum import IntEnum
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# Sessions of a tenant remembered without a waiting request.
_SESSIONS_IDLE_MAX = 64
Lane = Hashable
# A generated token is charged as this number of computed prompt tokens, as in the paper and in most price
# lists.
GENERATED_WORTH = 2


class Priority(IntEnum):
    """The class of a request; lower numbers come first. ``LOW`` is the first to go."""

    HIGH = 0
    NORMAL = 1
    LOW = 2

    @property
    def label(self) -> str:
        """Its name in headers, settings and metrics."""
        return self.name.lower()


class Waiting(Generic[T]):
    """One request in the queue; ``work_s`` is what an engine would compute for it, ``credit_tokens`` what its
    tenant may have saved up, for each unit of its weight."""

    __slots__ = (
        "arrived_s",
        "credit_tokens",
        "item",
        "key",
        "lane",
        "pool",
        "priority",
        "session",
        "tenant",
        "weight",
        "work_s",
    )

    def __init__(
        self,
        item: T,
        *,
        arrived_s: float,
        work_s: float = 0.0,
        tenant: str = "",
        weight: float = 1.0,
        priority: Priority = Priority.NORMAL,
        pool: str = "",
        lane: Lane = None,
        credit_tokens: float = 0.0,
        session: str = "",
    ) -> None:
        self.item = item
        self.arrived_s = arrived_s
        self.work_s = work_s
        self.tenant = tenant
        self.weight = weight
        self.priority = priority
        self.pool = pool
        self.lane = lane
        self.credit_tokens = credit_tokens
        self.session = session
        self.key = (0, 0.0, 0)
        """Its place among the requests of its tenant: round, arrival with ageing, number."""


class _Line(Generic[T]):
    """Waiting requests of a tenant in one band, by lane, each in order."""

    __slots__ = ("lanes", "round", "turns", "waiting", "weight")

    def __init__(self) -> None:
        self.lanes: dict[Lane, list[Waiting[T]]] = {}
        self.waiting = 0
        self.weight = 1.0
        self.round = 0
        """Of the request served last."""
        self.turns: dict[str, tuple[int, int]] = {}
        """Session -> the round of its latest request, and how many of its requests wait."""

    def add(self, one: Waiting[T]) -> None:
        own = self.round
        if one.session:
            latest, waiting = self.turns.get(one.session, (self.round - 1, 0))
            own = max(self.round, latest + 1)
            self.turns[one.session] = own, waiting + 1
            if len(self.turns) > 2 * self.waiting + _SESSIONS_IDLE_MAX:
                self.turns = {name: turn for name, turn in self.turns.items() if turn[1]}
        one.key = (own, *one.key[1:])
        insort(self.lanes.setdefault(one.lane, []), one, key=_key)
        self.waiting += 1
        self.weight = one.weight

    def remove(self, one: Waiting[T]) -> bool:
        lane = self.lanes.get(one.lane, [])
        at = bisect_left(lane, one.key, key=_key)
        if at == len(lane) or lane[at] is not one:
            return False
        del lane[at]
        if not lane:
            del self.lanes[one.lane]
        self.waiting -= 1
        if one.session:
            latest, waiting = self.turns[one.session]
            if waiting > 1 or one.key[0] <= self.round:
                self.turns[one.session] = latest, waiting - 1
            else:
                # It left without having been served: its session owes nothing.
                del self.turns[one.session]
        return True

    def newest(self) -> Waiting[T]:
        return max((one for lane in self.lanes.values() for one in lane), key=lambda one: one.key[-1])


class _Band(Generic[T]):
    """The tenants that wait in one class for one pool, and their counters."""

    __slots__ = ("credit_tokens", "lines", "served", "time", "work_s")

    def __init__(self) -> None:
        self.lines: dict[str, _Line[T]] = {}
        self.served: dict[str, float] = {}
        """Tokens computed for a tenant, divided by its weight."""
        self.time = 0.0
        """The counter of the tenant served last, before it was charged."""
        self.credit_tokens = 0.0
        self.work_s = 0.0

    def add(self, one: Waiting[T]) -> None:
        line = self.lines.get(one.tenant)
        if line is None:
            line = self.lines[one.tenant] = _Line()
            self.credit_tokens = one.credit_tokens
            self.served[one.tenant] = max(self._least, self.served.get(one.tenant, -math.inf))
        line.add(one)
        self.work_s += one.work_s

    def remove(self, one: Waiting[T]) -> bool:
        line = self.lines.get(one.tenant)
        if line is None or not line.remove(one):
            return False
        if not line.waiting:
            del self.lines[one.tenant]
        self.work_s -= one.work_s
        return True

    @property
    def _least(self) -> float:
        """The lowest counter that anybody may begin with."""
        return self.time - self.credit_tokens

    def charge(self, tenant: str, tokens: float) -> None:
        self.served[tenant] = self.served.get(tenant, self._least) + tokens

    def refund(self, tenant: str, tokens: float) -> None:
        served = self.served.get(tenant)
        if served is not None:
            self.served[tenant] = max(served - tokens, min(served, self._least))

    def next(self, fits: Callable[[Lane], bool]) -> Waiting[T] | None:
        def least(tenant: str) -> tuple[float, tuple[int, float, int]]:
            return self.served[tenant], min(lane[0].key for lane in self.lines[tenant].lanes.values())

        for tenant in sorted(self.lines, key=least):
            heads = sorted((lane[0] for lane in self.lines[tenant].lanes.values()), key=_key)
            for head in heads:
                if fits(head.lane):
                    return head
        return None


class Charge:
    """A tenant's charge for one request while others waited."""

    __slots__ = ("_band", "_tenant", "_tokens", "_weight")

    def __init__(self, band: _Band[Any], tenant: str, tokens: float, weight: float) -> None:
        self._band = band
        self._tenant = tenant
        self._tokens = tokens
        self._weight = weight

    def correct(self, tokens: float) -> None:
        """The request costs this many tokens instead. Counts where the tenants it was charged beside wait
        still: another band has counters of its own."""
        more, self._tokens = tokens - self._tokens, tokens
        if more >= 0:
            self._band.charge(self._tenant, more / self._weight)
        else:
            self._band.refund(self._tenant, -more / self._weight)


class FairQueue(Generic[T]):
    """See the module. ``ageing``: seconds that a request is put back for each second of its work; 0: first
    come, first served within a tenant."""

    def __init__(self, requests_max: int, *, ageing: float = 0.0) -> None:
        self.configure(requests_max, ageing=ageing)
        self._bands: dict[tuple[Priority, str], _Band[T]] = {}
        self._numbers = count()
        self._waiting = 0

    def configure(self, requests_max: int, *, ageing: float) -> None:
        """Set the settings of requests added from here on; waiting ones stay."""
        self._max = requests_max
        self._ageing = ageing

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Waiting[T]]:
        for band in self._bands.values():
            for line in band.lines.values():
                for lane in line.lanes.values():
                    yield from lane

    def add(self, one: Waiting[T]) -> Waiting[T] | None:
        """Let it wait. Returns the one that has to go instead, which may be this one."""
        one.key = (0, one.arrived_s + self._ageing * one.work_s, next(self._numbers))
        gone = self._victim(one) if self._waiting >= self._max else None
        if gone is one:
            return one
        if gone is not None:
            self.remove(gone)
        self._bands.setdefault((one.priority, one.pool), _Band()).add(one)
        self._waiting += 1
        return gone

    def remove(self, one: Waiting[T]) -> bool:
        """It waits no longer; False where it did not."""
        key = one.priority, one.pool
        band = self._bands.get(key)
        if band is None or not band.remove(one):
            return False
        self._waiting -= 1
        if not band.lines:
            del self._bands[key]
        return True

    def take(self, fits: Callable[[Lane], bool]) -> Waiting[T] | None:
        """The next one of those that fit somewhere; None where none does. ``charge`` what it costs before the
        next is taken."""
        known: dict[Lane, bool] = {}

        def asked(lane: Lane) -> bool:
            if lane not in known:
                known[lane] = fits(lane)
            return known[lane]

        for key in sorted(self._bands, key=lambda key: key[0]):
            band = self._bands[key]
            one = band.next(asked)
            if one is None:
                continue
            band.time = max(band.time, band.served[one.tenant])
            line = band.lines[one.tenant]
            line.round = max(line.round, one.key[0])
            del self._bands[key]
            self._bands[key] = band  # pools take turns
            self.remove(one)
            return one
        return None

    def charge(
        self, tenant: str, priority: Priority, pool: str, tokens: float, weight: float = 1.0
    ) -> Charge | None:
        """Charge a tenant with computed tokens; None where no request waits, and it counts nowhere."""
        band = self._bands.get((priority, pool))
        if band is None:
            return None
        band.charge(tenant, tokens / weight)
        return Charge(band, tenant, tokens, weight)

    def ahead_s(self, priority: Priority, pool: str) -> float:
        """Seconds of one engine's work that wait for a pool in this class and above."""
        bands = self._bands
        return sum(bands[key].work_s for key in bands if key[0] <= priority and key[1] == pool)

    def alone(self, tenant: str, pool: str) -> bool:
        """Whether no other tenant waits for this pool, in any class."""
        return all(key[1] != pool or band.lines.keys() <= {tenant} for key, band in self._bands.items())

    def lanes(self) -> set[Lane]:
        """Those that somebody waits for."""
        return {lane for band in self._bands.values() for line in band.lines.values() for lane in line.lanes}

    def _victim(self, newcomer: Waiting[T]) -> Waiting[T]:
        """The request that leaves to keep the bound, with the newcomer counted in."""
        lowest = max(key[0] for key in self._bands)
        if lowest < newcomer.priority:
            return newcomer
        lengths: dict[str, float] = {}
        for (priority, _), band in self._bands.items():
            if priority == lowest:
                for tenant, line in band.lines.items():
                    lengths[tenant] = lengths.get(tenant, 0.0) + line.waiting / line.weight
        if lowest == newcomer.priority:
            own = lengths.get(newcomer.tenant, 0.0) + 1 / newcomer.weight
            lengths[newcomer.tenant] = own
            if own >= max(lengths.values()):
                return newcomer
        longest = max(lengths, key=lambda tenant: lengths[tenant])
        lines = [
            band.lines[longest]
            for (priority, _), band in self._bands.items()
            if priority == lowest and longest in band.lines
        ]
        return max((line.newest() for line in lines), key=lambda one: one.key[-1])


def _key(one: Waiting[T]) -> tuple[int, float, int]:
    return one.key
