"""Results of a run of ``benchmarks.transfer`` so far, and its report as Markdown.

The report is whole at any moment: of a run that broke off it holds what was measured until then, says so in
its first lines, and names what is missing and why.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from benchmarks.transfer_beside import Slowdown, StepTimes
from benchmarks.transfer_checks import Check
from benchmarks.transfer_rates import KIB, Cell
from kvatlas.connectors.transfer.base import Direction

GOAL_PIECES = 256
"""Goals are for jobs of at least this many pieces; smaller ones are bounded by the time to start a copy."""
_UNFINISHED = "the run has not ended"


@dataclass
class Findings:
    """Everything a run has found; ``broken``: what could not be measured, and why, one line each."""

    title: str
    facts: list[tuple[str, str]]
    computes: bool
    checks: list[Check] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    slow: list[Slowdown] = field(default_factory=list)
    steps: list[StepTimes] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def correct(self) -> bool:
        """Whether no check found a wrong copy."""
        return all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        """As ``benchmarks.transfer`` describes it."""
        return 1 if not self.correct else 3 if self.broken or not self.ended else 0


def report_of(found: Findings) -> str:
    """The Markdown."""
    passed = sum(check.ok for check in found.checks)
    lines = [
        f"# Transfers on {found.title}",
        "",
        f"{dt.datetime.now(dt.UTC).date()}, by `python -m benchmarks.transfer`. "
        f"{' '.join(f'{note}.' for note in found.notes)}".rstrip(),
        "",
        *_broken_section(found),
        *_table(("what", "value"), [[_cell_text(text) for text in fact] for fact in found.facts]),
        "",
        *(_goals_section(found) if found.computes else []),
        "## Correctness",
        "",
        f"{passed} of {len(found.checks)} checks passed.",
        "",
        *_table(
            ("check", "result"),
            [[c.name, "ok" if c.ok else f"FAILED {_cell_text(c.detail)}"] for c in found.checks],
        ),
    ]
    if found.cells:
        lines += ["", *_rates_section(found.cells)]
    if found.slow:
        lines += ["", *_slowdown_section(found.slow)]
    if found.steps:
        lines += ["", *_steps_section(found.steps)]
    return "\n".join(lines) + "\n"


def _broken_section(found: Findings) -> list[str]:
    broken = found.broken + ([] if found.ended else [_UNFINISHED])
    if not broken:
        return []
    return ["**Broke off, or left something out:**", "", *(f"- {_cell_text(line)}" for line in broken), ""]


def _goals_section(found: Findings) -> list[str]:
    return [
        "## Goals",
        "",
        *_table(("goal", "worst case", "met"), goals(found.cells, found.slow)),
        "",
    ]


def goals(cells: list[Cell], slow: list[Slowdown]) -> list[list[str]]:
    """Each goal with its worst case."""
    rows = []
    for name, least, fits in (
        ("pieces of 64 KiB and more: 90 % of one big copy", 0.90, lambda size: size >= 64 * KIB),
        ("pieces of 16 KiB: 60 % of one big copy", 0.60, lambda size: size == 16 * KIB),
    ):
        for direction in Direction:
            own = [
                cell
                for cell in cells
                if cell.direction is direction
                and cell.pieces >= GOAL_PIECES
                and fits(cell.piece_bytes)
                and cell.measured
            ]
            worst = min(own, key=lambda cell: cell.share, default=None)
            if worst is None:
                rows.append([f"{name}, {direction.value}", "not measured", "-"])
                continue
            told = f"{worst.share:.0%} ({worst.pieces} x {size_text(worst.piece_bytes)})"
            rows.append([f"{name}, {direction.value}", told, "met" if worst.share >= least else "MISSED"])
    stores = [entry for entry in slow if entry.direction is Direction.STORE and entry.covered]
    if not stores:
        rows.append(["stores slow matrix products by at most 3 %", "not measured", "-"])
    else:
        most = max(stores, key=lambda entry: entry.percent)
        told = f"{most.percent:.1f} % ({size_text(most.piece_bytes)} pieces)"
        rows.append(
            ["stores slow matrix products by at most 3 %", told, "met" if most.percent <= 3.0 else "MISSED"]
        )
    return rows


def _rates_section(cells: list[Cell]) -> list[str]:
    lines = [
        "## Rates",
        "",
        "GB/s. *one copy*: the same bytes in one piece, the limit of the link; *share*: what the engine",
        "reaches of it. *call per piece*: a cudaMemcpyAsync for each (memmove with --host). *torch index*:",
        "gather, copy and scatter by torch (numpy with --host). Small jobs are submitted many at a time.",
        f"Goals look at jobs of {GOAL_PIECES} pieces and more.",
    ]
    titles = (
        (Direction.LOAD, "Loads: host to device"),
        (Direction.STORE, "Stores: device to host"),
        (None, "Both together"),
    )
    for direction, title in titles:
        columns = ["engine", "one copy"] + (["call per piece", "torch index"] if direction else [])
        rows = [
            [
                size_text(cell.piece_bytes),
                str(cell.pieces),
                size_text(cell.piece_bytes * cell.pieces),
                *(gbps(cell.rates.get(column)) for column in columns),
                f"{cell.share:.0%}" if cell.measured else "not measured",
            ]
            for cell in sorted(cells, key=lambda cell: (cell.piece_bytes, cell.pieces))
            if cell.direction is direction
        ]
        lines += ["", f"### {title}", "", *_table(("piece", "pieces", "job", *columns, "share"), rows)]
    return lines


def _slowdown_section(slow: list[Slowdown]) -> list[str]:
    rows = [
        [
            "loads" if entry.direction is Direction.LOAD else "stores",
            size_text(entry.piece_bytes),
            f"{entry.percent:+.1f} %",
            gbps(entry.rate),
            "yes" if entry.covered else "NO: transfers ended first",
        ]
        for entry in slow
    ]
    return [
        "## What computing loses meanwhile",
        "",
        "Matrix products (8192 x 8192, bf16) beside uninterrupted transfers, against the same alone before",
        "and after; medians.",
        "",
        *_table(
            ("transfers", "piece", "products take", "transfer rate alone, GB/s", "covered to the end"), rows
        ),
    ]


def _steps_section(steps: list[StepTimes]) -> list[str]:
    rows = [
        [
            entry.way,
            entry.transfers,
            *(f"{us:.0f}" for us in (*entry.alone_us, *entry.beside_us)),
            f"{entry.engine_calls_us:.0f}",
        ]
        for entry in steps
    ]
    return [
        "## What a decode step loses meanwhile",
        "",
        "A step enqueues many small kernels one by one (*launches*) or replays them as a graph (*graph*),",
        "then waits for the last. Beside transfers, its thread also submits them and polls, as vLLM's does.",
        "Microseconds per step; *engine calls*: the part of the median spent in submit and poll.",
        "",
        *_table(
            (
                "step",
                "transfers per step",
                "alone p50",
                "alone p99",
                "beside p50",
                "beside p99",
                "engine calls",
            ),
            rows,
        ),
    ]


def _table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"| {' | '.join('---' for _ in head)} |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _cell_text(text: str) -> str:
    """One line that breaks no table."""
    return " ".join(text.replace("|", "/").split())


def gbps(rate: float | None) -> str:
    """A rate in GB/s; empty for None."""
    return "" if rate is None else f"{rate / 1e9:.1f}" if rate >= 1e9 else f"{rate / 1e9:.2f}"


def size_text(size_bytes: int) -> str:
    """A size in the largest binary unit it reaches."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} B"
