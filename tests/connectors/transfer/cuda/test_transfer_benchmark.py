"""The benchmark's own checks find wrong engines, and its one command runs from end to end."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import transfer, transfer_checks
from benchmarks.transfer_beside import Slowdown
from benchmarks.transfer_machine import HostMachine
from benchmarks.transfer_rates import KIB, QUICK, Cell, Scale
from benchmarks.transfer_report import Findings, goals, report_of
from kvatlas.connectors.transfer.base import CLOSE_S, Direction, TransferJob
from kvatlas.connectors.transfer.host import HostMemoryError
from kvatlas.connectors.transfer.host_engine import HostTransferEngine
from tests.support.paths import ROOT

TINY = replace(QUICK, piece_bytes=(4096, 65536), pieces=(16,), rounds=1, round_bytes=1 << 20, steps=3)


def measured(machine: HostMachine, scale: Scale = TINY) -> tuple[Findings, list[str]]:
    """Results of a run, and its report after every step."""
    found = Findings(machine.title, machine.facts, machine.computes)
    saved: list[str] = []
    transfer.measure(machine, scale, found, lambda findings: saved.append(report_of(findings)))
    return found, saved


def without(job: TransferJob) -> TransferJob:
    """The job without its last block."""
    *groups, last = job.groups
    return replace(job, groups=(*groups, replace(last, block_ids=last.block_ids[:-1], slots=last.slots[:-1])))


class LosingEngine(HostTransferEngine):
    """Leaves out the last block of every job."""

    def submit(self, job: TransferJob, after: object = None) -> None:
        super().submit(without(job), after)


class LosingMachine(HostMachine):
    def engine(self, view: Any, pool: Any, way: str = "") -> LosingEngine:
        return LosingEngine(view, pool)


class LateMachine(HostMachine):
    """Earlier computation arrives too late for a job."""

    def fill_later(self, device: Any, start: int, size_bytes: int, value: int) -> None:
        """Never, which is late enough."""


@pytest.mark.parametrize("layout", transfer_checks.layouts(), ids=lambda layout: layout.name)
def test_a_lost_block_is_found_in_every_layout(layout: transfer_checks.Layout) -> None:
    assert transfer_checks.round_trip(HostMachine(), layout, "").ok
    assert not transfer_checks.round_trip(LosingMachine(), layout, "").ok


def test_the_race_is_won_only_by_waiting() -> None:
    assert transfer_checks.ordering(HostMachine()).ok
    lost = transfer_checks.ordering(LateMachine())
    assert not lost.ok
    assert "before the computation" in lost.detail


def test_replaying_a_job_leaves_everything_else() -> None:
    layout = transfer_checks.layouts()[3]
    view = layout.view(0)
    memory = np.zeros(layout.size_bytes, np.uint8)
    rows = np.full((transfer_checks.NUM_BLOCKS, view.row_bytes), 5, np.uint8)
    transfer_checks.replay(view, 0, memory, rows, transfer_checks._one(1, Direction.LOAD, 3, 4))
    assert int((memory == 5).sum()) == view.groups[0].row_bytes
    assert (memory[: 3 * 16384] == 0).all()


def test_on_the_host_everything_is_measured_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    found, saved = measured(HostMachine())
    assert (found.correct, found.broken, found.exit_code) == (True, [], 0)
    assert "| 64 KiB | 16 | 1 MiB |" in saved[-1]
    assert "## What a decode step loses meanwhile" in saved[-1]
    assert "## Goals" not in saved[-1]
    assert "Broke off" not in saved[-1]
    assert "FAIL" not in capsys.readouterr().err


def test_wrong_copies_are_reported_and_not_timed() -> None:
    found, saved = measured(LosingMachine())
    assert found.exit_code == 1
    assert "FAILED" in saved[-1]
    assert "## Rates" not in saved[-1]


@pytest.mark.long
def test_the_report_is_saved_after_every_measurement_and_says_that_more_is_to_come() -> None:
    found, saved = measured(HostMachine())
    parts = len(found.checks) + len(found.cells) + len(found.steps)
    assert len(saved) == parts + 1
    assert all("- the run has not ended" in report for report in saved[:-1])
    rates = [report for report in saved if "## Rates" in report]
    assert "| 4 KiB | 16 |" in rates[0]
    assert "| 64 KiB | 16 |" not in rates[0]


class ShortOfMemory(HostMachine):
    """Pinned memory for pieces of 64 KiB cannot be had."""

    def pool(self, size_bytes: int, row_bytes: int) -> Any:
        if row_bytes == 64 * KIB:
            raise HostMemoryError("100 MiB are available, 256 MiB are asked for")
        return super().pool(size_bytes, row_bytes)


@pytest.mark.long
def test_a_cell_that_fails_is_a_line_of_the_report_and_not_its_end() -> None:
    scale = replace(TINY, piece_bytes=(64 * KIB, 4 * KIB))
    found, saved = measured(ShortOfMemory(), scale)
    assert found.exit_code == 3
    assert [cell.measured for cell in found.cells] == [False] * 3 + [True] * 3
    assert "- load 16 x 64 KiB, engine: not measured: HostMemoryError: 100 MiB are available" in saved[-1]
    assert "| 64 KiB | 16 | 1 MiB |  |  |  |  | not measured |" in saved[-1]
    assert "beside 16 stores of one 64 KiB block: HostMemoryError" in saved[-1]


class FailingOnce(HostTransferEngine):
    """Says of its first load, after the checks, that it failed."""

    left = 1

    def poll(self) -> list[Any]:
        results = super().poll()
        for at, result in enumerate(results):
            if type(self).left and result.bytes_by_group == {0: 16 * 4 * KIB}:
                type(self).left = 0
                results[at] = replace(result, ok=False, error="the transfer engine is dead")
        return results


class FailingMachine(HostMachine):
    engines = 0

    def engine(self, view: Any, pool: Any, way: str = "") -> HostTransferEngine:
        type(self).engines += 1
        return FailingOnce(view, pool, queued_stores_max=1 << 16)


@pytest.mark.long
def test_after_a_failure_the_next_cell_gets_an_engine_of_its_own() -> None:
    scale = replace(TINY, piece_bytes=(4 * KIB,))
    found, saved = measured(FailingMachine(), scale)
    assert [bool(cell.errors) for cell in found.cells] == [True, False, False]
    assert (
        "load 16 x 4 KiB, engine: not measured: RuntimeError: jobs failed: the transfer engine is dead"
        in (saved[-1])
    )
    checks, steps = len(found.checks), len(found.steps)
    assert FailingMachine.engines == checks + steps + 2


class StuckEngine(HostTransferEngine):
    """A job of pieces of 64 KiB never ends."""

    def wait(self, job_ids: Any, timeout_s: float) -> bool:
        return super().wait(job_ids, timeout_s) and self._plan.row_bytes != 64 * KIB

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        assert self._plan.row_bytes != 64 * KIB, "closing a stuck engine would wait for it"
        return super().close(timeout_s)


class StuckMachine(HostMachine):
    def engine(self, view: Any, pool: Any, way: str = "") -> HostTransferEngine:
        return StuckEngine(view, pool, queued_stores_max=1 << 16)


@pytest.mark.long
def test_jobs_that_never_end_end_the_run_and_keep_what_came_before() -> None:
    found = Findings("stuck", [], computes=False)
    saved: list[str] = []
    assert not transfer.measure(StuckMachine(), TINY, found, lambda now: saved.append(report_of(now)))
    assert found.exit_code == 3
    assert "| 4 KiB | 16 |" in saved[-1]
    assert "- nothing after this was measured: jobs of 65536 byte pieces did not end" in saved[-1]


def test_the_time_limit_ends_a_run_whose_call_never_returns(tmp_path: Path) -> None:
    report = tmp_path / "some" / "report.md"
    script = (
        "import sys, threading; from benchmarks import transfer, transfer_checks;"
        "first = ('first', lambda: transfer_checks.Check('first', True));"
        "transfer_checks.all_checks = lambda machine: [first, ('second', threading.Event().wait)];"
        "transfer.TIME_MAX_S = 2.0;"
        f"sys.argv = ['transfer', '--host', '--quick', '--out', {str(report)!r}]; sys.exit(transfer.main())"
    )
    done = run("-c", script)
    assert done.returncode == 3, done.stderr[-2000:]
    assert "- nothing after this was measured: 2 s were over" in report.read_text()
    assert "1 of 1 checks passed" in report.read_text()


def test_a_report_that_cannot_be_written_is_an_error_before_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("-m", "benchmarks.transfer", "--host", "--out", str(tmp_path / "file" / "report.md"))
    assert done.returncode == 3
    assert "name a file that can be written" in done.stderr
    assert "ok  " not in done.stderr


def test_goals_are_judged_by_their_worst_case() -> None:
    def cell(direction: Direction, size: int, pieces: int, share: float) -> Cell:
        return Cell(direction, size, pieces, {"engine": share * 50e9, "one copy": 50e9})

    cells = [
        cell(Direction.LOAD, 65536, 256, 0.95),
        cell(Direction.LOAD, 1 << 20, 256, 0.91),
        cell(Direction.LOAD, 65536, 16, 0.10),
        cell(Direction.STORE, 65536, 256, 0.89),
        cell(Direction.LOAD, 16384, 256, 0.61),
        cell(Direction.LOAD, 16384, 4096, 0.59),
    ]
    slow = [
        Slowdown(Direction.STORE, 16384, 2.0, 1.0, True),
        Slowdown(Direction.STORE, 65536, 9.0, 1.0, False),
        Slowdown(Direction.LOAD, 65536, 30.0, 1.0, True),
    ]
    assert [row[2] for row in goals(cells, slow)] == ["met", "MISSED", "MISSED", "-", "met"]
    assert goals([], [])[4][2] == "-"


RUN_TIMEOUT_S = 600


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def test_without_a_gpu_it_says_so() -> None:
    done = run("-m", "benchmarks.transfer", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.startswith("no GPU to measure:")


def test_nothing_but_numpy_is_needed_to_start() -> None:
    """Modules for a bare GPU machine import neither vLLM nor msgspec, zmq or pytest."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('vllm', 'msgspec', 'zmq', 'pytest', 'redis')))"
    done = run("-c", f"{blocked}; import benchmarks.transfer, kvatlas.connectors.transfer.cuda")
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_the_gpus_path_runs_with_its_devices_replaced(tmp_path: Path) -> None:
    """Everything but the device: torch's tensors, the kernel interpreted, the driver's calls by ctypes."""
    pytest.importorskip("torch", reason="needs torch; make test-connectors runs it")
    pytest.importorskip("triton", reason="needs triton; make test-connectors runs it")
    report = tmp_path / "report.md"
    done = run("-m", "tests.connectors.transfer.cuda.fake_torch_cuda", str(report), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    told = report.read_text()
    assert "23 of 23 checks passed" in told
    for part in (
        "# Transfers on Fake GPU",
        "## Goals",
        "### Both together",
        "## What computing loses meanwhile",
        "| graph | 16 stores of one 64 KiB block |",
    ):
        assert part in told
