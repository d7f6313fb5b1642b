"""The copy kernel: interpreted on the CPU, and compiled for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

torch = pytest.importorskip("torch", reason="needs torch; make test-connectors runs it")
pytest.importorskip("triton", reason="needs triton; make test-connectors runs it")


INTERPRETED = """
import sys
import numpy as np
import torch
from kvatlas.connectors.transfer.base import Direction
from kvatlas.connectors.transfer.calibrate import Calibration
from kvatlas.connectors.transfer.cuda import CudaTransferEngine
from kvatlas.connectors.transfer.host_engine import HostTransferEngine
from kvatlas.connectors.transfer.triton_kernels import move_pieces
from tests.connectors.transfer.cuda.fakes import FakeDevice, FakeDriver
from tests.connectors.transfer.contract import Rig, TransferEngineContract

CPU = torch.device("cpu")
rng = np.random.default_rng(0)
for sizes in ([8], [8] * 5, [4096] * 40, [40000] * 3, [8, 16, 4096, 72000, 24], [12288] * 30, []):
    sizes = np.array(sizes, np.int64)
    starts = np.cumsum(sizes + 16) - sizes - 16
    source = rng.integers(0, 256, int((sizes + 16).sum()) + 16, np.uint8)
    target = rng.integers(0, 256, source.size, np.uint8)
    wanted = target.copy()
    for start, size in zip(starts, sizes):
        wanted[start : start + size] = source[start : start + size]
    move_pieces(source.ctypes.data + starts, target.ctypes.data + starts, sizes, device=CPU)
    assert np.array_equal(target, wanted), sizes

for bad in ((4, 0, 8), (0, 4, 8), (0, 0, 12)):
    try:
        move_pieces(*(np.array([1 << 12]) + b for b in bad[:2]), np.array(bad[2:]), device=CPU)
    except ValueError:
        continue
    raise SystemExit(f"{bad} was taken")

class Contract(TransferEngineContract):
    def __init__(self, kernel):
        self.kernel = kernel
    def make_engine(self, view, pool):
        if not self.kernel:
            return HostTransferEngine(view, pool)
        device = FakeDevice(mover=lambda src, dst, sizes: move_pieces(src, dst, sizes, device=CPU))
        chosen = Calibration(kernel_max_piece_bytes=1 << 20, kernel_min_pieces=1)
        return CudaTransferEngine(view, pool, device=device, driver=FakeDriver(device), calibration=chosen)

for layout in ("LBHNC", "BLHNC"):
    seen = []
    for kernel in (False, True):
        rig = Rig(Contract(kernel), layout, "sliding windows and one full group")
        assert rig.run(Direction.STORE, *rig.moves()).ok
        assert rig.run(Direction.LOAD, *rig.moves()).ok
        rig.engine.close()
        seen.append((rig.host.read(), rig.device.read()))
        if kernel:
            assert rig.engine.counts.kernel_pieces > 0
    assert all(np.array_equal(a, b) for a, b in zip(*seen))
print("same bytes")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvatlas.connectors.transfer.triton_kernels import _TILES, _move_kernel

signature = {"descriptors": "*i64", "count": "i32", "words_max": "i32"}
for _, pieces, words in _TILES:
    shape = {"pieces_in_tile": pieces, "words_in_tile": words}
    source = ASTSource(_move_kernel, {**signature, **dict.fromkeys(shape, "constexpr")}, shape)
    for capability in (80, 90):
        made = triton.compile(source, GPUTarget("cuda", capability, 32), options={"num_warps": 16})
        assert "st.global" in made.asm["ptx"]
print("compiled")
"""


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_kernel_moves_exactly_the_pieces_and_equals_the_cpus_engine() -> None:
    """In a process of its own: triton reads TRITON_INTERPRET when the kernel is defined."""
    assert "same bytes" in run(INTERPRETED, TRITON_INTERPRET="1")


def test_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    """Interpreting accepts more than the compiler does; this needs no GPU, only triton's NVIDIA backend."""
    assert "compiled" in run(COMPILED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
