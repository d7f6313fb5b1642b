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
from benchmarks.transfer_machine import HostMachine
from benchmarks.transfer_rates import QUICK, Cell, Slowdown
from connectors.transfer.base import Direction, TransferJob
from connectors.transfer.host import HostTransferEngine
from tests.support.paths import ROOT

TINY = replace(QUICK, piece_bytes=(4096, 65536), pieces=(16,), rounds=1, round_bytes=1 << 20)


def without(job: TransferJob) -> TransferJob:
    """The job without its last block."""
    *groups, last = job.groups
    return replace(job, groups=(*groups, replace(last, block_ids=last.block_ids[:-1], slots=last.slots[:-1])))


class LosingEngine(HostTransferEngine):
    """Leaves out the last block of every job."""

    def submit(self, job: TransferJob) -> None:
        super().submit(without(job))


class LosingMachine(HostMachine):
    def engine(self, view: Any, pool: Any, way: str = "") -> LosingEngine:
        return LosingEngine(view, pool)


class LateMachine(HostMachine):
    """What was computed before a job arrives too late for it."""

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
    report, correct = transfer.measure(HostMachine(), TINY)
    assert correct
    assert "| 64 KiB | 16 | 1 MiB |" in report
    assert "## Goals" not in report
    assert "FAIL" not in capsys.readouterr().err


def test_wrong_copies_are_told_and_not_timed() -> None:
    report, correct = transfer.measure(LosingMachine(), TINY)
    assert not correct
    assert "FAILED" in report
    assert "## Rates" not in report


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
    assert [row[2] for row in transfer.goals(cells, slow)] == ["met", "MISSED", "MISSED", "-", "met"]
    assert transfer.goals([], [])[4][2] == "-"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )


def test_without_a_gpu_it_says_so() -> None:
    done = run("-m", "benchmarks.transfer", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.startswith("no GPU to measure:")


def test_nothing_but_numpy_is_needed_to_start() -> None:
    """What runs on a bare GPU machine: no vLLM, no msgspec, no zmq, no pytest."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('vllm', 'msgspec', 'zmq', 'pytest', 'redis')))"
    done = run("-c", f"{blocked}; import benchmarks.transfer, connectors.transfer.cuda")
    assert done.returncode == 0, done.stderr


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
        "### Both at once",
        "## What computing loses meanwhile",
    ):
        assert part in told
