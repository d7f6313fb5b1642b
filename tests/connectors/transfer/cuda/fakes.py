"""A device and a driver that need no GPU: plain memory, streams that run in any order that events allow.

What is enqueued runs only when somebody asks (``done``, ``synchronize``), each time from a stream picked at
random among those that may go on. An engine that forgets to wait for something is found out by the
bytes, and ``log`` holds what was enqueued, in order.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvatlas.connectors.transfer.base import Direction, Indices
from kvatlas.connectors.transfer.cuda_driver import CudaDriver, DriverError, TorchDevice


@dataclass(eq=False)
class FakeEvent:
    """A wait for an event is for the record it had then, even if it is recorded again later."""

    recorded: int = 0
    reached: set[int] = field(default_factory=lambda: {0})


@dataclass(eq=False)
class FakeStream:
    name: str
    handle: int
    ops: deque[tuple[str, Any, int]] = field(default_factory=deque)


class Descriptors:
    """Objects that a copy reads while it runs; they must exist until then."""

    def __init__(self, src: Indices, dst: Indices, sizes: Indices) -> None:
        self.rows = list(zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True))

    def run(self, rng: random.Random) -> None:
        rng.shuffle(self.rows)
        for src, dst, size in self.rows:
            ctypes.memmove(dst, src, size)


class FakeDevice(TorchDevice):
    """``failing`` names methods that raise from now on; ``violations``: what no GPU forgives."""

    name = "fake device"

    def __init__(
        self, seed: int = 0, mover: Callable[[Indices, Indices, Indices], object] | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.log: list[tuple[str, ...]] = []
        self.failing: set[str] = set()
        self.violations: list[str] = []
        self.held = False
        """While true, nothing runs."""
        self._lock = threading.RLock()
        self._mover = mover
        self._streams: list[FakeStream] = []
        self.compute = self._new("compute")
        self.bound_threads: set[int] = set()
        self.events_made = 0

    def _new(self, name: str) -> FakeStream:
        stream = FakeStream(name, 1000 + len(self._streams))
        self._streams.append(stream)
        return stream

    def _check(self, method: str) -> None:
        if method in self.failing:
            raise RuntimeError(f"CUDA error: {method} hit an illegal address")

    def bind_thread(self) -> None:
        self.bound_threads.add(threading.get_ident())

    def current_stream(self) -> FakeStream:
        return self.compute

    def low_priority_stream(self) -> FakeStream:
        return self._new(f"low{len(self._streams)}")

    def raw(self, stream: FakeStream) -> int:
        return stream.handle

    def new_event(self) -> FakeEvent:
        self.events_made += 1
        return FakeEvent()

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self._check("record")
        with self._lock:
            event.recorded += 1
            stream.ops.append(("record", event, event.recorded))
            self.log.append(("record", stream.name))

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._check("wait")
        with self._lock:
            stream.ops.append(("wait", event, event.recorded))
            self.log.append(("wait", stream.name))

    def done(self, event: FakeEvent) -> bool:
        self._check("done")
        with self._lock:
            for _ in range(self.rng.randrange(6)):
                self._run_one()
            return event.recorded in event.reached

    def synchronize(self, stream: FakeStream) -> None:
        self._check("synchronize")
        with self._lock:
            self.log.append(("synchronize", stream.name))
            while stream.ops and self._run_one():
                pass

    def kernel_copy(self, src: Indices, dst: Indices, sizes: Indices, stream: FakeStream) -> object:
        self._check("kernel_copy")
        if ((src | dst | sizes) & 7).any():
            raise ValueError("not words")
        kept = Descriptors(src, dst, sizes)
        alive = weakref.ref(kept)

        def run() -> None:
            descriptors = alive()
            if descriptors is None:
                self.violations.append("a kernel's descriptors were released before it ran")
            elif self._mover is None:
                descriptors.run(self.rng)
            else:
                columns = [np.array(column, np.int64) for column in zip(*descriptors.rows, strict=True)]
                self._mover(*columns)

        self.enqueue(stream, run, "kernel")
        return kept

    def scratch(self, size_bytes: int) -> tuple[int, object]:
        self._check("scratch")
        memory = np.zeros(size_bytes + 64, np.uint8)
        return int(memory.ctypes.data) + -int(memory.ctypes.data) % 64, memory

    def enqueue(self, stream: FakeStream, run: Callable[[], None], name: str) -> None:
        """Put work on a stream, as a model would."""
        with self._lock:
            stream.ops.append(("run", run, 0))
            self.log.append((name, stream.name))

    def by_handle(self, handle: int) -> FakeStream:
        return next(stream for stream in self._streams if stream.handle == handle)

    def _run_one(self) -> bool:
        if self.held:
            return False
        able = [stream for stream in self._streams if stream.ops and self._able(stream.ops[0])]
        if not able:
            return False
        kind, what, version = self.rng.choice(able).ops.popleft()
        if kind == "record":
            what.reached.add(version)
        elif kind == "run":
            what()
        return True

    @staticmethod
    def _able(op: tuple[str, Any, int]) -> bool:
        kind, event, version = op
        return kind != "wait" or version in event.reached


class FakeDriver(CudaDriver):
    """Copies on a ``FakeDevice``. ``fail_at``: the copy call (from 0) that raises."""

    batched = True

    def __init__(self, device: FakeDevice, *, fail_at: int | None = None, mapped: bool = True) -> None:
        self.device = device
        self.fail_at = fail_at
        self.mapped = mapped
        self.copies: list[tuple[Direction, list[int]]] = []
        self.registered: dict[int, int] = {}
        self.register_limit_bytes: int | None = None
        self.bus_id = "0000:99:00.0"

    def bind_thread(self) -> None:
        self.device.bound_threads.add(threading.get_ident())

    def copy(self, direction: Direction, src: Indices, dst: Indices, sizes: Indices, stream: int) -> None:
        if self.fail_at is not None and len(self.copies) >= self.fail_at:
            raise DriverError("cuMemcpyBatchAsync", "CUDA_ERROR_INVALID_VALUE", "piece 0 of 1")
        self.copies.append((direction, sizes.tolist()))
        descriptors = Descriptors(src, dst, sizes)
        self.device.enqueue(
            self.device.by_handle(stream), lambda: descriptors.run(self.device.rng), f"copy {direction.value}"
        )

    def register_host(self, address: int, size_bytes: int) -> None:
        if self.register_limit_bytes is not None and size_bytes > self.register_limit_bytes:
            raise DriverError("cuMemHostRegister_v2", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        self.registered[address] = size_bytes

    def unregister_host(self, address: int) -> None:
        del self.registered[address]

    def maps_same_address(self, address: int) -> bool:
        return self.mapped

    def pci_bus_id(self) -> str:
        return self.bus_id
