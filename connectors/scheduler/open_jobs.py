"""Transfer jobs under way, from the scheduler's side: who has answered, and with what.

What always holds: a job leaves the book once, when every rank has answered, and a block of it counts as good
only if no rank blamed it. A rank that failed without naming blocks blames them all.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from connectors.messages import StepResults, Tally
from connectors.scheduler.plans import EngineRequest, PlannedBlock
from connectors.tier.base import Tier, TierChanges
from connectors.transfer.base import Direction, TransferResult

if TYPE_CHECKING:
    from connectors.hits import HitResolver


log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenJob:
    """One job. ``blocks`` are pinned in the GPU's pool if it is a store, in the tier if it is a load."""

    direction: Direction
    request_id: str
    blocks: list[PlannedBlock]
    ranks_left: int
    spoilt: bool = False
    """Nothing of it may be used any more, whatever the ranks say."""
    failed_keys: set[bytes] = field(default_factory=set)

    def good(self, block: PlannedBlock) -> bool:
        """Whether this block's bytes are right on every rank; meant for jobs that ended."""
        return not self.spoilt and block.key not in self.failed_keys

    @property
    def failed(self) -> bool:
        return self.spoilt or bool(self.failed_keys)


class OpenJobs:
    """The jobs of one engine. Ids start at 1 and are never used again."""

    def __init__(self, world_size: int) -> None:
        """``world_size``: ranks that answer each job."""
        self._world_size = world_size
        self._jobs: dict[int, OpenJob] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._jobs)

    def waiting(self, direction: Direction) -> int:
        """Jobs of this direction that not every rank has answered."""
        return sum(job.direction is direction for job in self._jobs.values())

    def open(self, direction: Direction, request_id: str, blocks: list[PlannedBlock]) -> int:
        """Enter a job and give its id."""
        job_id = next(self._ids)
        self._jobs[job_id] = OpenJob(direction, request_id, blocks, self._world_size)
        return job_id

    def take(self, results: StepResults) -> list[OpenJob]:
        """Enter what ranks answered; returns the jobs that ended with it."""
        ended: list[OpenJob] = []
        for result in results.results:
            job = self._jobs.get(result.job_id)
            if job is None:
                log.error("a rank answered transfer job %d, which is not under way", result.job_id)
                continue
            _merge(job, result)
            if job.ranks_left == 0:
                ended.append(self._jobs.pop(result.job_id))
        return ended

    def spoil_all(self) -> None:
        """What is under way now must not be kept, though it still has to end."""
        for job in self._jobs.values():
            job.spoilt = True


def _merge(job: OpenJob, result: TransferResult) -> None:
    job.ranks_left -= 1
    if result.ok:
        return
    level = logging.WARNING if job.direction is Direction.LOAD else logging.INFO
    log.log(level, "%s of request %s failed: %s", job.direction.value, job.request_id, result.error)
    job.failed_keys.update(result.failed_keys)
    if not result.failed_keys:
        job.spoilt = True


# How far a request can be loaded: asked of the tier, and remembered for as long as the answer stays good.
#
# A request that waits for room is asked about in each step, and for a long prompt the answer takes tens of
# milliseconds. What always holds: an answer is forgotten as soon as one of its blocks ceases to be held;
# one that could have grown meanwhile is worked out again, but no sooner than after ``REST`` times what that
# takes. A tier that does not know keeps a request waiting for the deadline, counted from the first time it
# was asked.


REST = 20
"""Working it out again takes at most one part in this many of the engine core's time, for each request."""


@dataclass(frozen=True, slots=True)
class _Answer:
    num_local_tokens: int
    num_tokens: int
    hit_tokens: int
    good_until: float
    keys: frozenset[bytes] | None
    """What must stay held; None: not worked out, anything that is removed may be of it."""


