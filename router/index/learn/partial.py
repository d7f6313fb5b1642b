"""Evidence of stores inside a block, which no event marks as such.

If hits may end inside a block, vLLM publishes the end of a prompt as a block of one hash block, under that
hash (``BlockPool.cache_partial_block``, vLLM 0.32). Two conclusions follow:

- *A block size not seen yet.* The parent of a whole full-attention block is the block before it, which the
  same request still holds. So a block of one hash block whose parent the group does not hold is a part of
  a longer one; until a whole block arrives, every prefix stored there is shorter than a block.
- *Hits inside a block under decode context parallelism (DCP)*, where a Mamba block is as long as a hash
  block (``partial_hash_hits_enabled``). Without such hits a prefix is stored up to a multiple of all block
  sizes (``HybridKVCacheCoordinator.get_num_cacheable_tokens``): a state that ends elsewhere proves them,
  and so does a part directly after the whole blocks of its group. Groups with the EAGLE flag store one
  block more, and prove nothing.

Look-ahead hashes (vLLM 0.33) weaken the second conclusion. The hash of a block is known a token or more after
its end, so that without hits inside a block, too, a prefix may be stored up to the hash before a multiple of
all block sizes, and the part of a prompt before the whole block around it. There only a state proves hits
inside a block, and only at another place than that, once all block sizes are known.

This applies only to models with Mamba groups in align mode. Nothing is inferred from missing events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from publisher.events import BlockStored, Family, GroupSpec, hash_unit, scheduler_block_size, spec_classes


class PartialEvidence:
    """Facts proved by the events of one engine."""

    def __init__(self, *, inside_seen: bool = False) -> None:
        # Whether hits inside a block are proven, if the block sizes leave it open.
        self.inside_seen = inside_seen
        self._whole: set[int] = set()
        self._last: dict[int, int | bytes] = {}
        # Last part of a full-attention block, and last state stored alone. The groups of a request publish
        # one after another.
        self._part: int | bytes | None = None
        self._state: int | bytes | None = None

    def watches(self, groups: Iterable[GroupSpec], idx: int) -> bool:
        """Whether further events of this group may prove something."""
        known = tuple(groups)
        if not _saves_states(known):
            return False
        group = next((g for g in known if g.group_idx == idx), None)
        if group is None:
            return True
        unsized = group.family is Family.FULL and idx not in self._whole
        return unsized or (not self.inside_seen and _is_open(known))

    def sized(
        self, event: BlockStored, group: GroupSpec, known: GroupSpec | None, held: Callable[[], bool]
    ) -> GroupSpec:
        """Return ``group`` with the block size that ``event`` shows.

        ``known`` is the group as known before; ``held``: whether it holds the event's parent.
        """
        idx = group.group_idx
        if group.family is not Family.FULL or event.block_size != group.block_size:
            return group
        grown = known is not None and known.block_size < group.block_size
        if grown or event.num_tokens() > event.block_size:
            self._whole.add(idx)
        if idx in self._whole:
            return replace(group, partial_only=False) if group.partial_only else group
        part = event.parent_block_hash is not None and not held()
        return replace(group, partial_only=True) if part else group

    def prove_inside(self, event: BlockStored, groups: tuple[GroupSpec, ...]) -> None:
        """Record whether ``event`` proves that hits may end inside a block."""
        if self.inside_seen or not _is_open(groups):
            return
        idx = event.group_idx or 0
        group = next((c.spec for c in spec_classes(groups) if idx in c.group_idxs), None)
        if group is None or group.is_eagle:
            return
        ahead = event.num_lookahead()
        if group.family is Family.MAMBA and event.parent_block_hash is None:
            self.inside_seen = _ends_inside(event, groups, ahead)
        elif ahead:
            return
        elif group.family is Family.MAMBA and event.block_hashes and event.num_tokens() == event.block_size:
            self._state = event.block_hashes[0]
            self.inside_seen = self._state == self._part
        elif group.family is Family.FULL and event.block_size < group.block_size:
            self._part = event.block_hashes[0] if event.block_hashes else None
            parent = event.parent_block_hash
            behind = parent is not None and parent == self._last.get(idx)
            self.inside_seen = behind or (self._part is not None and self._part == self._state)
        elif group.family is Family.FULL and event.block_hashes:
            self._last[idx] = event.block_hashes[-1]


def _saves_states(groups: tuple[GroupSpec, ...]) -> bool:
    return any(g.family is Family.MAMBA and g.mamba_cache_mode != "all" for g in groups)


def _ends_inside(event: BlockStored, groups: tuple[GroupSpec, ...], ahead: int) -> bool:
    """Whether a prefix with a state at its end could be stored only because hits may end inside a block."""
    if ahead and any(group.partial_only for group in groups):
        return False
    # An event without hashes stores no state, and does not show how far its hashes look ahead.
    if not event.block_hashes:
        return False
    unit, whole, end = hash_unit(groups), scheduler_block_size(groups), event.num_tokens()
    # Tokens whose hashes are not known yet when a multiple is reached.
    missing = -(-ahead // unit) * unit
    return end % whole != 0 and (end + missing) % whole != 0


def _is_open(groups: tuple[GroupSpec, ...]) -> bool:
    """Whether these are block sizes with which vLLM allows hits inside a block under DCP only."""
    unit = hash_unit(groups)
    states = [g.block_size for g in groups if g.family is Family.MAMBA and g.mamba_cache_mode == "align"]
    longer = any(g.family is Family.FULL and g.lookup_block_size > unit for g in groups)
    return longer and bool(states) and max(states) == unit
