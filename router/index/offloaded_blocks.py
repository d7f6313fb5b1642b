"""Blocks of one engine that its connectors hold outside the GPU, by its events.

Own places (host memory, a local disk) are counted like the GPU: one store
adds a copy, one removal removes one, separately for each owner. SGLang's host memory has one copy of a page,
and publishes it again when it adds windows or states of it (``finish_write_through``, SGLang 0.5.23). Events
about a shared store, among them all of MooncakeStoreConnector, are hints: a block is present or not, however
often it was published, and it expires if not published again for ``facts.shared_store_ttl_s`` (at least half
of that), because the store's evictions are not published. A removal revokes what this engine published, not
what others did. An event of vLLM's own offloading is one chunk, however many hashes it lists; one removal
lists those of several chunks. LMCache's connector publishes chunks under hashes of its own; their blocks are
found by their tokens (``lmcache.py``), and a chunk is held once. Until the engine's hash scheme is proven
they wait.

Nothing here affects the GPU's residency; one engine has at most ``PLACES_MAX`` places, events of further ones
are counted and ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import (
    GROUPS_MAX,
    BlockHash,
    BlockRemoved,
    BlockStored,
    WireHash,
    to_block_hash,
)
from kvatlas.router.index.base import Index, Plane
from kvatlas.router.index.lmcache import LmcacheChunks
from kvatlas.router.index.places import (
    CPU,
    MOONCAKE,
    OWNER_CHARS_MAX,
    REMOTE,
    STORAGE,
    TURNS,
    connector_of,
    is_cleared_with_gpu,
    is_remote,
    is_shared,
    lmcache_place,
    medium_named,
    medium_of,
    owner_of,
)
from kvatlas.router.index.places import place as place_of

# Maximum number of places per engine outside its GPU. An engine with host memory and one shared store has
# three.
PLACES_MAX = 8
_KEYS_MAX = PLACES_MAX * GROUPS_MAX

_Key = tuple[str | None, int | None, str | None, str | None]
# Media as vLLM's own offloading names them: an event is one chunk.
_CHUNK_MEDIA = frozenset({CPU, STORAGE})
# Medium of LMCache's connector inside vLLM, and of vLLM's MooncakeStoreConnector, which names a group.
_OTHERS_CPU = "cpu"
# Tokens of chunks that wait for the engine's hash scheme: some ten milliseconds of hashing.
_WAITING_TOKENS_MAX = 1 << 16
_UNUSED_MAX = 8
_REASON_CHARS_MAX = 70


class OffloadedBlocks:
    """Blocks of one engine outside its GPU. ``rejected`` counts invalid events by reason."""

    def __init__(
        self,
        engine_id: str,
        index: Index,
        rejected: Counter[str],
        scheme: Callable[[], HashScheme | None] = lambda: None,
        block_tokens: Callable[[], int] = lambda: 0,
    ) -> None:
        """``scheme``: proven one of the engine; ``block_tokens``: length of its blocks, 0 if unknown."""
        self.engine_id = engine_id
        self._index = index
        self._rejected = rejected
        self._scheme = scheme
        self._block_tokens = block_tokens
        self._lmcache = LmcacheChunks(scheme, lambda reason: self._not_used(f"LMCache {reason}"))
        self.unused = Counter[str]()
        """Events in unknown media, and those of LMCache that are not used, by reason; at most ``_UNUSED_MAX``
        reasons, and ``other``."""
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
        # Tokens of LMCache's chunks.
        self._chunk_tokens = 0
        # Chunks, or what may be some, until the hash scheme is proven, by their hashes.
        self._waiting: dict[WireHash, BlockStored] = {}
        self._waiting_tokens = 0
        # Whether an event listed several hashes of one chunk.
        self._lists_inner = False
        self._turn = 0
        self._turned_s: float | None = None
        self.stores = frozenset()
        self._lmcache.clear()

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
        lmcache = self._is_lmcache(event)
        if lmcache is None:
            self._wait(event)
            return 0
        if lmcache:
            self._apply_lmcache(event)
            return 0
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

    def _is_lmcache(self, event: BlockStored | BlockRemoved) -> bool | None:
        """Whether LMCache tells it; None: a store that has to wait for the hash scheme. Its connector to a
        server of its own (``LMCacheMPConnector``, 0.5.6) calls host memory CPU, as vLLM's does, which names
        groups: one hash of several blocks is LMCache's."""
        if event.group_idx is not None or event.ownership is not None:
            return False
        if event.medium not in {CPU, _OTHERS_CPU}:
            return False
        if isinstance(event, BlockRemoved):
            return event.medium == _OTHERS_CPU or self._chunk_tokens > 0
        scheme = self._scheme()
        if event.medium == CPU:
            block = self._block_tokens() if scheme is None else scheme.hash_block_size
            one = len(event.block_hashes) == 1 and event.num_tokens() == event.block_size
            if not one or event.block_size <= block:
                return False
        return True if scheme is not None else None

    def _wait(self, event: BlockStored) -> None:
        self._waited(event.block_hashes)  # it may come twice
        tokens = event.num_tokens()
        if not tokens or self._waiting_tokens + tokens > _WAITING_TOKENS_MAX or len(event.block_hashes) != 1:
            self._not_used("LMCache chunks before the hash scheme is proven")
            return
        # The tokens alone: encoded, they keep the whole batch that they are a part of.
        kept = replace(event, token_ids=event.token_ids.copy(), extra_keys=None)
        self._waiting[event.block_hashes[0]] = kept
        self._waiting_tokens += tokens

    def _waited(self, hashes: Sequence[WireHash]) -> None:
        """Remove chunks from those that wait."""
        for name in hashes if self._waiting else ():
            if (event := self._waiting.pop(name, None)) is not None:
                self._waiting_tokens -= event.num_tokens()

    def settle(self) -> None:
        """Apply what waited for the hash scheme, or for the length of blocks, as far as they are known."""
        if self._waiting and (self._scheme() is not None or self._block_tokens()):
            waiting, self._waiting, self._waiting_tokens = self._waiting, {}, 0
            for event in waiting.values():
                self.stored(event)

    def _apply_lmcache(self, event: BlockStored | BlockRemoved) -> None:
        told = event.num_tokens() if isinstance(event, BlockStored) else 0
        size = self._chunk_tokens or told
        name = lmcache_place(size)
        for change in self._lmcache.changes(event, 0, size):
            if change is None:
                self._index.clear(self.engine_id, name)
            elif not change.medium:
                self._chunk_tokens = size
                self._index.set_copies(self.engine_id, Plane(name, 0), change.block, int(change.stored))

    @staticmethod
    def _is_chunk(event: BlockStored | BlockRemoved, plane: Plane) -> bool:
        return event.medium in _CHUNK_MEDIA and not connector_of(plane.medium)

    def removed(self, event: BlockRemoved) -> None:
        """Remove one copy of each block, or set the number of copies given in the event."""
        self._waited(event.block_hashes)
        if self._is_lmcache(event):
            self._apply_lmcache(event)
            return
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

    def _not_used(self, reason: str) -> None:
        known, reason = self.unused, reason[:_REASON_CHARS_MAX]
        known[reason if reason in known or len(known) < _UNUSED_MAX else "other"] += 1

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
        if event.medium == _OTHERS_CPU and event.group_idx is not None and owner is None:
            if self.followed:
                return None
            medium, owner, locality = STORAGE, MOONCAKE, REMOTE
        if medium is None:
            self._rejected["unknown_medium"] += 1
            self._not_used(f"medium {str(event.medium)[:40]}")
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
