"""Counts of what a connector's half did since they were last taken; both halves and every rank add up.

A name is ``metric`` or ``metric/label/...``, values are sums. ``messages.stats`` carries them to vLLM's
log and Prometheus; nothing here needs vLLM.
"""

from __future__ import annotations

from connectors.transfer.base import TransferResult


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
