"""Eviction order under retention hints, shared with the connectors' policy ``hinted``.

Keys without a live hint go first, by recency. Keys with one go by value and then by recency. A hint ends
with its time to live. One owner's hints cover at most a share of the slots, and all hints together at most
``HINTED_SHARE_MAX``, so prompts without hints always find room. An owner beyond its share gives up its own
least valuable keys; where all hints together are at their limit, the owner with the most keys does.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import count, islice
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

import msgspec

# Each owner costs a few hundred bytes, and a search over all of them where the limit of all hints is reached.
OWNERS_MAX = 256
HINTED_SHARE_MAX = 0.75
OWNER_SHARE = 0.5
TTL_S_MAX = 86_400.0
# Values are compared by quarter: finer differences are within the error of an estimate.
VALUE_LEVELS = 4
_DEADLINES_SPARE = 64
K = TypeVar("K", bound=Hashable)


class RetentionHint(NamedTuple):
    """A router's advice on the blocks of one request."""

    ttl_s: float
    """How long a next turn may take to come, above 0 and up to ``TTL_S_MAX``."""
    value: float = 1.0
    """Probability that it comes, 0 to 1."""
    owner: str = ""
    """The tenant whose share the hint counts in."""
    tokens: int | None = None
    """Tokens from the start of the prompt that it covers; None: all."""

    @property
    def level(self) -> int:
        return min(VALUE_LEVELS - 1, int(self.value * VALUE_LEVELS))


class HintCounters(msgspec.Struct):
    """Numbers of keys since the start."""

    retained: int = 0
    """Given a hint, or a longer one."""
    saved: int = 0
    """Used under a live hint after younger keys had been evicted: ``lru`` would have evicted them."""
    expired: int = 0
    """Not used before their hint ended."""
    over_share: int = 0
    """Given no hint, or deprived of one, because of the shares."""


class _Live(NamedTuple):
    """A live hint of one key."""

    owner: str
    level: int
    deadline_s: float


