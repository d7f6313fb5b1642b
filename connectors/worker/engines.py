"""The transfer engine for the device a KV cache lies on, with host memory for its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from connectors.errors import ConfigError
from connectors.layout.blocks import CacheView, LayoutError, row_bytes_from_config
from connectors.transfer.base import StreamMark, TransferEngine, TransferJob, TransferResult
from connectors.transfer.host_pool import PinnedHostPool


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

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.close()
            self._pool.close()


def slots_of(kv_cache_config: Any, host_bytes: int, world_size: int, where: str) -> int:
    """Rows that each rank's share of ``host_bytes`` holds: the same number in scheduler and worker.

    ``ConfigError`` (``where`` names the setting) if there is no room for two rows.
    """
    row_bytes = row_bytes_from_config(kv_cache_config)
    slots = host_bytes // world_size // row_bytes
    if slots < 2:
        need = 2 * world_size * row_bytes
        raise ConfigError(where, host_bytes, f"a block takes {row_bytes} bytes of it; give {need} or more")
    return slots


def make_engine(view: CacheView, device: str, *, slots: int, row_bytes: int) -> TransferEngine:
    """An engine over at least ``slots`` new rows, for a ``cpu`` or ``cuda`` cache.

    ``row_bytes``: what a row takes by the configuration. ``LayoutError`` where a block of the cache turned
    out larger, ``ConfigError`` for other devices, ``HostMemoryError`` where the memory cannot be had.
    """
    if view.row_bytes > row_bytes:
        raise LayoutError(f"a block takes {view.row_bytes} bytes; its configuration says at most {row_bytes}")
    return EngineWithPool(*open_rows(view, device, slots, view.row_bytes))


def open_rows(
    view: CacheView, device: str, rows: int, row_bytes: int
) -> tuple[TransferEngine, PinnedHostPool]:
    """``rows`` rows of ``row_bytes`` for a ``cpu`` or ``cuda`` cache, and an engine that copies to them.

    Close the engine, then the pool. As many stores may wait as there are rows: whoever has rows for them has
    bounded them already. ConfigError for other devices, HostMemoryError where memory is short.
    """
    if device == "cpu":
        from connectors.transfer.host import HostTransferEngine  # noqa: PLC0415 - only where it is used

        pool = PinnedHostPool(rows * row_bytes, row_bytes)
        return HostTransferEngine(view, pool, row_bytes=row_bytes, queued_stores_max=rows), pool
    if device == "cuda":
        from connectors.transfer.cuda import open_cuda  # noqa: PLC0415 - only where it is used

        return open_cuda(replace(view, row_bytes=row_bytes), rows * row_bytes, queued_stores_max=rows)
    raise ConfigError("device", device, "there are transfer engines for cpu and cuda")
