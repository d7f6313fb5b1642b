"""The transfer engine for the device a KV cache lies on, with host memory for its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from connectors.errors import ConfigError
from connectors.layout.blocks import CacheView, LayoutError, row_bytes_from_config
from connectors.transfer.base import CLOSE_S, StreamMark, TransferEngine, TransferJob, TransferResult
from connectors.transfer.host_pool import HostMemoryError, PinnedHostPool, SharedMapping
from connectors.worker.replicas import Replicas, ShareOfStores

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a memory file system, not for files that stay


class EngineWithPool:
    """A ``TransferEngine`` that owns its host memory: both end together."""

    def __init__(self, engine: TransferEngine, pool: PinnedHostPool) -> None:
        self._engine = engine
        self._pool = pool
        self._closed = False

    def mark(self) -> StreamMark | None:
        return self._engine.mark()

    def submit(self, job: TransferJob, after: StreamMark | None = None) -> None:
        self._engine.submit(job, after)

    def poll(self) -> list[TransferResult]:
        return self._engine.poll()

    def wait(self, job_ids: Sequence[int], timeout_s: float) -> bool:
        return self._engine.wait(job_ids, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        if not self._closed and self._engine.close(timeout_s):
            self._closed = True
            self._pool.close()
        return self._closed


def slots_of(kv_cache_config: Any, host_bytes: int, shares: int, where: str) -> int:
    """Rows in each of so many shares of ``host_bytes``: the same number in scheduler and worker.

    ``ConfigError`` (``where`` names the setting) if there is no room for two rows.
    """
    row_bytes = row_bytes_from_config(kv_cache_config)
    slots = host_bytes // shares // row_bytes
    if slots < 2:
        need = 2 * shares * row_bytes
        raise ConfigError(where, host_bytes, f"a block takes {row_bytes} bytes of it; give {need} or more")
    return slots


def make_engine(
    view: CacheView,
    device: str,
    *,
    slots: int,
    row_bytes: int,
    replicas: Replicas | None = None,
    name: str = "",
    meet: Callable[[], bool] | None = None,
) -> TransferEngine:
    """An engine over at least ``slots`` new rows, for a ``cpu`` or ``cuda`` cache.

    ``row_bytes``: what a row takes by the configuration. ``LayoutError`` where a block of the cache turned
    out larger, ``ConfigError`` for other devices, ``HostMemoryError`` where the memory cannot be had.
    ``replicas``: these ranks use the same rows, in memory called after ``name``, the engine's own; ``meet``
    returns when all of them have come to it, or False where they cannot meet.
    """
    if view.row_bytes > row_bytes:
        raise LayoutError(f"a block takes {view.row_bytes} bytes; its configuration says at most {row_bytes}")
    if replicas is None or replicas.count < 2 or meet is None:
        return EngineWithPool(*open_rows(view, device, slots, view.row_bytes))
    path = _SHARED_MEMORY / f"kvatlas-{name}-{replicas.group}"
    shared = SharedMapping(path, first=replicas.index == 0)
    try:
        engine = EngineWithPool(*open_rows(view, device, slots, view.row_bytes, shared))
        if not meet():
            engine.close()
            raise HostMemoryError(
                f"share_replicas: ranks that share {path} must meet, and cannot; set it to false"
            )
    finally:
        path.unlink(missing_ok=True)  # who has mapped it keeps it; nothing stays behind after a crash
    return ShareOfStores(engine, replicas.by_slot)


def open_rows(
    view: CacheView, device: str, rows: int, row_bytes: int, shared: SharedMapping | None = None
) -> tuple[TransferEngine, PinnedHostPool]:
    """``rows`` rows of ``row_bytes`` for a ``cpu`` or ``cuda`` cache, and an engine that copies to them.

    Close the engine, then the pool. As many stores may wait as there are rows: whoever has rows for them has
    bounded them already. ConfigError for other devices, HostMemoryError where memory is short.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        from connectors.transfer.host import HostTransferEngine  # noqa: PLC0415 - only where it is used

        pool = PinnedHostPool(rows * row_bytes, row_bytes, shared=shared)
        return HostTransferEngine(view, pool, row_bytes=row_bytes, queued_stores_max=rows), pool
    if kind == "cuda":
        from connectors.transfer.cuda import open_cuda  # noqa: PLC0415 - only where it is used

        view = replace(view, row_bytes=row_bytes)
        gpu = int(index) if index else None
        return open_cuda(view, rows * row_bytes, device_index=gpu, queued_stores_max=rows, shared=shared)
    raise ConfigError("device", device, "there are transfer engines for cpu and cuda")
