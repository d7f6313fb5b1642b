"""A shared store as a tier of the scheduler half, with background lookups and cached answers.

``held`` puts a query (one batch: all keys that a request needs, for all ranks) on a bounded queue, from which
a thread queries the store. Until the answer or the deadline it returns None. Answers are cached for a while,
both held and absent; a key whose load failed is not held until it is stored again or its quarantine ends.

Invariants: the engine core's thread never waits for the store. The numbers of answers, queries and stores are
bounded by the settings.

A slot returned here is a ticket of the namespace (``Namespace.ticket``): the worker half stages rows itself
and needs only the epoch of the keys.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvatlas.connectors.store.base import EPOCHS_MAX, BlockStore, Deadline, Namespace
from kvatlas.connectors.tier.base import StoreTierSettings, TierChanges
from kvatlas.publisher.pool.retention_order import RetentionHint

log = logging.getLogger(__name__)

# Store keys per call: answers received before the deadline count.
_KEYS_PER_CALL = 1024


# Timeout of a call. Longer than a query's: connecting takes long, and a late answer helps the next query.
_CALL_S = 1.0


class LookupQuery:
    """Block keys to look up; a key is held if its values under all ``prefixes`` (the ranks) are."""

    def __init__(self, keys: list[bytes], prefixes: Sequence[bytes], deadline_s: float) -> None:
        self.keys = keys
        self.prefixes = tuple(prefixes)
        self.deadline = Deadline(deadline_s)
        # Reason of a failed query; set before ``done``.
        self.error = ""
        self.done = threading.Event()
        self._answers: list[tuple[bytes, bool]] = []

    def answers(self) -> list[tuple[bytes, bool]]:
        """(key, held) of the answers so far; may be called at any time."""
        return list(self._answers)

    def run(self, store: BlockStore) -> None:
        """Query the store in parts, so that a deadline loses only the remaining ones."""
        step = max(1, _KEYS_PER_CALL // len(self.prefixes))
        for start in range(0, len(self.keys), step):
            if self.deadline.passed():
                return
            keys = self.keys[start : start + step]
            spelled = [prefix + key for key in keys for prefix in self.prefixes]
            there = store.exists(spelled, max(_CALL_S, self.deadline.left_s()))
            ranks = len(self.prefixes)
            self._answers += [(key, all(there[at * ranks : (at + 1) * ranks])) for at, key in enumerate(keys)]


class StoreLookup:
    """A bounded queue of queries and the thread that runs them, in order."""

    def __init__(self, store: BlockStore, questions_max: int) -> None:
        self._store = store
        self._queue: queue.Queue[LookupQuery] = queue.Queue(questions_max)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvatlas-store-ask", daemon=True)
        self._thread.start()

    def put(self, query: LookupQuery) -> bool:
        """Queue a query. False if the queue is full."""
        try:
            self._queue.put_nowait(query)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread after its current call; waits at most ``timeout_s``."""
        self._closed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                query = self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
            started = time.monotonic()
            try:
                query.run(self._store)
            except Exception as error:  # noqa: BLE001 - no store error may end the thread
                query.error = f"{type(error).__name__}: {error}"
                log.debug("store %s: no answer after %.3f s", self._store.name, time.monotonic() - started)
            query.done.set()


@dataclass(slots=True)
class _Answer:
    held: bool
    at: float
    until: float
    ours: bool = False
    """Held because this engine stored it and announced it in an event."""


@dataclass(frozen=True, slots=True)
class _OpenQuery:
    query: LookupQuery
    at: float


