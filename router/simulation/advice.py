"""Advice from the outcomes of trials, one piece per topic.

A change is advised if it shortens the mean time to first token by at least ``GAIN_MIN`` (or the topic's own
minimum) on average, and for every seed. Pure: equal outcomes give equal texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvatlas.router.simulation.advise_trials import (
    HOST,
    Topic,
    TrialResult,
    gbit_s,
    more_tiers,
    retention_name,
)
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.tiers import TierSetup, TierSpec

GAIN_MIN = 0.03
ROUTING_GAIN_MIN = 0.05
MEMORY_GAIN_MIN = 0.10
AS_GOOD = 0.02
# With fewer requests, differences between runs are mostly random.
REQUESTS_MIN = 200
BUSY_MAX = 0.9
# Of prompt tokens: cached by the engines' reports, and not to be had of an endless cache by the ids.
UNSEEN_MAX = 0.1


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
    recorded: float | None = None,
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
    if doubt(results, num_requests, reusable, recorded):
        return [msgspec.structs.replace(one, value=None, firm=False) for one in found]
    return found


def doubt(
    results: Sequence[TrialResult], num_requests: int, reusable: float = 1.0, recorded: float | None = None
) -> str:
    """Return why these runs are not sufficient for firm advice; "" if they are. ``recorded``: the share of
    prompt tokens that the engines of the workload reported as cached."""
    if recorded is not None and recorded > reusable + UNSEEN_MAX:
        return (
            f"the engines reported {recorded:.0%} of the prompt tokens as cached, and the ids of these "
            f"prompts show {reusable:.0%} as shared: what is shared is shorter than a unit of ids, or was "
            "asked by clients that are not in this record"
        )
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
