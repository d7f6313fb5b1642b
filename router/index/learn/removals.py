"""What a publisher means by "removed": told by its events, with counts of the evidence for each reading.

- PER_COPY: one of several copies is gone (vLLM to date). Proof: a block of which a removal left copies is
  removed again, with no store between.
- COUNTED: the event says how many copies are left (``remaining_copy_counts``). Believed as it comes.
- LAST_COPY: sent when no copy is left. Taken for it when the index came to hold more copies than the engine's
  pool has blocks and PER_COPY was not proven; withdrawn by that proof at any time.

Undecided reads as PER_COPY: blocks that merely stay long are no evidence, since hot ones do. Copies beyond
the pool of a publisher proven PER_COPY mean re-reports (``kv_cache_report_mode=full``), which are then looked
for. A decision holds until the engine restarts. Bounded: the last ``_WATCHED_MAX`` removals are watched.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from publisher.events import BlockHash
from router.index.base import Plane

_WATCHED_MAX = 4096


class Removals(StrEnum):
    """How removals are read."""

    UNDECIDED = "undecided"
    PER_COPY = "per_copy"
    COUNTED = "counted"
    LAST_COPY = "last_copy"


class RemovalEvidence:
    """Evidence of one publisher's removals. Counters are since its start."""

    def __init__(self) -> None:
        self.semantics = Removals.UNDECIDED
        self.removed_again = 0
        """Blocks removed twice in a row: copies are told one by one."""
        self.told_counts = 0
        self.phantoms = 0
        """Audits that found more copies than blocks."""
        self.re_reports_suspected = False
        self._watched: dict[tuple[Plane, BlockHash], None] = {}

    @property
    def open(self) -> bool:
        """Whether removals may still prove something."""
        return self.semantics in {Removals.UNDECIDED, Removals.LAST_COPY}

    @property
    def watching(self) -> bool:
        """Whether stores matter to it now."""
        return bool(self._watched)

    def counted(self) -> None:
        """An event told the copies left."""
        self.told_counts += 1
        self.semantics = Removals.COUNTED
        self._watched.clear()

    def stored(self, plane: Plane, hashes: Iterable[BlockHash]) -> None:
        """Blocks were stored: a later removal of them proves nothing."""
        for block in hashes:
            self._watched.pop((plane, block), None)

    def removed(self, plane: Plane, hashes: Iterable[BlockHash], left: Iterable[BlockHash]) -> None:
        """Blocks were removed; of those in ``left`` there were copies before that were not told gone."""
        for block in hashes:
            if (plane, block) in self._watched:
                self.removed_again += 1
        if self.removed_again:
            self.semantics = Removals.PER_COPY
            self._watched.clear()
            return
        for block in left:
            if len(self._watched) >= _WATCHED_MAX:
                del self._watched[next(iter(self._watched))]
            self._watched[plane, block] = None

    def phantom(self) -> list[tuple[Plane, BlockHash]]:
        """The index holds more copies than the pool has blocks. Returns blocks now known to be gone."""
        self.phantoms += 1
        if self.semantics is Removals.PER_COPY:
            self.re_reports_suspected = True
        if self.semantics is not Removals.UNDECIDED:
            return []
        self.semantics = Removals.LAST_COPY
        return list(self._watched)
