"""Stores for the contract suite, and doubles that misbehave on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvatlas.connectors.store.base import BlockStore, Counters, StoreUnavailable

Values = dict[bytes, bytes]


class MemoryStore:
    """The contract in its plainest form; also keeps what was asked, and can be told to be slow or gone."""

    name = "memory"

    def __init__(self) -> None:
        self.values: Values = {}
        self.calls: list[tuple[str, int]] = []
        self.gone = False
        self.gate: threading.Event | None = None
        """While set and not open, calls wait: a store that hangs."""
        self.entered = threading.Semaphore(0)
        self._counters = Counters()
        self._lock = threading.Lock()

    def register_buffer(self, buffer: memoryview) -> None:
        """Any memory will do."""

    def _enter(self, call: str, count: int) -> None:
        self.calls.append((call, count))
        self.entered.release()
        if self.gate is not None:
            self.gate.wait()
        if self.gone:
            raise StoreUnavailable("gone")

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        self._enter("exists", len(keys))
        with self._lock:
            return [key in self.values for key in keys]

    def put(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        self._enter("put", len(items))
        with self._lock:
            self.values.update((key, bytes(value)) for key, value in items)
        return [True] * len(items)

    def get_into(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        self._enter("get_into", len(items))
        done = []
        with self._lock:
            for key, buffer in items:
                value = self.values.get(key)
                if value is None or len(value) != buffer.nbytes:
                    self._counters.add("absent" if value is None else "length")
                    done.append(False)
                    continue
                buffer[:] = value
                done.append(True)
        return done

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> None:
        self._enter("remove", len(keys))
        with self._lock:
            for key in keys:
                self.values.pop(key, None)

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot()

    def close(self) -> None:
        """Nothing to give back."""


class Shared:
    """One place that several stores share, and what a test may do behind their backs."""

    def __init__(self, open_one: Callable[[], BlockStore], overwrite: Callable[[bytes, bytes], None]) -> None:
        self._open_one = open_one
        self.overwrite = overwrite
        """Put these bytes under this key, whatever the store would say to it."""
        self._opened: list[BlockStore] = []

    def open(self) -> Any:
        """One more engine's view of the store."""
        self._opened.append(self._open_one())
        return self._opened[-1]

    def close(self) -> None:
        for store in self._opened:
            store.close()
