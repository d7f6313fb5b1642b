"""Transfer jobs under way, from the scheduler's side: who has answered, and with what.

What always holds: a job leaves the book once, when every rank has answered, and a block of it counts as good
only if no rank blamed it. A rank that failed without naming blocks blames them all.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field

from connectors.messages.jobs import StepResults
from connectors.scheduler.plans import PlannedBlock
from connectors.transfer.base import Direction, TransferResult

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
