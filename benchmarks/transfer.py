"""The transfer engine on this machine: first whether it copies correctly, then how fast.

    python -m benchmarks.transfer [--quick] [--out FILE] [--host]

Needs torch, triton and numpy and an NVIDIA GPU, nothing else; takes less than eight minutes, ``--quick`` less
than three. Writes a report as Markdown to benchmarks/results/transfer_<device>.md. ``--host`` does the same
with plain memory and the CPU's engine, against memcpy, on any machine, and prints the report.

Exit code: 0 everything correct (goals for speed may be missed: the report says which), 1 something was copied
wrongly, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import sys
import time
from pathlib import Path

from benchmarks import transfer_checks, transfer_rates
from benchmarks.transfer_checks import Check
from benchmarks.transfer_machine import CudaMachine, HostMachine, Machine
from benchmarks.transfer_rates import FULL, KIB, QUICK, Cell, Scale, Slowdown
from connectors.transfer.base import Direction

RESULTS = Path(__file__).parent / "results"
GOAL_PIECES = 256
"""Goals are for jobs of at least so many pieces; smaller ones are bounded by the time to start a copy."""


def main() -> int:
    """Run by ``python -m benchmarks.transfer``; returns the exit code."""
    parser = argparse.ArgumentParser(description="Correctness and speed of KV transfers on this machine.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--out", type=Path, help="where the report goes")
    parser.add_argument(
        "--host", action="store_true", help="plain memory and the CPU's engine, without a GPU"
    )
    parser.add_argument("--error-path", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.host:
        machine: Machine = HostMachine()
    elif reason := _no_gpu():
        print(f"no GPU to measure: {reason}; --host measures the CPU's engine", file=sys.stderr)
        return 2
    else:
        machine = CudaMachine()
    if arguments.error_path:
        wrong = transfer_checks.provoke_error(machine)
        print(wrong or "every job failed as it should", flush=True)
        os._exit(bool(wrong))  # the device's context is gone: nothing can be torn down in order
    report, correct = measure(machine, QUICK if arguments.quick else FULL)
    out = arguments.out or (None if arguments.host else RESULTS / f"transfer_{_slug(machine.title)}.md")
    if out is None:
        print(report)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report, encoding="utf-8")
        print(f"report: {out}")
    return 0 if correct else 1


def measure(machine: Machine, scale: Scale) -> tuple[str, bool]:
    """The report, and whether everything was copied correctly. Speed is measured only if it was."""
    started = time.monotonic()
    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(text.capitalize())
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    checks = []
    for check in transfer_checks.run_checks(machine):
        checks.append(check)
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name} {check.detail}", file=sys.stderr, flush=True)
    correct = all(check.ok for check in checks)
    cells: list[Cell] = []
    slow: list[Slowdown] = []
    if correct:
        for cell in transfer_rates.measure(machine, scale, say):
            cells.append(cell)
            print(_progress(cell), file=sys.stderr, flush=True)
        slow = transfer_rates.beside(machine, scale)
    machine.close()
    say(f"took {time.monotonic() - started:.0f} s")
    return report_of(machine, checks, cells, slow, notes), correct


def report_of(
    machine: Machine, checks: list[Check], cells: list[Cell], slow: list[Slowdown], notes: list[str]
) -> str:
    """The Markdown."""
    date = dt.datetime.now(dt.UTC).date()
    passed = sum(check.ok for check in checks)
    lines = [
        f"# Transfers on {machine.title}",
        "",
        f"{date}, by `python -m benchmarks.transfer`. {' '.join(f'{note}.' for note in notes)}",
        "",
        *_table(("what", "value"), [list(fact) for fact in machine.facts]),
        "",
        *(_goals_section(cells, slow) if machine.computes else []),
        "## Correctness",
        "",
        f"{passed} of {len(checks)} checks passed.",
        "",
        *_table(
            ("check", "result"),
            [[c.name, "ok" if c.ok else f"FAILED {c.detail}".replace("|", "/")] for c in checks],
        ),
    ]
    if cells:
        lines += ["", *_rates_section(cells)]
    if slow:
        lines += ["", *_slowdown_section(slow)]
    return "\n".join(lines) + "\n"


def _goals_section(cells: list[Cell], slow: list[Slowdown]) -> list[str]:
    return ["## Goals", "", *_table(("goal", "worst case", "met"), goals(cells, slow)), ""]


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
                if cell.direction is direction and cell.pieces >= GOAL_PIECES and fits(cell.piece_bytes)
            ]
            worst = min(own, key=lambda cell: cell.share, default=None)
            if worst is None:
                rows.append([f"{name}, {direction.value}", "not measured", "-"])
                continue
            told = f"{worst.share:.0%} ({worst.pieces} x {_size(worst.piece_bytes)})"
            rows.append([f"{name}, {direction.value}", told, "met" if worst.share >= least else "MISSED"])
    stores = [entry for entry in slow if entry.direction is Direction.STORE and entry.covered]
    if not stores:
        rows.append(["stores slow matrix products by at most 3 %", "not measured", "-"])
    else:
        most = max(stores, key=lambda entry: entry.percent)
        told = f"{most.percent:.1f} % ({_size(most.piece_bytes)} pieces)"
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
        "gather, copy and scatter by torch (numpy with --host). Small jobs are submitted up to 64 at a time.",
        f"Goals look at jobs of {GOAL_PIECES} pieces and more.",
    ]
    titles = (
        (Direction.LOAD, "Loads: host to device"),
        (Direction.STORE, "Stores: device to host"),
        (None, "Both at once"),
    )
    for direction, title in titles:
        columns = ["engine", "one copy"] + (["call per piece", "torch index"] if direction else [])
        rows = [
            [
                _size(cell.piece_bytes),
                str(cell.pieces),
                _size(cell.piece_bytes * cell.pieces),
                *(_gbps(cell.rates.get(column)) for column in columns),
                f"{cell.share:.0%}",
            ]
            for cell in cells
            if cell.direction is direction
        ]
        lines += ["", f"### {title}", "", *_table(("piece", "pieces", "job", *columns, "share"), rows)]
    return lines


def _slowdown_section(slow: list[Slowdown]) -> list[str]:
    rows = [
        [
            "loads" if entry.direction is Direction.LOAD else "stores",
            _size(entry.piece_bytes),
            f"{entry.percent:+.1f} %",
            _gbps(entry.rate),
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


def _table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"| {' | '.join('---' for _ in head)} |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _progress(cell: Cell) -> str:
    direction = cell.direction.value if cell.direction else "both"
    rates = ", ".join(f"{name} {_gbps(rate)}" for name, rate in cell.rates.items())
    return f"{direction:5} {cell.pieces:6} x {_size(cell.piece_bytes):8} {rates}"


def _gbps(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e9:.1f}" if rate >= 1e9 else f"{rate / 1e9:.2f}"


def _size(size_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} B"


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")


def _no_gpu() -> str:
    try:
        import torch  # noqa: PLC0415  # --host must work where there is no torch
    except ImportError as error:
        return str(error)
    return "" if torch.cuda.is_available() else "torch.cuda.is_available() is false"


if __name__ == "__main__":
    sys.exit(main())
