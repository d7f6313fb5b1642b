"""Chunks held by a store that has a feed of its own, as blocks in the index of a model.

A chunk of a store consists of parts: one object per rank of the engines that write it, each in one medium of
the store or in several. It counts only while every part is there, in whichever medium. A store is a set:
storing a part twice changes nothing, nor does removing one that is not held. Without removals, parts grow
old.

Invariants: the index holds exactly the whole chunks, under the store's own writer, so that forgetting the
store takes no step per block, but for those that ``attach`` has left to later steps; at most
``CHUNKS_MAX`` chunks are kept, further ones are counted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import islice
from typing import NamedTuple

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Index, Plane
from kvatlas.router.index.places import Reach, store_place
from kvatlas.router.index.store_parts import Parts

# About 200 MB of one store.
CHUNKS_MAX = 1 << 20
# Media of a store, at most.
STORE_MEDIA_MAX = 2
# Some milliseconds.
_DISCARDED_AT_ONCE = _WRITTEN_AT_ONCE = 1024
# No engine id contains a NUL.
_WRITER = "\x00store "
_GROUP_SHIFT = 64
_BLOCK_MASK = (1 << _GROUP_SHIFT) - 1


class StoreChange(NamedTuple):
    """One part of a chunk that was stored or removed; ``part`` counts from 0, ``medium`` too."""

    stored: bool
    group_idx: int
    block: BlockHash
    part: int = 0
    medium: int = 0


class StoreContent:
    """Chunks of one store."""

    def __init__(self, name: str, reach: Reach, parts: Parts) -> None:
        self._place = store_place(name, reach)
        self._writer = f"{_WRITER}{name}"
        self._parts = parts
        self._index: Index | None = None
        # (group, block) -> parts; the second has those that were not stored again since the last turn.
        self._held: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._turned_s: float | None = None
        # Keys of chunks that are yet to be written to the index, if they are still whole then.
        self._unwritten: list[int] = []
        self.whole = 0
        """Chunks that count."""
        self.overflows = 0
        """Chunks that were not kept, beyond ``CHUNKS_MAX``."""

    @property
    def chunks(self) -> int:
        """Chunks of which any part is held."""
        return len(self._held) + len(self._older)

    def attach(self, index: Index | None) -> None:
        """Write to this index from now on; None: to none. Some of what is held is written at once, the rest
        by ``step``."""
        if self._index is not None:
            self._index.forget(self._writer)
        self._index = index
        self._unwritten = [] if index is None else [*self._older, *self._held]
        self.step()

    def step(self) -> bool:
        """Write some of what ``attach`` has left; returns whether there is more."""
        keys, index = self._unwritten[-_WRITTEN_AT_ONCE:], self._index
        del self._unwritten[-_WRITTEN_AT_ONCE:]
        for key in keys if index is not None else ():
            group_idx = key >> _GROUP_SHIFT
            bits = self._held.get(key) or self._older.get(key, 0)
            if index is not None and self._parts.are_whole(group_idx, bits):
                plane = Plane(self._place, group_idx)
                index.set_copies(self._writer, plane, BlockHash(key & _BLOCK_MASK), 1)
        return bool(self._unwritten)

    def apply(self, change: StoreChange) -> None:
        """Apply a change."""
        stored, group_idx, block, part, medium = change
        key, bit = group_idx << _GROUP_SHIFT | block, 1 << part + medium * self._parts.most
        held = self._held.get(key) or self._older.get(key, 0)
        if stored and not held and self.chunks >= CHUNKS_MAX:
            self.overflows += 1
            return
        left = held | bit if stored else held & ~bit
        if stored:
            self._older.pop(key, None)
            self._held[key] = left
        elif left:
            (self._held if key in self._held else self._older)[key] = left
        else:
            self._held.pop(key, None)
            self._older.pop(key, None)
        self._note(group_idx, block, held, left)

    def listed(self, changes: Iterable[StoreChange], found: dict[int, int]) -> None:
        """Add stored parts to a list of all that the store holds, for ``replace``; of at most ``CHUNKS_MAX``
        chunks."""
        for _, group_idx, block, part, medium in changes:
            key, bit = group_idx << _GROUP_SHIFT | block, 1 << part + medium * self._parts.most
            if key in found or len(found) < CHUNKS_MAX:
                found[key] = found.get(key, 0) | bit
            else:
                self.overflows += 1

    def replace(self, found: dict[int, int]) -> Generator[None, None, None]:
        """Hold exactly what was listed from now on, with a yield after some of the changes."""
        known = [*self._older, *self._held]
        for start in range(0, len(known), _WRITTEN_AT_ONCE):
            for key in known[start : start + _WRITTEN_AT_ONCE]:
                if key not in found:
                    before = self._held.pop(key, 0) or self._older.pop(key, 0)
                    self._note(key >> _GROUP_SHIFT, BlockHash(key & _BLOCK_MASK), before, 0)
            yield
        for at, (key, left) in enumerate(found.items()):
            before = self._held.get(key) or self._older.pop(key, 0)
            self._held[key] = left
            self._note(key >> _GROUP_SHIFT, BlockHash(key & _BLOCK_MASK), before, left)
            if at % _WRITTEN_AT_ONCE == _WRITTEN_AT_ONCE - 1:
                yield

    def _note(self, group_idx: int, block: BlockHash, before: int, after: int) -> None:
        was, is_whole = self._parts.are_whole(group_idx, before), self._parts.are_whole(group_idx, after)
        if was == is_whole:
            return
        self.whole += 1 if is_whole else -1
        if self._index is not None:
            self._index.set_copies(self._writer, Plane(self._place, group_idx), block, int(is_whole))

    def clear(self) -> None:
        """Discard everything: what the store holds is not known any more."""
        self._held, self._older, self._unwritten, self.whole = {}, {}, [], 0
        if self._index is not None:
            self._index.forget(self._writer)

    def age(self, now_s: float, ttl_s: float) -> bool:
        """Discard some of the parts that were not stored again for ``ttl_s``, at the earliest after half of
        it; returns whether there are more."""
        if self._turned_s is None:
            self._turned_s = now_s
        if now_s - self._turned_s < ttl_s / 2:
            return False
        for key in list(islice(self._older, _DISCARDED_AT_ONCE)):
            self._note(key >> _GROUP_SHIFT, BlockHash(key & _BLOCK_MASK), self._older.pop(key), 0)
        if self._older:
            return True
        self._turned_s = now_s
        self._held, self._older = {}, self._held
        return False
