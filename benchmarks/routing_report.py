"""The report of ``benchmarks/routing.py``: kvatlas and the best other router in every cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

SERVING = "kvatlas"
CLOSED = "closed agent sessions"
LEVEL = 1.02
GAIN = 0.90
COLLAPSE = 1.5
"""Worst seed over the best other router's worst."""
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t, two-sided 95 %, for 1, 2, .. degrees of freedom; 2 beyond."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One arm over one draw. ``pool`` and ``load`` are shares; seconds to the first token, to the whole
    answer, and of the whole run."""

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
    answer_s: float = 0.0
    lasted_s: float = 0.0
    revision: str = ""
    """The checkout's."""

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


class Against(NamedTuple):
    """Serving policy over the best other arm: the mean over seeds, and half its 95 % interval (None: one
    seed); ``tail`` and ``worst``: the same of p99, and its worst seed over the other's worst."""

    arm: str
    ratio: float
    half: float | None
    tail: float
    worst: float

    def __str__(self) -> str:
        spread = "" if self.half is None else f" ±{self.half:.2f}"
        return f"{self.ratio:.2f}{spread}"


Arms = dict[str, dict[int, Run]]
Book = dict[Place, Arms]
Value = Callable[[Run], float]


def report(runs: Iterable[Run], settings: str, requests: int) -> str:
    """Markdown of all runs of one kind of settings."""
    book: Book = {}
    for run in runs:
        place = Place(run.workload, run.load, run.model, run.pool)
        book.setdefault(place, {}).setdefault(run.arm, {})[run.seed] = run
    lines = ["# kvatlas and other routers: simulated fleets", "", _about(book, settings, requests), ""]
    lines += ["## Result", "", *_verdicts(book)]
    for workload, load in sorted({(place.workload, place.load) for place in book}):
        part = {place: arms for place, arms in sorted(book.items()) if place[:2] == (workload, load)}
        lines += ["", f"## {workload}, load {load:.0%}", "", *_table(part, _mean_s, with_tail=True)]
        if workload == CLOSED:
            lines += ["", "Mean seconds to the complete answer:", "", *_table(part, _answer_s)]
            lines += ["", "Total time, seconds:", "", *_table(part, _lasted_s)]
    return "\n".join(lines) + "\n"


def against(arms: Arms, value: Value) -> Against | None:
    """The serving policy against the arm with the lowest mean, seed by seed; None without either."""
    mine = arms.get(SERVING, {})
    others = {arm: runs for arm, runs in arms.items() if arm != SERVING and set(runs) & set(mine)}
    if not others:
        return None
    best = min(others, key=lambda arm: (_mean(others[arm], value), arm))
    pairs = [(mine[seed], run) for seed, run in others[best].items() if seed in mine]
    ratios = [value(one) / value(other) for one, other in pairs]
    tail = statistics.fmean(one.p99_s / other.p99_s for one, other in pairs)
    worst = max(value(one) for one, _ in pairs) / max(value(other) for _, other in pairs)
    return Against(best, statistics.fmean(ratios), _half(ratios), tail, worst)


def _about(book: Book, settings: str, requests: int) -> str:
    count = sum(len(seeds) for arms in book.values() for seeds in arms.values())
    seeds = sorted({seed for arms in book.values() for by_seed in arms.values() for seed in by_seed})
    return (
        f"`PYTHONPATH=. python benchmarks/routing.py`: {count} runs, {len(book)} cells, seeds {seeds}, at "
        f"most {requests} requests each, 8 engines, {revisions(_runs(book))}; {SERVING} with {settings}. All "
        "seconds are simulated and depend on no machine. Cells: mean seconds to the first token over the "
        "seeds, ± half a 95 % interval, in brackets hit %, p99 and the worst seed's mean; the shortest mean "
        "is bold. Ratio: kvatlas over the best other router, so below 1 kvatlas is faster, then that of p99 "
        "and of the worst seeds. What is simulated and what not: docs/simulate.md."
    )


