"""libcuda as far as ``CudaDriver`` calls it: C functions with CUDA's signatures, over plain memory."""

from __future__ import annotations

import ctypes
from typing import Any

_NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 100: b"CUDA_ERROR_NO_DEVICE"}

P, INT, U64, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t


class FakeLibcuda:
    """``batch_since``: the version (12080) from which it has batched copies; None: never.

    ``fail_piece``: index of the piece that a copy fails at. ``calls``: what was called, in order.
    """

    def __init__(
        self, *, batch_since: int | None = 12080, fail_piece: int | None = None, register_code: int = 0
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._batch_since = batch_since
        self._fail_piece = fail_piece
        self._singles = 0
        self._batch = ctypes.CFUNCTYPE(INT, P, P, P, SIZE, P, P, SIZE, P, P)(self._copy_batch)

        def define(name: str, types: tuple[Any, ...], function: Any) -> None:
            setattr(self, name, ctypes.CFUNCTYPE(INT, *types)(function))

        define("cuInit", (ctypes.c_uint,), lambda flags: 0)
        define("cuDeviceGet", (P, INT), self._device_get)
        define("cuDeviceGetPCIBusId", (P, INT, INT), self._bus_id)
        define("cuDevicePrimaryCtxRetain", (P, INT), lambda out, device: self._put(out, P, 0xC0DE))
        define("cuCtxSetCurrent", (P,), lambda context: self._note("context", context))
        define(
            "cuMemHostRegister_v2",
            (P, SIZE, ctypes.c_uint),
            lambda address, size, flags: self._note("register", address, size, flags) or register_code,
        )
        define("cuMemHostUnregister", (P,), lambda address: self._note("unregister", address))
        define(
            "cuMemHostGetDevicePointer_v2", (P, P, ctypes.c_uint), lambda out, p, f: self._put(out, U64, p)
        )
        define("cuMemcpyAsync", (U64, U64, SIZE, P), self._copy_one)
        define("cuGetProcAddress_v2", (ctypes.c_char_p, P, INT, U64, P), self._resolve)
        define("cuGetErrorName", (INT, P), self._error_name)
        define("cuGetErrorString", (INT, P), lambda code, out: self._put(out, ctypes.c_char_p, b"no luck"))

    def _note(self, *call: Any) -> int:
        self.calls.append(call)
        return 0

    @staticmethod
    def _put(out: int, kind: Any, value: Any) -> int:
        ctypes.cast(out, ctypes.POINTER(kind))[0] = value
        return 0

    def _device_get(self, out: int, index: int) -> int:
        return self._put(out, INT, index) if index < 4 else 100

    def _error_name(self, code: int, out: int) -> int:
        return self._put(out, ctypes.c_char_p, _NAMES.get(code))

    @staticmethod
    def _bus_id(out: int, length: int, device: int) -> int:
        ctypes.memmove(out, b"0000:4%d:00.0\0" % device, 13)
        return 0

    def _resolve(self, name: bytes, out: int, version: int, flags: int, status: int) -> int:
        self.calls.append(("resolve", name, version))
        if self._batch_since is None or version < self._batch_since or name != b"cuMemcpyBatchAsync":
            return 500
        return self._put(out, P, ctypes.cast(self._batch, P).value)

    def _copy_one(self, dst: int, src: int, size: int, stream: int) -> int:
        if self._fail_piece == self._singles:
            return 1
        self._singles += 1
        ctypes.memmove(dst, src, size)
        return self._note("copy", size, stream)

    def _copy_batch(
        self, dsts: int, srcs: int, sizes: int, count: int, attributes: int, firsts: int,
        attribute_count: int, failed: int, stream: int,
    ) -> int:  # fmt: skip
        words = (ctypes.c_int * 6).from_address(attributes)
        first = SIZE.from_address(firsts).value
        self.calls.append(("batch", count, tuple(words), attribute_count, first, stream))
        if self._fail_piece is not None:
            return self._put(failed, SIZE, self._fail_piece) or 1
        for index in range(count):
            dst, src, size = (U64.from_address(array + 8 * index).value for array in (dsts, srcs, sizes))
            ctypes.memmove(dst, src, size)
        return 0