class RetentionOrder(Generic[K]):
    """Order in which the keys of a tier with ``slots`` slots are evicted. All times are of one clock.

    Invariants: an added key is in exactly one queue until it is removed or chosen; live hints are within the
    shares; there are at most twice as many deadlines as live hints, and a constant.
    """

    def __init__(self, slots: int, owner_share: float = OWNER_SHARE) -> None:
        self.counters = HintCounters()
        self._owner_max = int(slots * min(owner_share, HINTED_SHARE_MAX))
        self._hinted_max = int(slots * HINTED_SHARE_MAX)
        # Queues, oldest first, with the stamp of each key's last use. Lapsed: had a hint and lost it.
        self._plain: OrderedDict[K, int] = OrderedDict()
        self._lapsed: OrderedDict[K, int] = OrderedDict()
        self._owned: dict[str, list[OrderedDict[K, int]]] = {}
        self._sizes: Counter[str] = Counter()
        self._live: dict[K, _Live] = {}
        self._deadlines: list[tuple[float, int, K]] = []
        self._stamps = count()
        self._evicted_stamp = -1

    @property
    def num_hinted(self) -> int:
        """Number of keys with a live hint, as of the last call with a time."""
        return len(self._live)

    def add(self, keys: Sequence[K]) -> None:
        """Add new keys of one request, in prompt order: the last one is evicted first."""
        for key in reversed(keys):
            self._plain[key] = next(self._stamps)

    def use(self, keys: Sequence[K], now: float) -> None:
        """Mark keys of one request, in prompt order, as used."""
        self._expire(now)
        for key in reversed(keys):
            queue, live = self._queue(key), key in self._live
            # Without its hint this key would have been evicted: younger ones have been.
            self.counters.saved += live and queue[key] < self._evicted_stamp
            del queue[key]
            (queue if live else self._plain)[key] = next(self._stamps)

    def retain(self, keys: Sequence[K], hint: RetentionHint, now: float) -> None:
        """Apply a hint to different keys of one request, in prompt order, that were just added or used."""
        self._expire(now)
        owner = hint.owner
        # Owners cannot shorten each other's hints: a tenant could otherwise evict another one's prefix.
        keys = [key for key in keys if (live := self._live.get(key)) is None or live.owner == owner]
        too_many_owners = owner not in self._sizes and len(self._sizes) >= OWNERS_MAX
        for key in keys:
            self.remove(key)
        # The start of the prompt gets the hint: the end of a prefix is useless without it.
        room = 0 if too_many_owners else self._make_room(hint, len(keys))
        self.counters.retained += room
        self.counters.over_share += len(keys) - room
        self.add(keys[room:])
        deadline_s = now + hint.ttl_s
        for key in reversed(keys[:room]):
            stamp = next(self._stamps)
            queues = self._owned.setdefault(owner, [OrderedDict() for _ in range(VALUE_LEVELS)])
            queues[hint.level][key] = stamp
            self._sizes[owner] += 1
            self._live[key] = _Live(owner, hint.level, deadline_s)
            heapq.heappush(self._deadlines, (deadline_s, stamp, key))
        # Removed and renewed hints leave their deadlines in the heap; rebuilding it at twice the live ones is
        # O(1) per hint.
        if len(self._deadlines) > 2 * len(self._live) + _DEADLINES_SPARE:
            self._deadlines = [entry for entry in self._deadlines if self._is_current(entry)]
            heapq.heapify(self._deadlines)

    def remove(self, key: K) -> None:
        del self._queue(key)[key]
        live = self._live.pop(key, None)
        if live is not None:
            self._sizes[live.owner] -= 1
            if not self._sizes[live.owner]:
                del self._sizes[live.owner], self._owned[live.owner]

    def take_oldest(self, number: int, spared: Callable[[K], bool], now: float) -> list[K]:
        """Choose and remove up to ``number`` keys that are not spared."""
        self._expire(now)
        chosen = list(islice((pair for pair in self._ranked() if not spared(pair[1])), number))
        for stamp, key in chosen:
            self._evicted_stamp = max(self._evicted_stamp, stamp)
            self.remove(key)
        return [key for _, key in chosen]

    def _ranked(self) -> Iterator[tuple[int, K]]:
        """All keys with their stamps, the first to be evicted first."""
        yield from _by_stamp([self._plain, self._lapsed])
        for level in range(VALUE_LEVELS):
            yield from _by_stamp([queues[level] for queues in self._owned.values()])

    def _queue(self, key: K) -> OrderedDict[K, int]:
        live = self._live.get(key)
        if live is not None:
            return self._owned[live.owner][live.level]
        return self._plain if key in self._plain else self._lapsed

    def _make_room(self, hint: RetentionHint, wanted: int) -> int:
        """Take hints away until ``wanted`` more keys of this owner fit; returns how many do."""
        # Once: the search costs as much as there are owners.
        largest = max(self._sizes, key=self._sizes.__getitem__, default=hint.owner)
        while True:
            own, left = self._sizes.get(hint.owner, 0), self._hinted_max - len(self._live)
            room = min(self._owner_max - own, left)
            if room >= wanted:
                return wanted
            giver = hint.owner
            # The limit of all hints is reached: the owner with the most keys gives up some, so that one
            # tenant cannot occupy all.
            if room == left and self._sizes.get(largest, 0) > own + room + 1:
                giver = largest
            least = self._least(giver)
            if least is None or (giver == hint.owner and self._live[least].level > hint.level):
                return room
            self.counters.over_share += 1
            self._lapse(least)

    def _least(self, owner: str) -> K | None:
        """The least valuable and then least recently used hinted key of an owner."""
        return next((next(iter(queue)) for queue in self._owned.get(owner, ()) if queue), None)

    def _lapse(self, key: K) -> None:
        stamp = self._queue(key)[key]
        self.remove(key)
        self._lapsed[key] = stamp

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            if self._is_current(entry):
                self.counters.expired += 1
                self._lapse(entry[2])

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        live = self._live.get(entry[2])
        return live is not None and live.deadline_s == entry[0]


def _by_stamp(queues: Iterable[OrderedDict[K, int]]) -> Iterator[tuple[int, K]]:
    """Keys of queues, each almost in the order of its stamps, with these; the oldest first."""
    pairs = [((stamp, key) for key, stamp in queue.items()) for queue in queues]
    return heapq.merge(*pairs, key=itemgetter(0))
