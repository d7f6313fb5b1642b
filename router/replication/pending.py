"""Pending, sent and refreshed blocks of one mirrored engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Words
from kvatlas.router.index.learn.learned_keys import LearnedKeys
from kvatlas.router.replication.master import ScriptCall
from kvatlas.router.replication.registry import (
    EngineFacts,
    EngineSlot,
)


class MirrorStats(msgspec.Struct):
    """Counters since start."""

    flushes: Annotated[int, "kvatlas_mirror_flushes_total"] = 0
    """Times waiting changes were written to the shared index."""
    blocks_written: Annotated[int, "kvatlas_mirror_blocks_written_total"] = 0
    """Blocks written."""
    blocks_refused: Annotated[int, "kvatlas_mirror_blocks_refused_total"] = 0
    """Blocks refused because the server is full; they are retried."""
    late_batches: Annotated[int, "kvatlas_mirror_late_batches_total"] = 0
    """Writes refused because a newer one had come before; done again."""
    fenced: Annotated[int, "kvatlas_mirror_fenced_total"] = 0
    """Engines dropped because another writer holds them."""
    lost_fences: Annotated[int, "kvatlas_mirror_lost_fences_total"] = 0
    """Writes refused because the engine's registry entry on the server was gone."""
    lost_slots: Annotated[int, "kvatlas_mirror_lost_slots_total"] = 0
    """Engines whose slot in the shared index was lost or changed; written again."""
    claims: Annotated[int, "kvatlas_mirror_claims_total"] = 0
    """Times the writing of an engine was claimed."""
    remirrors: Annotated[int, "kvatlas_mirror_remirrors_total"] = 0
    """Times all blocks of an engine were written again."""
    overflows: Annotated[int, "kvatlas_mirror_overflows_total"] = 0
    """Times an engine had more than 262,144 blocks waiting."""
    scope_changes: Annotated[int, "kvatlas_mirror_scope_changes_total"] = 0
    """Times the shared index of the model was another one than before."""
    errors: Annotated[dict[str, int], "kvatlas_mirror_errors_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Writes that failed, by reason."""

    def error(self, reason: str) -> None:
        self.errors[reason] = self.errors.get(reason, 0) + 1


class PendingEngine(msgspec.Struct, eq=False):
    """One engine of a writer.

    Bounded by ``TOUCHED_MAX`` changed blocks, and by the content of the memory index.
    """

    token: int
    whole: bool
    """Without a slot: whether ``touched`` is everything that the memory index holds of the engine."""
    slot: EngineSlot | None = None
    """None: a generation must be claimed before anything is written."""
    touched: set[BlockHash] = set()
    backlog: list[Words] = []
    """Unchanged blocks to write again: arrays, taken from the end."""
    facts: EngineFacts = msgspec.field(default_factory=EngineFacts)
    facts_due: bool = True
    in_flight: int = 0
    """Number of batches sent without a reply yet."""
    learned: LearnedKeys | None = None
    """Blocks are written under the keys that these give them; None: under their own hashes."""
    _refresh: Words | None = None
    _refreshed: int = 0
    _round_began: float = 0.0

    @property
    def idle(self) -> bool:
        return self.slot is not None and not (self.touched or self.backlog or self.facts_due)

    @property
    def written(self) -> bool:
        """Whether the server has everything that the memory index holds."""
        return self.slot is not None and not (self.touched or self.backlog or self.in_flight)

    def claimed(self, slot: EngineSlot, now: float) -> None:
        self.slot, self.facts_due = slot, True
        self._refresh, self._round_began = None, now

    def invalidate(self, *, whole: bool) -> None:
        """Discard what was written: claim a new generation before the next write."""
        self.slot, self.whole = None, whole
        self.touched, self.backlog = set(), []

    def touch(self, hashes: Sequence[BlockHash], limit: int) -> bool:
        """Record changed blocks; False if they exceed ``limit``, so that all blocks must be written again."""
        if self.slot is None and not self.whole:
            return True  # the claim writes everything
        self.touched.update(hashes)
        if len(self.touched) <= limit:
            return True
        self.invalidate(whole=False)
        return False

    def take(self, limit: int) -> list[BlockHash]:
        """Take the next blocks to write, changes first."""
        if len(self.touched) <= limit:
            taken, self.touched = list(self.touched), set()
        else:
            taken = [self.touched.pop() for _ in range(limit)]
        while self.backlog and len(taken) < limit:
            last = self.backlog.pop()
            split = max(0, len(last) - (limit - len(taken)))
            taken += map(BlockHash, last[split:].tolist())
            if split:
                self.backlog.append(last[:split])
        return taken

    def refresh(self, held: Callable[[], Words], now: float, period_s: float) -> None:
        """Move the blocks that are due to the backlog, if it is empty.

        ``held`` lists all blocks for the next round.
        """
        if self.slot is None or self.backlog:
            return
        share = (now - self._round_began) / period_s
        if self._refresh is not None:
            due = min(len(self._refresh), int(len(self._refresh) * share) + 1)
            if due > self._refreshed:
                self.backlog.append(self._refresh[self._refreshed : due])
            self._refreshed = due
        if share >= 1:
            self._refresh, self._refreshed, self._round_began = held(), 0, now


class Batch(msgspec.Struct, eq=False):
    """Blocks of one engine, in one script call."""

    engine_id: str
    engine: PendingEngine
    hashes: list[BlockHash]
    call: ScriptCall
    provisional: bool
    """Whether its codes were reduced for lack of memory: it must then be written again."""
    _finished: bool = False

    def __post_init__(self) -> None:
        self.engine.in_flight += 1

    def finish(self) -> bool:
        """End the batch: the reply arrived or the batch was abandoned. Returns False if called before."""
        if self._finished:
            return False
        self._finished = True
        self.engine.in_flight -= 1
        return True
