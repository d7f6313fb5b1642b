"""One simulated rank: its KV memory, position by position, and a transfer engine that dawdles and fails.

A block holds, per token offset, a value made of the group and of every token before and at that position; a
state block holds one value. So a block that was read too early or too late, given to another request, or
filled from the wrong row shows up where the model would read it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvatlas.connectors.transfer.base import CLOSE_S, Direction, TransferJob, TransferResult

Content = dict[int, object]


@dataclass
class SimMemory:
    """Block id -> offset -> value. Block 0 is the null block, which must not be touched."""

    blocks: dict[int, Content] = field(default_factory=dict)

    def wipe(self, block_id: int) -> None:
        self.blocks[block_id] = {}

    def write(self, block_id: int, offset: int, value: object) -> None:
        assert block_id != 0, "the null block is written"
        self.blocks.setdefault(block_id, {})[offset] = value

    def read(self, block_id: int, offset: int) -> object:
        assert block_id != 0, "the null block is read"
        return self.blocks.get(block_id, {}).get(offset)


@dataclass
class _Running:
    job: TransferJob
    todo: list[tuple[int, int, bytes]]
    fails: bool
    spoilt: set[bytes] = field(default_factory=set)


class SimEngine:
    """A ``TransferEngine`` that copies a few blocks per ``tick``, in any order, several jobs together.

    ``failure_rate``: share of jobs that end in failure, some of their targets filled with garbage;
    ``name_keys``: they say which. A row knows whose value it holds.
    """

    def __init__(
        self, memory: SimMemory, rng: random.Random, *, failure_rate: float, name_keys: bool
    ) -> None:
        self.rows: dict[int, tuple[bytes, Content]] = {}
        self.ended: list[int] = []
        self.failure_rate = failure_rate
        self.lazy = False
        """Nothing moves while this is set."""
        self._memory = memory
        self._rng = rng
        self._name_keys = name_keys
        self._running: list[_Running] = []
        self._results: list[TransferResult] = []

    @property
    def idle(self) -> bool:
        return not self._running

    def mark(self) -> None:
        return None

    def submit(self, job: TransferJob, after: object = None) -> None:
        todo = [
            (int(block_id), int(slot), key)
            for moves in job.groups
            for block_id, slot, key in zip(moves.block_ids, moves.slots, moves.keys, strict=True)
        ]
        assert todo, "an empty job reached the engine"
        assert all(block_id != 0 for block_id, _, _ in todo), "the null block is in a job"
        self._rng.shuffle(todo)
        if job.direction is Direction.STORE:
            for _, slot, _ in todo:
                self.rows.pop(slot, None)
        self._running.append(_Running(job, todo, self._rng.random() < self.failure_rate))

    def tick(self, *, all_of_it: bool = False) -> None:
        """Let time pass."""
        if self.lazy and not all_of_it:
            return
        self._rng.shuffle(self._running)
        for running in list(self._running):
            steps = len(running.todo) if all_of_it else self._rng.randint(0, 4)
            for _ in range(min(steps, len(running.todo))):
                self._copy(running, running.todo.pop())
            if not running.todo and (all_of_it or self._rng.random() < 0.7):
                self._running.remove(running)
                self._end(running)

    def poll(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        self.tick(all_of_it=True)
        return True

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        self.tick(all_of_it=True)
        return True

    def _copy(self, running: _Running, move: tuple[int, int, bytes]) -> None:
        block_id, slot, key = move
        last = not running.todo and not running.spoilt
        garbage = running.fails and (last or self._rng.random() < 0.3)
        if garbage:
            running.spoilt.add(key)
        if running.job.direction is Direction.STORE:
            content = dict(self._memory.blocks.get(block_id, {}))
            self.rows[slot] = (key, {0: "garbage"} if garbage else content)
            return
        assert slot in self.rows, "a row is read before it was written"
        held, content = self.rows[slot]
        assert held == key, "a row is read that holds another key"
        self._memory.blocks[block_id] = {0: "garbage"} if garbage else dict(content)

    def _end(self, running: _Running) -> None:
        job = running.job
        self.ended.append(job.job_id)
        blamed = tuple(sorted(running.spoilt)) if self._name_keys else ()
        error = "simulated" if running.fails else ""
        self._results.append(
            TransferResult(job.job_id, job.direction, not running.fails, 0.001, {}, error, blamed)
        )
