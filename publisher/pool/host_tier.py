"""Blocks that a KV connector would keep outside a simulated engine's GPU, load and report.

The least recently used blocks are evicted, those with a retention hint later. This is the connectors' policy
``hinted``, and without hints ``lru``, with the same hits (``tests/connectors/tier/test_simulated_tier.py``).
A request loads the blocks held here after its GPU hit, as far as all groups can resume, like a connector;
moving the bytes takes time and no compute.

Invariant: the blocks held are those of the stored events minus those of the removed ones.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import count, islice
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from kvatlas.publisher.events import BlockRemoved, BlockStored, Event
from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.publisher.pool.hits import HitFinder
from kvatlas.publisher.pool.layout import PoolLayout
from kvatlas.publisher.pool.store import Copies, PoolRequest, WireHash

OWNER = "kvatlas-host"
_THERE: Copies = 1

HeldKey = tuple[int, WireHash]
"""Group, and the hash at the block's end."""
_ByGroup = Sequence[dict[WireHash, Copies]]


# Eviction order under retention hints, shared with the connectors' policy ``hinted``.
#
# Keys without a live hint go first, by recency. Keys with one go by value and then by recency. A hint ends
# with its time to live. One owner's hints cover at most a share of the slots, and all hints together at most
# ``HINTED_SHARE_MAX``, so prompts without hints always find room. An owner beyond its share gives up its own
# least valuable keys; where all hints together are at their limit, the owner with the most keys does.


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


