"""Running transfer jobs in the scheduler half, cached lookups, pins on source blocks, and pending KV events.

Invariants of jobs: a job ends once, when every rank has answered. A block is good only if no rank reported it
as failed; a rank that fails without naming blocks fails all of them.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvatlas.connectors.scheduler.plans import EngineRequest, PlannedBlock
from kvatlas.connectors.tier.base import Tier, TierChanges
from kvatlas.connectors.transfer.base import Counts, Direction, StepResults, TransferResult

if TYPE_CHECKING:
    from kvatlas.connectors.hits import HitResolver


log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenJob:
    """One job. ``blocks`` are pinned in the GPU's pool if it is a store, in the tier if it is a load."""

    direction: Direction
    request_id: str
    blocks: list[PlannedBlock]
    ranks_left: int
    discarded: bool = False
    """Its blocks must not be used, whatever the ranks answer."""
    failed_keys: set[bytes] = field(default_factory=set)

    def good(self, block: PlannedBlock) -> bool:
        """Whether this block is valid on every rank; call it for ended jobs."""
        return not self.discarded and block.key not in self.failed_keys

    @property
    def failed(self) -> bool:
        return self.discarded or bool(self.failed_keys)


class OpenJobs:
    """The jobs of one engine. Ids start at 1 and are never reused."""

    def __init__(self, world_size: int) -> None:
        """``world_size``: number of ranks that answer each job."""
        self._world_size = world_size
        self._jobs: dict[int, OpenJob] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._jobs)

    def waiting(self, direction: Direction) -> int:
        """Jobs of this direction that not every rank has answered."""
        return sum(job.direction is direction for job in self._jobs.values())

    def open(self, direction: Direction, request_id: str, blocks: list[PlannedBlock]) -> int:
        job_id = next(self._ids)
        self._jobs[job_id] = OpenJob(direction, request_id, blocks, self._world_size)
        return job_id

    def take(self, results: StepResults) -> list[OpenJob]:
        ended: list[OpenJob] = []
        for result in results.results:
            job = self._jobs.get(result.job_id)
            if job is None:
                log.error("a rank answered transfer job %d, which is not running", result.job_id)
                continue
            _merge(job, result)
            if job.ranks_left == 0:
                ended.append(self._jobs.pop(result.job_id))
        return ended

    def discard_all(self) -> None:
        """Mark all running jobs as discarded; they still have to end."""
        for job in self._jobs.values():
            job.discarded = True


def _merge(job: OpenJob, result: TransferResult) -> None:
    job.ranks_left -= 1
    if result.ok:
        return
    level = logging.WARNING if job.direction is Direction.LOAD else logging.INFO
    log.log(level, "%s of request %s failed: %s", job.direction.value, job.request_id, result.error)
    job.failed_keys.update(result.failed_keys)
    # The rank does not know which blocks failed, so none may be used.
    if not result.failed_keys:
        job.discarded = True


# Lookups of the loadable prefix of waiting requests, with cached results.
#
# The engine asks for a request that waits for room in each step, and for a long prompt the lookup takes tens
# of milliseconds. Invariants: a result is dropped as soon as one of its blocks is no longer held. A result
# that could have grown is computed again, but only after ``REST`` times its own duration. If the tier does
# not know, the request waits until the deadline, counted from its first lookup.


# Repeated lookups of a request take at most 1/REST of the engine core's time.
REST = 20


@dataclass(frozen=True, slots=True)
class _Answer:
    num_local_tokens: int
    num_tokens: int
    hit_tokens: int
    good_until: float
    keys: frozenset[bytes] | None
    """Keys that must stay held; None if unknown: then any removal invalidates the result."""


