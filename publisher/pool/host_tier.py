"""Host memory behind a simulated engine's GPU: what a KV connector would keep there, load, and tell of.

Every block that the pool stores is copied, in the order of its events; the least recently stored go first. A
request is given what lies there from its GPU hit on, as far as all groups can resume, and so is as far as a
connector would take it; moving the bytes takes time and no compute.
Always true: the blocks held are those of the stored events less those of the removed ones.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from publisher.events import BlockRemoved, BlockStored, Event
from publisher.pool.hits import HitFinder
from publisher.pool.layout import PoolLayout
from publisher.pool.request import PoolRequest
from publisher.pool.store import Copies, WireHash

OWNER = "kvatlas-host"
_THERE: Copies = 1


class HostTier:
    """``blocks_max`` blocks of any group. Used on the scheduler's thread."""

    def __init__(self, layout: PoolLayout, blocks_max: int) -> None:
        if layout.uses_eagle:
            layout = replace(layout, alignment=layout.scheduler_block_size, partial_hits=False)
        self._layout = layout
        self._blocks_max = blocks_max
        self._held: OrderedDict[tuple[int, WireHash], None] = OrderedDict()
        self._by_group: list[dict[WireHash, Copies]] = [{} for _ in layout.groups]

    def follow(self, events: Iterable[Event]) -> list[Event]:
        """Copy what the pool stored; returns what the connector tells of it."""
        told: list[Event] = []
        for event in events:
            if isinstance(event, BlockStored):
                told += self._store(event)
        return told

    def reach(self, request: PoolRequest, hit: int) -> int:
        """Tokens that the GPU hit and a load together give; never less than ``hit``."""
        whole = self._layout.scheduler_block_size
        hashes = request.known_hashes()
        before: dict[WireHash, Copies] = dict.fromkeys(
            hashes[: hit // whole * whole // self._layout.hash_block_size], _THERE
        )
        maps = [ChainMap(before, held) for held in self._by_group]
        finder = HitFinder(self._layout, maps)  # type: ignore[arg-type]
        found = finder.find(hashes, request.num_tokens - 1).length
        while found > hit and not self._ends_are_held(hashes, found):
            found = finder.find(hashes, found - 1).length
        return max(hit, found)

    def _ends_are_held(self, hashes: Sequence[WireHash], end: int) -> bool:
        """Whether each block that a load would end in is held under the hash at that end."""
        last = hashes[end // self._layout.hash_block_size - 1]
        inside = (group.group_idx for group in self._layout.groups if end % group.block_size)
        return all(last in self._by_group[group_idx] for group_idx in inside)

    def _store(self, event: BlockStored) -> list[Event]:
        group = event.group_idx or 0
        new: list[int | bytes] = []
        for block in event.block_hashes:
            if (group, block) in self._held:
                self._held.move_to_end((group, block))
            else:
                self._held[group, block] = None
                self._by_group[group][block] = _THERE
                new.append(block)
        if not new:
            return []
        stored = replace(
            event, block_hashes=new, extra_keys=None, medium="CPU", locality="LOCAL", ownership=OWNER
        )
        return [stored, *self._evict()]

    def _evict(self) -> list[Event]:
        gone: list[Event] = []
        while len(self._held) > self._blocks_max:
            (group, block), _ = self._held.popitem(last=False)
            del self._by_group[group][block]
            gone.append(BlockRemoved([block], "CPU", group, "LOCAL", OWNER))
        return gone
