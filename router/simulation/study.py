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
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.publisher.pool.layout import pool_layout
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.requests import Request, WorkloadError
from kvatlas.router.simulation.setup import VARIANTS, FleetRun, FleetSetup, Row, Variant, simulated_scheme

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


# Cache layouts known by name, and those in a file. Sizes in tokens.
#
# Pages are counted as in vLLM: a block of any group takes one page of the pool, whatever the group.


# Divides vLLM's own block sizes (16 to 64 on GPUs), and is an eighth of Mooncake's unit.
BLOCK_TOKENS = 64


class ModelError(ValueError):
    """A layout that cannot be simulated."""


def _full(block: int) -> tuple[GroupSpec, ...]:
    return (GroupSpec(0, "full_attention", block),)


def _gpt_oss(block: int) -> tuple[GroupSpec, ...]:
    """Every other layer attends to 128 tokens (gpt-oss)."""
    return (GroupSpec(0, "full_attention", block), GroupSpec(1, "sliding_window", block, sliding_window=128))


def _gemma3(block: int) -> tuple[GroupSpec, ...]:
    """Five of six layers attend to 1,024 tokens (Gemma 3)."""
    windows = [GroupSpec(i, "sliding_window", block, sliding_window=1024) for i in range(5)]
    return (*windows, GroupSpec(5, "full_attention", block))


def _mamba_hybrid(block: int) -> tuple[GroupSpec, ...]:
    """Three of four layers keep a state; their blocks, and the full group's, are eight times as long."""
    states = [GroupSpec(i, "mamba", 8 * block, mamba_cache_mode="align") for i in range(1, 4)]
    return (GroupSpec(0, "full_attention", 8 * block), *states)


MODELS = {"full": _full, "gpt-oss-like": _gpt_oss, "gemma3-like": _gemma3, "mamba-hybrid": _mamba_hybrid}


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON file: ``{"groups": [{"group_idx": 0, "kind": "full_attention", "block_size": 16}, ..]}``."""

    groups: list[GroupSpec]


def groups_of(model: str, block_tokens: int = BLOCK_TOKENS) -> tuple[GroupSpec, ...]:
    """Return the groups of a named layout, or of a file's. Raises ``ModelError``."""
    make = MODELS.get(model)
    groups = _of_file(Path(model)) if make is None else make(block_tokens)
    for group in groups:
        if group.block_size < 1:
            raise ModelError(f"group {group.group_idx}: block_size = {group.block_size}: expected at least 1")
    return groups


def check_units(groups: tuple[GroupSpec, ...], unit_tokens: int) -> None:
    """Check the block size.

    Raises ``ModelError`` if a workload with several tokens per id cannot represent it.
    """
    for group in groups:
        if unit_tokens % group.block_size and group.block_size % unit_tokens:
            raise ModelError(
                f"group {group.group_idx}: block_size = {group.block_size}; a workload identifies tokens in "
                f"units of {unit_tokens}, so a block must divide that or be a multiple of it"
            )


def _of_file(path: Path) -> tuple[GroupSpec, ...]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ModelFile).groups
    except FileNotFoundError:
        raise ModelError(f"{path}: neither a file nor one of {', '.join(MODELS)}") from None
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not found:
        raise ModelError(f"{path}: groups: expected at least one")
    return tuple(found)
