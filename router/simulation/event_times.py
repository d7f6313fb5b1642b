"""Times of the next event of each simulated engine, and of arrivals, in virtual time.

Invariants: an engine has at most one time, the last one set; every request arrives once, and in closed
sessions never before the one it follows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvatlas.router.simulation.requests import Follows, Request


class Calendar:
    """Next event times; infinity means never."""

    def __init__(self, engines: int) -> None:
        self._noted = [float("inf")] * engines
        self._heap: list[tuple[float, int]] = []

    def note(self, engine: int, at_s: float) -> None:
        """Set an engine's next event time, replacing the previous one."""
        if at_s != self._noted[engine]:
            self._noted[engine] = at_s
            if at_s < float("inf"):
                heapq.heappush(self._heap, (at_s, engine))

    def next_s(self) -> float:
        heap = self._heap
        while heap and heap[0][0] != self._noted[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][0] if heap else float("inf")

    def take(self) -> int:
        """Remove and return the engine with the next event; ``next_s`` must be finite."""
        engine = heapq.heappop(self._heap)[1]
        self._noted[engine] = float("inf")
        return engine


class Arrivals:
    """Requests yet to arrive, in the order of their times and then of the workload.

    Open: every request arrives at its recorded time. Closed: a request that follows another one arrives when
    its client would send it, which is known once the other one was sent or answered. Recorded times and
    pauses are divided by ``speed``.
    """

    def __init__(self, requests: Sequence[Request], *, speed: float, closed: bool) -> None:
        self._speed = speed
        self._times_s = [request.at_s / speed for request in requests]
        self._after_start: dict[int, list[tuple[int, float]]] = {}
        self._after_end: dict[int, list[tuple[int, Follows]]] = {}
        self._heap: list[tuple[float, int]] = []
        for index, request in enumerate(requests):
            follows = request.follows if closed else None
            if follows is None:
                self._heap.append((self._times_s[index], index))
            elif follows.answered:
                self._after_end.setdefault(follows.request, []).append((index, follows))
            else:
                self._after_start.setdefault(follows.request, []).append((index, follows.gap_s))
        heapq.heapify(self._heap)

    def next_s(self) -> float:
        """Return the time of the next arrival; infinity if none is known."""
        return self._heap[0][0] if self._heap else float("inf")

    def take(self) -> int:
        """Remove and return the request that arrives now."""
        index = heapq.heappop(self._heap)[1]
        for later, gap_s in self._after_start.pop(index, ()):
            self._come(later, self._times_s[index] + gap_s / self._speed)
        return index

    def arrived_s(self, index: int) -> float:
        return self._times_s[index]

    def ended(self, index: int, now: float) -> None:
        """Record that a request was answered or refused; requests that follow it arrive after their pause."""
        for later, follows in self._after_end.pop(index, ()):
            if follows.think_s is not None:
                at_s = now + follows.think_s / self._speed
            else:
                at_s = max(now, self._times_s[index] + follows.gap_s / self._speed)
            self._come(later, at_s)

    def _come(self, index: int, at_s: float) -> None:
        self._times_s[index] = at_s
        heapq.heappush(self._heap, (at_s, index))
