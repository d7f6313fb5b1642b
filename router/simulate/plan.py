"""A plan: which variants run with which retentions and rates, at what load; and the resulting study.

Every variant of one cell (retention, rate factor, seed) gets the same requests at the same times, so variants
are compared request by request. The arrival speed is determined once per seed, with the first retention and
the given rates: a variant with another retention, or slower engines, has to handle the same traffic.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from publisher.events import GroupSpec
from publisher.pool.layout import pool_layout
from router.simulate.run.setup import FleetSetup, simulated_scheme
from router.simulate.run.variants import Variant
from router.simulate.study import (
    Job,
    Outcome,
    Placed,
    Result,
    Workloads,
    compare,
    round_robin,
    run_all,
    speed_for,
)

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
    """Run a plan over the workloads, one per seed."""
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
    """Return one number of a variant, over its seeds."""
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