class Lookups:
    """Answers for the waiting requests of one engine. ``clock`` and ``deadline_s`` in seconds."""

    def __init__(
        self,
        resolver: HitResolver,
        tier: Tier,
        tally: Tally,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._resolver = resolver
        self._tier = tier
        self._tally = tally
        self._deadline_s = deadline_s
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._asked_again: set[str] = set()
        self._waiting_since: dict[str, float] = {}

    def hit(self, request: EngineRequest, num_local_tokens: int) -> int | None:
        """Tokens of the longest loadable prefix, local ones included, or 0; None: ask again in a step."""
        now, request_id = self._clock(), request.request_id
        answer = self._answers.get(request_id)
        if (
            answer is not None
            and (answer.num_local_tokens, answer.num_tokens) == (num_local_tokens, request.num_tokens)
            and now < answer.good_until
        ):
            return answer.hit_tokens
        hit = self._work_out(request, num_local_tokens)
        if hit is None:
            since = self._waiting_since.setdefault(request_id, now)
            if now - since < self._deadline_s:
                return None
            self._tally.add("lookups/late")
            return 0
        self._waiting_since.pop(request_id, None)
        self._answers[request_id] = _Answer(
            num_local_tokens,
            request.num_tokens,
            hit,
            good_until=now + (REST + 1) * (self._clock() - now),
            keys=self._needed(request, num_local_tokens, hit),
        )
        return hit

    def removed(self, keys: frozenset[bytes]) -> None:
        """These blocks are no longer held."""
        for request_id, answer in list(self._answers.items()):
            if answer.keys is None or not answer.keys.isdisjoint(keys):
                del self._answers[request_id]

    def forget(self, request_id: str) -> None:
        """The request was admitted, or is gone."""
        self._answers.pop(request_id, None)
        self._asked_again.discard(request_id)
        self._waiting_since.pop(request_id, None)

    def _work_out(self, request: EngineRequest, num_local_tokens: int) -> int | None:
        hashes = request.block_hashes
        known: dict[bytes, bool] = {}
        while keys := self._resolver.lookup_keys(
            hashes, request.num_tokens, num_local_tokens=num_local_tokens, known=known
        ):
            held = self._tier.held(request.request_id, keys)
            if held is None:
                return None
            known.update((key, key in held) for key in keys)

        def usable(key: bytes) -> bool:
            return known.get(key, False)

        return self._resolver.find_hit(hashes, request.num_tokens, usable, num_local_tokens=num_local_tokens)

    def _needed(
        self, request: EngineRequest, num_local_tokens: int, hit_tokens: int
    ) -> frozenset[bytes] | None:
        """The keys of the blocks to load; not worth its time for a request that is asked about only once."""
        if not hit_tokens:
            return frozenset()
        if request.request_id not in self._asked_again:
            self._asked_again.add(request.request_id)
            return None
        return frozenset(
            self._resolver.key_at(request.block_hashes, group_idx, index, hit_tokens)
            for group_idx, indices in self._resolver.load_mask(num_local_tokens, hit_tokens).items()
            for index in indices
        )


# Keeps the GPU blocks that stores read from being given to other requests, by the engine's own ref counts.
#
# A pinned block may lose its request; it returns to the pool with its last pin. What always holds: every
# pin is taken back exactly once, and no more than ``blocks_max`` different blocks are pinned.


class SourcePins:
    """Pins on the blocks of one engine's pool. ``bind`` comes before anything else."""

    def __init__(self, share_max: float) -> None:
        """``share_max``: part of the pool (0 to 1) that may be pinned; at least one block may."""
        self._share_max = share_max
        self._pool: Any = None
        self._pins: Counter[int] = Counter()
        self.blocks_max = 0

    def bind(self, pool: Any) -> None:
        """Use vLLM's ``BlockPool``."""
        self._pool = pool
        self.blocks_max = max(1, int(pool.num_gpu_blocks * self._share_max))

    @property
    def bound(self) -> bool:
        return self._pool is not None

    @property
    def count(self) -> int:
        """Different blocks that are pinned now."""
        return len(self._pins)

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self.blocks_max - len(self._pins)

    def pin(self, block_ids: Sequence[int]) -> None:
        """Hold these blocks, which now belong to a request or to the prefix cache."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self._pins.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give back one pin on each. RuntimeError: there is none."""
        for block_id in block_ids:
            if self._pins[block_id] < 1:
                raise RuntimeError(f"block {block_id} is given back without being pinned")
            self._pins[block_id] -= 1
            if not self._pins[block_id]:
                del self._pins[block_id]
        # The tail first: the pool reuses in this order, and a prefix outlives what builds on it.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def frees_on_completion(self) -> bool:
        """Some pinned block has no other holder: the pool grows when its store ends."""
        return any(self._pool.blocks[block_id].ref_cnt <= pins for block_id, pins in self._pins.items())


# Which stores will be told of in KV events, from their begin to their announcement.
#
# What an event says is kept by an ``EventLog`` while the store is under way, for the request may be gone
# when it ends. What always holds: nothing is kept of a store that failed, nor of one that ended without a
# change of what is loadable: a tier need not announce again what it has announced before.


class EventLog(Protocol):
    """Says in KV events what became loadable; ``connectors.scheduler.events`` is the one for vLLM."""

    def submitted(self, request: EngineRequest, block: PlannedBlock) -> None:
        """A store of this block begins: keep what its event will say."""

    def dropped(self, key: bytes) -> None:
        """There will be no event of that store; nothing need be kept of the key."""

    def events(self, changes: TierChanges) -> list[Any]:
        """The events of these changes."""


class PendingEvents:
    """Stands before an event log, or before none where KV events are off."""

    def __init__(self, event_log: EventLog | None) -> None:
        self._log = event_log
        self._ended: set[bytes] = set()
        """Stored well since events were taken, and not begun again."""

    def begun(self, request: EngineRequest, blocks: list[PlannedBlock]) -> None:
        """A job that stores these blocks begins."""
        if self._log is not None:
            for block in blocks:
                self._log.submitted(request, block)
                self._ended.discard(block.key)

    def ended(self, key: bytes, *, ok: bool) -> None:
        """The store of this key ended; what it changed is among the next changes."""
        if self._log is None:
            return
        if ok:
            self._ended.add(key)
        else:
            self._log.dropped(key)

    def take(self, changes: TierChanges) -> list[Any]:
        """The events of all changes since the last call."""
        if self._log is None:
            return []
        events = self._log.events(changes)
        for key in self._ended:
            self._log.dropped(key)
        self._ended.clear()
        return events
