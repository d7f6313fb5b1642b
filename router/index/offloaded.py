"""Blocks that an engine's connectors hold outside the GPU: what it would load, and what it holds.

Hit rules: the GPU hit ``L`` is determined first. A connector is then asked for the rest: from ``L`` on it
looks in its own places only, by the rules of ``hit_rules.py``, where everything before ``L`` counts as
present. Hence for a boundary ``x > L``: full attention needs every block from ``L`` to ``x``, a window its
last blocks before ``x`` as far as they lie after ``L``, Mamba the state at ``x``. A boundary that needs
blocks of two connectors is not valid. Places without an owner in events belong to one connector (vLLM's
offloading looks in all its tiers), and each owner is a separate connector. One connector loads everything:
the one that reaches furthest (the first that holds anything with ``ModelFacts.first_connector_loads``); host
memory comes before storage, then by name.

vLLM's own offloading keeps chunks of ``CacheLayout.blocks_per_chunk`` blocks, each under the hash at its end
(``_lookup_complete_chunks``, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py, 0.33): it loads
whole chunks, from the one around ``L`` on, and nothing that is less than a chunk.

If hits may end inside a block, a connector is asked from the last whole block on; the block in which a load
ends must be held under the hash at that end, and with EAGLE loads end on whole blocks. Blocks that any engine
wrote to a shared store are available to every engine that uses it. vLLM's MooncakeStoreConnector and LMCache
look a prompt up in their store from its first token on, whatever is on the GPU, and load what goes beyond
``L`` (``Reach.alone``; ``lookup``, mooncake/store/worker.py, 0.33). Sources: vLLM 0.32
(``Scheduler.schedule``, the offloading connectors' lookup, MultiConnector); checked against a direct
implementation in tests/router/index/rules/test_offload.py.

The writer (``OffloadedBlocks``): own places (host memory, a local disk) are counted like the GPU: one store
adds a copy, one removal removes one, separately for each owner. SGLang's host memory has one copy of a page,
and publishes it again when it adds windows or states of it (``finish_write_through``, SGLang 0.5.23). Events
about a shared store, among them all of MooncakeStoreConnector, are hints: a block is present or not, however
often it was published, and it expires if not published again for ``facts.shared_store_ttl_s`` (at least half
of that), because the store's evictions are not published. A removal revokes what this engine published, not
what others did. An event of vLLM's own offloading is one chunk, however many hashes it lists; one removal
lists those of several chunks.

Nothing here affects the GPU's residency; one engine has at most ``PLACES_MAX`` places, events of further ones
are counted and ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvatlas.publisher.events import GROUPS_MAX, MEDIA, BlockHash, BlockRemoved, BlockStored, to_block_hash
from kvatlas.publisher.groups import scheduler_block_size
from kvatlas.router.index.base import Index, Plane, Rows, Words
from kvatlas.router.index.hit_rules import WordHits, end_of, evaluate
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.index.places import (
    CPU,
    GPU,
    MOONCAKE,
    OWNER_CHARS_MAX,
    REMOTE,
    STORAGE,
    TURNS,
    connector_of,
    is_cleared_with_gpu,
    is_remote,
    is_shared,
    medium_named,
    medium_of,
    owner_of,
    reach_of,
)
from kvatlas.router.index.places import place as place_of
from kvatlas.router.index.run_ends import Ends

# Word numbers from here down are of other replicas' rows; -1 is unused (``NOWHERE``).
_ELSEWHERE = -2
# Maximum number of places per engine outside its GPU. An engine with host memory and one shared store has
# three.
PLACES_MAX = 8
_KEYS_MAX = PLACES_MAX * GROUPS_MAX

_Key = tuple[str | None, int | None, str | None, str | None]


class Tier(NamedTuple):
    """All places in which one connector looks.

    ``layers``: media from the nearest on, each with all places up to and including it, so that the last layer
    is complete.
    """

    stores: frozenset[str]
    """Shared stores in it, by owner; it applies to engines that use one of them."""
    layers: tuple[tuple[str, tuple[str, ...]], ...]


class Extent(NamedTuple):
    """Per layer of a tier: its medium, and the hits with this layer and the nearer ones, by bit of a word."""

    tier: Tier
    layers: tuple[tuple[str, WordHits], ...]
    tokens_min: int
    """Fewest tokens that it loads."""


def tiers(rows: Rows) -> tuple[Tier, ...]:
    """Return the connectors that hold anything, in the order in which they are asked."""
    return _tiers(frozenset(plane.medium for plane, _ in rows.places if plane.medium != GPU))


@lru_cache(maxsize=256)
def _tiers(places: frozenset[str]) -> tuple[Tier, ...]:
    of_connector: dict[str, list[str]] = {}
    for place in sorted(places):
        of_connector.setdefault(connector_of(place), []).append(place)
    found: list[tuple[int, str, Tier]] = []
    for connector, held in of_connector.items():
        layers: list[tuple[str, tuple[str, ...]]] = []
        up_to: tuple[str, ...] = ()
        for medium in MEDIA[1:]:
            here = tuple(place for place in held if medium_of(place) == medium)
            if here:
                up_to += here
                layers.append((medium, up_to))
        stores = frozenset(owner_of(place) for place in held if is_shared(place))
        if layers:
            found.append((MEDIA.index(layers[0][0]), connector, Tier(stores, tuple(layers))))
    return tuple(tier for _, _, tier in sorted(found, key=lambda each: each[:2]))


def tier_extents(
    rows: Rows, layout: CacheLayout, num_tokens: int, word: int, on_gpu: WordHits, *, detail: bool = False
) -> tuple[Extent, ...]:
    """Return the extent of the hits of the 64 engines of ``word`` with each tier."""
    below = _below(on_gpu.hit_ends, layout, rows.num_hashes)
    found: list[Extent] = []
    for tier in tiers(rows):
        first = tier.layers[0][1]
        chunk, alone = _chunk(layout, first), reach_of(first[0]).alone
        if not chunk:
            continue
        ends = _ends(layout, chunk)
        before = np.zeros(rows.num_hashes, np.uint64) if alone else below
        layers = tuple(
            (
                medium,
                evaluate(
                    _joined(rows, layout, word, places, before, chunk),
                    ends,
                    num_tokens,
                    word=word,
                    loading=True,
                    detail=detail,
                ),
            )
            for medium, places in tier.layers
        )
        tokens_min = 0
        if chunk > 1 and not alone:
            tokens_min = chunk * max([group.block_size for group in layout.groups], default=0)
        found.append(Extent(tier, layers, tokens_min))
    return tuple(found)


def usable(extents: tuple[Extent, ...], stores: frozenset[str]) -> tuple[Extent, ...]:
    """Return the tiers that an engine has; ``stores`` are the shared stores it uses."""
    return tuple(r for r in extents if not r.tier.stores or not r.tier.stores.isdisjoint(stores))


def loaded(extents: tuple[Extent, ...], bit: int, hit: int, *, first: bool = False) -> dict[str, int]:
    """Return the tokens that one engine would load beyond its GPU hit, by medium; ``extents`` are of its
    tiers.

    ``first``: the first connector that has any loads, however little it has.
    """
    most: dict[str, int] = {}
    furthest = hit
    for _, layers, tokens_min in extents:
        by_medium: dict[str, int] = {}
        at = hit
        for medium, hits in layers:
            end = end_of(hits.hit_ends, bit)
            if end > at:
                by_medium[medium] = end - at
                at = end
        if at > furthest and at - hit >= tokens_min:
            most, furthest = by_medium, at
            if first:
                break
    return most


def held_alone(rows: Rows, layout: CacheLayout, num_tokens: int, word: int) -> list[int]:
    """Return the tokens of the prompt that the host memory of vLLM's own offloading holds by itself in every
    group, for the 64 engines of ``word``, by bit. Its ``p2p`` tier serves others from there
    (vllm/v1/kv_offload/tiering, 0.32)."""
    for tier in tiers(rows):
        medium, places = tier.layers[0]
        if medium == CPU and not connector_of(places[0]):
            nothing, chunk = np.zeros(rows.num_hashes, np.uint64), layout.blocks_per_chunk
            own = _joined(rows, layout, word, places, nothing, chunk)
            return evaluate(own, _ends(layout, chunk), num_tokens, word=word, loading=True).hit
    return []


def shared_part(rows: Rows) -> Rows:
    """Return the rows of shared stores in the shared index, in a form that can be merged with local rows."""
    columns = {
        (plane, _ELSEWHERE - word): column
        for (plane, word), column in rows.columns.items()
        if is_shared(plane.medium)
    }
    return Rows(rows.num_hashes, columns)


def _chunk(layout: CacheLayout, places: tuple[str, ...]) -> int:
    """Return the blocks of a chunk of the connector that has these places; 0 if blocks do not divide it."""
    if not connector_of(places[0]):
        return layout.blocks_per_chunk
    tokens = reach_of(places[0]).chunk_tokens
    size = max([group.block_size for group in layout.groups], default=1)
    return 1 if not tokens else 0 if tokens % size else tokens // size


@lru_cache(maxsize=256)
def _ends(layout: CacheLayout, chunk: int) -> CacheLayout:
    """Return the layout with the boundaries at which a load in chunks of this many blocks may end."""
    whole = layout.alignment
    if not layout.lookahead and any(c.spec.is_eagle for c in layout.classes):
        whole = max(whole, scheduler_block_size(layout.groups))
    if chunk > 1:
        whole = math.lcm(whole, *[chunk * group.block_size for group in layout.groups])
    return layout if layout.alignment == whole else replace(layout, alignment=whole)


def _joined(
    rows: Rows, layout: CacheLayout, word: int, places: tuple[str, ...], below: Words, chunk: int
) -> Rows:
    """Return one tier's rows as GPU rows, with everything before the GPU hits present."""
    columns: dict[tuple[Plane, int], Words] = {}
    for group in layout.groups:
        held = np.zeros(rows.num_hashes, np.uint64)
        for place in places:
            plane = Plane(place, group.group_idx)
            held = held | (_held_by_any(rows, plane) if is_shared(place) else rows.plane(plane, word))
        if chunk > 1:
            held = _whole_chunks(held, chunk * group.block_size // layout.hash_block_size)
        columns[Plane(GPU, group.group_idx), word] = held | below
    return Rows(rows.num_hashes, columns)


def _whole_chunks(held: Words, size: int) -> Words:
    """Return all hash blocks of the chunks of this size whose last one is held."""
    found = np.zeros_like(held)
    ends = held[size - 1 :: size]
    found[: len(ends) * size] = np.repeat(ends, size)
    return found


def _held_by_any(rows: Rows, plane: Plane) -> Words:
    """Return all bits set for blocks that any engine published."""
    told = np.zeros(rows.num_hashes, bool)
    for (at, _), column in rows.columns.items():
        if at == plane:
            told |= column != 0
    return np.where(told, ~np.uint64(0), np.uint64(0))


def _below(hits: Ends, layout: CacheLayout, num_hashes: int) -> Words:
    """Return per hash block the engines whose GPU hit, rounded down to a whole block, covers it."""
    whole = scheduler_block_size(layout.groups)
    ends = np.zeros(num_hashes, np.uint64)
    for tokens, bits in hits:
        blocks = tokens // whole * whole // layout.hash_block_size
        if blocks:
            ends[blocks - 1] |= np.uint64(bits)
    covered: Words = np.bitwise_or.accumulate(ends[::-1])[::-1]
    return covered


# Media as vLLM's own offloading and LMCache name them: an event is one chunk.
_CHUNK_MEDIA = frozenset({CPU, STORAGE, "cpu"})
_UNKNOWN_MEDIA_MAX = 8
_MEDIUM_CHARS_MAX = 40


class OffloadedBlocks:
    """Blocks of one engine outside its GPU. ``rejected`` counts invalid events by reason."""

    def __init__(self, engine_id: str, index: Index, rejected: Counter[str]) -> None:
        self.engine_id = engine_id
        self._index = index
        self._rejected = rejected
        self.unknown_media = Counter[str]()
        """Events in unknown media, by name; at most ``_UNKNOWN_MEDIA_MAX`` names, and ``other``."""
        # Shared stores that this engine wrote to.
        self.stores: frozenset[str] = frozenset()
        self.followed: frozenset[str] = frozenset()
        """Stores with feeds of their own that it loads from."""
        self.reset()

    def reset(self) -> None:
        """Reset after a restart of the engine; the caller resets the index."""
        self._planes: dict[_Key, Plane] = {}
        self._places: set[str] = set()
        self._cleared_with_gpu: set[str] = set()
        # Host memory of vLLM's own connector, and whether it may have been emptied without events.
        self._own_host: str | None = None
        self._doubted = False
        # Whether an event listed several hashes of one chunk.
        self._lists_inner = False
        self._turn = 0
        self._turned_s: float | None = None
        self.stores = frozenset()

    def follow(self, stores: frozenset[str]) -> None:
        """Set the stores with feeds of their own that this engine loads from: these tell all that vLLM's
        MooncakeStoreConnector would, and what is removed."""
        self.followed = stores
        self._planes.clear()
        for name in [name for name in self._places if owner_of(name) == MOONCAKE]:
            self._places.discard(name)
            self._index.clear(self.engine_id, name)
        self.stores -= {MOONCAKE}

    def stored(self, event: BlockStored) -> int:
        """Add one copy of each block; where there is one at most, mark it present. Returns the tokens of the
        chunk that the event describes; 0 if it describes blocks."""
        plane = self._plane(event)
        if plane is None:
            return 0
        hashes = [to_block_hash(value) for value in event.block_hashes]
        chunk = event.num_tokens() if self._is_chunk(event, plane) else 0
        if chunk and len(hashes) > 1:
            # With ``self_describing_kv_events``; only the last one is a key.
            hashes, self._lists_inner = hashes[-1:], True
        if not is_shared(plane.medium) and not is_cleared_with_gpu(event.medium):
            if self._doubted and plane.medium == self._own_host and self._holds(plane, hashes):
                self._empty_own_host()
            self._index.store(self.engine_id, plane, hashes)
            return chunk
        for block in hashes:
            self._index.set_copies(self.engine_id, plane, block, 1)
        return 0

    @staticmethod
    def _is_chunk(event: BlockStored | BlockRemoved, plane: Plane) -> bool:
        return event.medium in _CHUNK_MEDIA and not connector_of(plane.medium)

    def removed(self, event: BlockRemoved) -> None:
        """Remove one copy of each block, or set the number of copies given in the event."""
        plane = self._plane(event)
        if plane is None:
            return
        hashes = [to_block_hash(value) for value in event.block_hashes]
        if self._lists_inner and self._is_chunk(event, plane):
            hashes = [block for block in hashes if self._index.holds(self.engine_id, plane.medium, block)]
        counts = event.remaining_copy_counts
        if is_shared(plane.medium):
            for turn in TURNS:
                told = Plane(_of_turn(plane.medium, turn), plane.group_idx)
                for block in hashes if told.medium in self._places else ():
                    self._index.set_copies(self.engine_id, told, block, 0)
        elif counts is None or len(counts) != len(hashes):
            self._index.remove(self.engine_id, plane, hashes)
        else:
            for block, left in zip(hashes, counts, strict=True):
                if left is None:
                    self._index.remove(self.engine_id, plane, (block,))
                else:
                    self._index.set_copies(self.engine_id, plane, block, left)

    def lost(self, blocks: Sequence[BlockHash], groups: int, *, shared_only: bool) -> None:
        """Forget what was found to be in no storage any more, in any of this many groups; ``shared_only``: by
        another engine, which looks in shared stores only."""
        for name in self._places:
            if medium_of(name) == STORAGE and (is_shared(name) or not shared_only):
                for plane in (Plane(name, group) for group in range(groups)):
                    for block in blocks:
                        self._index.set_copies(self.engine_id, plane, block, 0)

    def gpu_cleared(self, *, connector: bool = False) -> None:
        """Handle a cleared GPU cache: empty the media that the engine clears with it. ``connector``: the call
        is known to reset vLLM's connector too. Others may have done so (``/sleep``, ``/pause``), and its
        OffloadingConnector publishes nothing of it (``CPUOffloadingManager.reset_cache``,
        v1/kv_offload/cpu/manager.py, vLLM 0.32 and 0.33). It stores no block that it holds, so the first one
        that it stores again is the proof."""
        for name in self._cleared_with_gpu:
            self._index.clear(self.engine_id, name)
        self._doubted = True
        if connector:
            self._empty_own_host()

    def _empty_own_host(self) -> None:
        self._doubted = False
        if self._own_host is not None:
            self._index.clear(self.engine_id, self._own_host)

    def _holds(self, plane: Plane, hashes: list[BlockHash]) -> bool:
        slot = self._index.slot(self.engine_id)
        if slot is None:
            return False
        held = self._index.lookup(hashes).plane(plane, slot.word)
        return bool((held >> np.uint64(slot.bit) & np.uint64(1)).any())

    def age(self, now_s: float, ttl_s: float) -> None:
        """Expire shared-store blocks older than ``ttl_s``; call it several times per ``ttl_s``."""
        if not self.stores:
            self._turned_s = None
            return
        if self._turned_s is None:
            self._turned_s = now_s
        if now_s - self._turned_s < ttl_s / 2:
            return
        self._turned_s = now_s
        self._turn = 1 - self._turn
        self._planes = {key: plane for key, plane in self._planes.items() if not is_shared(plane.medium)}
        for name in [_of_turn(name, self._turn) for name in self._places if is_shared(name)]:
            if name in self._places:
                self._places.discard(name)
                self._index.clear(self.engine_id, name)

    def _plane(self, event: BlockStored | BlockRemoved) -> Plane | None:
        key = (event.medium, event.group_idx, event.locality, event.ownership)
        plane = self._planes.get(key)
        if plane is None:
            plane = self._find(event)
            if plane is not None and len(self._planes) < _KEYS_MAX:
                self._planes[key] = plane
        return plane

    def _find(self, event: BlockStored | BlockRemoved) -> Plane | None:
        medium, owner, locality = medium_named(event.medium), event.ownership, event.locality
        if event.medium == "cpu" and event.group_idx is not None and owner is None:
            if self.followed:
                return None
            medium, owner, locality = STORAGE, MOONCAKE, REMOTE
        if medium is None:
            self._rejected["unknown_medium"] += 1
            known, name = self.unknown_media, str(event.medium)[:_MEDIUM_CHARS_MAX]
            known[name if name in known or len(known) < _UNKNOWN_MEDIA_MAX else "other"] += 1
            return None
        if owner is not None and len(owner) > OWNER_CHARS_MAX:
            self._rejected["owner_too_long"] += 1
            return None
        shared = is_remote(medium, locality, owner)
        name = place_of(medium, owner, turn=self._turn if shared else None)
        if name not in self._places:
            if len(self._places) >= PLACES_MAX:
                self._rejected["too_many_places"] += 1
                return None
            self._places.add(name)
        if is_cleared_with_gpu(event.medium):
            self._cleared_with_gpu.add(name)
        if event.medium == name == CPU:
            self._own_host = name
        if shared:
            self.stores |= {owner_of(name)}
        return Plane(name, event.group_idx or 0)


def _of_turn(name: str, turn: int) -> str:
    """Return the shared store's place for ``turn``."""
    head, at, owner = name.partition("@")
    return f"{head.partition('*')[0]}*{turn}{at}{owner}"
