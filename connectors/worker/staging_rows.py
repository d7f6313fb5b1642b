"""Staging rows that remember what they hold: a value fetched once is loaded from host memory the next time.

A row is empty, in use by a transfer, or keeps a value under its store key; values go, the least recently used
first, when rows are needed. Store keys name content, so what is kept can never be out of date. What always
holds: a row in use is given to nobody else, except that several loads may read one kept value at once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from connectors.store.base import BlockStore, Counters, Deadline, find_fault, seal
from connectors.transfer.base import Direction


class RowCache:
    """``rows`` rows, by number. Not thread-safe: one owner."""

    def __init__(self, rows: int) -> None:
        self._empty = list(range(rows))
        self._idle: OrderedDict[bytes, int] = OrderedDict()
        """Kept values that nobody reads; the least recently used first."""
        self._read: dict[bytes, int] = {}
        """Kept values that loads read."""
        self._readers: Counter[bytes] = Counter()
        self._spoilt: set[bytes] = set()
        """Of those being read, the ones that nobody else shall read."""

    @property
    def available(self) -> int:
        """Rows that ``take`` could give."""
        return len(self._empty) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Rows to write to, at most ``available``; ends what some of them keep."""
        return [self._empty.pop() if self._empty else self._idle.popitem(last=False)[1] for _ in range(count)]

    def give_back(self, rows: Sequence[int], keys: Sequence[bytes | None]) -> None:
        """Rows that ``take`` gave. With a key: the row holds its value; None: it holds nothing of use."""
        for row, key in zip(rows, keys, strict=True):
            if key is None or key in self._idle or key in self._read:
                self._empty.append(row)
            else:
                self._idle[key] = row

    def read(self, key: bytes) -> int | None:
        """The row that keeps this value, until ``end_read``; None: no row does."""
        if key in self._spoilt:
            return None
        row = self._read.get(key)
        if row is None:
            row = self._idle.pop(key, None)
            if row is None:
                return None
            self._read[key] = row
        self._readers[key] += 1
        return row

    def end_read(self, key: bytes, *, keep: bool = True) -> None:
        """``keep=False``: nobody shall read it again."""
        if not keep:
            self._spoilt.add(key)
        self._readers[key] -= 1
        if self._readers[key]:
            return
        del self._readers[key]
        row = self._read.pop(key)
        if key in self._spoilt:
            self._spoilt.discard(key)
            self._empty.append(row)
        else:
            self._idle[key] = row


# Copies values between staging rows and a shared store, on a few threads.
#
# An errand is a batch of values one way, under one deadline. Putting seals each value and leaves out those
# the store has; getting checks each frame and removes values that are not what they should be. What always
# holds: an errand comes back once, and its rows are touched by nobody else until it does, however long that
# takes.


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedValue:
    """``value``: the row and room for its frame; ``store_key``: what the store calls it."""

    key: bytes
    store_key: bytes
    value: memoryview


@dataclass(slots=True)
class StoreTask:
    """``STORE`` puts values, ``LOAD`` gets them. ``failed``: block keys that were not, when it is back."""

    direction: Direction
    values: list[StagedValue]
    namespace: bytes
    """What frames are sealed with."""
    deadline: Deadline
    failed: set[bytes] = field(default_factory=set)
    error: str = ""


class StoreThreads:
    """``begin`` errands, ``take_done`` them. Nothing waits in ``begin``: callers bound what they begin."""

    def __init__(self, store: BlockStore, threads: int) -> None:
        """``threads`` that get values, and half as many that put them."""
        self.counters = Counters()
        self._store = store
        self._queues: dict[Direction, queue.SimpleQueue[StoreTask | None]] = {
            direction: queue.SimpleQueue() for direction in Direction
        }
        self._changed = threading.Condition()
        self._done: deque[StoreTask] = deque()
        self._threads = [
            threading.Thread(
                target=self._run, args=(mine,), name=f"kvatlas-store-{direction.value}", daemon=True
            )
            for direction, mine in self._queues.items()
            for _ in range(threads if direction is Direction.LOAD else max(1, threads // 2))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, errand: StoreTask) -> None:
        self._queues[errand.direction].put(errand)

    def take_done(self) -> list[StoreTask]:
        """Errands that came back since the last call."""
        with self._changed:
            done = list(self._done)
            self._done.clear()
        return done

    def wait_done(self, timeout_s: float) -> None:
        """Until some errand is back and not taken, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._done, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the threads. False: some are still in a call, and use their rows."""
        for mine in self._queues.values():
            for _ in self._threads:
                mine.put(None)
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            thread.join(deadline.left_s())
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, mine: queue.SimpleQueue[StoreTask | None]) -> None:
        while (errand := mine.get()) is not None:
            try:
                if errand.deadline.passed():
                    raise TimeoutError("the deadline passed before the store was asked")
                if errand.direction is Direction.STORE:
                    self._put(errand)
                else:
                    self._get(errand)
            except Exception as error:  # noqa: BLE001 - whatever a store raises, the errand must come back
                errand.error = f"{type(error).__name__}: {error}"
                errand.failed = {staged.key for staged in errand.values}
                self.counters.add(f"{errand.direction.value}_unavailable")
            with self._changed:
                self._done.append(errand)
                self._changed.notify_all()

    def _put(self, errand: StoreTask) -> None:
        there = self._store.exists([staged.store_key for staged in errand.values], errand.deadline.left_s())
        missing = [staged for staged, found in zip(errand.values, there, strict=True) if not found]
        self.counters.add("store_there_already", len(errand.values) - len(missing))
        for staged in missing:
            seal(staged.value, errand.namespace, staged.key)
        put = self._store.put(
            [(staged.store_key, staged.value) for staged in missing], errand.deadline.left_s()
        )
        errand.failed = {staged.key for staged, done in zip(missing, put, strict=True) if not done}
        if errand.failed:
            errand.error = f"store {self._store.name} did not take {len(errand.failed)} values"
            self.counters.add("store_refused", len(errand.failed))

    def _get(self, errand: StoreTask) -> None:
        got = self._store.get_into(
            [(staged.store_key, staged.value) for staged in errand.values], errand.deadline.left_s()
        )
        bad: list[bytes] = []
        for staged, done in zip(errand.values, got, strict=True):
            if not done:
                errand.failed.add(staged.key)
                self.counters.add("load_missing")
            elif (fault := find_fault(staged.value, errand.namespace, staged.key)) is not None:
                errand.failed.add(staged.key)
                self.counters.add(f"load_fault_{fault.value}")
                bad.append(staged.store_key)
        if not errand.failed:
            return
        missing = len(errand.failed) - len(bad)
        errand.error = f"store {self._store.name}: {missing} values missing or short, {len(bad)} bad"
        if bad:
            log.warning("%s; removing the bad ones", errand.error)
            self._store.remove(bad, errand.deadline.left_s())
