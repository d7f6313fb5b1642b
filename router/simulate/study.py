"""A study: one workload, one model, a set of arms and retentions, each a run of its own; then compared.

``--load`` is relative: arrivals are sped up until round robin, which needs no knowledge, would keep the
engines' prompts that share of the time. So every arm of a study meets the same arrivals, and arms that hit more
have more time to spare. Always true: the same study gives the same numbers, however many processes run it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import msgspec

from publisher.groups import Family, GroupSpec
from router.simulate.arms import ARMS, Arm
from router.simulate.fleet import FleetRun, FleetSetup, FleetSim
from router.simulate.workload import UNIT_TOKENS, Request

POOL_BLOCKS_MIN = 64


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``name`` is the arm's; ``setup`` says the rest."""

    name: str
    arm: Arm
    setup: FleetSetup


Done = Callable[[Job, FleetRun], None]


def pool_blocks(
    requests: Sequence[Request], groups: tuple[GroupSpec, ...], engines: int, share: float
) -> int:
    """Pages of each engine so that the fleet's pools are ``share`` of what the workload's prompts and answers
    would fill if each was kept once, in the full-attention group (else the group of the finest blocks)."""
    units = {identifier for request in requests for identifier in request.ids}
    sizes = [g.block_size for g in groups if g.family is Family.FULL] or [g.block_size for g in groups]
    return max(POOL_BLOCKS_MIN, int(share * len(units) * UNIT_TOKENS / min(sizes) / engines))


def mean_prompt_tokens(requests: Sequence[Request]) -> float:
    return sum(request.input_tokens for request in requests) / len(requests)


def speed_for(load: float, requests: Sequence[Request], setup: FleetSetup) -> float:
    """How many times as fast as recorded the requests must come for round robin to be busy for ``load``."""
    run = run_one(Job(name="round-robin", arm=ARMS["round-robin"], setup=setup), requests)
    recorded_s = requests[-1].at_s - requests[0].at_s
    needed_s = sum(run.busy_s) / setup.engines
    if recorded_s <= 0 or needed_s <= 0:
        raise ValueError("the workload is too short to give it a load: all its requests come at once")
    return load * recorded_s / needed_s


def run_one(job: Job, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> FleetRun:
    sim = FleetSim(job.setup, job.arm, mean_prompt_tokens=mean_prompt_tokens(requests))
    return sim.run(requests, progress)


_shared: Sequence[Request] = ()


def _adopt(requests: Sequence[Request]) -> None:
    global _shared  # noqa: PLW0603  # a worker's copy of the workload: sent once, not with every job
    _shared = requests


def _work(job: Job) -> FleetRun:
    return run_one(job, _shared)


def run_all(
    jobs: Sequence[Job], requests: Sequence[Request], *, processes: int, done: Done | None = None
) -> dict[Job, FleetRun]:
    """Every job's run. ``done`` is told of each as it ends; with one process all happens in this one."""
    found: dict[Job, FleetRun] = {}
    for job, run in _each(jobs, requests, processes):
        found[job] = run
        if done is not None:
            done(job, run)
    return {job: found[job] for job in jobs}


def _each(jobs: Sequence[Job], requests: Sequence[Request], processes: int) -> Iterable[tuple[Job, FleetRun]]:
    if processes <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield job, run_one(job, requests)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(processes, len(jobs)), mp_context=context, initializer=_adopt, initargs=(requests,)
    ) as workers:
        futures = {workers.submit(_work, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()
