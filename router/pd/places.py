"""How many decode engines may wait at a prefill engine for blocks that are not there yet. Pure.

vLLM's Mooncake sender has few tasks (twice ``num_workers``, 20), and each decode engine that waits takes one.
If the prefill comes to nothing, nobody wakes it until both engines' time is over, though its client has left:
the task is taken, and the decode engine keeps the blocks that it had reserved, all that time. So places are
few, and one that is stuck stays taken.
"""

from __future__ import annotations

_AFTER_S = 60.0
"""By which a decode engine's own time-out exceeds the prefill engine's."""


class Places:
    """Of all prefill engines; times are monotonic seconds."""

    __slots__ = ("_open", "_stuck")

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._stuck: dict[str, list[float]] = {}

    def taken(self, engine_id: str, now: float) -> int:
        """Places taken at this engine."""
        young = {one: [end_s for end_s in ends if end_s > now] for one, ends in self._stuck.items()}
        self._stuck = {one: ends for one, ends in young.items() if ends}
        return self._open.get(engine_id, 0) + len(self._stuck.get(engine_id, ()))

    def take(self, engine_id: str) -> None:
        """One more."""
        self._open[engine_id] = self._open.get(engine_id, 0) + 1

    def free(self, engine_id: str) -> None:
        """One less: the prefill is over, or no decode engine was told."""
        left = self._open[engine_id] - 1
        if left:
            self._open[engine_id] = left
        else:
            del self._open[engine_id]

    def stick(self, engine_id: str, now: float, abort_s: float) -> None:
        """The prefill came to nothing, and a decode engine waits for it until the engines' time is over."""
        self.free(engine_id)
        self._stuck.setdefault(engine_id, []).append(now + abort_s + _AFTER_S)
