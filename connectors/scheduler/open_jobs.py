"""Running transfer jobs in the scheduler half, cached lookups, pins on source blocks, and pending KV events.

Invariants of jobs: a job ends once, when every rank has answered. A block is good only if no rank reported it
as failed; a rank that fails without naming blocks fails all of them.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvatlas.connectors.scheduler.plans import PlannedBlock
from kvatlas.connectors.transfer.base import Direction, StepResults, TransferResult

if TYPE_CHECKING:
    pass


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