def revisions(runs: Iterable[Run]) -> str:
    """The revisions at which these were measured."""
    found = sorted({run.revision or "unknown" for run in runs})
    return f"revision{'s' * (len(found) > 1)} {', '.join(found)}"


def _runs(book: Book) -> Iterator[Run]:
    for arms in book.values():
        for by_seed in arms.values():
            yield from by_seed.values()


def _verdicts(book: Book) -> Iterator[str]:
    found = {place: one for place, arms in sorted(book.items()) if (one := against(arms, _mean_s))}
    ahead = sum(one.ratio <= GAIN for one in found.values())
    level = sum(one.ratio <= LEVEL for one in found.values())
    lost = {place: one for place, one in found.items() if one.ratio > LEVEL}
    yield (
        f"- Mean time to first token at most {LEVEL:g} times the best other router's in {level} of "
        f"{len(found)} cells, at least {1 - GAIN:.0%} below it in {ahead}."
    )
    tails = sum(one.tail <= LEVEL for one in found.values())
    fallen = {place: one for place, one in found.items() if one.worst > COLLAPSE}
    yield f"- p99 at most {LEVEL:g} times that router's in {tails}."
    yield f"- Worst seed above {COLLAPSE:g} times that router's worst: {len(fallen)}."
    for place, one in sorted(fallen.items(), key=lambda item: -item[1].worst):
        yield f"  - {place}: {one.worst:.2f} times {one.arm}'s"
    yield f"- Cells that kvatlas loses: {len(lost)}."
    for place, one in sorted(lost.items(), key=lambda item: -item[1].ratio):
        yield f"  - {place}: {one} times {one.arm}'s"
    for what, value in (("complete answer", _answer_s), ("total time", _lasted_s)):
        for place, arms in sorted(book.items()):
            one = against(arms, value) if place.workload == CLOSED else None
            if one is not None:
                yield f"- {place}: {what} {one} times {one.arm}'s, the best other."


def _table(book: Mapping[Place, Arms], value: Value, *, with_tail: bool = False) -> Iterator[str]:
    arms = list(dict.fromkeys(arm for by_arm in book.values() for arm in by_arm))
    yield "| model, pool | " + " | ".join(arms) + " | best other | ratio |"
    yield "|---" * (len(arms) + 3) + "|"
    for place, by_arm in book.items():
        best_s = min(_mean(runs, value) for runs in by_arm.values())
        cells = [_cell(by_arm.get(arm), value, best_s, with_tail=with_tail) for arm in arms]
        one = against(by_arm, value)
        last = ["-", "-"] if one is None else [one.arm, f"{one}, {one.tail:.2f}, {one.worst:.2f}"]
        yield f"| {place.model}, {place.pool:.0%} | " + " | ".join(cells + last) + " |"


def _cell(runs: dict[int, Run] | None, value: Value, best_s: float, *, with_tail: bool) -> str:
    if runs is None:
        return "-"
    mean_s, half = _mean(runs, value), _half([value(run) for run in runs.values()])
    text = f"{mean_s:.2f}" if half is None else f"{mean_s:.2f} ±{half:.2f}"
    text = f"**{text}**" if mean_s <= best_s else text
    if not with_tail:
        return text
    hits, tail_s = _mean(runs, lambda run: run.hit_share), _mean(runs, lambda run: run.p99_s)
    worst_s = max(value(run) for run in runs.values())
    return f"{text} ({100 * hits:.0f}, {tail_s:.1f}, {worst_s:.2f})"


def _mean(runs: dict[int, Run], value: Value) -> float:
    return statistics.fmean(value(run) for run in runs.values())


def _half(values: list[float]) -> float | None:
    freedom = len(values) - 1
    if freedom < 1:
        return None
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else 2.0
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def _mean_s(run: Run) -> float:
    return run.mean_s


def _answer_s(run: Run) -> float:
    return run.answer_s


def _lasted_s(run: Run) -> float:
    return run.lasted_s
