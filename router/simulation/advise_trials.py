"""Trials of the user's own traffic that change one thing each, and the numbers of their runs.

The base trial is the fleet as it is. Every other trial changes the policy, the retention, the memory on the
GPUs or behind them, or the number of engines. All get the same requests at
the same times, seed by seed. ``judge`` draws the conclusions.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from kvatlas.publisher.groups import Family
from kvatlas.router.simulation.cache_layouts import POOL_BLOCKS_MIN
from kvatlas.router.simulation.outcome import WARM_SHARE, Outcome
from kvatlas.router.simulation.requests import Request
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.split_verdict import SplitVerdict, verdict
from kvatlas.router.simulation.study import Job, check_layout
from kvatlas.router.simulation.tiers import (
    KV_KIB_PER_TOKEN,
    TierSetup,
    TierSpec,
    block_bytes,
    read_host,
    read_store,
)
from kvatlas.router.simulation.variants import VARIANTS, Variant

Topic = Literal["now", "routing", "retention", "memory", "tiers", "pull", "engines", "apart"]
RETENTIONS: tuple[int | None, ...] = (0, 1024, 4096, None)
MEMORY = (0.5, 2.0)
HOST = "400%"
# Memory outside the GPUs to try, in the syntax of ``--host-memory`` and ``--store``.
STORES = ("400%:gbit_s=25", "400%:gbit_s=100")
# Links between engines that pull prefixes from each other's host memory.
PULL_GBIT_S = (25.0, 100.0)
ENGINE_FACTORS = (0.5, 0.75, 1.5, 2.0)
PREFILL_SHARES = (0.25, 0.5, 0.75)
ALIKE = "all alike"
NO_PULL = "host memory alone"
BLIND = "least-load"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One change; ``value`` is its new value."""

    topic: Topic
    value: str
    setup: FleetSetup
    variant: Variant

    def job(self, seed: int) -> Job:
        setup = msgspec.structs.replace(self.setup, seed=seed)
        return Job(name=f"{self.topic} {self.value}", variant=self.variant, setup=setup, workload=seed)


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """A trial's numbers, means over the seeds. ``change``: change of the mean TTFT relative to the base; for
    topics ``apart`` and ``pull``, to the first trial of the topic."""

    topic: Topic
    value: str
    hit_share: float
    mean_s: float
    p90_s: float
    p99_s: float
    busy_share: float
    refused: int
    change: float
    every_seed: bool
    """Whether the mean is shorter than the base's for every seed."""
    apart: SplitVerdict | None = None
    """Set for topic ``apart``: disaggregated prefill compared with the same engines without roles."""


def retention_name(retention: int | None) -> str:
    return "dense" if retention is None else str(retention)


def trials(setup: FleetSetup, *, ttft_target_s: float | None = None) -> list[Trial]:
    """Return the trials, the base first. With a target, more engines are tried."""
    serving = VARIANTS["kvatlas"]

    def changed(topic: Topic, value: str, **fields: object) -> Trial:
        return Trial(
            topic=topic, value=value, setup=msgspec.structs.replace(setup, **fields), variant=serving
        )

    found = [Trial(topic="now", value="as it is", setup=setup, variant=serving)]
    found.append(Trial(topic="routing", value=BLIND, setup=setup, variant=VARIANTS[BLIND]))
    if has_retention(setup):
        found += [
            changed("retention", retention_name(retention), retention=retention)
            for retention in RETENTIONS
            if retention != setup.retention and allowed(setup, retention)
        ]
    found += [
        changed("memory", f"{factor:.0%}", num_blocks=max(POOL_BLOCKS_MIN, int(factor * setup.num_blocks)))
        for factor in MEMORY
    ]
    found += [changed("tiers", name, tiers=tiers) for name, tiers in more_tiers(setup).items()]
    found += pulls(setup)
    factors = ENGINE_FACTORS if ttft_target_s is None else (*ENGINE_FACTORS, 3.0, 4.0)
    counts = sorted({max(1, round(factor * setup.engines)) for factor in factors} - {setup.engines})
    found += [changed("engines", str(count), engines=count) for count in counts]
    found += splits(setup)
    return found


def splits(setup: FleetSetup) -> list[Trial]:
    """Return trials with disaggregated prefill, by the number of prefill engines; the first has none."""
    if setup.engines < 2:
        return []
    counts = sorted(
        {min(max(1, round(share * setup.engines)), setup.engines - 1) for share in PREFILL_SHARES}
    )
    serving = VARIANTS["kvatlas"]
    return [
        Trial(
            topic="apart",
            value=f"{count} + {setup.engines - count}" if count else ALIKE,
            setup=setup,
            variant=msgspec.structs.replace(serving, prefill=count),
        )
        for count in (0, *counts)
    ]


