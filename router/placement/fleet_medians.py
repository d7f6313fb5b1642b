"""Medians over the engines of a fleet of what each has learned, for engines that have learned nothing yet.

Exact, and kept from one time to the next: an engine that changed costs a search in what the others have, and
is read when the medians are asked for. To sort a thousand engines after each first token would take longer
than the decision. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")
Row = Sequence[float | None]
Medians = dict[str | None, list[float | None]]
"""By group; None where no engine of it has a value."""


class FleetMedians(Generic[Key, Found]):
    """Columns of values by engine. ``read`` returns an engine's group and its values, where it has any; None:
    it has learned nothing. ``made`` returns what is kept of the medians."""

    def __init__(
        self,
        columns: int,
        read: Callable[[Key], tuple[str | None, Row] | None],
        made: Callable[[Medians], Found],
    ) -> None:
        self.kept: Found | None = None
        """Result that was made of the medians; None: not computed (``fit``)."""
        self._columns = columns
        self._read = read
        self._made = made
        self._changed: dict[Key, None] = {}
        self._known: dict[Key, tuple[str | None, Row]] = {}
        self._sorted: dict[str | None, list[list[float]]] = {}

    def changed(self, key: Key) -> None:
        """Note that an engine's values may have changed."""
        self._changed[key] = self.kept = None

    def left(self, key: Key) -> None:
        """Remove an engine."""
        self._changed.pop(key, None)
        if self._drop(key):
            self.kept = None

    def fit(self) -> Found:
        """Compute ``kept``."""
        for key in self._changed:
            self._drop(key)
            found = self._read(key)
            if found is not None and any(value is not None for value in found[1]):
                group, row = self._known[key] = found
                columns = self._sorted.setdefault(group, [[] for _ in range(self._columns)])
                for column, value in zip(columns, row, strict=True):
                    if value is not None:
                        insort(column, value)
        self._changed.clear()
        self.kept = made = self._made(
            {group: [_median(one) if one else None for one in all_] for group, all_ in self._sorted.items()}
        )
        return made

    def _drop(self, key: Key) -> bool:
        if (known := self._known.pop(key, None)) is None:
            return False
        group, row = known
        columns = self._sorted[group]
        for column, value in zip(columns, row, strict=True):
            if value is not None:
                del column[bisect_left(column, value)]
        if not any(columns):
            del self._sorted[group]
        return True


def _median(values: Sequence[float]) -> float:
    """Of sorted values, as ``statistics.median``."""
    half, odd = divmod(len(values), 2)
    return values[half] if odd else (values[half - 1] + values[half]) / 2
