"""Counts of what a connector's half did since they were last taken; both halves and every rank add up.

A name is ``metric`` or ``metric/label/...``, values are sums. ``messages.stats`` carries them to vLLM's
log and Prometheus; nothing here needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable

from connectors.transfer.base import Direction, TransferResult

_FADES = 0.95
"""Of a job's weight in a rate, with each later job."""


class Tally:
    """Sums by name; not safe to share between threads."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        if value:
            self._sums[name] = self._sums.get(name, 0) + value

    def take(self) -> dict[str, float]:
        """All sums, which are zero afterwards."""
        sums, self._sums = self._sums, {}
        return sums

    def transfer(self, result: TransferResult) -> None:
        """Count one ended job of one rank. Its time is shared among its groups by their bytes."""
        direction = result.direction.value
        self.add(f"jobs/{direction}/{'ok' if result.ok else 'failed'}")
        total = sum(result.bytes_by_group.values())
        for group_idx, size in result.bytes_by_group.items():
            self.add(f"bytes/{direction}/{group_idx}", size)
            self.add(f"seconds/{direction}/{group_idx}", result.seconds * size / total if total else 0)


class Rates:
    """Bytes per second of the latest jobs of each direction."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(Direction, (0.0, 0.0))

    def add(self, results: Iterable[TransferResult]) -> None:
        for result in results:
            if result.ok and result.seconds > 0:
                size, seconds = self._sums[result.direction]
                moved = sum(result.bytes_by_group.values())
                self._sums[result.direction] = _FADES * size + moved, _FADES * seconds + result.seconds

    def bytes_per_second(self) -> dict[str, float]:
        """By direction; those that moved nothing yet are left out."""
        return {
            direction.value: size / seconds
            for direction, (size, seconds) in self._sums.items()
            if seconds > 0
        }
