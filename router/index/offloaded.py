"""Blocks of one engine outside its GPU, as published by its connectors: the writer's side.

Own places (host memory, a local disk) are counted like the GPU: one store adds a copy, one removal removes
one, separately for each owner. Events about a shared store are hints: a block is present or not, however
often it was published, and it expires if not published again for ``facts.shared_store_ttl_s`` (at least half
of that), because the store's evictions are not published. A removal revokes what this engine published, not
what others did.

Nothing here affects the GPU's residency; one engine has at most ``PLACES_MAX`` places, events of further ones
are counted and ignored.
"""

from __future__ import annotations

from collections import Counter

from publisher.events import GROUPS_MAX, BlockRemoved, BlockStored, to_block_hash
from router.index.base import (
    OWNER_CHARS_MAX,
    TURNS,
    Index,
    Plane,
    is_cleared_with_gpu,
    is_remote,
    is_shared,
    medium_named,
    owner_of,
    place,
)

# Maximum number of places per engine outside its GPU. An engine with host memory and one shared store has
# three.
PLACES_MAX = 8
_KEYS_MAX = PLACES_MAX * GROUPS_MAX

_Key = tuple[str | None, int | None, str | None, str | None]


class OffloadedBlocks:
    """Blocks of one engine outside its GPU. ``rejected`` counts invalid events by reason."""

    def __init__(self, engine_id: str, index: Index, rejected: Counter[str]) -> None:
        self.engine_id = engine_id
        self._index = index
        self._rejected = rejected
        # Shared stores that this engine wrote to.
        self.stores: frozenset[str] = frozenset()
        self.reset()

    def reset(self) -> None:
        """Reset after a restart of the engine; the caller resets the index."""
        self._planes: dict[_Key, Plane] = {}
        self._places: set[str] = set()
        self._cleared_with_gpu: set[str] = set()
        self._turn = 0
        self._turned_s: float | None = None
        self.stores = frozenset()

    def stored(self, event: BlockStored) -> None:
        """Add one copy of each block; in a shared store, mark it present."""
        plane = self._plane(event)
        if plane is None:
            return
        hashes = [to_block_hash(value) for value in event.block_hashes]
        if not is_shared(plane.medium):
            self._index.store(self.engine_id, plane, hashes)
            return
        for block in hashes:
            self._index.set_copies(self.engine_id, plane, block, 1)

    def removed(self, event: BlockRemoved) -> None:
        """Remove one copy of each block, or set the number of copies given in the event."""
        plane = self._plane(event)
        if plane is None:
            return
        hashes = [to_block_hash(value) for value in event.block_hashes]
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

    def gpu_cleared(self) -> None:
        """Handle a cleared GPU cache: empty the media that the engine clears with it."""
        for name in self._cleared_with_gpu:
            self._index.clear(self.engine_id, name)

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
        medium, owner = medium_named(event.medium), event.ownership
        if medium is None:
            self._rejected["unknown_medium"] += 1
            return None
        if owner is not None and len(owner) > OWNER_CHARS_MAX:
            self._rejected["owner_too_long"] += 1
            return None
        shared = is_remote(medium, event.locality, owner)
        name = place(medium, owner, turn=self._turn if shared else None)
        if name not in self._places:
            if len(self._places) >= PLACES_MAX:
                self._rejected["too_many_places"] += 1
                return None
            self._places.add(name)
        if is_cleared_with_gpu(event.medium):
            self._cleared_with_gpu.add(name)
        if shared:
            self.stores |= {owner_of(name)}
        return Plane(name, event.group_idx or 0)


def _of_turn(name: str, turn: int) -> str:
    """Return the shared store's place for ``turn``."""
    head, at, owner = name.partition("@")
    return f"{head.partition('*')[0]}*{turn}{at}{owner}"
