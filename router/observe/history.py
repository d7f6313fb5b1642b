"""Counts of the last minutes per interval, in a ring of fixed size.

Counters elsewhere only grow. ``HistoryLog`` receives them every ``EVERY_S`` seconds and keeps the
differences, so requests cost nothing extra. Intervals are numbered by the monotonic clock, which all
processes of a machine share: histories of several workers are added up interval by interval. Pure and
bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Self

import msgspec

EVERY_S = 5.0
# Five minutes.
INTERVALS_MAX = 60


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one engine, or of all. ``requests``: ended requests; ``errors``: those answered with a status
    of 500 or above, or cut by the engine; ``unavailable``: those answered with 503. Engines reported
    ``hit_tokens`` of ``prompt_tokens`` as cached; ``exact`` of ``compared`` predictions were right."""

    requests: int = 0
    errors: int = 0
    unavailable: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    exact: int = 0
    compared: int = 0

    def since(self, before: Counts) -> Counts:
        """The difference; the whole count if a counter fell, because the engine left and came back."""
        was, now = msgspec.structs.asdict(before), msgspec.structs.asdict(self)
        if any(now[name] < was[name] for name in was):
            return self
        return Counts(**{name: now[name] - was[name] for name in was})


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """Values at one moment: requests in the proxy, engines, and engines that are up."""

    active: int = 0
    engines: int = 0
    engines_up: int = 0


class HistoryInterval(Counts, frozen=True, kw_only=True):
    """Counts of one interval. ``slot``: its number, which grows by one every ``every_s``; ``seconds``: its
    length, shorter for the current one. ``active``, ``engines`` and ``engines_up`` are values at its end."""

    slot: int
    seconds: float
    active: int
    engines: int
    engines_up: int

    def joined(self, other: Self) -> Self:
        """Merge with another worker's interval: counts are added; gauges that all workers share take the
        maximum."""
        one, two = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        added = {name: one[name] + two[name] for name in (*Counts.__struct_fields__, "active")}
        largest = {name: max(one[name], two[name]) for name in ("seconds", "engines", "engines_up")}
        return msgspec.structs.replace(self, **added, **largest)


class RecentHistory(msgspec.Struct, frozen=True):
    """Intervals of the last five minutes, oldest first; the last one is the current one. ``at_s``: time of
    the data, Unix time."""

    at_s: float
    every_s: float
    intervals: list[HistoryInterval]

    def joined(self, others: Iterable[RecentHistory]) -> RecentHistory:
        """Merge with the histories of sibling workers."""
        by_slot: dict[int, HistoryInterval] = {}
        for history in (self, *others):
            for interval in history.intervals:
                known = by_slot.get(interval.slot)
                by_slot[interval.slot] = interval if known is None else known.joined(interval)
        return RecentHistory(self.at_s, self.every_s, [by_slot[slot] for slot in sorted(by_slot)])


class HistoryLog:
    """History of one process, which started at ``now`` (monotonic seconds) with all counters at zero."""

    def __init__(self, now: float) -> None:
        self._ring: deque[HistoryInterval] = deque(maxlen=INTERVALS_MAX)
        self._before: Mapping[str, Counts] = {}
        self._begun_s = now

    def add(self, now: float, counts: Mapping[str, Counts], gauges: Gauges) -> float:
        """End the current interval if it is over; ``counts`` are by engine. Returns the seconds until the
        next end."""
        if int(now // EVERY_S) != int(self._begun_s // EVERY_S):
            self._ring.append(self._present(now, counts, gauges))
            self._before, self._begun_s = counts, now
        return EVERY_S - now % EVERY_S

    def recent_history(
        self, now: float, counts: Mapping[str, Counts], gauges: Gauges, *, unix_s: float
    ) -> RecentHistory:
        """Return the history at ``now``, which is ``unix_s`` in Unix time."""
        oldest = int(now // EVERY_S) - INTERVALS_MAX
        kept = [interval for interval in self._ring if interval.slot >= oldest]
        return RecentHistory(unix_s, EVERY_S, [*kept, self._present(now, counts, gauges)])

    def _present(self, now: float, counts: Mapping[str, Counts], gauges: Gauges) -> HistoryInterval:
        nothing, sums = Counts(), dict.fromkeys(Counts.__struct_fields__, 0)
        for engine, one in counts.items():
            for name, count in msgspec.structs.asdict(one.since(self._before.get(engine, nothing))).items():
                sums[name] += count
        return HistoryInterval(
            **sums,
            **msgspec.structs.asdict(gauges),
            slot=int(self._begun_s // EVERY_S),
            seconds=now - self._begun_s,
        )
