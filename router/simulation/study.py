"""A study: many runs in parallel, planned over variants, retentions and rates, and their numbers.

Jobs run in the requested number of processes, with progress. Invariant: the same jobs give the same numbers
for any number of processes.

Every variant of one cell (retention, rate factor, seed) gets the same requests at the same times, so variants
are compared request by request. ``speed_for`` makes loads comparable: it speeds arrivals up until round
robin, which needs no knowledge, would spend that share of the time on prompts. The speed is determined once
per seed, with the first retention and the given rates: a variant with another retention, or slower engines,
has to handle the same traffic, and variants with more hits have more idle time.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, ClassVar

import msgspec

from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.pool.layout import pool_layout
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.outcome import FleetRun, Outcome, Result, compare, result_of
from kvatlas.router.simulation.requests import Request, WorkloadError
from kvatlas.router.simulation.setup import FleetSetup, simulated_scheme
from kvatlas.router.simulation.variants import VARIANTS, Variant

PROGRESS_S = 0.2
# Is called with the number of requests placed since the last call, over all jobs.
Placed = Callable[[int], None]
Workloads = Mapping[int, Sequence[Request]]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``name``: the variant's; ``workload``: key of its requests; ``setup``: all other
    parameters."""

    name: str
    variant: Variant
    setup: FleetSetup
    workload: int = 0


def mean_prompt_tokens(requests: Sequence[Request]) -> float:
    return sum(request.input_tokens for request in requests) / len(requests)


def round_robin(setup: FleetSetup, workload: int = 0) -> Job:
    """Return the run that ``speed_for`` needs: arrivals as recorded, so that a load is the same for open and
    closed sessions."""
    asked = msgspec.structs.replace(setup, speed=1.0, closed=False)
    return Job(name="round-robin", variant=VARIANTS["round-robin"], setup=asked, workload=workload)


def speed_for(load: float, requests: Sequence[Request], even: Result) -> float:
    """Return the factor on the recorded speed at which round robin is busy for ``load``.

    ``even`` is its run of these requests at their own speed. Raises ``WorkloadError`` for a workload without
    duration.
    """
    recorded_s = requests[-1].at_s - requests[0].at_s
    needed_s = sum(even.curves.busy_s) / len(even.curves.busy_s)
    if recorded_s <= 0 or needed_s <= 0:
        raise WorkloadError("all requests arrive at the same time: give --speed, as no load can be set")
    return load * recorded_s / needed_s


def run_one(job: Job, requests: Sequence[Request], progress: Placed | None = None) -> FleetRun:
    sim = FleetSim(job.setup, job.variant)
    return sim.run(requests, progress)


def run_all(
    jobs: Sequence[Job], workloads: Workloads, *, processes: int, placed: Placed | None = None
) -> dict[Job, Result]:
    """Return every job's result, in the order of ``jobs``. With one process, everything runs in this one.

    Raises the errors of runs; runs that have not started then do not start.
    """
    if processes <= 1 or len(jobs) <= 1:
        return {job: result_of(run_one(job, workloads[job.workload], placed)) for job in jobs}
    found = dict(_elsewhere(jobs, workloads, min(processes, len(jobs)), placed))
    return {job: found[job] for job in jobs}


def _elsewhere(
    jobs: Sequence[Job], workloads: Workloads, processes: int, placed: Placed | None
) -> Iterator[tuple[Job, Result]]:
    # Forking a process with threads can deadlock.
    context = multiprocessing.get_context("spawn")
    count = context.Value(ctypes.c_int64, 0)
    workers = ProcessPoolExecutor(
        processes, mp_context=context, initializer=_adopt, initargs=(dict(workloads), count)
    )
    told = 0
    try:
        futures: dict[Future[Result], Job] = {workers.submit(_work, job): job for job in jobs}
        waiting: Iterable[Future[Result]] = futures
        while waiting:
            done, waiting = wait(waiting, PROGRESS_S, return_when=FIRST_COMPLETED)
            now = count.value
            if placed is not None and now > told:
                placed(now - told)
                told = now
            for future in done:
                yield futures[future], future.result()
    finally:
        workers.shutdown(cancel_futures=True)


class _Worker:
    """Data sent to a worker process once, instead of with every job."""

    workloads: ClassVar[Workloads] = {}
    count: ClassVar[Any] = None


def _adopt(workloads: Workloads, count: Any) -> None:
    _Worker.workloads, _Worker.count = workloads, count


def _work(job: Job) -> Result:
    def placed(more: int) -> None:
        with _Worker.count.get_lock():
            _Worker.count.value += more

    return result_of(run_one(job, _Worker.workloads[job.workload], placed))


# Student's t, two-sided 95 %, for 1, 2, .. degrees of freedom; 2 for more.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``setup`` has the other parameters: its retention, speed and seed are set per cell."""

    setup: FleetSetup
    variants: dict[str, Variant]
    retentions: tuple[int | None, ...] = (0,)
    rate_factors: tuple[float, ...] = (1.0,)
    """Prefill rates relative to the timing's, for sensitivity."""
    load: float | None = 0.85
    """Share of the time that prompts take under round robin; None: arrivals at ``setup.speed``."""

    def check(self) -> None:
        """Raise ``ValueError`` for a retention that the model does not allow."""
        for retention in self.retentions:
            check_layout(self.setup.groups, retention)

    def num_runs(self, seeds: int) -> int:
        cells = len(self.retentions) * len(self.rate_factors)
        return seeds * (cells * len(self.variants) + (self.load is not None))


class VariantReport(msgspec.Struct, frozen=True, kw_only=True):
    """One variant in one cell; ``outcomes`` and ``results`` by seed, in order."""

    variant: str
    retention: int | None
    rate_factor: float
    outcomes: list[Outcome]
    results: list[Result]


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Reports in the order of retentions, rate factors, variants."""

    speeds: list[float]
    reports: list[VariantReport]


class Interval(msgspec.Struct, frozen=True):
    """A mean over seeds and half its 95 % interval; None with one seed."""

    mean: float
    half: float | None


def check_layout(groups: tuple[GroupSpec, ...], retention: int | None) -> None:
    """Raise ``ValueError`` for groups, or a retention with them, that vLLM would not run."""
    pool_layout(groups, simulated_scheme(groups), retention)


def run_plan(plan: Plan, workloads: Workloads, *, processes: int, placed: Placed | None = None) -> Study:
    speeds = _speeds(plan, workloads, processes, placed)
    jobs = {
        (retention, factor, name, seed): _job(plan, retention, factor, name, seed, speeds[seed])
        for retention in plan.retentions
        for factor in plan.rate_factors
        for name in plan.variants
        for seed in workloads
    }
    results = run_all(list(jobs.values()), workloads, processes=processes, placed=placed)
    reports = []
    for retention in plan.retentions:
        for factor in plan.rate_factors:
            by_seed = [
                {name: results[jobs[retention, factor, name, seed]] for name in plan.variants}
                for seed in workloads
            ]
            compared = [compare(cell) for cell in by_seed]
            reports += [
                VariantReport(
                    variant=name,
                    retention=retention,
                    rate_factor=factor,
                    outcomes=[cell[name] for cell in compared],
                    results=[cell[name] for cell in by_seed],
                )
                for name in plan.variants
            ]
    return Study(speeds=list(speeds.values()), reports=reports)


def over_seeds(outcomes: Sequence[Outcome], name: str) -> Interval:
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
    return Job(name=name, variant=plan.variants[name], setup=setup, workload=seed)
