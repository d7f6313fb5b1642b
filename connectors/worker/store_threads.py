"""Threads that copy values between staging rows and a shared store.

A task is a batch of values in one direction with one deadline. Storing seals each value and skips those
that the store has; loading checks each frame and removes invalid values. Invariant: a task ends once, and
no other code touches its rows until then.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from dataclasses import dataclass, field

from kvatlas.connectors.store.base import BlockStore, Counters, Deadline
from kvatlas.connectors.store.frame import find_fault, seal
from kvatlas.connectors.transfer.base import Direction

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedValue:
    """A value in a staging row: ``value`` is the row with room for its frame, ``store_key`` its key there."""

    key: bytes
    store_key: bytes
    value: memoryview


@dataclass(slots=True)
class StoreTask:
    """A batch: ``STORE`` puts values, ``LOAD`` gets them. ``failed``: block keys that failed, at its end."""

    direction: Direction
    values: list[StagedValue]
    namespace: bytes
    """Digest for sealing frames."""
    deadline: Deadline
    failed: set[bytes] = field(default_factory=set)
    error: str = ""


class StoreThreads:
    """Threads that run tasks. ``begin`` never blocks; callers bound the number of tasks."""

    def __init__(self, store: BlockStore, threads: int) -> None:
        """Start ``threads`` threads that get values, and half as many that put them."""
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

    def begin(self, task: StoreTask) -> None:
        self._queues[task.direction].put(task)

    def take_done(self) -> list[StoreTask]:
        """Tasks that ended since the last call."""
        with self._changed:
            done = list(self._done)
            self._done.clear()
        return done

    def wait_done(self, timeout_s: float) -> None:
        """Wait until some task has ended and is not taken, or until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._done, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the threads. False: some are still in a call and use their rows."""
        for mine in self._queues.values():
            for _ in self._threads:
                mine.put(None)
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            thread.join(deadline.left_s())
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, mine: queue.SimpleQueue[StoreTask | None]) -> None:
        while (task := mine.get()) is not None:
            try:
                if task.deadline.passed():
                    raise TimeoutError("the deadline passed before the store was asked")
                if task.direction is Direction.STORE:
                    self._put(task)
                else:
                    self._get(task)
            except Exception as error:  # noqa: BLE001 - the task must end after any store error
                task.error = f"{type(error).__name__}: {error}"
                task.failed = {staged.key for staged in task.values}
                self.counters.add(f"{task.direction.value}_unavailable")
            with self._changed:
                self._done.append(task)
                self._changed.notify_all()

    def _put(self, task: StoreTask) -> None:
        there = self._store.exists([staged.store_key for staged in task.values], task.deadline.left_s())
        missing = [staged for staged, found in zip(task.values, there, strict=True) if not found]
        self.counters.add("store_there_already", len(task.values) - len(missing))
        for staged in missing:
            seal(staged.value, task.namespace, staged.key)
        put = self._store.put(
            [(staged.store_key, staged.value) for staged in missing], task.deadline.left_s()
        )
        task.failed = {staged.key for staged, done in zip(missing, put, strict=True) if not done}
        if task.failed:
            task.error = f"store {self._store.name} did not take {len(task.failed)} values"
            self.counters.add("store_refused", len(task.failed))

    def _get(self, task: StoreTask) -> None:
        got = self._store.get_into(
            [(staged.store_key, staged.value) for staged in task.values], task.deadline.left_s()
        )
        bad: list[bytes] = []
        for staged, done in zip(task.values, got, strict=True):
            if not done:
                task.failed.add(staged.key)
                self.counters.add("load_missing")
            elif (fault := find_fault(staged.value, task.namespace, staged.key)) is not None:
                task.failed.add(staged.key)
                self.counters.add(f"load_fault_{fault.value}")
                bad.append(staged.store_key)
        if not task.failed:
            return
        missing = len(task.failed) - len(bad)
        task.error = f"store {self._store.name}: {missing} values missing or short, {len(bad)} bad"
        if bad:
            log.warning("%s; removing the bad ones", task.error)
            self._store.remove(bad, task.deadline.left_s())
