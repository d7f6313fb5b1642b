"""Blocks that a KV connector would keep outside a simulated engine's GPU, load and report.

The least recently used blocks are evicted, those with a retention hint later. This is the connectors' policy
``hinted``, and without hints ``lru``, with the same hits (``tests/connectors/tier/test_simulated_tier.py``).
A request loads the blocks held here after its GPU hit, as far as all groups can resume, like a connector;
moving the bytes takes time and no compute.

Invariant: the blocks held are those of the stored events minus those of the removed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from kvatlas.publisher.events import BlockRemoved, BlockStored, Event, encode_tokens
from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.publisher.pool.hits import HitFinder
from kvatlas.publisher.pool.layout import PoolLayout
from kvatlas.publisher.pool.retention_order import OWNER_SHARE, RetentionHint, RetentionOrder
from kvatlas.publisher.pool.store import Copies, PoolRequest, WireHash

OWNER = "kvatlas-host"
_THERE: Copies = 1
_NO_TOKENS = encode_tokens([])

HeldKey = tuple[int, WireHash]
"""Group, and the hash at the block's end."""
_ByGroup = Sequence[dict[WireHash, Copies]]


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
        if self._owner is None:
            # vLLM's own offloading tells a hash per event, and no tokens.
            events += [
                BlockStored([block], None, _NO_TOKENS, 0, medium="CPU", group_idx=idx, locality="LOCAL")
                for idx, block in new
            ]
        elif new:
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
