"""Streams and events of one device, as far as transfers need them.

``Device`` lies between the transfer engine and torch: ``TorchDevice`` is the real one, a fake one can record
or reorder what is enqueued, so that ordering is tested on machines without a GPU. torch is imported when a
``TorchDevice`` is made.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from connectors.transfer.base import Indices

StreamHandle = Any
"""A stream of the device; only the device that made it looks inside."""
EventHandle = Any


class Device(Protocol):
    """One device. Every method but ``synchronize`` only enqueues. All raise when the device has failed."""

    @property
    def name(self) -> str:
        """What the device calls itself."""

    def bind_thread(self) -> None:
        """Make the device current in the calling thread."""

    def current_stream(self) -> StreamHandle:
        """The stream on which the calling thread's computation is enqueued."""

    def low_priority_stream(self) -> StreamHandle:
        """A new stream that yields to computation wherever the device can choose."""

    def raw(self, stream: StreamHandle) -> int:
        """The driver's handle of the stream."""

    def new_event(self) -> EventHandle:
        """An event without timing; may be recorded again once nothing waits for its last record."""

    def record(self, event: EventHandle, stream: StreamHandle) -> None:
        """Mark the work enqueued on the stream so far."""

    def wait(self, stream: StreamHandle, event: EventHandle) -> None:
        """Hold back what is enqueued on the stream from now on until the event's last record is reached."""

    def done(self, event: EventHandle) -> bool:
        """Whether the event's last record has been reached."""

    def synchronize(self, stream: StreamHandle) -> None:
        """Block until everything enqueued on the stream has run."""

    def kernel_copy(self, src: Indices, dst: Indices, sizes: Indices, stream: StreamHandle) -> object:
        """Copy by a kernel that reads ``src`` (mapped host memory) itself.

        Sizes and addresses are multiples of 8. What is returned must be kept until the copy has run.
        """

    def scratch(self, size_bytes: int) -> tuple[int, object]:
        """Device memory for a short time: its address, and what keeps it."""


class TorchDevice:
    """``Device`` on torch.cuda. ``index`` counts as torch does."""

    def __init__(self, index: int | None = None) -> None:
        self._torch: Any = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            msg = "no CUDA device: torch.cuda.is_available() is false"
            raise RuntimeError(msg)
        self.index: int = self._torch.cuda.current_device() if index is None else index
        self._device = self._torch.device("cuda", self.index)
        self._lowest: int = self._torch.cuda.Stream.priority_range()[0]
        self._kernels: Any = None
        self._descriptors: Any = None

    @property
    def name(self) -> str:
        return str(self._torch.cuda.get_device_name(self.index))

    def bind_thread(self) -> None:
        self._torch.cuda.set_device(self.index)

    def current_stream(self) -> StreamHandle:
        return self._torch.cuda.current_stream(self.index)

    def low_priority_stream(self) -> StreamHandle:
        return self._torch.cuda.Stream(self._device, priority=self._lowest)

    def raw(self, stream: StreamHandle) -> int:
        return int(stream.cuda_stream)

    def new_event(self) -> EventHandle:
        return self._torch.cuda.Event()

    def record(self, event: EventHandle, stream: StreamHandle) -> None:
        event.record(stream)

    def wait(self, stream: StreamHandle, event: EventHandle) -> None:
        stream.wait_event(event)

    def done(self, event: EventHandle) -> bool:
        return bool(event.query())

    def synchronize(self, stream: StreamHandle) -> None:
        stream.synchronize()

    def kernel_copy(self, src: Indices, dst: Indices, sizes: Indices, stream: StreamHandle) -> object:
        if self._kernels is None:
            self._kernels = importlib.import_module("connectors.transfer.triton_kernels")
            self._descriptors = self._kernels.DescriptorPool(self._device)
        with self._torch.cuda.stream(stream):
            return self._kernels.move_pieces(src, dst, sizes, device=self._device, pool=self._descriptors)

    def scratch(self, size_bytes: int) -> tuple[int, object]:
        memory = self._torch.empty(size_bytes, dtype=self._torch.uint8, device=self._device)
        return int(memory.data_ptr()), memory
