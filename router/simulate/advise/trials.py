"""Trials of one's own traffic that change one thing each, and the numbers of their runs.

The base trial is the fleet as it is. Every other one changes the policy, the retention, the memory on the
GPUs or behind them, the number of engines or a knob of the serving policy, and meets the same requests at the
same times, seed by seed. ``judge.py`` says what follows.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from publisher.groups import Family
from router.placement.candidate import PolicySettings
from router.simulate.outcome import WARM_SHARE, Outcome
from router.simulate.plan import check_layout
from router.simulate.run.arms import ARMS, Arm
from router.simulate.run.setup import FleetSetup
from router.simulate.run.tier_setup import (
    KV_KIB_PER_TOKEN,
    TierSetup,
    TierSpec,
    block_bytes,
    read_host,
    read_store,
)
from router.simulate.study import POOL_BLOCKS_MIN, Job
from router.simulate.verdict import SplitVerdict, verdict
from router.simulate.workload.requests import Request

Topic = Literal["now", "routing", "retention", "memory", "tiers", "engines", "apart", "knobs"]
RETENTIONS: tuple[int | None, ...] = (0, 1024, 4096, None)
MEMORY = (0.5, 2.0)
HOST = "400%"
STORES = ("400%:gbit_s=25", "400%:gbit_s=100")
"""Memory outside the GPUs to try, as ``--host-memory`` and ``--store`` take it."""
ENGINE_FACTORS = (0.5, 0.75, 1.5, 2.0)
PREFILL_SHARES = (0.25, 0.5, 0.75)
ALIKE = "all alike"
BLIND = ("least-load", "power-of-two")
KNOBS = ((0.0, 0.0), (0.25, 0.0), (0.5, 0.5), (0.25, 2.0))
"""(beta, eviction_premium) to try beside the settings as they are."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One thing changed; ``value`` says to what."""

    topic: Topic
    value: str
    setup: FleetSetup
    arm: Arm

    def job(self, seed: int) -> Job:
        setup = msgspec.structs.replace(self.setup, seed=seed)
        return Job(name=f"{self.topic} {self.value}", arm=self.arm, setup=setup, workload=seed)


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """A trial's numbers, means over the seeds. ``change``: of the mean TTFT, relative to the base; for topic
    ``apart`` to its first trial."""

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
    """Of topic ``apart``: prefill and decode apart, against the same engines alike."""


def retention_name(retention: int | None) -> str:
    return "dense" if retention is None else str(retention)


def trials(setup: FleetSetup, *, ttft_target_s: float | None = None) -> list[Trial]:
    """The base first. With a target more engines are tried."""
    serving = ARMS["kvatlas"]

    def changed(topic: Topic, value: str, **fields: object) -> Trial:
        return Trial(topic=topic, value=value, setup=msgspec.structs.replace(setup, **fields), arm=serving)

    found = [Trial(topic="now", value="as it is", setup=setup, arm=serving)]
    found += [
        Trial(topic="routing", value=name, setup=setup, arm=ARMS[name])
        for name in (*BLIND, "full-attention-in-flight")
    ]
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
    factors = ENGINE_FACTORS if ttft_target_s is None else (*ENGINE_FACTORS, 3.0, 4.0)
    counts = sorted({max(1, round(factor * setup.engines)) for factor in factors} - {setup.engines})
    found += [changed("engines", str(count), engines=count) for count in counts]
    found += splits(setup)
    for beta, premium in KNOBS:
        knobs = msgspec.structs.replace(setup.policy, beta=beta, eviction_premium=premium)
        if knobs != setup.policy:
            found.append(changed("knobs", knobs_name(knobs), policy=knobs))
    return found


def splits(setup: FleetSetup) -> list[Trial]:
    """Prefill and decode apart, by the number of engines that prefill; the first has all alike. In all of
    them prompts hold up the answers beside them, as in vLLM."""
    if setup.engines < 2:
        return []
    timing = msgspec.structs.replace(setup.timing, stall_share=1.0)
    counts = sorted(
        {min(max(1, round(share * setup.engines)), setup.engines - 1) for share in PREFILL_SHARES}
    )
    serving, stalled = ARMS["kvatlas"], msgspec.structs.replace(setup, timing=timing)
    return [
        Trial(
            topic="apart",
            value=f"{count} + {setup.engines - count}" if count else ALIKE,
            setup=stalled,
            arm=msgspec.structs.replace(serving, prefill=count),
        )
        for count in (0, *counts)
    ]


def more_tiers(setup: FleetSetup) -> dict[str, TierSetup]:
    """Each kind of memory behind the GPUs that the fleet does not have, by name."""
    size = block_bytes(setup.groups, KV_KIB_PER_TOKEN)
    now = setup.tiers or TierSetup(block_bytes=size)
    found = {}
    if now.host is None:
        host = read_host(HOST, setup.num_blocks, now.block_bytes)
        found[f"host memory {HOST}"] = msgspec.structs.replace(now, host=host)
    if now.store is None:
        for text in STORES:
            store = read_store(text, setup.num_blocks * setup.engines, now.block_bytes)
            found[_store_name(store)] = msgspec.structs.replace(now, store=store)
    return found


def _store_name(store: TierSpec) -> str:
    return f"store, {gbit_s(store)}"


def gbit_s(spec: TierSpec) -> str:
    return f"{spec.bytes_per_s * 8 / 1e9:g} Gbit/s"


def knobs_name(knobs: PolicySettings) -> str:
    return f"beta {knobs.beta:g}, premium {knobs.eviction_premium:g}"


def has_retention(setup: FleetSetup) -> bool:
    return any(group.family in {Family.WINDOW, Family.MAMBA} for group in setup.groups)


def allowed(setup: FleetSetup, retention: int | None) -> bool:
    try:
        check_layout(setup.groups, retention)
    except ValueError:
        return False
    return True


def tell(trial: Trial, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> TrialResult:
    """Sums up one trial; ``outcomes`` and ``base`` are in the same order of seeds."""

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
    """What one endless cache would hit at most, of the same requests that outcomes count (``WARM_SHARE``).

    A prompt may take what any earlier prompt or answer began with, to the last whole unit that both share,
    but for its last token.
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


def told_of(
    tried: Sequence[Trial], outcomes: Mapping[Job, Outcome], seeds: Sequence[int]
) -> list[TrialResult]:
    """The trials' numbers, in their order; those apart are compared with the same engines alike."""
    base = [outcomes[tried[0].job(seed)] for seed in seeds]
    alike = next((trial for trial in tried if trial.topic == "apart"), None)
    against = [] if alike is None else [outcomes[alike.job(seed)] for seed in seeds]
    told = []
    for trial in tried:
        found = [outcomes[trial.job(seed)] for seed in seeds]
        one = tell(trial, found, against if trial.topic == "apart" else base)
        if trial.arm.prefill:
            one = msgspec.structs.replace(one, apart=verdict(against, found))
        told.append(one)
    return told
