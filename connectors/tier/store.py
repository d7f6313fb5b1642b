"""A shared store as the scheduler's half sees it: what is held there, asked in the background.

``held`` puts a question (one batch: all keys a request needs to know, for all ranks) on a bounded queue,
which a thread takes to the store; until the answer, or the deadline, it says None. Answers are believed for a
while, held ones and absent ones; a key whose load failed is not held until it was stored anew or its
quarantine ends. What always holds: the engine core's thread never waits for the store, and no more than the
configured number of answers, questions and stores is kept.

A slot given out here is a ticket of the namespace (``Namespace.ticket``): rows are staged by the worker's
half, which needs no place from here but the epoch that the keys belong to.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.store.base import BlockStore, Deadline
from connectors.store.namespace import EPOCHS_MAX, Namespace
from connectors.tier.base import StoreTierSettings, TierChanges

# Asks a shared store what it holds, on a thread of its own, so that nobody else waits for the store.


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


@dataclass(slots=True)
class _Answer:
    held: bool
    at: float
    until: float
    ours: bool = False
    """Held because this engine stored it, which was said in an event."""


@dataclass(frozen=True, slots=True)
class _Asked:
    question: Question
    at: float


class StoreTier:
    """``connectors.tier.base.Tier`` over a ``BlockStore``. One owner; ``close`` ends its thread."""

    medium = "STORAGE"

    def __init__(
        self,
        store: BlockStore,
        namespace: Namespace,
        settings: StoreTierSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._store = store
        self._namespace = namespace
        self._settings = settings or StoreTierSettings()
        self._clock = clock
        self._epoch = 0
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._quarantine: OrderedDict[bytes, float] = OrderedDict()
        self._open: dict[str, _Asked] = {}
        self._late: deque[_Asked] = deque(maxlen=self._settings.questions_max)
        self._storing: dict[bytes, int] = {}
        """Key -> the epoch it is being stored in."""
        self._loading: Counter[bytes] = Counter()
        self._changes: list[tuple[bool, bytes]] = []
        self._unavailable_until = 0.0
        self._lookup = StoreLookup(store, self._settings.questions_max)

    # -- asking ------------------------------------------------------------------------------------------

    def held(self, request_id: str, keys: Sequence[bytes]) -> frozenset[bytes] | None:
        """Those of these keys that every rank's value is there for; None: the answer is on its way."""
        now = self._clock()
        self._learn_late(now)
        asked = self._open.get(request_id)
        if asked is not None:
            late = now - asked.at >= self._settings.lookup_deadline_s
            if not asked.question.done.is_set() and not late:
                return None
            del self._open[request_id]
            self._learn(asked, now)
        if now < self._unavailable_until:
            return frozenset()
        unknown = list(dict.fromkeys(key for key in keys if self._believed(key, now) is None))
        if unknown and self._ask(request_id, unknown, now):
            return None
        return frozenset(key for key in keys if self._believed(key, now))

    def forget_request(self, request_id: str) -> None:
        """Its open question may still be answered; nobody reads the answer."""
        self._open.pop(request_id, None)

    # -- storing -----------------------------------------------------------------------------------------

    def begin_store(self, chain: Sequence[bytes], lineage: Sequence[bytes] = ()) -> list[tuple[bytes, int]]:
        """Keys that were not found in the store lately, up to the cap, and nothing while it is away."""
        del lineage
        now = self._clock()
        if now < self._unavailable_until:
            self.counters["stores_left_out_store_away"] += len(chain)
            return []
        ticket = self._namespace.ticket(self._epoch)
        begun: list[tuple[bytes, int]] = []
        for key in chain:
            if key in self._storing or self._loading[key] or self._is_stored(key, now):
                continue
            if len(self._storing) >= self._settings.stores_max:
                self.counters["stores_left_out_too_many"] += 1
                continue
            self._storing[key] = self._epoch
            begun.append((key, ticket))
        return begun

    def end_store(self, key: bytes, *, ok: bool) -> None:
        """RuntimeError for a store that was not begun."""
        epoch = self._storing.pop(key, None)
        if epoch is None:
            raise RuntimeError(f"end of a store that was not begun: {key.hex()}")
        if not ok:
            self.counters["failed_stores"] += 1
        elif epoch == self._epoch:
            self._quarantine.pop(key, None)
            before = self._answers.get(key)
            self._remember(key, held=True, ours=True)
            if before is None or not before.ours:
                self._changes.append((True, key))

    # -- loading -----------------------------------------------------------------------------------------

    def begin_load(self, keys: Sequence[bytes]) -> list[int] | None:
        """A ticket per key, or None where one is not held to the best of what is known."""
        now = self._clock()
        # An answer may have run out since it was given: the load finds out what is true.
        if not all((answer := self._answers.get(key)) and answer.held for key in keys):
            return None
        if any(self._in_quarantine(key, now) for key in keys):
            return None
        self._loading.update(keys)
        return [self._namespace.ticket(self._epoch)] * len(keys)

    def end_load(self, key: bytes, *, ok: bool) -> None:
        """RuntimeError for a load that was not begun."""
        if not self._loading[key]:
            raise RuntimeError(f"end of a load that was not begun: {key.hex()}")
        self._loading[key] -= 1
        if not self._loading[key]:
            del self._loading[key]
        if ok:
            return
        self.counters["failed_loads"] += 1
        self._drop(key)
        self._quarantine[key] = self._clock() + self._settings.quarantine_s
        self._quarantine.move_to_end(key)
        while len(self._quarantine) > self._settings.answers_max:
            self._quarantine.popitem(last=False)

    # -- the rest ----------------------------------------------------------------------------------------

    def take_changes(self) -> TierChanges:
        """Of keys that this engine stored: of others their own writers tell."""
        changes = TierChanges(tuple(self._changes))
        self._changes.clear()
        return changes

    def reset(self) -> bool:
        """Begin a new epoch, which no other engine shares: nothing stored before is held here any more.

        Other engines keep what is theirs. Always True: what is under way ends in the old epoch.
        """
        if self._epoch + 1 >= EPOCHS_MAX:
            raise RuntimeError("too many resets; restart the engine")
        self._epoch += 1
        for key in list(self._answers):
            self._drop(key)
        self._quarantine.clear()
        self._open.clear()
        self._late.clear()
        log.warning(
            "the connector was reset: nobody can tell which engines have the same weights now, so until its "
            "restart this engine shares what it puts in store %s with no other",
            self._store.name,
        )
        return True

    def busy(self) -> bool:
        return bool(self._storing) or bool(self._loading)

    def close(self) -> None:
        """May be called again."""
        self._lookup.close()

    # -- what is believed --------------------------------------------------------------------------------

    def _believed(self, key: bytes, now: float) -> bool | None:
        """None: not known, or no more."""
        if self._in_quarantine(key, now):
            return False
        answer = self._answers.get(key)
        return None if answer is None or now >= answer.until else answer.held

    def _is_stored(self, key: bytes, now: float) -> bool:
        answer = self._answers.get(key)
        if answer is None or not answer.held or self._in_quarantine(key, now):
            return False
        return now - answer.at < max(self._settings.stored_for_s, self._settings.held_for_s)

    def _in_quarantine(self, key: bytes, now: float) -> bool:
        until = self._quarantine.get(key)
        if until is None:
            return False
        if now >= until:
            del self._quarantine[key]
            return False
        return True

    def _remember(self, key: bytes, *, held: bool, ours: bool = False) -> None:
        before = self._answers.get(key)
        if before is not None and before.ours:
            ours = held
            if not held:
                self._changes.append((False, key))
        now = self._clock()
        ttl_s = self._settings.held_for_s if held else self._settings.absent_for_s
        self._keep(key, _Answer(held, now, now + ttl_s, ours))

    def _assume_absent(self, key: bytes) -> None:
        """Nobody said so; but who asked has waited long enough."""
        before, now = self._answers.get(key), self._clock()
        ours = before is not None and before.ours
        self._keep(key, _Answer(False, now, now + self._settings.absent_for_s, ours))

    def _keep(self, key: bytes, answer: _Answer) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        while len(self._answers) > self._settings.answers_max:
            self._answers.popitem(last=False)

    def _drop(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None and answer.ours:
            self._changes.append((False, key))

    # -- questions ---------------------------------------------------------------------------------------

    def _ask(self, request_id: str, keys: list[bytes], now: float) -> bool:
        prefixes = self._namespace.digests(self._epoch)
        question = Question(keys, prefixes, self._settings.lookup_deadline_s)
        if not self._lookup.put(question):
            self.counters["questions_left_out"] += 1
            return False
        self._open[request_id] = _Asked(question, now)
        return True

    def _learn(self, asked: _Asked, now: float) -> None:
        question = asked.question
        done = question.done.is_set()
        self._believe(asked)
        if done and question.error:
            self.counters["questions_failed"] += 1
            self._unavailable_until = now + self._settings.away_for_s
        elif not done:
            self.counters["questions_late"] += 1
            self._late.append(asked)
        for key in question.keys:
            if self._believed(key, now) is None:
                self._assume_absent(key)

    def _learn_late(self, now: float) -> None:
        """What was answered after its deadline helps whoever asks next."""
        while self._late and self._late[0].question.done.is_set():
            asked = self._late.popleft()
            if asked.question.error:
                self._unavailable_until = now + self._settings.away_for_s
            self._believe(asked)

    def _believe(self, asked: _Asked) -> None:
        for key, held in asked.question.answers():
            before = self._answers.get(key)
            # What was stored since it was asked is known better.
            if before is None or not before.ours or before.at < asked.at:
                self._remember(key, held=held)