class StoreTier:
    """``kvatlas.connectors.tier.base.Tier`` over a ``BlockStore``. One owner; ``close`` ends its thread."""

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
        self._open: dict[str, _OpenQuery] = {}
        self._late: deque[_OpenQuery] = deque(maxlen=self._settings.questions_max)
        # Key -> the epoch of its running store.
        self._storing: dict[bytes, int] = {}
        self._loading: Counter[bytes] = Counter()
        self._changes: list[tuple[bool, bytes]] = []
        self._unavailable_until = 0.0
        self._lookup = StoreLookup(store, self._settings.questions_max)

    # -- lookups -----------------------------------------------------------------------------------------

    def held(self, request_id: str, keys: Sequence[bytes]) -> frozenset[bytes] | None:
        """The keys for which every rank's value is stored; None while the query runs."""
        now = self._clock()
        self._take_late_answers(now)
        opened = self._open.get(request_id)
        if opened is not None:
            late = now - opened.at >= self._settings.lookup_deadline_s
            if not opened.query.done.is_set() and not late:
                return None
            del self._open[request_id]
            self._take_answers(opened, now)
        if now < self._unavailable_until:
            return frozenset()
        unknown = list(dict.fromkeys(key for key in keys if self._cached(key, now) is None))
        if unknown and self._begin_query(request_id, unknown, now):
            return None
        return frozenset(key for key in keys if self._cached(key, now))

    def forget_request(self, request_id: str) -> None:
        """Drop a request's open query; a later answer is ignored."""
        self._open.pop(request_id, None)

    # -- storing -----------------------------------------------------------------------------------------

    def begin_store(self, chain: Sequence[bytes], lineage: Sequence[bytes] = ()) -> list[tuple[bytes, int]]:
        """Begin to store the keys not known to be present, up to the limit; none while the store is away."""
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
        """End a store. RuntimeError if it was not begun."""
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
        """A ticket per key; None if one is not known to be held."""
        now = self._clock()
        # An expired answer still counts: the load itself shows whether the value is there.
        if not all((answer := self._answers.get(key)) and answer.held for key in keys):
            return None
        if any(self._in_quarantine(key, now) for key in keys):
            return None
        self._loading.update(keys)
        return [self._namespace.ticket(self._epoch)] * len(keys)

    def end_load(self, key: bytes, *, ok: bool) -> None:
        """End a load. RuntimeError if it was not begun."""
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

    # -- other methods of a tier -------------------------------------------------------------------------

    def retain(self, keys: Sequence[bytes], hint: RetentionHint) -> None:
        """Nothing to do: the store evicts by itself."""

    def take_changes(self) -> TierChanges:
        """Changes of keys that this engine stored; other engines announce theirs."""
        changes = TierChanges(tuple(self._changes))
        self._changes.clear()
        return changes

    def reset(self) -> bool:
        """Begin a new epoch, which no other engine shares: earlier values are no longer held here.

        Other engines keep theirs. Always True: running transfers end in the old epoch.
        """
        if self._epoch + 1 >= EPOCHS_MAX:
            raise RuntimeError("too many resets; restart the engine")
        self._epoch += 1
        for key in list(self._answers):
            self._drop(key)
        self._open.clear()
        self._late.clear()
        log.warning(
            "the connector was reset: other engines may have other weights now, so until its restart this "
            "engine shares no blocks in store %s with other engines",
            self._store.name,
        )
        return True

    def busy(self) -> bool:
        return bool(self._storing) or bool(self._loading)

    def close(self) -> None:
        """End the lookup thread; may be called again."""
        self._lookup.close()

    # -- cached answers ----------------------------------------------------------------------------------

    def _cached(self, key: bytes, now: float) -> bool | None:
        """The cached answer; None if there is none or it has expired."""
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
        """Cache an unanswered key as absent: its request has waited long enough."""
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

    # -- queries -----------------------------------------------------------------------------------------

    def _begin_query(self, request_id: str, keys: list[bytes], now: float) -> bool:
        prefixes = self._namespace.digests(self._epoch)
        query = LookupQuery(keys, prefixes, self._settings.lookup_deadline_s)
        if not self._lookup.put(query):
            self.counters["questions_left_out"] += 1
            return False
        self._open[request_id] = _OpenQuery(query, now)
        return True

    def _take_answers(self, opened: _OpenQuery, now: float) -> None:
        query = opened.query
        done = query.done.is_set()
        self._cache_answers(opened)
        if done and query.error:
            self.counters["questions_failed"] += 1
            self._unavailable_until = now + self._settings.away_for_s
        elif not done:
            self.counters["questions_late"] += 1
            self._late.append(opened)
        for key in query.keys:
            if self._cached(key, now) is None:
                self._assume_absent(key)

    def _take_late_answers(self, now: float) -> None:
        """Use answers that came after their deadline for later lookups."""
        while self._late and self._late[0].query.done.is_set():
            opened = self._late.popleft()
            if opened.query.error:
                self._unavailable_until = now + self._settings.away_for_s
            self._cache_answers(opened)

    def _cache_answers(self, opened: _OpenQuery) -> None:
        for key, held in opened.query.answers():
            before = self._answers.get(key)
            # A store since the query is newer than its answer.
            if before is None or not before.ours or before.at < opened.at:
                self._remember(key, held=held)
