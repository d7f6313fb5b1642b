"""Many runs at once: jobs over workloads, on as many processes as asked for, with progress.

``speed_for`` makes loads comparable: arrivals are sped up until round robin, which needs no knowledge, would
keep the engines' prompts busy for that share of the time. So every arm of a study meets the same arrivals,
and arms that hit more have more time to spare. Always true: the same jobs give the same numbers, however many
processes run them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, ClassVar

import msgspec

from publisher.groups import Family, GroupSpec
from router.simulate.outcome import Result, result_of
from router.simulate.run.arms import ARMS, Arm
from router.simulate.run.fleet import FleetSim
from router.simulate.run.rows import FleetRun
from router.simulate.run.setup import FleetSetup
from router.simulate.workload.requests import Request, WorkloadError

POOL_BLOCKS_MIN = 64
PROGRESS_S = 0.2
Placed = Callable[[int], None]
"""Told how many requests have been placed, over all jobs."""
Workloads = Mapping[int, Sequence[Request]]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``name`` is the arm's, ``workload`` the key of its requests; ``setup`` says the rest."""

    name: str
    arm: Arm
    setup: FleetSetup
    workload: int = 0


def pool_blocks(
    requests: Sequence[Request], groups: tuple[GroupSpec, ...], engines: int, share: float
) -> int:
    """Pages of each engine so that the fleet's pools are ``share`` of what the workload's prompts and answers
    would fill if each was kept once, in the full-attention group (else the group of the finest blocks)."""
    units = {identifier for request in requests for identifier in request.ids}
    unit_tokens = requests[0].unit_tokens
    sizes = [g.block_size for g in groups if g.family is Family.FULL] or [g.block_size for g in groups]
    return max(POOL_BLOCKS_MIN, int(share * len(units) * unit_tokens / min(sizes) / engines))


def mean_prompt_tokens(requests: Sequence[Request]) -> float:
    return sum(request.input_tokens for request in requests) / len(requests)


def round_robin(setup: FleetSetup, workload: int = 0) -> Job:
    """The run that ``speed_for`` wants: arrivals as recorded, so that a load is the
    same whether sessions are closed or not."""
    asked = msgspec.structs.replace(setup, speed=1.0, closed=False)
    return Job(name="round-robin", arm=ARMS["round-robin"], setup=asked, workload=workload)


def speed_for(load: float, requests: Sequence[Request], even: Result) -> float:
    """How many times as fast as recorded requests must come for round robin to be busy for ``load``.

    ``even`` is its run of these requests at their own speed. Raises ``WorkloadError`` for a workload without
    duration.
    """
    recorded_s = requests[-1].at_s - requests[0].at_s
    needed_s = sum(even.curves.busy_s) / len(even.curves.busy_s)
    if recorded_s <= 0 or needed_s <= 0:
        raise WorkloadError("all requests come at once: no load can be set for them, only --speed")
    return load * recorded_s / needed_s


def run_one(job: Job, requests: Sequence[Request], progress: Placed | None = None) -> FleetRun:
    """One job, row by row."""
    sim = FleetSim(job.setup, job.arm, mean_prompt_tokens=mean_prompt_tokens(requests))
    return sim.run(requests, progress)


def run_all(
    jobs: Sequence[Job], workloads: Workloads, *, processes: int, placed: Placed | None = None
) -> dict[Job, Result]:
    """Every job's result, in the order of ``jobs``. With one process all happens in this one.

    Raises what a run raises; runs that have not begun then do not begin.
    """
    ends = _here(jobs, workloads, placed)
    if processes > 1 and len(jobs) > 1:
        ends = _elsewhere(jobs, workloads, min(processes, len(jobs)), placed)
    found = dict(ends)
    return {job: found[job] for job in jobs}


def _here(jobs: Sequence[Job], workloads: Workloads, placed: Placed | None) -> Iterator[tuple[Job, Result]]:
    for job in jobs:
        yield job, result_of(run_one(job, workloads[job.workload], placed))


def _elsewhere(
    jobs: Sequence[Job], workloads: Workloads, processes: int, placed: Placed | None
) -> Iterator[tuple[Job, Result]]:
    context = multiprocessing.get_context("spawn")  # a fork of a program with threads may hang
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
    """What a worker process is given once, not with every job."""

    workloads: ClassVar[Workloads] = {}
    count: ClassVar[Any] = None


def _adopt(workloads: Workloads, count: Any) -> None:
    _Worker.workloads, _Worker.count = workloads, count


def _work(job: Job) -> Result:
    def placed(more: int) -> None:
        with _Worker.count.get_lock():
            _Worker.count.value += more

    return result_of(run_one(job, _Worker.workloads[job.workload], placed))
