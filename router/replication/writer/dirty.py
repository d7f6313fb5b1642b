"""What waits to be written of one mirrored engine, what has been sent, and what is due for a refresh."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from publisher.events import BlockHash
from router.index.base import Words
from router.replication.redis.master import ScriptCall
from router.replication.schema.registry import EngineFacts, EngineSlot


class MirrorStats(msgspec.Struct):
    """Counters since start."""

    flushes: int = 0
    """Times waiting changes were written to the shared index."""
    blocks_written: int = 0
    """Blocks written."""
    blocks_refused: int = 0
    """Blocks refused because the server is full; they are retried."""
    late_batches: int = 0
    """Writes refused because a newer one had come before; done again."""
    fenced: int = 0
    """Engines dropped because another writer holds them."""
    lost_fences: int = 0
    """Writes refused because the engine's registry entry on the server was gone."""
    lost_seats: int = 0
    """Engines whose slot in the shared index was lost or changed; written again."""
    claims: int = 0
    """Times the writing of an engine was claimed."""
    remirrors: int = 0
    """Times all blocks of an engine were written again."""
    overflows: int = 0
    """Times an engine had more than ``touched_max`` blocks waiting."""
    scope_changes: int = 0
    """Times the shared index of the model was another one than before."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    """Writes that failed, by reason."""

    def error(self, reason: str) -> None:
        self.errors[reason] = self.errors.get(reason, 0) + 1


class PendingEngine:
    """One engine of a writer. Bounded by ``touched_max`` changed blocks, and by what the memory index
    holds."""

    __slots__ = (
        "_refresh",
        "_refreshed",
        "_round_began",
        "backlog",
        "facts",
        "facts_due",
        "in_flight",
        "slot",
        "token",
        "touched",
        "whole",
    )

    def __init__(self, token: int, *, whole: bool) -> None:
        self.token = token
        self.slot: EngineSlot | None = None
        """None: a generation must be claimed before anything is written."""
        self.touched: set[BlockHash] = set()
        self.whole = whole
        """Without a slot: whether ``touched`` is all that the memory index holds of the engine."""
        self.backlog: list[Words] = []
        """Unchanged blocks to write again: arrays, taken from the end."""
        self.facts = EngineFacts()
        self.facts_due = True
        self.in_flight = 0
        """Batches sent whose reply has not arrived."""
        self._refresh: Words | None = None
        self._refreshed = 0
        self._round_began = 0.0

    @property
    def idle(self) -> bool:
        return self.slot is not None and not (self.touched or self.backlog or self.facts_due)

    @property
    def written(self) -> bool:
        """Whether the server has everything that the memory index holds."""
        return self.slot is not None and not (self.touched or self.backlog or self.in_flight)

    @property
    def waiting(self) -> int:
        """Blocks not sent yet."""
        return len(self.touched) + sum(map(len, self.backlog))

    def claimed(self, slot: EngineSlot, now: float) -> None:
        """Note the slot and generation that were claimed."""
        self.slot, self.facts_due = slot, True
        self._refresh, self._round_began = None, now

    def invalidate(self, *, whole: bool) -> None:
        """What was written no longer counts: claim a new generation before the next write."""
        self.slot, self.whole = None, whole
        self.touched, self.backlog = set(), []

    def touch(self, hashes: Sequence[BlockHash], limit: int) -> bool:
        """Note changed blocks; False if they exceed ``limit``, so that all blocks must be written again."""
        if self.slot is None and not self.whole:
            return True  # the claim writes everything
        self.touched.update(hashes)
        if len(self.touched) <= limit:
            return True
        self.invalidate(whole=False)
        return False

    def take(self, limit: int) -> list[BlockHash]:
        """The next blocks to write, changes first."""
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
        """Move the blocks that are due to the backlog, if it is empty; ``held`` lists all blocks for the next
        round."""
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


class Batch:
    """Blocks of one engine, in one script call."""

    __slots__ = ("_finished", "call", "engine", "engine_id", "hashes", "provisional")

    def __init__(
        self,
        engine_id: str,
        engine: PendingEngine,
        hashes: list[BlockHash],
        call: ScriptCall,
        provisional: bool,
    ) -> None:
        self.engine_id = engine_id
        self.engine = engine
        self.hashes = hashes
        self.call = call
        self.provisional = provisional
        """Its codes were reduced for want of memory: it must be written again."""
        self._finished = False
        engine.in_flight += 1

    def finish(self) -> bool:
        """The reply arrived or the batch was given up; False if ``finish`` was called before."""
        if self._finished:
            return False
        self._finished = True
        self.engine.in_flight -= 1
        return True
