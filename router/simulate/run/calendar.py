"""When something happens next on each engine of a simulated fleet, in one order of virtual time.

Always true: an engine has one time at most, the one noted last.
"""

from __future__ import annotations

import heapq


class Calendar:
    """Seconds of virtual time; infinity is never."""

    def __init__(self, engines: int) -> None:
        self._noted = [float("inf")] * engines
        self._heap: list[tuple[float, int]] = []

    def note(self, engine: int, at_s: float) -> None:
        """Something happens on this engine then, and not when it was said before."""
        if at_s != self._noted[engine]:
            self._noted[engine] = at_s
            if at_s < float("inf"):
                heapq.heappush(self._heap, (at_s, engine))

    def next_s(self) -> float:
        """When the next thing happens."""
        heap = self._heap
        while heap and heap[0][0] != self._noted[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][0] if heap else float("inf")

    def take(self) -> int:
        """That engine, which has no time from now on; ``next_s`` has said that there is one."""
        engine = heapq.heappop(self._heap)[1]
        self._noted[engine] = float("inf")
        return engine
