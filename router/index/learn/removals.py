"""The meaning of "removed" for a publisher, inferred from its events, with counts of the evidence.

PER_COPY: one of several copies was removed (vLLM to date); proof: a block of which a removal left copies is
removed again, without a store in between. COUNTED: the event carries the number of remaining copies
(``remaining_copy_counts``). LAST_COPY: sent when no copy is left; assumed when the index holds more copies
than the engine's pool has blocks and PER_COPY is not proven; revoked by that proof at any time. Undecided
counts as PER_COPY: blocks that stay long are no evidence, since hot ones do. Copies beyond the pool of a
proven PER_COPY publisher mean re-reports (``kv_cache_report_mode=full``), which are then detected. A decision
holds until the engine restarts. At most ``_WATCHED_MAX`` removals are watched.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Plane

_WATCHED_MAX = 4096


class Removals(StrEnum):
    """Meaning of removal events."""

    UNDECIDED = "undecided"
    PER_COPY = "per_copy"
    COUNTED = "counted"
    LAST_COPY = "last_copy"


class RemovalEvidence:
    """Evidence about one publisher's removals. Counters since its start."""

    def __init__(self) -> None:
        self.semantics = Removals.UNDECIDED
        # Blocks removed twice in a row: removals are per copy.
        self.removed_again = 0
        self.told_counts = 0
        # Number of audits that found more copies than blocks.
        self.phantoms = 0
        self.re_reports_suspected = False
        self._watched: dict[tuple[Plane, BlockHash], None] = {}

    @property
    def open(self) -> bool:
        """Whether removals may still prove something."""
        return self.semantics in {Removals.UNDECIDED, Removals.LAST_COPY}

    @property
    def watching(self) -> bool:
        """Whether stores currently affect the evidence."""
        return bool(self._watched)

    def counted(self) -> None:
        """Record an event with the number of remaining copies."""
        self.told_counts += 1
        self.semantics = Removals.COUNTED
        self._watched.clear()

    def stored(self, plane: Plane, hashes: Iterable[BlockHash]) -> None:
        """Record stored blocks: a later removal of them proves nothing."""
        for block in hashes:
            self._watched.pop((plane, block), None)

    def removed(self, plane: Plane, hashes: Iterable[BlockHash], left: Iterable[BlockHash]) -> None:
        """Record removed blocks; those in ``left`` still have copies in the index."""
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
        """Record that the index holds more copies than the pool has blocks.

        Returns blocks now known to be removed.
        """
        self.phantoms += 1
        if self.semantics is Removals.PER_COPY:
            self.re_reports_suspected = True
        if self.semantics is not Removals.UNDECIDED:
            return []
        self.semantics = Removals.LAST_COPY
        return list(self._watched)
