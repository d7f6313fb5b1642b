"""The transfer engine on this machine: first whether it copies correctly, then how fast.

    python -m benchmarks.transfer [--quick] [--out FILE] [--host]

Needs this checkout, torch, triton and numpy and an NVIDIA GPU, nothing else; takes less than ten minutes,
``--quick`` less than four. Writes a report as Markdown to FILE, by default to
benchmarks/results/transfer_<device>.md, and writes it again after everything it measured: whatever ends the
run, what was measured until then is there. ``--host`` does the same with plain memory and the CPU's engine,
against memcpy, on any machine, and prints the report.

Exit code: 0 everything correct (goals for speed may be missed: the report says which), 1 something was copied
wrongly, 2 there is no GPU, 3 something could not be measured (the report says what and why) or the report
could not be written.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from benchmarks import transfer_beside, transfer_checks, transfer_rates
from benchmarks.transfer_gpu import CudaMachine
from benchmarks.transfer_machine import HostMachine, Machine
from benchmarks.transfer_rates import FULL, QUICK, Cell, Scale, StuckError
from benchmarks.transfer_report import Findings, gbps, report_of, size_text

RESULTS = Path(__file__).parent / "results"
TIME_MAX_S = 570.0
"""After this the run ends by itself, whatever hangs: machines are lent for ten minutes."""
BESIDE_S = 60.0
"""For matrix products, and again for decode-like steps."""
BROKE_OFF = 3

T = TypeVar("T")
Save = Callable[[Findings], None]


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
    if not arguments.host and (reason := _no_gpu()):
        print(f"no GPU to measure: {reason}; --host measures the CPU's engine", file=sys.stderr)
        return 2
    try:
        machine: Machine = HostMachine() if arguments.host else CudaMachine()
    except Exception as error:  # noqa: BLE001  # any failure is a line of the report
        return _never_began(error, arguments.out)
    if arguments.error_path:
        wrong = transfer_checks.provoke_error(machine)
        print(wrong or "every job failed as it should", flush=True)
        os._exit(bool(wrong))  # the device's context is gone: nothing can be torn down in order
    out = arguments.out or (None if arguments.host else RESULTS / f"transfer_{_slug(machine.title)}.md")
    found = Findings(machine.title, machine.facts, machine.computes)
    try:
        save = _saver(out)
        save(found)
    except OSError as error:
        print(f"--out {out}: {error}; name a file that can be written", file=sys.stderr)
        return BROKE_OFF
    with _time_limit(found, save, TIME_MAX_S):
        hung = not measure(machine, QUICK if arguments.quick else FULL, found, save)
    print(report_of(found) if out is None else f"report: {out}", flush=True)
    if hung:
        os._exit(found.exit_code)  # ending in order would wait for what hangs
    return found.exit_code


def measure(machine: Machine, scale: Scale, found: Findings, save: Save) -> bool:
    """Fill ``found``, saving it after every step. False: something hangs, so nothing more can be done here.

    Speed is measured only if no copy was wrong. What raises becomes a line of ``found.broken``.
    """
    started = time.monotonic()

    def say(text: str) -> None:
        found.notes.append(text.capitalize())
        _progress(f"[{time.monotonic() - started:5.0f} s] {text}")

    try:
        for check in _each(transfer_checks.all_checks(machine), found):
            found.checks.append(check)
            _progress(f"{'ok  ' if check.ok else 'FAIL'} {check.name} {check.detail}")
            save(found)
        if found.correct:
            for cell in transfer_rates.measure(machine, scale, say):
                _take_cell(cell, found)
                save(found)
            if machine.computes:
                until = time.monotonic() + BESIDE_S
                for slow in _each(transfer_beside.slowdowns(machine, scale), found, until):
                    found.slow.append(slow)
                    save(found)
            until = time.monotonic() + BESIDE_S
            for step in _each(transfer_beside.step_times(machine, scale), found, until):
                found.steps.append(step)
                save(found)
        machine.close()
    except StuckError as error:
        found.broken.append(f"nothing after this was measured: {error}")
        hung = True
    except Exception as error:  # noqa: BLE001  # any failure is a line of the report
        found.broken.append(f"nothing after this was measured: {_text(error)}")
        hung = False
    else:
        hung = False
    found.ended = True
    say(f"took {time.monotonic() - started:.0f} s")
    save(found)
    return not hung


def _each(
    parts: Iterator[tuple[str, Callable[[], T]]], found: Findings, until: float | None = None
) -> Iterator[T]:
    """Results of each part. One that raises, or comes after ``until``, is a line instead."""
    for name, run in parts:
        if until is not None and time.monotonic() > until:
            found.notes.append(f"Time is over: {name} and what follows is not measured")
            return
        try:
            result = run()
        except StuckError:
            raise
        except Exception as error:  # noqa: BLE001  # any failure is a line of the report
            found.broken.append(f"{name}: {_text(error)}")
            _progress(f"not measured: {found.broken[-1]}")
        else:
            yield result


def _take_cell(cell: Cell, found: Findings) -> None:
    found.cells.append(cell)
    direction = cell.direction.value if cell.direction else "both"
    name = f"{direction:5} {cell.pieces:6} x {size_text(cell.piece_bytes):8}"
    _progress(f"{name} " + ", ".join(f"{column} {gbps(rate)}" for column, rate in cell.rates.items()))
    for column, error in cell.errors.items():
        found.broken.append(f"{' '.join(name.split())}, {column}: not measured: {error}")
        _progress(found.broken[-1])


class _time_limit:  # noqa: N801  # used like a function
    """Ends the process, with what was found, where the run takes too long: a driver's call may hang."""

    def __init__(self, found: Findings, save: Save, limit_s: float) -> None:
        self._found, self._save = found, save
        self._limit_s = limit_s
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self._found.broken.append(f"nothing after this was measured: {self._limit_s:.0f} s were over")
        self._save(self._found)
        _progress(self._found.broken[-1])
        os._exit(self._found.exit_code)


def _saver(out: Path | None) -> Save:
    """Replaces the report as a whole: a reader, or a copy of the folder, never sees half of one."""
    if out is None:
        return lambda found: None
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()

    def save(found: Findings) -> None:
        with lock:
            draft = out.with_name(f".{out.name}.part")
            draft.write_text(report_of(found), encoding="utf-8")
            draft.replace(out)

    return save


def _never_began(error: Exception, out: Path | None) -> int:
    """The device or its calibration failed: say so, in the report too if its place is known."""
    print(f"this machine cannot be measured: {_text(error)}", file=sys.stderr)
    if out is not None:
        found = Findings("a machine that cannot be measured", [], computes=False, broken=[_text(error)])
        found.ended = True
        _saver(out)(found)
    return BROKE_OFF


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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
