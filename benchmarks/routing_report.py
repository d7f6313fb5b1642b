"""The report of ``benchmarks/routing.py``: tables per workload and load, and what became of each bar."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

SERVING = "kvatlas"
CHAT = "conversation"
BEST_CHAT = 1.02
WORST = 1.05
WORST_P99 = 1.10
GAIN = 0.90
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t, two-sided 95 %, for 1, 2, .. degrees of freedom; 2 beyond."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One arm over one draw. ``pool`` and ``load`` are shares; seconds to the first token."""

    workload: str
    model: str
    pool: float
    load: float
    seed: int
    arm: str
    requests: int
    settings: str
    hit_share: float
    mean_s: float
    p99_s: float
    error_tokens: float

    @property
    def where(self) -> str:
        return f"{self.workload}, {self.model}, pool {self.pool:.0%}, load {self.load:.0%}"


class Place(NamedTuple):
    workload: str
    load: float
    model: str
    pool: float

    def __str__(self) -> str:
        return f"{self.workload}, {self.model}, pool {self.pool:.0%}, load {self.load:.0%}"


class Ratio(NamedTuple):
    """Serving policy over another arm: the mean over seeds, and half its 95 % interval (None: one seed)."""

    arm: str
    mean: float
    half: float | None

    def __str__(self) -> str:
        spread = "" if self.half is None else f" ±{100 * self.half:.0f}"
        return f"{100 * (self.mean - 1):+.1f}{spread} % against {self.arm}"


Book = dict[Place, dict[str, dict[int, Run]]]
Value = Callable[[Run], float]


def report(runs: Iterable[Run], settings: str, requests: int) -> str:
    """Markdown of all runs of one kind of settings."""
    book: Book = {}
    for run in runs:
        place = Place(run.workload, run.load, run.model, run.pool)
        book.setdefault(place, {}).setdefault(run.arm, {})[run.seed] = run
    lines = [
        "# Which policy, where: simulated fleets",
        "",
        _about(book, settings, requests),
        "",
        "## Bars",
        "",
        *_verdicts(book),
    ]
    for workload, load in sorted({(p.workload, -p.load) for p in book}):
        places = sorted(p for p in book if (p.workload, p.load) == (workload, -load))
        arms = [arm for arm in _arms(book) if any(arm in book[place] for place in places)]
        lines += ["", f"## {workload}, load {-load:.0%}", ""]
        lines += ["| model, pool | " + " | ".join(arms) + " |", "|---|" + "---|" * len(arms)]
        for place in places:
            best = min(_mean(runs, lambda r: r.mean_s) for runs in book[place].values())
            cells = [_cell(book[place].get(arm), best) for arm in arms]
            lines.append(f"| {place.model}, {place.pool:.0%} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _about(book: Book, settings: str, requests: int) -> str:
    count = sum(len(seeds) for arms in book.values() for seeds in arms.values())
    seeds = sorted({seed for arms in book.values() for by_seed in arms.values() for seed in by_seed})
    return (
        f"`PYTHONPATH=. python benchmarks/routing.py`: {count} runs, {len(book)} cells, seeds {seeds}, "
        f"{requests} requests each, 8 engines; {SERVING} with {settings}. Columns: hit %, mean and p99 "
        "seconds to the first token, means over the seeds, ± half a 95 % interval of the mean. Bold: the "
        "shortest mean. What is simulated and what not: docs/simulate.md."
    )


def _arms(book: Book) -> list[str]:
    return list(dict.fromkeys(arm for arms in book.values() for arm in arms))


def _mean(runs: dict[int, Run], value: Value) -> float:
    return statistics.fmean(value(run) for run in runs.values())


def _cell(runs: dict[int, Run] | None, best_s: float) -> str:
    if runs is None:
        return "-"
    mean_s = _mean(runs, lambda r: r.mean_s)
    half = _half([run.mean_s for run in runs.values()])
    text = f"{mean_s:.2f}" if half is None else f"{mean_s:.2f} ±{half:.2f}"
    text = f"**{text}**" if mean_s <= best_s else text
    return f"{100 * _mean(runs, lambda r: r.hit_share):.0f} {text} {_mean(runs, lambda r: r.p99_s):.1f}"


def _half(values: list[float]) -> float | None:
    freedom = len(values) - 1
    if freedom < 1:
        return None
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else 2.0
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def _ratios(arms: dict[str, dict[int, Run]], value: Value) -> list[Ratio]:
    """Against every other arm, seed by seed; the worst first."""
    mine = arms.get(SERVING, {})
    found = []
    for arm, runs in arms.items():
        values = [value(mine[seed]) / value(run) for seed, run in runs.items() if seed in mine]
        if arm != SERVING and values:
            found.append(Ratio(arm, statistics.fmean(values), _half(values)))
    return sorted(found, key=lambda ratio: -ratio.mean)


def _verdicts(book: Book) -> list[str]:
    tight = min(place.pool for place in book)
    chat = {place: _ratios(arms, _mean_s)[:1] for place, arms in book.items() if place.workload == CHAT}
    other = {
        place: [ratio for ratio in _ratios(arms, _mean_s) if ratio.arm == "full-attention"]
        for place, arms in book.items()
        if place.workload != CHAT and place.pool == tight and "full" not in place.model
    }
    worst = {place: _ratios(arms, _mean_s)[:1] for place, arms in book.items()}
    tails = {place: _ratios(arms, _p99_s)[:1] for place, arms in book.items()}
    lines = _bar("Chat: mean within 2 % of the best arm in every cell", chat, BEST_CHAT)
    lines += _bar(
        f"Branching and tenants at pool {tight:.0%}, hybrid models: mean at least 10 % below full-attention",
        other,
        GAIN,
    )
    lines += _bar("Everywhere: mean at most 5 % behind any arm", worst, WORST)
    lines += _bar("Everywhere: p99 at most 10 % behind the best arm", tails, WORST_P99)
    return lines


def _mean_s(run: Run) -> float:
    return run.mean_s


def _p99_s(run: Run) -> float:
    return run.p99_s


def _bar(what: str, ratios: dict[Place, list[Ratio]], limit: float) -> list[str]:
    """The verdict line, and one per cell that is beyond the bar."""
    held = {place: found[0] for place, found in ratios.items() if found}
    beyond = {place: ratio for place, ratio in sorted(held.items()) if ratio.mean > limit}
    surely = sum(ratio.half is not None and ratio.mean - ratio.half > limit for ratio in beyond.values())
    verdict = "not measured" if not held else "held" if not beyond else "not held"
    tail = f"; {surely} beyond it by more than the noise" if beyond else ""
    lines = [f"- **{verdict}**: {what} ({len(held) - len(beyond)} of {len(held)} cells{tail})"]
    lines += [f"  - {place}: {ratio}" for place, ratio in beyond.items()]
    return lines
