"""What the scheduler's half and the worker's half of a connector tell each other, once per step.

The two halves live in different processes; these values are pickled between them, so they hold plain data
only. Job ids are given by the scheduler's half and never reused. Every job is answered once by every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.transfer.base import TransferJob, TransferResult


@dataclass(slots=True)
class StepJobs:
    """Scheduler to worker."""

    loads: list[TransferJob] = field(default_factory=list)
    stores: list[TransferJob] = field(default_factory=list)
    load_requests: dict[int, str] = field(default_factory=dict)
    """Load job id -> the request that waits for it; a request waits for one load job at a time."""


@dataclass(slots=True)
class StepResults:
    """Worker to scheduler: what ended, by rank. ``merge`` is associative and commutative."""

    results: list[TransferResult] = field(default_factory=list)

    def merge(self, other: StepResults) -> StepResults:
        return StepResults(self.results + other.results)
