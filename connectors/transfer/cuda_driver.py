"""CUDA driver calls for block transfers, through ctypes.

torch has neither a batched copy of many small pieces nor the pinning of existing memory; the driver has both,
and takes numpy arrays of addresses by pointer, without a Python object per piece. The batched copy is
resolved for interface version 12.8, because a later version of the function takes other arguments. Without
it, each piece is copied by its own call.

Invariant: ``copy`` only enqueues; the descriptor arrays may be reused when it returns, the memory may not.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np

from kvatlas.connectors.transfer.base import Direction, Indices

# Interface version of ``cuMemcpyBatchAsync`` used here: the one that reports the failing index.
BATCH_COPY_VERSION = 12080

# The source is read in stream order: it may still be written by earlier work.
_SRC_ORDER_STREAM = 1
# The source is stable from the call on.
_SRC_ORDER_ANY = 3
_REGISTER_PORTABLE_MAPPED = 1 | 2
_NO_INDEX = ctypes.c_size_t(-1).value


class DriverError(Exception):
    """A CUDA driver call failed. ``name`` is CUDA's own name of the error, as in its documentation."""

    def __init__(self, call: str, name: str, detail: str) -> None:
        super().__init__(f"{call}: {name} ({detail})")
        self.call = call
        self.name = name


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. Locations are left at zero: they are hints for managed memory only."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetPCIBusId": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_POINTER), ctypes.c_int),
    "cuCtxSetCurrent": (_POINTER,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, ctypes.c_uint),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(ctypes.c_uint64), _POINTER, ctypes.c_uint),
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER),
    "cuGetProcAddress_v2": (
        ctypes.c_char_p,
        ctypes.POINTER(_POINTER),
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_int),
    ),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}
_BATCH_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int,
    _POINTER,  # dsts
    _POINTER,  # srcs
    _POINTER,  # sizes
    _SIZE,  # how many
    ctypes.POINTER(CopyAttributes),
    ctypes.POINTER(_SIZE),  # first piece of each attribute
    _SIZE,  # how many attributes
    ctypes.POINTER(_SIZE),  # index of the piece that failed
    _POINTER,  # stream
)


