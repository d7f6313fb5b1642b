"""Blocks that a KV connector would keep outside a simulated engine's GPU, load and report.

Blocks are stored in chains, the blocks of one request in prompt order. The least recently used blocks are
evicted, those of a chain from its end on; a block is never evicted for another block of the same chain. This
is the connectors' policy ``lru``, with the same hits (``tests/connectors/tier/test_simulated_tier.py``). A
request loads the blocks held here after its GPU hit, as far as all groups can resume, like a connector;
moving the bytes takes time and no compute.

Invariant: the blocks held are those of the stored events minus those of the removed ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from publisher.events import BlockRemoved, BlockStored, Event, Family, GroupSpec
from publisher.pool.hits import HitFinder
from publisher.pool.layout import PoolLayout
from publisher.pool.store import Copies, PoolRequest, WireHash

OWNER = "kvatlas-host"
_THERE: Copies = 1

HeldKey = tuple[int, WireHash]
"""Group, and the hash at the block's end."""


class HostTier:
    """A store of ``blocks_max`` blocks of any group, used by the scheduler's thread only."""

    def __init__(self, layout: PoolLayout, blocks_max: int) -> None:
        if layout.uses_eagle:
            layout = replace(layout, alignment=layout.scheduler_block_size, partial_hits=False)
        self._layout = layout
        self._blocks_max = blocks_max
        self._held: OrderedDict[HeldKey, None] = OrderedDict()
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

    def store(self, chain: Sequence[HeldKey]) -> tuple[list[HeldKey], list[HeldKey]]:
        """Store these blocks as far as there is room; returns the new blocks and the evicted ones."""
        held, chosen = self._held, set(chain)
        self.use([key for key in chain if key in held])
        new = [key for key in dict.fromkeys(chain) if key not in held]
        missing = len(held) + len(new) - self._blocks_max
        gone = self._oldest(missing, chosen) if missing > 0 else []
        new = new[: self._blocks_max - len(held) + len(gone)]
        for group, block in gone:
            del held[group, block]
            del self._by_group[group][block]
        for key in reversed(new):
            held[key] = None
            self._by_group[key[0]][key[1]] = _THERE
        return new, gone

    def use(self, keys: Sequence[HeldKey]) -> None:
        """Mark these blocks, which must be held, as recently used."""
        for key in reversed(keys):
            self._held.move_to_end(key)

    def reach(self, request: PoolRequest, hit: int) -> int:
        """Tokens covered by the GPU hit and a load together; at least ``hit``."""
        hashes = request.known_hashes()
        whole = self._layout.scheduler_block_size
        local = hit // whole * whole
        if not self._goes_on(hashes, local):
            return hit
        before = set(hashes[: local // self._layout.hash_block_size])
        maps = [_LoadView(before, held) for held in self._by_group]
        finder = HitFinder(self._layout, maps)  # type: ignore[arg-type]
        found = finder.find(hashes, request.num_tokens - 1).length
        while found > hit and not self._ends_are_held(hashes, found):
            found = finder.find(hashes, found - 1).length
        return max(hit, found)

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

    def _goes_on(self, hashes: Sequence[WireHash], local: int) -> bool:
        """Whether a load is possible: full attention needs the next block."""
        if self._full is None:
            return True
        end = (local // self._full.block_size + 1) * self._full.block_size // self._layout.hash_block_size
        return end <= len(hashes) and hashes[end - 1] in self._by_group[self._full.group_idx]

    def _ends_are_held(self, hashes: Sequence[WireHash], end: int) -> bool:
        """Whether each block in which a load would end is held under the hash at that end."""
        last = hashes[end // self._layout.hash_block_size - 1]
        inside = (group.group_idx for group in self._layout.groups if end % group.block_size)
        return all(last in self._by_group[group_idx] for group_idx in inside)

    def _oldest(self, count: int, spared: set[HeldKey]) -> list[HeldKey]:
        found: list[HeldKey] = []
        for key in self._held:
            if len(found) == count:
                break
            if key not in spared:
                found.append(key)
        return found

    def _store(self, event: BlockStored) -> list[Event]:
        group = event.group_idx or 0
        new, gone = self.store([(group, block) for block in event.block_hashes])
        events: list[Event] = [BlockRemoved([block], "CPU", idx, "LOCAL", OWNER) for idx, block in gone]
        if new:
            events.append(
                replace(
                    event,
                    block_hashes=[block for _, block in new],
                    extra_keys=None,
                    medium="CPU",
                    locality="LOCAL",
                    ownership=OWNER,
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