class Lookups:
    """Lookup results of the waiting requests of one engine. ``clock`` and ``deadline_s`` in seconds."""

    def __init__(
        self,
        resolver: HitResolver,
        tier: Tier,
        counters: Counts,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._resolver = resolver
        self._tier = tier
        self._counters = counters
        self._deadline_s = deadline_s
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._asked_again: set[str] = set()
        self._waiting_since: dict[str, float] = {}

    def hit(self, request: EngineRequest, num_local_tokens: int) -> int | None:
        """Tokens of the longest loadable prefix including local ones, or 0; None: not known in this step."""
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
            # A store that does not answer must not keep the request from computing.
            if now - since < self._deadline_s:
                return None
            self._counters.add("lookups/late")
            return 0
        self._waiting_since.pop(request_id, None)
        self._answers[request_id] = _Answer(
            num_local_tokens,
            request.num_tokens,
            hit,
            # The engine asks for a waiting request in each step, and a lookup of a long prompt takes tens of
            # milliseconds: a result that could have grown is used for REST times its own duration.
            good_until=now + (REST + 1) * (self._clock() - now),
            keys=self._needed(request, num_local_tokens, hit),
        )
        return hit

    def removed(self, keys: frozenset[bytes]) -> None:
        """Drop results that depend on these blocks, which are no longer held."""
        for request_id, answer in list(self._answers.items()):
            if answer.keys is None or not answer.keys.isdisjoint(keys):
                del self._answers[request_id]

    def forget(self, request_id: str) -> None:
        """Drop the results of a request that was admitted or has ended."""
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
        """Keys of the blocks to load; None at the first lookup, as most requests need only one."""
        if not hit_tokens:
            return frozenset()
        # Most requests are looked up once, and collecting keys costs as much as the lookup.
        if request.request_id not in self._asked_again:
            self._asked_again.add(request.request_id)
            return None
        return frozenset(
            self._resolver.key_at(request.block_hashes, group_idx, index, hit_tokens)
            for group_idx, indices in self._resolver.load_mask(num_local_tokens, hit_tokens).items()
            for index in indices
        )


# Pins protect the GPU blocks that stores read from reuse, through the engine's reference counts.
#
# The request of a pinned block may end; the block returns to the pool with its last pin. Invariants: every
# pin is released exactly once, and at most ``blocks_max`` different blocks are pinned.


class SourcePins:
    """Pins on the blocks of one engine's pool. Call ``bind`` first."""

    def __init__(self, share_max: float) -> None:
        """``share_max``: largest share of the pool (0 to 1) that may be pinned; at least one block may."""
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
        """Number of different blocks pinned now."""
        return len(self._pins)

    @property
    def room(self) -> int:
        """Number of further blocks that may be pinned."""
        return self.blocks_max - len(self._pins)

    def pin(self, block_ids: Sequence[int]) -> None:
        """Pin these blocks, which belong to a request or to the prefix cache."""
        # The engine's own reference count: vLLM then neither reuses nor counts the block as free.
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self._pins.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Release one pin on each. RuntimeError for a block without a pin."""
        for block_id in block_ids:
            if self._pins[block_id] < 1:
                raise RuntimeError(f"cannot unpin block {block_id}: it is not pinned")
            self._pins[block_id] -= 1
            if not self._pins[block_id]:
                del self._pins[block_id]
        # The tail first: the pool reuses blocks in this order, and a prefix must outlive its extensions.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def frees_on_completion(self) -> bool:
        """Whether some pinned block has no other user, so that the end of its store frees it."""
        # Only then is it worth waiting for the store instead of preempting.
        return any(self._pool.blocks[block_id].ref_cnt <= pins for block_id, pins in self._pins.items())


# KV events of running stores.
#
# An ``EventLog`` keeps the content of an event while its store runs, because the request may have ended
# before the store does. Invariant: nothing is kept of a store that failed, nor of one that ended without
# making a block loadable (a tier may have announced the block before).


class EventLog(Protocol):
    """Makes KV events of blocks that became loadable; ``kvatlas.connectors.reports`` is vLLM's form."""

    def submitted(self, request: EngineRequest, block: PlannedBlock) -> None:
        """Keep the content of the event of this block, whose store begins."""

    def dropped(self, key: bytes) -> None:
        """Drop the content kept for this key; its store will have no event."""

    def events(self, changes: TierChanges) -> list[Any]:
        """Make the events of these changes."""


class PendingEvents:
    """Wrapper of an event log; without one (KV events off) it does nothing."""

    def __init__(self, event_log: EventLog | None) -> None:
        self._log = event_log
        # Keys stored successfully since events were taken, and not begun again.
        self._ended: set[bytes] = set()

    def begun(self, request: EngineRequest, blocks: list[PlannedBlock]) -> None:
        """Handle the begin of a job that stores these blocks."""
        if self._log is not None:
            for block in blocks:
                self._log.submitted(request, block)
                self._ended.discard(block.key)

    def ended(self, key: bytes, *, ok: bool) -> None:
        """Handle the end of this key's store; the next changes include its result."""
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
        # Stored without becoming loadable now, e.g. because the tier had announced the block before.
        for key in self._ended:
            self._log.dropped(key)
        self._ended.clear()
        return events