class HostTier:
    """A store of ``blocks_max`` blocks of any group, used by the scheduler's thread only. Times matter only
    where requests have hints. ``owner`` in events: None as in those of vLLM's own offloading."""

    def __init__(
        self,
        layout: PoolLayout,
        blocks_max: int,
        owner_share: float = OWNER_SHARE,
        *,
        owner: str | None = OWNER,
    ) -> None:
        if layout.uses_eagle:
            # A connector finds hits of whole blocks only, if EAGLE drops the last one.
            layout = replace(layout, alignment=layout.scheduler_block_size, partial_hits=False)
        self._layout = layout
        self._blocks_max = blocks_max
        self._owner = owner
        self._held: set[HeldKey] = set()
        self._order: RetentionOrder[HeldKey] = RetentionOrder(blocks_max, owner_share)
        self._by_group: list[dict[WireHash, Copies]] = [{} for _ in layout.groups]
        full = [group for group in layout.groups if group.family is Family.FULL]
        self._full = full[0] if full and not layout.partial_hits else None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: HeldKey) -> bool:
        return key in self._held

    def follow(self, events: Iterable[Event]) -> list[Event]:
        """Copy the blocks that the pool stored; returns the connector's events."""
        published: list[Event] = []
        for event in events:
            if isinstance(event, BlockStored):
                published += self._store(event)
        return published

    def store(
        self, chain: Sequence[HeldKey], hint: RetentionHint | None = None, now: float = 0.0
    ) -> tuple[list[HeldKey], list[HeldKey]]:
        """Store these blocks as far as there is room; returns the new blocks and the evicted ones."""
        held, chosen = self._held, set(chain)
        self.use([key for key in chain if key in held], now=now)
        new = [key for key in dict.fromkeys(chain) if key not in held]
        missing = len(held) + len(new) - self._blocks_max
        gone = self._order.take_oldest(missing, chosen.__contains__, now) if missing > 0 else []
        new = new[: self._blocks_max - len(held) + len(gone)]
        for group, block in gone:
            held.remove((group, block))
            del self._by_group[group][block]
        for key in new:
            held.add(key)
            self._by_group[key[0]][key[1]] = _THERE
        self._order.add(new)
        if hint is not None:
            self._order.retain([key for key in dict.fromkeys(chain) if key in held], hint, now)
        return new, gone

    def use(self, keys: Sequence[HeldKey], hint: RetentionHint | None = None, now: float = 0.0) -> None:
        """Mark these blocks, which must be held, as recently used."""
        self._order.use(keys, now)
        if hint is not None:
            self._order.retain(keys, hint, now)

    def reach(self, request: PoolRequest, hit: int, more: AbstractSet[HeldKey] = frozenset()) -> int:
        """Tokens covered by the GPU hit and a load together; at least ``hit``. ``more``: blocks held
        elsewhere that would be loaded too."""
        hashes = request.known_hashes()
        whole = self._layout.scheduler_block_size
        local = hit // whole * whole
        by_group = self._by_group
        if more:
            by_group = [dict(held) for held in by_group]
            for group, block in more:
                by_group[group][block] = _THERE
        if not self._goes_on(hashes, local, by_group):
            return hit
        before = set(hashes[: local // self._layout.hash_block_size])
        maps = [_LoadView(before, held) for held in by_group]
        finder = HitFinder(self._layout, maps)  # type: ignore[arg-type]
        found = finder.find(hashes, request.num_tokens - 1).length
        while found > hit and not self._ends_are_held(hashes, found, by_group):
            found = finder.find(hashes, found - 1).length
        return max(hit, found)

    def missing_keys(self, request: PoolRequest) -> list[HeldKey]:
        """All blocks of the prompt that are not held here, under the hash at any of their ends."""
        groups = [group.group_idx for group in self._layout.groups]
        keys = ((group, block) for block in request.known_hashes() for group in groups)
        return [key for key in keys if key not in self._held]

    def load_keys(self, request: PoolRequest, hit: int, end: int) -> list[HeldKey]:
        """The blocks that a load from the GPU hit to ``end`` moves, in prompt order."""
        unit, hashes = self._layout.hash_block_size, request.hashes
        found: list[tuple[int, int, WireHash]] = []
        for group in self._layout.groups:
            size = group.block_size
            first = max(hit, _first_read(group, end))
            for position in range(first // size, -(-end // size)):
                last = min((position + 1) * size, end)
                found.append((last, group.group_idx, hashes[last // unit - 1]))
        return [(group_idx, block) for _, group_idx, block in sorted(found, key=lambda one: one[:2])]

    def _goes_on(self, hashes: Sequence[WireHash], local: int, by_group: _ByGroup) -> bool:
        """Whether a load is possible: full attention needs the next block."""
        if self._full is None:
            return True
        end = (local // self._full.block_size + 1) * self._full.block_size // self._layout.hash_block_size
        return end <= len(hashes) and hashes[end - 1] in by_group[self._full.group_idx]

    def _ends_are_held(self, hashes: Sequence[WireHash], end: int, by_group: _ByGroup) -> bool:
        """Whether each block in which a load would end is held under the hash at that end."""
        last = hashes[end // self._layout.hash_block_size - 1]
        inside = (group.group_idx for group in self._layout.groups if end % group.block_size)
        return all(last in by_group[group_idx] for group_idx in inside)

    def _store(self, event: BlockStored) -> list[Event]:
        group = event.group_idx or 0
        new, gone = self.store([(group, block) for block in event.block_hashes])
        events: list[Event] = [BlockRemoved([block], "CPU", idx, "LOCAL", self._owner) for idx, block in gone]
        if new:
            events.append(
                replace(
                    event,
                    block_hashes=[block for _, block in new],
                    extra_keys=None,
                    medium="CPU",
                    locality="LOCAL",
                    ownership=self._owner,
                )
            )
        return events


class _LoadView:
    """One group's blocks as a finder looks them up: the blocks held here, and all before the load."""

    __slots__ = ("_before", "_held")

    def __init__(self, before: set[WireHash], held: dict[WireHash, Copies]) -> None:
        self._before, self._held = before, held

    def __contains__(self, block: WireHash) -> bool:
        return block in self._before or block in self._held

    def __getitem__(self, block: WireHash) -> Copies:
        return _THERE


def _first_read(group: GroupSpec, end: int) -> int:
    """The first token that a group still reads when a prompt continues from ``end``."""
    match group.family:
        case Family.WINDOW:
            return end - (group.sliding_window or 1) + 1
        case Family.CHUNKED:
            chunk = group.attention_chunk_size or group.block_size
            return end // chunk * chunk
        case Family.MAMBA:
            return end - 1
        case _:
            return 0