def pulls(setup: FleetSetup) -> list[Trial]:
    """Return trials of engines that pull prefixes, by the link; the first has host memory alone."""
    if setup.engines < 2:
        return []
    tiers = setup.tiers or TierSetup(block_bytes=block_bytes(setup.groups, KV_KIB_PER_TOKEN))
    if tiers.host is None:
        host = read_host(HOST, setup.num_blocks, tiers.block_bytes)
        tiers = msgspec.structs.replace(tiers, host=host)
    return [
        Trial(
            topic="pull",
            value=f"{link:g} Gbit/s" if link else NO_PULL,
            setup=msgspec.structs.replace(
                setup, tiers=msgspec.structs.replace(tiers, pull_bytes_per_s=link * 1e9 / 8)
            ),
            variant=VARIANTS["kvatlas"],
        )
        for link in (0.0, *PULL_GBIT_S)
    ]


def more_tiers(setup: FleetSetup) -> dict[str, TierSetup]:
    """Yield each kind of memory behind the GPUs that the fleet does not have, by name."""
    size = block_bytes(setup.groups, KV_KIB_PER_TOKEN)
    now = setup.tiers or TierSetup(block_bytes=size)
    found = {}
    if now.host is None:
        host = read_host(HOST, setup.num_blocks, now.block_bytes)
        found[f"host memory {HOST}"] = msgspec.structs.replace(now, host=host)
    if now.store is None:
        for text in STORES:
            store = read_store(text, setup.num_blocks * setup.engines, now.block_bytes)
            found[f"store, {gbit_s(store)}"] = msgspec.structs.replace(now, store=store)
    return found


def gbit_s(spec: TierSpec) -> str:
    return f"{spec.bytes_per_s * 8 / 1e9:g} Gbit/s"


def has_retention(setup: FleetSetup) -> bool:
    return any(group.family in {Family.WINDOW, Family.MAMBA} for group in setup.groups)


def allowed(setup: FleetSetup, retention: int | None) -> bool:
    try:
        check_layout(setup.groups, retention)
    except ValueError:
        return False
    return True


def result_of_trial(trial: Trial, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> TrialResult:
    """Sum up one trial; ``outcomes`` and ``base`` are in the same order of seeds."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(outcome, name) for outcome in outcomes)

    changes = [
        mine.ttft_mean_s / theirs.ttft_mean_s - 1 if theirs.ttft_mean_s else 0.0
        for mine, theirs in zip(outcomes, base, strict=True)
    ]
    return TrialResult(
        topic=trial.topic,
        value=trial.value,
        hit_share=mean("hit_share"),
        mean_s=mean("ttft_mean_s"),
        p90_s=mean("ttft_p90_s"),
        p99_s=mean("ttft_p99_s"),
        busy_share=mean("busy_share"),
        refused=max(outcome.refused for outcome in outcomes),
        change=statistics.fmean(changes),
        every_seed=all(change < 0 for change in changes),
    )


def reusable_share(requests: Sequence[Request]) -> float:
    """Return the hit share of one infinite cache, over the requests that outcomes count (``WARM_SHARE``).

    A prompt may reuse the beginning of any earlier prompt or answer, up to the last whole unit that both
    share, except for its last token.
    """
    first = int(WARM_SHARE * len(requests))
    seen: set[tuple[int, int]] = set()
    reused = total = 0
    for place, request in enumerate(requests):
        chain = shared = 0
        known = True
        for number, identifier in enumerate(request.ids):
            chain = hash((chain, identifier))
            known = known and (number, chain) in seen
            if known:
                shared = (number + 1) * request.unit_tokens
            seen.add((number, chain))
        if place >= first:
            reused += min(shared, request.input_tokens - 1)
            total += request.input_tokens
    return reused / total if total else 0.0


def results_of(
    tried: Sequence[Trial], outcomes: Mapping[Job, Outcome], seeds: Sequence[int]
) -> list[TrialResult]:
    """Return the trials' numbers in order; those of topics ``apart`` and ``pull`` are compared with the first
    of their topic."""
    firsts = {trial.topic: trial for trial in reversed(tried)}
    results = []
    for trial in tried:
        found = [outcomes[trial.job(seed)] for seed in seeds]
        first = firsts[trial.topic] if trial.topic in {"apart", "pull"} else tried[0]
        against = [outcomes[first.job(seed)] for seed in seeds]
        one = result_of_trial(trial, found, against)
        if trial.variant.prefill:
            one = msgspec.structs.replace(one, apart=verdict(against, found))
        results.append(one)
    return results
