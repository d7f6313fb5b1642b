"""A store of block values that several engines share.

Keys are opaque bytes (already under a namespace), values are whole rows framed by ``connectors.store.frame``.
Every call ends by its deadline, or as soon after it as what it waits for can be interrupted (a hung network
file system cannot): whoever calls from a thread that must go on hands the call to another thread. A store
never raises for a missing, corrupt or foreign value: that is a miss, and counted; it raises
``StoreUnavailable`` when it cannot be asked at all.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol


class StoreUnavailable(Exception):  # noqa: N818
    """The store could not be reached, or did not answer by the deadline."""


class BlockStore(Protocol):
    """Safe to call from several threads at once."""

    name: str
    """What KV events call it (``ownership``)."""

    def register_buffer(self, buffer: memoryview) -> None:
        """Values will be put from and got into this memory; it stays until ``close``. Once, before them."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """One answer per key; ``deadline_s``: seconds from now for the whole call."""

    def put(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        """Write values; one that exists is left, or replaced by an equal one. True: others can read it."""

    def get_into(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        """Fill each buffer with its key's value, of exactly its length. False: a miss, buffer undefined.

        Buffers are written to until the call returns, never afterwards.
        """

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Drop values found bad; absent ones are no error."""

    def counters(self) -> dict[str, int]:
        """What went otherwise than hoped since the start, by reason; grows only."""

    def close(self) -> None: ...


def close_within(store: BlockStore, timeout_s: float) -> bool:
    """Close a store whose client may wait for a server that is gone. False: it still does."""
    thread = threading.Thread(target=store.close, name="kvatlas-store-close", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


class Deadline:
    """A moment by which something must have ended."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left, 0 when there are none."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() >= self._end


class Counters:
    """Named counts that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self._counts[reason] += count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
