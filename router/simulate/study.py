"""Many runs in parallel: jobs over workloads, in the requested number of processes, with progress.

``speed_for`` makes loads comparable: it speeds arrivals up until round robin, which needs no knowledge, would
spend that share of the time on prompts. So every variant of a study gets the same arrivals, and variants with
more hits have more idle time. Invariant: the same jobs give the same numbers for any number of processes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from publisher.events import Family, GroupSpec
from router.simulate.run.fleet import FleetSim
from router.simulate.run.setup import FleetRun, FleetSetup, Row
from router.simulate.run.variants import VARIANTS, Variant
from router.simulate.workload.requests import Request, WorkloadError

# Outcome of a run: hit share, time to first token, balance, prediction error, regret. Tokens and seconds.
#
# The first ``WARM_SHARE`` of the requests fills the caches: hits, times and predictions are counted from then
# on; numbers of the engines (busy, imbalance, preemptions) cover the whole run. Variants that ran over the
# same requests are compared request by request: the *regret* of a variant is how much later each first token
# came than with the best variant, on average.


WARM_SHARE = 0.2
WINDOWS = 20
Floats = npt.NDArray[np.float64]


class NothingServedError(ValueError):
    """No request of a run fits into an engine."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one variant. ``exact_share``: share of predictions that were right to the token."""

    requests: int
    refused: int
    """Requests that fit into no engine's cache, or that ``admit`` refused; no other number includes them,
    except ``within_1_s_share`` and ``within_3_s_share``."""
    hit_share: float
    host_share: float = 0.0
    """Share of the prompt tokens that were hits loaded from host memory; ``store_share``: from the store."""
    store_share: float = 0.0
    pull_share: float = 0.0
    """Share of the prompt tokens that were pulled from other engines; ``promised_share``: share that the
    decisions expected to be pulled."""
    promised_share: float = 0.0
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    busy_share: float
    """Share of the engines' time spent on prompts."""
    imbalance: float
    """Prompt seconds of the busiest engine over the mean."""
    error_mean_tokens: float
    """Mean of |predicted - hit|."""
    exact_share: float
    regret_s: float
    preemptions: int
    answer_mean_s: float = 0.0
    """Time to the last token."""
    per_token_mean_s: float = 0.0
    """Time between two tokens of an answer, over answers with more than one."""
    per_token_p99_s: float = 0.0
    lasted_s: float = 0.0
    """From the first arrival to the end of the last answer, over the whole run."""
    apart_share: float = 0.0
    """Share of the requests whose prompt another engine computed."""
    within_1_s_share: float = 0.0
    """Share of all requests, refused ones included, whose first token came within 1 s; ``within_3_s_share``:
    within 3 s."""
    within_3_s_share: float = 0.0


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Curves of the whole run, warm-up included: hit share in ``WINDOWS`` steps, prompt seconds per
    engine."""

    hit_shares: list[float]
    busy_s: list[float]
    lasted_s: float

    @property
    def busy_shares(self) -> list[float]:
        return [busy_s / self.lasted_s for busy_s in self.busy_s] if self.lasted_s else []


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run. ``ttft_s``: per measured request, -1 for one that was refused."""

    outcome: Outcome
    ttft_s: Floats
    curves: Curves


