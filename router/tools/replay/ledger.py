"""An index that also remembers: for every block of every plane what happened to it last, and when.

It is the serving index with a journal, so what a replay counts is what the router would have held. ``at`` is
the position of the event being applied; whoever plays a capture sets it. Memory grows with the distinct
blocks of the capture, nothing is ever dropped: for tools, not for serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from publisher.events import BlockHash
from router.index.base import Plane
from router.index.store.memory import MemoryIndex

Gone = Literal["", "evicted", "cleared", "restarted"]


class EventPosition(NamedTuple):
    """One event of one engine: seq of its batch, and its number in the batch, from 0."""

    seq: int
    event: int


class BlockLog(msgspec.Struct):
    """One block in one plane: physical copies now, and the last change in either direction."""

    copies: int = 0
    stored: EventPosition | None = None
    gone: EventPosition | None = None
    how: Gone = ""


class PlaneCounts(msgspec.Struct):
    """One plane of one engine. ``stored`` to ``cleared`` count copies since the start of the capture."""

    blocks: int = 0
    """Distinct blocks held now."""
    copies: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    """Dropped by a cache reset or a restart."""
    unknown_removals: int = 0
    """Removals of blocks that were not there: history is missing."""


class Ledger(MemoryIndex):
    """See ``router.index.base.Index`` for what the index does."""

    def __init__(self) -> None:
        super().__init__()
        self.at = EventPosition(0, 0)
        self.logs: dict[tuple[str, Plane], dict[BlockHash, BlockLog]] = {}
        self.counts: dict[tuple[str, Plane], PlaneCounts] = {}

    def seen_planes(self, engine_id: str) -> list[Plane]:
        """Every plane the engine ever stored a block in or removed one from."""
        return sorted(plane for engine, plane in self.counts if engine == engine_id)

    def log(self, engine_id: str, plane: Plane, block: BlockHash) -> BlockLog | None:
        """What is remembered of a block; None where it was never there."""
        return self.logs.get((engine_id, plane), {}).get(block)

    def held(self, engine_id: str, plane: Plane) -> dict[BlockHash, int]:
        """Blocks held now, with their copies."""
        logs = self.logs.get((engine_id, plane), {})
        return {block: log.copies for block, log in logs.items() if log.copies}

    def restart_journal(self) -> None:
        """Forget what was remembered, the index itself excepted."""
        self.logs.clear()
        self.counts.clear()

    def store(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> None:
        super().store(engine_id, plane, hashes)
        logs, counts = self._of(engine_id, plane)
        for block in hashes:
            log = logs.get(block)
            if log is None:
                log = logs[block] = BlockLog()
            counts.blocks += not log.copies
            log.copies += 1
            log.stored = self.at
        counts.copies += len(hashes)
        counts.stored += len(hashes)

    def remove(self, engine_id: str, plane: Plane, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        left = super().remove(engine_id, plane, hashes)
        logs, counts = self._of(engine_id, plane)
        for block in hashes:
            log = logs.get(block)
            if log is None or not log.copies:
                counts.unknown_removals += 1
                continue
            self._take(log, counts, 1, "evicted")
            counts.removed += 1
        return left

    def set_copies(self, engine_id: str, plane: Plane, block: BlockHash, copies: int) -> None:
        log = self.log(engine_id, plane, block)
        held = log.copies if log is not None else 0
        if copies > held:
            self.store(engine_id, plane, [block] * (copies - held))
        elif copies < held:
            self.remove(engine_id, plane, [block] * (held - copies))

    def clear(self, engine_id: str, medium: str) -> None:
        super().clear(engine_id, medium)
        self._drop(
            engine_id, "cleared", [plane for plane in self.seen_planes(engine_id) if plane.medium == medium]
        )

    def forget(self, engine_id: str) -> None:
        super().forget(engine_id)
        self._drop(engine_id, "restarted", self.seen_planes(engine_id))

    def _of(self, engine_id: str, plane: Plane) -> tuple[dict[BlockHash, BlockLog], PlaneCounts]:
        key = engine_id, plane
        if key not in self.counts:
            self.logs[key], self.counts[key] = {}, PlaneCounts()
        return self.logs[key], self.counts[key]

    def _drop(self, engine_id: str, how: Gone, planes: list[Plane]) -> None:
        for plane in planes:
            logs, counts = self._of(engine_id, plane)
            counts.cleared += counts.copies
            for log in logs.values():
                if log.copies:
                    self._take(log, counts, log.copies, how)

    def _take(self, log: BlockLog, counts: PlaneCounts, copies: int, how: Gone) -> None:
        log.copies -= copies
        counts.copies -= copies
        if not log.copies:
            counts.blocks -= 1
            log.gone, log.how = self.at, how