class CudaDriver:
    """libcuda for one device (``device_index`` as torch counts, after CUDA_VISIBLE_DEVICES).

    ``library`` replaces libcuda; ``allow_batched=False`` disables the batched copy. Raises DriverError
    without a driver or such a device, and in every method. Tests replace it by a subclass.
    """

    def __init__(self, device_index: int = 0, *, library: Any = None, allow_batched: bool = True) -> None:
        self._lib = library if library is not None else _load_libcuda()
        self._calls = {name: self._function(name, types) for name, types in _SIGNATURES.items()}
        self._context = _POINTER()
        self._device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), device_index)
        # torch uses the primary context until the process ends, so it is never released.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device.value)
        self.bind_thread()
        self._batch_copy = self._resolve_batch_copy() if allow_batched else None

    @property
    def batched(self) -> bool:
        """Whether one call copies many pieces."""
        return self._batch_copy is not None

    def bind_thread(self) -> None:
        """Make the device current in the calling thread; every thread that copies calls it once."""
        self._call("cuCtxSetCurrent", self._context)

    def copy(self, direction: Direction, src: Indices, dst: Indices, sizes: Indices, stream: int) -> None:
        """Enqueue copies of ``sizes[i]`` bytes from ``src[i]`` to ``dst[i]``, in no particular order.

        ``stream`` is the driver's handle, never the default stream. After an error some of the pieces may
        have been enqueued.
        """
        sources, targets, lengths = (np.ascontiguousarray(array, np.int64) for array in (src, dst, sizes))
        if not len(sources) == len(targets) == len(lengths):
            msg = f"descriptors differ in length: {len(sources)}, {len(targets)}, {len(lengths)}"
            raise ValueError(msg)
        if len(sources) == 0:
            return
        if self._batch_copy is None:
            self._copy_each(sources, targets, lengths, stream)
            return
        order = _SRC_ORDER_STREAM if direction is Direction.STORE else _SRC_ORDER_ANY
        attributes = CopyAttributes(src_access_order=order)
        first, failed = _SIZE(0), _SIZE(_NO_INDEX)
        code = self._batch_copy(
            targets.ctypes.data,
            sources.ctypes.data,
            lengths.ctypes.data,
            len(sources),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            ctypes.byref(failed),
            stream,
        )
        if code:
            where = "the batch" if failed.value == _NO_INDEX else f"piece {failed.value} of {len(sources)}"
            raise self._error("cuMemcpyBatchAsync", code, where)

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin host memory and map it into the device's address space."""
        self._call("cuMemHostRegister_v2", address, size_bytes, _REGISTER_PORTABLE_MAPPED)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def maps_same_address(self, address: int) -> bool:
        """Whether a kernel can read registered memory by its host address."""
        mapped = ctypes.c_uint64()
        code = self._calls["cuMemHostGetDevicePointer_v2"](ctypes.byref(mapped), address, 0)
        return not code and mapped.value == address

    def pci_bus_id(self) -> str:
        """PCI address of the device, ``dddd:bb:dd.f``."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._device.value)
        return text.value.decode()

    def _copy_each(self, sources: Indices, targets: Indices, lengths: Indices, stream: int) -> None:
        copy = self._calls["cuMemcpyAsync"]
        descriptors = zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True)
        for index, (target, source, length) in enumerate(descriptors):
            code = copy(target, source, length, stream)
            if code:
                raise self._error("cuMemcpyAsync", code, f"piece {index} of {len(sources)}")

    def _resolve_batch_copy(self) -> Any:
        address, status = _POINTER(), ctypes.c_int()
        code = self._calls["cuGetProcAddress_v2"](
            b"cuMemcpyBatchAsync", ctypes.byref(address), BATCH_COPY_VERSION, 0, ctypes.byref(status)
        )
        # A driver before 12.8 returns an error or no address; then each piece takes one call.
        return _BATCH_COPY(address.value) if not code and address.value else None

    def _function(self, name: str, types: tuple[Any, ...]) -> Any:
        function = getattr(self._lib, name, None)
        if function is None:
            raise DriverError(name, "not found", "libcuda is too old: CUDA 12 or later is needed")
        function.argtypes = types
        function.restype = ctypes.c_int
        return function

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code:
            raise self._error(name, code, "")

    def _error(self, call: str, code: int, where: str) -> DriverError:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._calls["cuGetErrorName"](code, ctypes.byref(name))
        self._calls["cuGetErrorString"](code, ctypes.byref(text))
        words = [(text.value or b"no description").decode(), where]
        return DriverError(call, (name.value or b"code %d" % code).decode(), ", ".join(filter(None, words)))


def _load_libcuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError("loading libcuda.so.1", "no driver", f"no NVIDIA machine? {error}") from error


StreamHandle = Any
"""A stream of the device; opaque except to the device that made it."""
EventHandle = Any


class TorchDevice:
    """Streams and events of one device, by torch.cuda. ``index`` counts as torch does.

    Every method except ``synchronize`` only enqueues; all raise after a device error. Tests replace it by a
    subclass that records or reorders enqueued work.
    """

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
        """Make an event without timing; it may be recorded again when nothing waits for its last record."""
        return self._torch.cuda.Event()

    def record(self, event: EventHandle, stream: StreamHandle) -> None:
        event.record(stream)

    def wait(self, stream: StreamHandle, event: EventHandle) -> None:
        """Delay later work on the stream until the event's last record is reached."""
        stream.wait_event(event)

    def done(self, event: EventHandle) -> bool:
        return bool(event.query())

    def synchronize(self, stream: StreamHandle) -> None:
        stream.synchronize()

    def kernel_copy(self, src: Indices, dst: Indices, sizes: Indices, stream: StreamHandle) -> object:
        """Copy by a kernel that reads ``src`` (mapped host memory) itself.

        Sizes and addresses are multiples of 8. Keep the returned object until the copy has run.
        """
        if self._kernels is None:
            self._kernels = importlib.import_module("kvatlas.connectors.transfer.triton_kernels")
            self._descriptors = self._kernels.DescriptorPool(self._device)
        with self._torch.cuda.stream(stream):
            return self._kernels.move_pieces(src, dst, sizes, device=self._device, pool=self._descriptors)

    def scratch(self, size_bytes: int) -> tuple[int, object]:
        """Temporary device memory: its address, and the object that owns it."""
        memory = self._torch.empty(size_bytes, dtype=self._torch.uint8, device=self._device)
        return int(memory.data_ptr()), memory
