"""Runs the GPU's benchmark without a GPU: torch.cuda and libcuda are replaced, all else is real.

    TRITON_INTERPRET=1 python -m tests.connectors.transfer.cuda.fake_torch_cuda REPORT

Copies happen when they are enqueued, so nothing about time or order is learnt: only that every call fits.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks import transfer, transfer_checks
from kvatlas.connectors.transfer import cuda_driver
from tests.connectors.transfer.cuda.fake_libcuda import FakeLibcuda


class Stream:
    _handles = count(100)

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = next(self._handles)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)

    def wait_event(self, event: Event) -> None:
        assert event.at is not None

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        return (end.at - self.at) * 1e3


class Graph:
    def replay(self) -> None: ...


def on_cpu(function: Any) -> Any:
    def made(*arguments: Any, **options: Any) -> Any:
        if "cuda" in str(options.get("device", "")):
            options["device"] = "cpu"
        if function.__name__ == "randn":
            arguments = (64, 64)
        return function(*arguments, **options)

    return made


def replace_cuda() -> None:
    current = Stream()
    fakes = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_name": lambda index: "Fake GPU",
        "set_device": lambda index: None,
        "current_stream": lambda index=None: current,
        "synchronize": lambda: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "_sleep": lambda cycles: None,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": lambda graph, capture_error_mode: contextlib.nullcontext(),
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    for name in ("zeros", "empty", "randn", "tensor"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in ("cuda", "pin_memory", "to"):
        setattr(torch.Tensor, name, lambda tensor, *arguments, **options: tensor)
    cuda_driver._load_libcuda = FakeLibcuda


def main() -> int:
    replace_cuda()
    # What only a device can do: read too early, and break.
    transfer_checks.control = lambda machine: transfer_checks.Check("control", True)
    transfer_checks.error_path = lambda: transfer_checks.Check("error path", True)
    transfer.QUICK = replace(
        transfer.QUICK,
        pieces=(4,),
        rounds=1,
        round_bytes=1 << 20,
        products=2,
        steps=2,
        piece_bytes=(4096, 65536),
    )
    sys.argv = ["transfer", "--quick", "--out", str(Path(sys.argv[1]))]
    return transfer.main()


if __name__ == "__main__":
    sys.exit(main())
