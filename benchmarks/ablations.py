"""Parts of kvatlas's decision, each off in turn, for ``benchmarks/routing.py --ablations``.

A part gains in a cell if first tokens come later without it: the ratio of the means without and with it is
above 1. With few seeds a ratio near 1 says little; so the table shows in how many seeds it is above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from benchmarks.routing_report import SERVING, Run, revisions
from kvatlas.router.placement.candidate import Candidate, PlacementRequest, PolicySettings
from kvatlas.router.placement.cost import Choice, make_choice, score
from kvatlas.router.placement.policies import ArmState
from kvatlas.router.simulation.variants import VARIANTS, Variant

GAIN: Final = 1.02
_NEVER: Final = 1e9


def cheapest(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """Choose the lowest cost: no ties, and no probes."""
    scored = score(candidates, prompt.prompt_tokens, settings)
    return make_choice(scored, int(scored.totals.argmin()), "cheapest")


def _without(**settings: float) -> Variant:
    return replace(VARIANTS[SERVING], settings=tuple(settings.items()))


ABLATIONS: Mapping[str, Variant] = MappingProxyType(
    {
        "prompts in flight": replace(VARIANTS[SERVING], in_flight=False),
        "evictions ahead": replace(VARIANTS[SERVING], evictions=False),
        "wait for pages": _without(room_share=0.0),
        "gauges": VARIANTS[SERVING],  # polled never
        "eviction premium": _without(eviction_premium=0.0),
        "what a prefill delays": _without(delay=0.0),
        "shared prefix": _without(beta=0.0),
        "spread": _without(spread=0.0),
        "probes": _without(probe_interval_s=_NEVER),
        "ties": replace(VARIANTS[SERVING], policy=cheapest),
        "price of a sequence (012)": _without(sequence_s=0.0),
        "price of scarce pages (013)": _without(scarcity_premium=0.0),
    }
)
"""Each part and kvatlas without it."""
LOADED: Final = frozenset({"price of a sequence (012)", "price of scarce pages (013)"})
"""Parts that count only where prompts can be loaded from memory outside the GPUs."""


def gauge_s(arm: str, usual_s: float) -> float:
    """Seconds between two polls of gauges in a run of this arm."""
    return math.inf if arm == "gauges" else usual_s


def arms_of(store: str) -> tuple[str, ...]:
    """Return the arms of a cell with this store outside the GPUs ("": none)."""
    return (SERVING, *(part for part in ABLATIONS if bool(store) == (part in LOADED)))


def report(runs: Sequence[Run]) -> str:
    """Markdown: a cell per row, a part per column; then the parts without a gain anywhere."""
    cells: dict[tuple[str, str], dict[str, dict[int, Run]]] = {}
    for run in runs:
        cells.setdefault((run.settings, run.where), {}).setdefault(run.arm, {})[run.seed] = run
    about = (
        f"`PYTHONPATH=. python benchmarks/routing.py --ablations`: {len(runs)} runs, seeds "
        f"{sorted({run.seed for run in runs})}, at most {max([run.requests for run in runs], default=0)} "
        f"requests each, 8 engines, {revisions(runs)}. Cells: first-token time without the part by that with "
        "it, mean and p99, as geometric means over the seeds; in brackets in how many of them the mean grew. "
        "Above 1 the part gains."
    )
    lines = ["# What each part of a decision gains", "", about]
    gains: dict[str, list[str]] = {}
    for settings in sorted({key[0] for key in cells}):
        part = {where: arms for (of, where), arms in sorted(cells.items()) if of == settings}
        arms = [arm for arm in ABLATIONS if any(arm in found for found in part.values())]
        behind = ", store" if "a store of" in settings else ""
        lines += ["", f"{settings}:", "", *_table(part, arms, gains, behind)]
    lines += ["", "## Verdict", ""]
    for arm, where in gains.items():
        shown = "; ".join(where) if where else "**no cell**"
        lines.append(f"- {arm}: gains at least {GAIN - 1:.0%} in most seeds in {shown}.")
    return "\n".join(lines) + "\n"


def _table(
    part: Mapping[str, Mapping[str, Mapping[int, Run]]],
    arms: Sequence[str],
    gains: dict[str, list[str]],
    behind: str,
) -> Iterator[str]:
    yield "| cell | with all | " + " | ".join(arms) + " |"
    yield "|---" * (len(arms) + 2) + "|"
    for where, found in part.items():
        whole = found.get(SERVING, {})
        if not whole:
            continue
        cells = [f"{_mean([run.mean_s for run in whole.values()]):.2f} s"]
        for arm in arms:
            mine = gains.setdefault(arm, [])
            pairs = [(run, whole[seed]) for seed, run in found.get(arm, {}).items() if seed in whole]
            if not pairs:
                cells.append("-")
                continue
            mean = _ratio(pairs, lambda run: run.mean_s)
            worse = sum(without.mean_s > run.mean_s for without, run in pairs)
            if mean >= GAIN and 2 * worse > len(pairs):
                mine.append(where + behind)
            tail = _ratio(pairs, lambda run: run.p99_s)
            cells.append(f"{mean:.2f}, {tail:.2f} ({worse} of {len(pairs)})")
        yield f"| {where} | " + " | ".join(cells) + " |"


def _ratio(pairs: Sequence[tuple[Run, Run]], value: Callable[[Run], float]) -> float:
    """Geometric mean, over seeds, of the value without the part by that with it."""
    return math.exp(_mean([math.log(value(without) / value(run)) for without, run in pairs]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
