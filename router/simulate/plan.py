"""A plan: which arms run under which retentions and rates, at what load; and the study that comes of it.

Every arm of one cell (retention, rate factor, seed) meets the same requests at the same times, so they are
compared request by request. The speed of arrivals is found once per seed, with the first retention and the
rates as given: an arm under another retention, or on slower engines, has to cope with the same traffic.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from publisher.block_hash import HashScheme
from publisher.groups import GroupSpec
from publisher.pool.layout import pool_layout
from router.simulate.outcome import Outcome, Result, compare
from router.simulate.run.arms import Arm
from router.simulate.run.setup import FleetSetup
from router.simulate.study import Job, Placed, Workloads, round_robin, run_all, speed_for

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t, two-sided 95 %, for 1, 2, .. degrees of freedom; 2 beyond."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``setup`` says the rest: its retention, speed and seed are set per cell."""

    setup: FleetSetup
    arms: dict[str, Arm]
    retentions: tuple[int | None, ...] = (0,)
    rate_factors: tuple[float, ...] = (1.0,)
    """Prefill rates relative to the timing's, for sensitivity."""
    load: float | None = 0.85
    """How busy round robin is to be with prompts; None: arrivals at ``setup.speed``."""

    def check(self) -> None:
        """Raises ``ValueError`` for a retention that the model does not allow."""
        for retention in self.retentions:
            check_layout(self.setup.groups, retention)

    def num_runs(self, seeds: int) -> int:
        cells = len(self.retentions) * len(self.rate_factors)
        return seeds * (cells * len(self.arms) + (self.load is not None))


class ArmReport(msgspec.Struct, frozen=True, kw_only=True):
    """One arm in one cell; ``outcomes`` and ``results`` by seed, in order."""

    arm: str
    retention: int | None
    rate_factor: float
    outcomes: list[Outcome]
    results: list[Result]


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Reports in the order of retentions, rate factors, arms."""

    speeds: list[float]
    reports: list[ArmReport]


class Interval(msgspec.Struct, frozen=True):
    """A mean over seeds and half its 95 % interval, None with one seed."""

    mean: float
    half: float | None


def check_layout(groups: tuple[GroupSpec, ...], retention: int | None) -> None:
    """Raises ``ValueError`` for groups, or a retention with them, that vLLM would not run."""
    scheme = HashScheme(algo="xxhash_cbor", hash_block_size=math.gcd(*(g.block_size for g in groups)))
    pool_layout(groups, scheme, retention)


def run_plan(plan: Plan, workloads: Workloads, *, processes: int, placed: Placed | None = None) -> Study:
    """All runs of a plan over the workloads, one per seed."""
    speeds = _speeds(plan, workloads, processes, placed)
    jobs = {
        (retention, factor, name, seed): _job(plan, retention, factor, name, seed, speeds[seed])
        for retention in plan.retentions
        for factor in plan.rate_factors
        for name in plan.arms
        for seed in workloads
    }
    results = run_all(list(jobs.values()), workloads, processes=processes, placed=placed)
    reports = []
    for retention in plan.retentions:
        for factor in plan.rate_factors:
            by_seed = [
                {name: results[jobs[retention, factor, name, seed]] for name in plan.arms}
                for seed in workloads
            ]
            compared = [compare(cell) for cell in by_seed]
            reports += [
                ArmReport(
                    arm=name,
                    retention=retention,
                    rate_factor=factor,
                    outcomes=[cell[name] for cell in compared],
                    results=[cell[name] for cell in by_seed],
                )
                for name in plan.arms
            ]
    return Study(speeds=list(speeds.values()), reports=reports)


def over_seeds(outcomes: Sequence[Outcome], name: str) -> Interval:
    """One number of an arm, over its seeds."""
    values = [float(getattr(outcome, name)) for outcome in outcomes]
    if len(values) < 2:
        return Interval(values[0], None)
    freedom = len(values) - 1
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else 2.0
    return Interval(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values)))


def _speeds(plan: Plan, workloads: Workloads, processes: int, placed: Placed | None) -> dict[int, float]:
    if plan.load is None:
        return dict.fromkeys(workloads, plan.setup.speed)
    jobs = {seed: round_robin(_setup(plan, plan.retentions[0], 1.0, seed), seed) for seed in workloads}
    results = run_all(list(jobs.values()), workloads, processes=processes, placed=placed)
    return {seed: speed_for(plan.load, workloads[seed], results[job]) for seed, job in jobs.items()}


def _setup(plan: Plan, retention: int | None, factor: float, seed: int) -> FleetSetup:
    timing = plan.setup.timing
    return msgspec.structs.replace(
        plan.setup,
        retention=retention,
        seed=seed,
        timing=msgspec.structs.replace(timing, prefill_s_per_token=timing.prefill_s_per_token / factor),
    )


def _job(plan: Plan, retention: int | None, factor: float, name: str, seed: int, speed: float) -> Job:
    setup = msgspec.structs.replace(_setup(plan, retention, factor, seed), speed=speed)
    return Job(name=name, arm=plan.arms[name], setup=setup, workload=seed)