def result_of(run: FleetRun) -> Result:
    """Sum up one run; ``regret_s`` is 0 until it is compared. Raises ``NothingServedError``."""
    rows = run.rows[int(WARM_SHARE * len(run.rows)) :]
    served = [row for row in rows if row.ttft_s >= 0]
    if not served:
        raise NothingServedError("no request fits into the engines' caches: give them more blocks")
    waits = np.array([row.ttft_s for row in served])
    errors = np.array([abs(row.predicted - row.hit) for row in served])
    p50, p90, p99 = (float(value) for value in np.percentile(waits, [50, 90, 99]))
    paces = np.array([row.per_token_s for row in served if row.per_token_s >= 0] or [0.0])
    busy = np.array(run.busy_s)
    lasted_s = run.ended_s - min(row.arrived_s for row in run.rows)
    outcome = Outcome(
        requests=len(served),
        refused=len(rows) - len(served),
        hit_share=_hit_share(served),
        host_share=_share(served, "cpu"),
        store_share=_share(served, "storage"),
        pull_share=_share(served, "pulled"),
        promised_share=_share(served, "promised"),
        ttft_mean_s=float(waits.mean()),
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        busy_share=float(busy.mean() / lasted_s) if lasted_s else 0.0,
        imbalance=float(busy.max() / busy.mean()) if busy.mean() else 1.0,
        error_mean_tokens=float(errors.mean()),
        exact_share=float((errors == 0).mean()),
        regret_s=0.0,
        preemptions=run.preemptions,
        answer_mean_s=float(np.mean([row.answer_s for row in served])),
        per_token_mean_s=float(paces.mean()),
        per_token_p99_s=float(np.percentile(paces, 99)),
        lasted_s=lasted_s,
        apart_share=sum(row.fetched > 0 for row in served) / len(served),
        within_1_s_share=float((waits <= 1.0).sum() / len(rows)),
        within_3_s_share=float((waits <= 3.0).sum() / len(rows)),
    )
    curves = Curves(hit_shares=_over_time(run), busy_s=list(run.busy_s), lasted_s=lasted_s)
    return Result(outcome=outcome, ttft_s=np.array([row.ttft_s for row in rows]), curves=curves)


def best_ttft(results: Mapping[str, Result]) -> Floats:
    """Return the shortest time over all variants per measured request; -1 if none served it."""
    times = np.array([result.ttft_s for result in results.values()])
    times[times < 0] = np.inf
    best: Floats = times.min(axis=0)
    best[np.isinf(best)] = -1.0
    return best


def compare(results: Mapping[str, Result]) -> dict[str, Outcome]:
    """Return the outcomes of variants that ran over the same requests, by name, with their regret."""
    best = best_ttft(results)
    compared = {}
    for name, result in results.items():
        served = result.ttft_s >= 0
        regret_s = float((result.ttft_s - best)[served].mean())
        compared[name] = msgspec.structs.replace(result.outcome, regret_s=regret_s)
    return compared


def _hit_share(rows: list[Row]) -> float:
    return _share(rows, "hit")


def _share(rows: list[Row], tokens: str) -> float:
    found: int = sum(getattr(row, tokens) for row in rows)
    return found / sum(row.prompt_tokens for row in rows)


def _over_time(run: FleetRun) -> list[float]:
    rows = [row for row in run.rows if row.ttft_s >= 0]
    parts = np.array_split(np.arange(len(rows)), min(WINDOWS, len(rows)))
    return [_hit_share(rows[part[0] : part[-1] + 1]) for part in parts]


POOL_BLOCKS_MIN = 64
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


def pool_blocks(
    requests: Sequence[Request], groups: tuple[GroupSpec, ...], engines: int, share: float
) -> int:
    """Return the pages of each engine so that the fleet's pools hold ``share`` of what the workload's prompts
    and answers would fill if each was kept once, in the full-attention group (else the group with the
    smallest blocks)."""
    units = {identifier for request in requests for identifier in request.ids}
    unit_tokens = requests[0].unit_tokens
    sizes = [g.block_size for g in groups if g.family is Family.FULL] or [g.block_size for g in groups]
    return max(POOL_BLOCKS_MIN, int(share * len(units) * unit_tokens / min(sizes) / engines))


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
    """Run one job, row by row."""
    sim = FleetSim(job.setup, job.variant, mean_prompt_tokens=mean_prompt_tokens(requests))
    return sim.run(requests, progress)


def run_all(
    jobs: Sequence[Job], workloads: Workloads, *, processes: int, placed: Placed | None = None
) -> dict[Job, Result]:
    """Return every job's result, in the order of ``jobs``. With one process, everything runs in this one.

    Raises the errors of runs; runs that have not started then do not start.
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
