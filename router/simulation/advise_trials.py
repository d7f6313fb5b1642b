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
from kvatlas.router.simulation.report import SplitVerdict, verdict
from kvatlas.router.simulation.requests import Request
from kvatlas.router.simulation.setup import VARIANTS, FleetSetup, Variant
from kvatlas.router.simulation.study import POOL_BLOCKS_MIN, WARM_SHARE, Job, Outcome, check_layout
from kvatlas.router.simulation.tiers import (
    KV_KIB_PER_TOKEN,
    TierSetup,
    TierSpec,
    block_bytes,
    read_host,
    read_store,
)

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
    # In all of them prompts delay the generation beside them, as in vLLM.
    if setup.engines < 2:
        return []
    timing = msgspec.structs.replace(setup.timing, stall_share=1.0)
    counts = sorted(
        {min(max(1, round(share * setup.engines)), setup.engines - 1) for share in PREFILL_SHARES}
    )
    serving, stalled = VARIANTS["kvatlas"], msgspec.structs.replace(setup, timing=timing)
    return [
        Trial(
            topic="apart",
            value=f"{count} + {setup.engines - count}" if count else ALIKE,
            setup=stalled,
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


# Advice from the outcomes of trials, one piece per topic.
#
# A change is advised if it shortens the mean time to first token by at least ``GAIN_MIN`` (or the topic's own
# minimum) on average, and for every seed. Pure: equal outcomes give equal texts.


GAIN_MIN = 0.03
ROUTING_GAIN_MIN = 0.05
MEMORY_GAIN_MIN = 0.10
AS_GOOD = 0.02
# With fewer requests, differences between runs are mostly random.
REQUESTS_MIN = 200
BUSY_MAX = 0.9


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """``value``: the advised value of ``setting``; None if the current one is good."""

    topic: Topic
    setting: str
    value: str | None
    text: str
    firm: bool = True
    """False if the runs are not sufficient for advice; ``value`` is None then."""


def judge(
    setup: FleetSetup,
    results: Sequence[TrialResult],
    *,
    reusable: float,
    num_requests: int,
    ttft_target_s: float | None = None,
) -> list[Advice]:
    """Return one piece of advice per topic, in the order of ``Topic``; ``results`` is in the order of
    ``trials``.

    With a ``doubt``, none of it is firm.
    """
    base = results[0]
    by_topic: dict[Topic, list[TrialResult]] = {}
    for one in results[1:]:
        by_topic.setdefault(one.topic, []).append(one)
    found = [_routing(base, by_topic["routing"], reusable)]
    found.append(_retention(setup, base, by_topic.get("retention", [])))
    found.append(_memory(setup, base, by_topic["memory"]))
    found += _tiers(setup, base, by_topic.get("tiers", []))
    found += _pull(setup, by_topic.get("pull", []))
    found.append(_engines(setup, base, by_topic.get("engines", []), ttft_target_s))
    found += _apart(by_topic.get("apart", []))
    if doubt(results, num_requests):
        return [msgspec.structs.replace(one, value=None, firm=False) for one in found]
    return found


def doubt(results: Sequence[TrialResult], num_requests: int) -> str:
    """Return why these runs are not sufficient for firm advice; "" if they are."""
    if num_requests < REQUESTS_MIN:
        return f"{num_requests} requests are too few for advice; at least {REQUESTS_MIN} are needed"
    if results[0].refused:
        return f"{results[0].refused} requests fit no engine's cache and are left out: --pool is too small"
    return ""


def _routing(base: TrialResult, others: Sequence[TrialResult], reusable: float) -> Advice:
    (blind,) = others
    shares = (
        ""
        if base.refused
        else (
            f"; an endless cache would hit at most {reusable:.0%} of the prompt tokens, this fleet hits "
            f"{base.hit_share:.0%}, and {blind.hit_share:.0%} under {blind.value}"
        )
    )
    gain = 1 - base.mean_s / blind.mean_s if blind.mean_s else 0.0
    if gain >= ROUTING_GAIN_MIN:
        text = (
            f"Prefix routing pays: mean time to first token {base.mean_s:.3f} s, {gain:.0%} less than "
            f"{blind.value} ({blind.mean_s:.3f} s){shares}."
        )
        return Advice(topic="routing", setting="policy", value=None, text=text)
    text = (
        f"Prefix routing does not pay on this traffic: {blind.value} has {blind.mean_s:.3f} s, the serving "
        f"policy {base.mean_s:.3f} s on average{shares}. {blind.value} does as well and needs no events."
    )
    return Advice(topic="routing", setting="policy", value=blind.value, text=text)


def _retention(setup: FleetSetup, base: TrialResult, others: Sequence[TrialResult]) -> Advice:
    setting, now = "prefix_cache_retention_interval", retention_name(setup.retention)
    if not others:
        text = f"{setting} has no effect: every group of this model is full attention."
        return Advice(topic="retention", setting=setting, value=None, text=text)
    shortest_s = min(one.mean_s for one in others)
    near = [one for one in others if one.mean_s <= shortest_s * (1 + AS_GOOD)]
    # Of equally good values, dense comes last: it takes the most pages.
    best = near[0]
    listed = ", ".join(f"{one.value}: {one.change:+.0%}, hit {one.hit_share:.0%}" for one in others)
    if -best.change >= GAIN_MIN and best.every_seed:
        names = " or ".join(one.value for one in near)
        also = f" ({names}: within {AS_GOOD:.0%} of each other)" if len(near) > 1 else ""
        text = (
            f"Set {setting} to {best.value} on the engines (now {now}){also}: mean {base.mean_s:.3f} -> "
            f"{best.mean_s:.3f} s ({best.change:+.0%}), hit {base.hit_share:.0%} -> {best.hit_share:.0%}."
        )
        return Advice(topic="retention", setting=setting, value=best.value, text=text)
    text = f"Leave {setting} at {now}: mean {base.mean_s:.3f} s, hit {base.hit_share:.0%}; {listed}."
    return Advice(topic="retention", setting=setting, value=None, text=text)


def _memory(setup: FleetSetup, base: TrialResult, others: Sequence[TrialResult]) -> Advice:
    half, double = others
    listed = (
        f"half: {half.mean_s:.3f} s ({half.change:+.0%}), now: {base.mean_s:.3f} s, double: "
        f"{double.mean_s:.3f} s ({double.change:+.0%})"
    )
    setting = "KV cache memory"
    if -double.change >= MEMORY_GAIN_MIN and double.every_seed:
        text = (
            f"More KV memory pays (gpu_memory_utilization, a smaller KV dtype, or offloading): {listed}, hit "
            f"{base.hit_share:.0%} -> {double.hit_share:.0%} with {2 * setup.num_blocks} blocks per engine."
        )
        return Advice(topic="memory", setting=setting, value="200%", text=text)
    if half.change <= AS_GOOD and not half.refused:
        text = f"Half the KV memory would do: {listed}."
        return Advice(topic="memory", setting=setting, value="50%", text=text)
    text = f"The KV memory is about right: {listed}."
    return Advice(topic="memory", setting=setting, value=None, text=text)


def _tiers(setup: FleetSetup, base: TrialResult, others: Sequence[TrialResult]) -> list[Advice]:
    """Report the benefit of memory outside the GPUs; nothing if the fleet has both kinds."""
    if not others:
        return []
    words = {name: _tier_words(tiers, setup.tiers) for name, tiers in more_tiers(setup).items()}
    shortest_s = min(one.mean_s for one in others)
    best = next(one for one in others if one.mean_s <= shortest_s * (1 + AS_GOOD))
    pays = -best.change >= MEMORY_GAIN_MIN and best.every_seed
    verdict = f"pays, first {words[best.value]}" if pays else "would bring little"
    listed = "; ".join(f"{words[one.value]} {_brings(one)}" for one in others)
    text = (
        f"Memory behind the GPUs {verdict}: {listed}. "
        f"Now: mean {base.mean_s:.3f} s, hit {base.hit_share:.0%}."
    )
    return [Advice(topic="tiers", setting="KV connector", value=best.value if pays else None, text=text)]


def _pull(setup: FleetSetup, others: Sequence[TrialResult]) -> list[Advice]:
    """Report what pulling prefixes between the engines brings beyond host memory alone; nothing for a single
    engine."""
    if not others:
        return []
    alone, linked = others[0], others[1:]
    shortest_s = min(one.mean_s for one in linked)
    best = next(one for one in linked if one.mean_s <= shortest_s * (1 + AS_GOOD))
    pays = -best.change >= GAIN_MIN and best.every_seed
    verdict = f"pays over {best.value}" if pays else "would bring little"
    added = "" if setup.tiers is not None and setup.tiers.host is not None else f" of {HOST}"
    listed = "; ".join(f"{one.value} {_brings(one)}" for one in linked)
    text = (
        f"Pulling prefixes between engines {verdict}: {listed}. "
        f"With host memory{added} alone: mean {alone.mean_s:.3f} s, hit {alone.hit_share:.0%}."
    )
    return [Advice(topic="pull", setting="pull.enabled", value="true" if pays else None, text=text)]


def _brings(one: TrialResult) -> str:
    gain = f"brings {-one.change:.0%}" if one.change <= 0 else f"costs {one.change:.0%}"
    return f"{gain} (mean {one.mean_s:.3f} s, hit {one.hit_share:.0%})"


def _tier_words(tiers: TierSetup, now: TierSetup | None) -> str:
    """Describe the kind of memory that ``now`` does not have."""
    added = tiers.host if now is None or now.host is None else None
    if added is not None:
        return f"host memory of {_gib(added, tiers)} per engine"
    if tiers.store is None:
        return ""
    return f"a shared store of {_gib(tiers.store, tiers)} over {gbit_s(tiers.store)}"


def _gib(spec: TierSpec, tiers: TierSetup) -> str:
    return f"{spec.blocks * tiers.block_bytes / (1 << 30):.0f} GiB"


def _engines(
    setup: FleetSetup, base: TrialResult, others: Sequence[TrialResult], target_s: float | None
) -> Advice:
    by_count = {int(one.value): one for one in others} | {setup.engines: base}
    listed = ", ".join(f"{count}: {by_count[count].p90_s:.2f} s" for count in sorted(by_count))
    over = f" The engines are busy with prompts {base.busy_share:.0%} of the time." * (
        base.busy_share > BUSY_MAX
    )
    if target_s is None:
        text = f"p90 of the time to first token by number of engines: {listed}.{over} --ttft-target chooses."
        return Advice(topic="engines", setting="engines", value=None, text=text)
    enough = [count for count in sorted(by_count) if by_count[count].p90_s <= target_s]
    if not enough:
        most = max(by_count)
        text = f"Not even {most} engines keep the p90 within {target_s:g} s: {listed}.{over}"
        return Advice(topic="engines", setting="engines", value=None, text=text)
    value = None if enough[0] == setup.engines else str(enough[0])
    text = f"{enough[0]} engines (now {setup.engines}) keep the p90 within {target_s:g} s: {listed}.{over}"
    return Advice(topic="engines", setting="engines", value=value, text=text)


def _apart(others: Sequence[TrialResult]) -> list[Advice]:
    """Advise whether some engines should prefill for the others, and how many; None for a single engine."""
    tried = {one.value: one.apart for one in others if one.apart is not None}
    if not tried:
        return []
    best, found = min(tried.items(), key=lambda item: item[1].answer)
    listed = "; ".join(f"{value}: {one.text}" for value, one in tried.items())
    setting = "engines to prefill + to decode"
    value, where = None, ""
    if found.word == "pays":
        value, where = best, f", with {best} engines (role=prefill, role=decode)"
    elif found.word == "is a trade":
        where = f" of first tokens for whole answers, best with {best} engines"
    text = f"Prefill and decode apart {found.word} on this traffic{where}: {listed}."
    return [Advice(topic="apart", setting=setting, value=value, text=text)]
