"""Asks a shared store what it holds, on a thread of its own, so that nobody else waits for the store."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

from connectors.store.base import BlockStore, Deadline

log = logging.getLogger(__name__)

_ASKED_AT_ONCE = 1024
"""Store keys per call: what was answered before the deadline counts."""


_CALL_S = 1.0
"""A call may take longer than the question: making a connection does, and a late answer helps the next."""


class Question:
    """Block keys to ask for; each is held if its value under every one of ``prefixes`` (the ranks) is."""

    def __init__(self, keys: list[bytes], prefixes: Sequence[bytes], deadline_s: float) -> None:
        self.keys = keys
        self.prefixes = tuple(prefixes)
        self.deadline = Deadline(deadline_s)
        self.error = ""
        """Why the store could not be asked; set before ``done``."""
        self.done = threading.Event()
        self._answers: list[tuple[bytes, bool]] = []

    def answers(self) -> list[tuple[bytes, bool]]:
        """(key, held) for what is known so far; may be read at any time."""
        return list(self._answers)

    def ask(self, store: BlockStore) -> None:
        """Part by part, so that a late answer is not all lost."""
        step = max(1, _ASKED_AT_ONCE // len(self.prefixes))
        for start in range(0, len(self.keys), step):
            if self.deadline.passed():
                return
            keys = self.keys[start : start + step]
            spelled = [prefix + key for key in keys for prefix in self.prefixes]
            there = store.exists(spelled, max(_CALL_S, self.deadline.left_s()))
            ranks = len(self.prefixes)
            self._answers += [(key, all(there[at * ranks : (at + 1) * ranks])) for at, key in enumerate(keys)]


class StoreLookup:
    """A bounded queue of questions and the thread that asks them, in order."""

    def __init__(self, store: BlockStore, questions_max: int) -> None:
        self._store = store
        self._queue: queue.Queue[Question] = queue.Queue(questions_max)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvatlas-store-ask", daemon=True)
        self._thread.start()

    def put(self, question: Question) -> bool:
        """False: too many are waiting already."""
        try:
            self._queue.put_nowait(question)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread once the call it is in returns; does not wait longer than told."""
        self._closed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                question = self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
            started = time.monotonic()
            try:
                question.ask(self._store)
            except Exception as error:  # noqa: BLE001 - the thread must live on, whatever a store raises
                question.error = f"{type(error).__name__}: {error}"
                log.debug("store %s: no answer after %.3f s", self._store.name, time.monotonic() - started)
            question.done.set()
